"""The lock of the GPU that the tests share, and the record of a run, on suites that need no GPU."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from ptxlab.testing import gpu_tests
from tests.support.device import DeviceLock, pytest_collection_modifyitems

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = 30.0  # seconds, for what happens at once on a machine that is idle


class Holder(threading.Thread):
    """Takes the lock as another worker does, with descriptors of its own, and keeps it until it is told."""

    def __init__(self, folder: Path, *, alone: bool) -> None:
        super().__init__(daemon=True)
        self.lock, self.alone = DeviceLock(folder, "gpu"), alone
        self.has_it, self.may_go = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        self.lock.acquire(alone=self.alone)
        self.has_it.set()
        self.may_go.wait()
        self.lock.release()

    def done(self) -> None:
        self.may_go.set()
        self.join(AT_ONCE)
        assert not self.is_alive()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Callable[[str], Holder]]:
    holders: list[Holder] = []

    def make(how: str) -> Holder:
        holders.append(Holder(tmp_path, alone=how == "alone"))
        return holders[-1]

    yield make
    for thread in holders:
        thread.may_go.set()
        thread.join(AT_ONCE)
        thread.lock.close()


def is_waiting(holder: Holder) -> bool:
    """Tell whether the holder still waits for the lock."""
    return not holder.has_it.wait(0.1)


def test_many_share_it_and_one_has_it_alone(holder: Callable[[str], Holder]) -> None:
    first, second = holder("shared"), holder("shared")
    assert first.has_it.wait(AT_ONCE) and second.has_it.wait(AT_ONCE)
    alone = holder("alone")
    assert is_waiting(alone)
    first.done()
    assert is_waiting(alone)
    second.done()
    assert alone.has_it.wait(AT_ONCE)
    waiting = [holder("shared"), holder("alone")]
    assert all(map(is_waiting, waiting))
    alone.done()
    for thread in waiting:  # whichever comes first
        thread.may_go.set()
    assert all(thread.has_it.wait(AT_ONCE) for thread in waiting)


def test_who_wants_it_alone_keeps_nobody_from_sharing_it(holder: Callable[[str], Holder]) -> None:
    first = holder("shared")
    assert first.has_it.wait(AT_ONCE)
    alone = holder("alone")
    assert is_waiting(alone)
    later = holder("shared")
    assert later.has_it.wait(AT_ONCE)
    first.done()
    assert is_waiting(alone)
    later.done()
    assert alone.has_it.wait(AT_ONCE)


def test_it_is_kept_alone_from_one_test_to_the_next(tmp_path: Path, holder: Callable[[str], Holder]) -> None:
    lock = DeviceLock(tmp_path, "gpu")
    lock.acquire(alone=True)
    lock.acquire(alone=True)
    sharer = holder("shared")
    assert is_waiting(sharer)
    lock.release()
    assert sharer.has_it.wait(AT_ONCE)
    lock.close()


@pytest.mark.full
def test_a_process_that_dies_releases_it(tmp_path: Path, holder: Callable[[str], Holder]) -> None:
    code = (
        "from pathlib import Path; from tests.support.device import DeviceLock; lock = DeviceLock(Path('.'), 'gpu');"
        "lock.acquire(alone=True); print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout and process.stdout.readline()
        sharer = holder("shared")
        assert is_waiting(sharer)
        process.kill()
    assert sharer.has_it.wait(AT_ONCE)


def make_item(*marks: str, seconds: int = 0) -> Any:
    """Make a stand-in for a collected test with these marks."""
    names = {*marks, *(["long"] if seconds else [])}
    return SimpleNamespace(get_closest_marker=lambda name: SimpleNamespace(args=(seconds,)) if name in names else None)


def test_what_measures_comes_last_and_the_longest_first() -> None:
    """A short one stands behind each long one."""
    measuring, longest, longer = (
        make_item("gpu", "timing", seconds=90),
        make_item("gpu", seconds=80),
        make_item("gpu", seconds=20),
    )
    short, second_short, without_gpu = make_item("gpu"), make_item("gpu"), make_item(seconds=50)
    tests = [measuring, short, longer, second_short, longest, without_gpu]
    pytest_collection_modifyitems(tests)
    assert tests == [longest, short, longer, second_short, without_gpu, measuring]


SUITE = """
import json, os, time
from pathlib import Path
import pytest

@pytest.fixture(autouse=True, scope="module")
def made_for_all():
    span("fixture")

def span(name):
    start = time.monotonic()
    time.sleep(0.1)
    with open(Path(__file__).parent / "spans", "a") as file:
        file.write(json.dumps([name, os.environ["PYTEST_XDIST_WORKER"], start, time.monotonic()]) + "\\n")

@pytest.mark.gpu
@pytest.mark.parametrize("i", range(6))
def test_shares(i):
    span("shares")

@pytest.mark.gpu
@pytest.mark.timing
@pytest.mark.parametrize("i", range(3))
def test_measures(i):
    span("measures")

@pytest.mark.gpu
@pytest.mark.long(10)
def test_long():
    span("long")

@pytest.mark.gpu
@pytest.mark.parametrize("what", ["no tool", "no tool", "no card"])
def test_skips(what):
    pytest.skip(f"{what} here")

@pytest.mark.gpu
def test_fails():
    assert 1 == 2, "numbers differ"

@pytest.fixture
def broken():
    yield
    raise ValueError("left behind")

@pytest.mark.gpu
def test_passes_and_cannot_clean_up(broken):
    pass

@pytest.mark.gpu
@pytest.mark.xfail(reason="not yet")
def test_not_yet():
    assert False

def test_needs_none():
    span("needs none")
"""


def run_suite(folder: Path, *options: str, text: str = SUITE, left_out: str = "") -> subprocess.CompletedProcess[str]:
    """Run a suite with the project's plugins, in a folder of its own, whose locks are its own too."""
    (folder / "suite").mkdir()
    (folder / "suite" / "test_other.py").write_text(left_out)
    (folder / "suite" / "test_mini.py").write_text(text)
    markers = "markers =\n    gpu: needs one\n    timing: measures\n    long: first\n"
    plugins = "-p tests.support.device -p tests.support.recording -p no:cacheprovider -p no:hypothesispytest"
    options_of_all = f"addopts = -q --strict-markers {plugins}\n"
    (folder / "pytest.ini").write_text(f"[pytest]\ntestpaths = suite\n{options_of_all}{markers}")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "PTXLAB_COMMIT": "0123456789"}
    command = [sys.executable, "-m", "pytest", *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


class Span(NamedTuple):
    """Test that a worker ran, with its start and end."""

    name: str
    worker: str
    start: float
    end: float

    def overlaps(self, span: "Span") -> bool:
        return self.start < span.end and span.start < self.end


@pytest.mark.full
def test_a_file_without_tests_on_a_gpu_is_left_unread(tmp_path: Path) -> None:
    def run(folder: str, *options: str, text: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / folder).mkdir()
        test = "import pytest\n@pytest.mark.gpu\ndef test_passes():\n    pass\n"
        return run_suite(tmp_path / folder, *options, text=test, left_out=text)

    broken = "raise AssertionError('read')\n"
    assert run("unread", "-m", "gpu", text=broken).returncode == 0
    assert run("read", "-m", "gpu", text=f"# gpu\n{broken}").returncode == 2
    hidden = "import pytest\nmark = getattr(pytest.mark, 'g' + 'pu')\n@mark\ndef test_hidden():\n    pass\n"
    completed = run("hidden", text=hidden)
    assert completed.returncode == 4 and "test_hidden: its file must name a gpu" in completed.stderr, completed.stderr


@pytest.mark.full
def test_a_whole_run_on_several_workers_is_recorded(tmp_path: Path) -> None:
    start = monotonic()
    left_out = 'import pytest\npytest.importorskip("no_such_module", reason="no_such_module is not installed")\n# gpu\n'
    completed = run_suite(
        tmp_path, "-m", "gpu", "-n", "2", "--dist", "worksteal", "--record-tests", "tests.json", left_out=left_out
    )
    assert completed.returncode == 1 and "recorded in tests.json" in completed.stdout, (
        completed.stdout + completed.stderr
    )
    record = gpu_tests.load(tmp_path / "tests.json")
    assert (record.command, record.part) == ("pytest -m gpu -n 2 --dist worksteal", "")
    assert (record.commit, record.sources) == ("0123456789", gpu_tests.digests())
    assert 0.3 < record.seconds < monotonic() - start and {"name", "slug"} <= set(record.device)
    assert {"ptxlab", "python", "numpy", "pytest"} <= set(record.versions)
    file = "suite/test_mini.py"
    assert record.passed == {file: 10}
    assert record.failed == {
        f"{file}::test_fails": "AssertionError: numbers differ",
        f"{file}::test_passes_and_cannot_clean_up": "teardown: ValueError: left behind",
    }
    assert record.skipped == {
        "no tool here": [f"{file}::test_skips[no tool0]", f"{file}::test_skips[no tool1]"],
        "no card here": [f"{file}::test_skips[no card]"],
        "fails as expected: not yet": [f"{file}::test_not_yet"],
        "no_such_module is not installed": ["suite/test_other.py"],
    }
    spans = [Span(*json.loads(line)) for line in (tmp_path / "suite" / "spans").read_text().splitlines()]
    alone = [span for span in spans if span.name == "measures"]
    assert len({span.worker for span in alone}) == 1, "all that measures is on one worker"
    first = {
        worker: min((s for s in spans if s.worker == worker and s.name != "fixture"), key=lambda s: s.start).name
        for worker in {span.worker for span in spans}
    }
    assert "long" in first.values(), "it is ahead of the short ones"
    assert len(alone) == 3 and sum(span.name == "shares" for span in spans) == 6
    assert not any(measuring.overlaps(span) for measuring in alone for span in spans if span is not measuring)


def test_what_measures_is_marked() -> None:
    """A test on the GPU that looks at a clock, or at how far a stream has come, has the device to itself."""
    signs = ("perf_counter", "stream.done", "time_us", ".time(", "measure(", "launched(", "counted_banks")
    unmarked = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        whole = path.read_text()
        marks = next((line for line in whole.split("\n") if line.startswith("pytestmark")), "")
        for text in whole.split("\n\n\n"):
            name = re.search(r"^def (test_\w+)", text, re.MULTILINE)
            if name and "mark.gpu" in text + marks and any(sign in text for sign in signs):
                unmarked += [f"{path.name}: {name[1]}"] if "mark.timing" not in text + marks else []
    assert unmarked == []
