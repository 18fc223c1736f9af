"""Tiers of the suite, runs that go on where they stopped, and parts of a run. A plugin of pytest.

`pytest -m smoke` takes a minute, `pytest` four, `pytest -m full` runs what `pytest` leaves out. The markers `full` and
`smoke` put a whole test into a tier. `full_cases`, `default_cases` and `smoke_cases` do so for some of its cases, by
patterns of case ids as in `fnmatch`; with `default_cases`, all others are `full`. A pattern that matches no case is an
error. Cases on a GPU have no tier: `pytest -m gpu` runs all. A case named by its whole id runs whatever its tier.
"""

import hashlib
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from _pytest.mark.expression import Expression

RESUME, DRAW = "--resume", "--draw"
PASSED = "ptxlab_passed"  # key of a worker's input: tests that a resumed run leaves out

# Examples take as long as the machine lets them: a deadline would only measure its load.
hypothesis.settings.register_profile("repeated", deadline=None, derandomize=True)
hypothesis.settings.register_profile("drawn", deadline=None)


@dataclass(frozen=True)
class Draw:
    """A part of a run: one case in `parts`, chosen by a hash of `seed` and the case's id."""

    seed: str
    parts: int

    @classmethod
    def parse(cls, text: str) -> "Draw":
        """Read HASH/N. Raises pytest.UsageError."""
        form = re.fullmatch(r"(\w+)/([1-9]\d*)", text)
        if form is None:
            raise pytest.UsageError(f"{DRAW}: expects HASH/N with N >= 1, such as 4d1718cd/8 (got {text})")
        return cls(form[1], int(form[2]))

    def takes(self, nodeid: str) -> bool:
        """Tell whether that case is in this part."""
        return int(hashlib.sha256(f"{self.seed} {nodeid}".encode()).hexdigest()[:8], 16) % self.parts == 0


class Progress:
    """The tests that have passed at one state of the checkout, in pytest's cache; a killed run keeps its part."""

    def __init__(self, config: pytest.Config, digest: str) -> None:
        assert config.cache is not None
        folder = config.cache.mkdir("ptxlab-passed")
        self.path = folder / digest
        for path in folder.iterdir():
            if path != self.path:  # of another state
                path.unlink()
        self._finished_calls: set[str] = set()

    def load(self) -> set[str]:
        """Read the ids of the tests that have passed."""
        return set(self.path.read_text(encoding="utf-8").splitlines()) if self.path.exists() else set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a test whose call and teardown passed; take out one that has failed, whatever it did before."""
        if report.failed and report.nodeid in (passed := self.load()):
            remaining = sorted(passed - {report.nodeid})
            self.path.write_text("".join(f"{nodeid}\n" for nodeid in remaining), encoding="utf-8")
        if report.when == "call" and report.passed:
            self._finished_calls.add(report.nodeid)
        elif report.when == "teardown" and report.passed and report.nodeid in self._finished_calls:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of a long run."""
    group = parser.getgroup("tiers")
    group.addoption(RESUME, action="store_true", help="leave out what has passed at this state of the checkout")
    group.addoption(DRAW, metavar="HASH/N", type=str, help="run one case in N, chosen by HASH and the case's id")


def pytest_configure(config: pytest.Config) -> None:
    """Check the options, choose how Hypothesis finds examples, and begin to record what passes."""
    config.stash[_DRAW] = Draw.parse(text) if (text := config.getoption(DRAW)) else None
    if not config.getoption("--hypothesis-profile", None):
        hypothesis.settings.load_profile(examples_of(config))
    if hasattr(config, "workerinput"):
        config.stash[_LEFT_OUT] = set(config.workerinput[PASSED])
        return
    progress = _progress_of(config)
    resumes = config.getoption(RESUME)
    if resumes and progress is None:
        raise pytest.UsageError(f"{RESUME}: needs a git checkout and pytest's cache")
    config.stash[_LEFT_OUT] = progress.load() if resumes and progress else set()
    if progress is not None:
        config.pluginmanager.register(progress)


_DRAW = pytest.StashKey[Draw | None]()
_LEFT_OUT = pytest.StashKey[set[str]]()  # ids of tests that a resumed run leaves out


def examples_of(config: pytest.Config) -> str:
    """Name the Hypothesis profile of a run: `full` and `gpu` draw new examples, all else repeats the same ones."""
    may_draw = _selects(config, "full") or _selects(config, "gpu")
    return "drawn" if config.option.markexpr and may_draw and not config.getoption(DRAW) else "repeated"


def selects_only_gpu(config: pytest.Config) -> bool:
    """Tell whether `-m` asks for tests on a GPU and no others."""
    return bool(config.option.markexpr) and _selects(config, "gpu") and not _selects(config)


def _selects(config: pytest.Config, *markers: str) -> bool:
    """Tell whether `-m` selects a test with these markers and no others."""

    def has(name: str, /, **_: str | int | bool | None) -> bool:
        return name in markers

    try:
        return Expression.compile(config.option.markexpr or "").evaluate(has)
    except SyntaxError:  # pytest says so when it selects
        return False


def _progress_of(config: pytest.Config) -> Progress | None:
    """Open the record that a run of `full` keeps and a resumed run reads; None if it has none."""
    keeps_record = config.getoption(RESUME) or (config.option.markexpr and _selects(config, "full"))
    if not keeps_record or config.option.collectonly or getattr(config, "cache", None) is None:
        return None
    digest = state_of(config.rootpath)
    return Progress(config, digest) if digest else None


def state_of(root: Path) -> str:
    """Compute a digest of every file that git does not ignore; empty without git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    sha = hashlib.sha256()
    for name in sorted(set(listed.decode().split("\0")) - {""}):
        path = root / name
        sha.update(name.encode() + b"\0")
        if path.is_file():
            sha.update(hashlib.sha256(path.read_bytes()).digest())
    return sha.hexdigest()[:32]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker what a resumed run leaves out, so that all workers collect the same tests."""
    node.workerinput[PASSED] = sorted(node.config.stash[_LEFT_OUT])


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> Iterator[Any]:
    """Put the cases of a test into their tiers: here all of them are together, whichever are asked for."""
    collected = yield
    tests: list[Any] = collected if isinstance(collected, list) else []
    cases = [test for test in tests if isinstance(test, pytest.Function)]
    if cases:
        assign(cases)
    return collected


def assign(cases: Sequence[pytest.Function]) -> None:
    """Mark the cases of one test `full` and `smoke`. Raises CollectError for a pattern that matches no case."""
    by_id = {_case_of(test): test for test in cases if not test.get_closest_marker("gpu")}
    default, full, smoke = (_matching(cases[0], f"{tier}_cases", by_id) for tier in ("default", "full", "smoke"))
    for case, test in by_id.items():
        if (default is not None and case not in default) or (full is not None and case in full):
            test.add_marker("full")
        if smoke is not None and case in smoke:
            test.add_marker("smoke")
        if test.get_closest_marker("smoke") and test.get_closest_marker("full"):
            raise pytest.Collector.CollectError(f"{test.nodeid}: a case of `smoke` must be one of the default tier")


def _case_of(test: pytest.Function) -> str:
    callspec = getattr(test, "callspec", None)
    return callspec.id if callspec else ""


def _matching(test: pytest.Function, marker: str, cases: dict[str, Any]) -> set[str] | None:
    """Find the case ids that the patterns of a marker match; None without the marker."""
    mark = next(test.iter_markers(marker), None)
    if mark is None:
        return None
    matches: set[str] = set()
    for pattern in mark.args:
        escaped = pattern.replace("[", "[[]")
        matching = {case for case in cases if fnmatchcase(case, escaped)}
        if not matching:
            first_cases = ", ".join(list(cases)[:20]) + (", ..." if len(cases) > 20 else "")
            name = test.nodeid.partition("[")[0]
            raise pytest.Collector.CollectError(f"{name}: {marker}: {pattern!r} matches no case; cases: {first_cases}")
        matches |= matching
    return matches


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect `full` and `gpu` tests in a run without `-m`.

    Then deselect the tests that a resumed run and a draw leave out.
    """
    draw, left_out = config.stash[_DRAW], config.stash[_LEFT_OUT]
    words = set(re.findall(r"\w+", config.option.markexpr or ""))
    tier = not words
    without_gpu = tier or (bool(words & {"full", "smoke"}) and "gpu" not in words)
    named = {arg.partition("::")[2] for arg in config.args if "::" in arg} if tier else set()

    def stays(test: pytest.Item) -> bool:
        if without_gpu and test.get_closest_marker("gpu"):
            return False
        if tier and test.get_closest_marker("full") and test.nodeid.partition("::")[2] not in named:
            return False
        return test.nodeid not in left_out and (draw is None or draw.takes(test.nodeid))

    staying = [test for test in items if stays(test)]
    if len(staying) < len(items):
        staying_ids = {id(test) for test in staying}
        config.hook.pytest_deselected(items=[test for test in items if id(test) not in staying_ids])
        items[:] = staying


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Let a resumed run with nothing left to do succeed."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.stash[_LEFT_OUT]:
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what was left out, and how to run the same part again."""
    if passed := config.stash[_LEFT_OUT]:
        terminalreporter.write_line(f"{RESUME}: left out {len(passed)} cases that have passed at this state before")
    if draw := config.stash[_DRAW]:
        again = shlex.join(["pytest", *config.invocation_params.args])
        terminalreporter.write_line(f"{DRAW}: one case in {draw.parts}; again: {again}")
