"""One GPU among all workers: a test that measures has it to itself, the others share it. A plugin of pytest.

Workers are processes, so the lock is one of a file, which the system releases when a process dies. Tests that measure
come last, when everything is compiled, and wait until nobody else wants the device: no test waits for them to begin.
"""

import contextlib
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest


class DeviceLock:
    """A lock that many may share or one may have alone; whoever wants it alone waits for all who share it."""

    def __init__(self, folder: Path, name: str) -> None:
        self._device = os.open(folder / f"{name}.device", os.O_RDWR | os.O_CREAT, 0o600)
        self.alone: bool | None = None  # how it is held; None: not at all

    def acquire(self, *, alone: bool) -> None:
        """Wait for it; who has it alone keeps it."""
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
        """Release it for good."""
        os.close(self._device)


@cache
def _lock() -> DeviceLock:
    """Of this process."""
    return DeviceLock(Path(tempfile.gettempdir()), f"ptxlab-tests-{os.getuid()}")


def _measures(item: pytest.Item | None) -> bool:
    return item is not None and all(item.get_closest_marker(name) for name in ("gpu", "timing"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that measure come last."""
    items.sort(key=_measures)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around fixtures of every scope, and outside of the timeout
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[Any]:
    """The device for a test, alone or shared; alone for all that measure one after the other."""
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
    """Wait for what is still running, and give back memory that is kept unused: others may need it."""
    with contextlib.suppress(RuntimeError):  # of a device that a test has broken: those that follow will say so
        if (cupy := sys.modules.get("cupy")) is not None:
            cupy.cuda.Device().synchronize()
            cupy.get_default_memory_pool().free_all_blocks()
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
