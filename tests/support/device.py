"""One GPU among all workers: a test that measures has it to itself, the others share it. A plugin of pytest.

Workers are processes, so the lock is one of a file, which the system releases when a process dies. Tests that measure
come last, when everything is compiled, all of them on one worker: no other worker waits for the device, and their
fixtures are set up once. Of the others, those marked `long(seconds)` begin first. A worker is sent one test at a time.
"""

import contextlib
import fcntl
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from xdist.scheduler import LoadScheduling

from tests.support import tiers

ALONE = "@alone"  # behind the id of a test that measures, in the list of tests that a worker sends


class DeviceLock:
    """A lock that many may share or one may have alone; whoever wants it alone waits for all who share it."""

    def __init__(self, folder: Path, name: str) -> None:
        self._device = os.open(folder / f"{name}.device", os.O_RDWR | os.O_CREAT, 0o600)
        self.alone: bool | None = None  # how it is held; None: not at all

    def acquire(self, *, alone: bool) -> None:
        """Wait for the device.

        A process that holds it alone may acquire it alone again. Any other second call without `release` raises
        AssertionError.
        """
        if self.alone is not None:
            assert self.alone and alone, "released after every test, but between two that measure"
            return
        fcntl.flock(self._device, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        self.alone = alone

    def release(self) -> None:
        """Let others have it."""
        fcntl.flock(self._device, fcntl.LOCK_UN)
        self.alone = None

    def close(self) -> None:
        """Close the lock's file, which releases the device for good."""
        os.close(self._device)


@cache
def _lock() -> DeviceLock:
    """Return this process's lock on the device."""
    return DeviceLock(Path(tempfile.gettempdir()), f"ptxlab-tests-{os.getuid()}")


@cache
def _names_gpu(path: Path) -> bool:
    """Tell whether a file names a `gpu` or a `backend`: one that does neither marks no test `gpu`."""
    return re.search(r"\bgpu\b|backend", path.read_text(encoding="utf-8")) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the files without tests on a GPU unread in a run of nothing else: half of the time of 16 workers."""
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return True if is_test and tiers.selects_only_gpu(config) and not _names_gpu(collection_path) else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Raise UsageError for a test on a GPU in a file that `pytest -m gpu` leaves unread."""
    if item.get_closest_marker("gpu") and not _names_gpu(item.path):
        raise pytest.UsageError(f"{item.nodeid}: its file must name a gpu or backend, or `pytest -m gpu` leaves it out")


def _measures(test: pytest.Item | None) -> bool:
    return test is not None and all(test.get_closest_marker(name) for name in ("gpu", "timing"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests marked `long(seconds)` first, the longest ahead, and those that measure last.

    A worker is sent two tests at the start: a short one stands behind each of the long ones.
    """
    long = sorted((test for test in items if _seconds(test) and not _measures(test)), key=_seconds, reverse=True)
    short = [test for test in items if not _seconds(test) and not _measures(test)]
    pairs = [test for pair in zip_longest(long, short[: len(long)]) for test in pair if test is not None]
    items[:] = [*pairs, *short[len(long) :], *(test for test in items if _measures(test))]


def _seconds(test: pytest.Item) -> int:
    """Read the seconds that a test on a GPU is marked with."""
    mark = test.get_closest_marker("long")
    return mark.args[0] if mark and test.get_closest_marker("gpu") else 0


class DeviceScheduling(LoadScheduling):
    """Scheduling of one test at a time to each worker, in the order of the list; what measures is last, on one."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        self.maxschedchunk = 1
        self.measuring: list[int] = []  # indices of tests that no worker has yet

    def schedule(self) -> None:
        """Withhold the tests that measure once the first tests are sent out."""
        begins = self.collection is None
        super().schedule()
        if begins and self.collection:
            names = self.collection
            self.measuring = [index for index in self.pending if names[index].endswith(ALONE)]
            self.pending[:] = [index for index in self.pending if not names[index].endswith(ALONE)]

    def check_schedule(self, node: Any, duration: float = 0) -> None:
        """Send all that measures to the first worker for which nothing else is left."""
        if self.measuring and not self.pending and not node.shutting_down:
            self.pending[:], self.measuring = self.measuring, []
            self._send_tests(node, len(self.pending))
        super().check_schedule(node, duration)

    @property
    def tests_finished(self) -> bool:
        """Tell whether every test has been sent and all but the last of each worker are done."""
        return not self.measuring and super().tests_finished

    @property
    def has_pending(self) -> bool:
        """Tell whether there is a test that is not done."""
        return bool(self.measuring) or super().has_pending


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> DeviceScheduling | None:
    """Schedule a run of GPU tests alone; any other is distributed as `--dist` says."""
    return DeviceScheduling(config, log) if tiers.selects_only_gpu(config) else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> Iterator[None]:
    """Mark the tests that measure in the list of ids that a worker sends, for the scheduler."""
    tests = session.items
    if hasattr(session.config, "workerinput"):
        session.items = [SimpleNamespace(nodeid=_name_for_scheduler(test)) for test in tests]  # type: ignore[misc]
    try:
        return (yield)
    finally:
        session.items = tests


def _name_for_scheduler(test: pytest.Item) -> str:
    return test.nodeid + (ALONE if _measures(test) else "")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around fixtures of every scope, and outside of the timeout
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[Any]:
    """Hold the device while a GPU test runs, alone or shared.

    Tests that measure, one after the other, keep it alone until the last of them has ended.
    """
    if item.get_closest_marker("gpu") is None:
        return (yield)
    lock, alone = _lock(), _measures(item)
    lock.acquire(alone=alone)
    try:
        return (yield)
    finally:
        _leave_device()
        if not (alone and _measures(nextitem)):
            lock.release()


def _leave_device() -> None:
    """Wait for running work, and free the pools' unused memory, which other processes may need."""
    with contextlib.suppress(RuntimeError):  # of a device that a test has broken: those that follow will say so
        if (cupy := sys.modules.get("cupy")) is not None:
            cupy.cuda.Device().synchronize()
            cupy.get_default_memory_pool().free_all_blocks()
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
