"""`--record-tests FILE`: what a run of the tests found, as `ptxlab.testing.gpu_tests` reads it. A plugin of pytest."""

import json
import platform
import shlex
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from ptxlab import bench, gpu
from ptxlab.errors import FileError
from ptxlab.io.files import require_folder, write_text
from ptxlab.sources import commit
from ptxlab.testing import gpu_tests

OPTION = "--record-tests"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(OPTION, type=Path, metavar="FILE", help="write a record of what passed, failed and was skipped")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption(OPTION)
    if path is None or hasattr(config, "workerinput"):  # workers report to the process that writes
        return
    try:
        require_folder(path.absolute())
    except FileError as error:
        raise pytest.UsageError(f"{OPTION}: {error}") from None
    config.pluginmanager.register(Recorder(config, path))


class Recorder:
    """Gathers the outcome of every test, from all workers, and writes them at the end."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self.config, self.path = config, path
        self.sources, self.commit = gpu_tests.digests(), commit()
        self.date, self.start = datetime.now(UTC).isoformat(timespec="seconds"), monotonic()
        self.outcomes: dict[str, tuple[str, str]] = {}  # by test: passed, failed or skipped, and why
        self.written = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.outcomes[report.nodeid] = "failed", self.without_root(_problem(report))
        elif report.skipped:
            self.outcomes[report.nodeid] = "skipped", self.without_root(_reason(report))
        elif report.when == "call":
            self.outcomes[report.nodeid] = "passed", ""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:  # a whole module
            self.outcomes[report.nodeid] = "skipped", self.without_root(_reason(report))

    def without_root(self, text: str) -> str:
        """Replace absolute paths in a text by paths in the checkout."""
        return text.replace(f"{self.config.rootpath}/", "")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self.written = f"{OPTION}: nothing written, the run did not come to its end"
            return
        write_text(self.path, json.dumps(self.record().to_json(), indent=1) + "\n")
        self.written = f"recorded in {self.path}"

    def record(self) -> gpu_tests.GpuTests:
        device = gpu.device_info() if gpu.why_not(None) is None else None
        skipped: dict[str, list[str]] = {}
        for test, why in self.of("skipped"):
            skipped.setdefault(why, []).append(test)
        return gpu_tests.GpuTests(
            command=shlex.join(["pytest", *_without_option(self.config.invocation_params.args)]),
            part=shlex.join(_narrowing_arguments(self.config)),
            device={"name": device.name, "slug": device.slug, "driver": device.driver}
            if device
            else {"name": platform.processor() or platform.machine(), "slug": "cpu"},
            versions={**bench.versions(device), "pytest": pytest.__version__},
            commit=self.commit,
            date=self.date,
            seconds=round(monotonic() - self.start, 1),
            passed=dict(Counter(test.partition("::")[0] for test, _ in self.of("passed"))),
            failed=dict(self.of("failed")),
            skipped=skipped,
            sources=self.sources,
        )

    def of(self, outcome: str) -> Iterator[tuple[str, str]]:
        """Yield the tests with an outcome, in order, each with the reason."""
        return (
            (test, why) for test, (outcome_of_test, why) in sorted(self.outcomes.items()) if outcome_of_test == outcome
        )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_line(self.written)


def _problem(report: pytest.TestReport) -> str:
    """Return in one line what went wrong, and the phase unless it was the test itself."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else str(report.longrepr)).strip().split("\n")
    return ("" if report.when == "call" else f"{report.when}: ") + lines[0 if crash else -1]


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"fails as expected: {report.wasxfail}"
    location = report.longrepr  # path, line, reason
    return str(location[2] if isinstance(location, tuple | list) else location).removeprefix("Skipped: ")


def _without_option(words: tuple[str, ...]) -> list[str]:
    """Remove the option that names the record's file, which is a path of some machine."""
    remaining = [word for word in words if not word.startswith(f"{OPTION}=")]
    if OPTION in remaining:
        index = remaining.index(OPTION)
        del remaining[index : index + 2]
    return remaining


def _narrowing_arguments(config: pytest.Config) -> list[str]:
    """List what makes the run narrower than `pytest -m gpu`.

    These are paths, and options that choose tests or end it early.
    """
    option, testpaths = config.option, config.getini("testpaths")
    words = [] if config.args_source is not pytest.Config.ArgsSource.ARGS or config.args == testpaths else config.args
    chosen = {"-m": {"gpu": "", "": "not gpu and not full"}.get(option.markexpr, option.markexpr), "-k": option.keyword}
    # plugins bring these options, and a run may go without a plugin
    options = {"--draw": "draw", "--resume": "resume", "--maxfail": "maxfail", "--last-failed": "lf"}
    chosen |= {word: str(getattr(option, name, None) or "") for word, name in options.items()}
    ignored = [*(option.deselect or ()), *(option.ignore or ()), *(option.ignore_glob or ())]
    return [
        *words,
        *(word for name, value in chosen.items() if value for word in (name, value)),
        *(word for value in ignored for word in ("--deselect", value)),
    ]
