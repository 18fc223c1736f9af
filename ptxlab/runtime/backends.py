"""Choice of the backend: the requested one if it can run the kernel; by default the GPU, else the emulator."""

import math
from collections.abc import Iterable
from typing import Protocol

from ptxlab import emulator, gpu
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.spec import Launch
from ptxlab.validate import is_one_of

BACKENDS = ("gpu", "emulator")
EMULATOR_SECONDS = 10.0  # an implicit choice of the emulator may take this long, not more
_LANE_INSTRUCTIONS_PER_SECOND = 50e6


class Runnable(Protocol):
    """Attributes of a kernel (`runtime.Kernel`) by which its backend is chosen."""

    @property
    def entry(self) -> str:
        """The entry symbol."""

    @property
    def arch(self) -> str | None:
        """The lowest architecture, or with a letter the only one; None: any."""

    @property
    def module(self) -> emulator.Module:
        """The PTX as the emulator parses it."""


def choose_backend(
    backend: str | None, kernel: Runnable, launch: Launch, *, on_device: bool, checks: Iterable[str] = ()
) -> str:
    """Return the backend to use: `gpu` or `emulator`.

    Raises an error that says why the requested backend cannot run this kernel here.
    """
    if not is_one_of(backend, (*BACKENDS, None)):
        raise ArgumentError("backend", f"one of {', '.join(BACKENDS)}", backend)
    if backend == "emulator":
        if on_device:
            raise ArgumentError("backend", "arrays on the CPU (NumPy) for the emulator", "arrays on a GPU")
        return backend
    missing = gpu.why_not(kernel.arch, exact=(kernel.arch or "0")[-1].isalpha())
    reason = "checks are the emulator's" if checks else missing
    if reason is None:
        return "gpu"
    if backend == "gpu" or on_device:
        raise UnavailableError(f'{kernel.entry}: no GPU backend here: {reason}; pass backend="emulator"')
    seconds = estimate_seconds(kernel, launch)
    if seconds > EMULATOR_SECONDS:
        raise UnavailableError(
            f"{kernel.entry}: no GPU backend here ({reason}), and the emulator would take about {seconds:.0f} s; "
            'pass backend="emulator" to run it all the same'
        )
    return "emulator"


def estimate_seconds(kernel: Runnable, launch: Launch) -> float:
    """Estimate the seconds that the emulator needs, if every thread runs every instruction once."""
    threads = math.prod(launch.grid) * math.prod(launch.block)
    return threads * len(kernel.module.entries[kernel.entry].instructions) / _LANE_INSTRUCTIONS_PER_SECOND
