"""The pytest plugin: the fixture `emulate`, the marker `ptxlab`, and its options.

pytest loads this module at every start, in every project. So NumPy, the emulator and the rest are imported only when a
test first uses the fixture.
"""

import os
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ptxlab.testing.annotations import Annotation
    from ptxlab.testing.emulate import Emulate

_item: pytest.StashKey[pytest.Item] = pytest.StashKey()  # the test that runs now
_MARKER = 'ptxlab(checks="all", seeds=1): checks of `emulate`, and its number of late schedules beside the early one'


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, all in one group."""
    group = parser.getgroup("ptxlab", "kernels in the emulator (ptxlab)")
    group.addoption(
        "--ptxlab-backend", choices=("emulator", "gpu"), default="emulator", help="Where `emulate` runs kernels."
    )
    group.addoption("--ptxlab-seed", type=int, default=0, metavar="N", help="First seed of the late schedules.")
    group.addoption(
        "--ptxlab-schedule",
        default="",
        metavar="early|late:SEED",
        help="Run only this schedule, which a failure printed.",
    )
    group.addoption(
        "--ptxlab-format",
        choices=("github", "sarif", "json"),
        default="github" if os.environ.get("GITHUB_ACTIONS") == "true" else None,
        help="Also print findings as annotations. Default: github in a GitHub workflow.",
    )
    group.addoption("--ptxlab-output", default="", metavar="FILE", help="Write annotations here. Default: terminal.")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and check the options."""
    config.addinivalue_line("markers", _MARKER)
    schedule, output = config.getoption("--ptxlab-schedule"), config.getoption("--ptxlab-output")
    mode, _, seed = schedule.partition(":")
    if schedule and schedule != "early" and (mode != "late" or not seed.isdecimal()):
        raise pytest.UsageError(f"--ptxlab-schedule expects early or late:SEED, got {schedule}")
    if config.getoption("--ptxlab-seed") < 0:
        raise pytest.UsageError(f"--ptxlab-seed expects 0 or more, got {config.getoption('--ptxlab-seed')}")
    if output and not config.getoption("--ptxlab-format"):
        raise pytest.UsageError("--ptxlab-output expects --ptxlab-format beside it")
    if output and not Path(output).absolute().parent.is_dir():
        raise pytest.UsageError(f"--ptxlab-output expects a file in a folder that exists, got {output}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Remember the test, whose marker and folder `emulate` uses, and check the marker."""
    item.config.stash[_item] = item
    marker = item.get_closest_marker("ptxlab")
    if marker and (marker.args or {*marker.kwargs} - {"checks", "seeds"}):
        pytest.fail(f"{item.nodeid}: the marker ptxlab takes checks= and seeds=", pytrace=False)


@pytest.fixture(scope="session")
def emulate(request: pytest.FixtureRequest) -> "Emulate":
    """Run a kernel in the emulator: `out = emulate("scale.cu", grid=4, block=128, a=a, s=2.0)`, `out.a`.

    Session scope: a kernel is compiled once, and Hypothesis may call the fixture for every example.
    """
    from ptxlab.testing.emulate import Emulate, Settings

    config = request.config

    def settings() -> Settings:
        test = config.stash[_item]
        marker = test.get_closest_marker("ptxlab")
        return Settings(
            folder=test.path.parent,
            root=config.rootpath,
            test=test.nodeid,
            backend=config.getoption("--ptxlab-backend"),
            first_seed=config.getoption("--ptxlab-seed"),
            only=config.getoption("--ptxlab-schedule"),
            **(marker.kwargs if marker else {}),
        )

    return Emulate(settings)


# Annotations travel in the reports of failed tests, so that with xdist they reach the process that writes them.


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    """Add the annotations to the report of a failed test."""
    report: Any = yield
    if call.excinfo is not None and report.failed:
        report.ptxlab = [vars(annotation) for annotation in _annotations(call.excinfo.value)]
    return report


def _annotations(error: BaseException) -> "list[Annotation]":
    """Return the annotations of an error, or of all errors of a group.

    Hypothesis raises a group for several distinct failures.
    """
    if isinstance(error, BaseExceptionGroup):
        return [annotation for part in error.exceptions for annotation in _annotations(part)]
    annotations: list[Annotation] = getattr(error, "annotations", [])
    return annotations


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write the annotations of all failed tests."""
    form, output = config.getoption("--ptxlab-format"), config.getoption("--ptxlab-output")
    if not form:
        return
    reports = [report for group in terminalreporter.stats.values() for report in group]
    annotations = [annotation for report in reports for annotation in getattr(report, "ptxlab", [])]
    if not annotations and not output:
        return
    from ptxlab.testing.annotations import Annotation, render

    text = render(form, (Annotation(**annotation) for annotation in annotations))
    if output:
        Path(output).write_text(text, encoding="utf-8")
        terminalreporter.write_line(f"ptxlab: {len(annotations)} findings written to {output}")
    else:
        terminalreporter.write(text)
