"""The target architecture that kernels are chosen and compiled for, if it is not that of the GPU here.

A Hopper GPU runs PTX for `compute_80`, which its driver compiles; the emulator runs PTX for any. So what an A100 would
be given can be tried without one: the same kernels, the same integers. Times say nothing about an A100.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ptxlab.toolchain import check_arch

_target: ContextVar[str | None] = ContextVar("target", default=None)


# What kernels are compiled for inside `compiling_for`; None: each backend's own architecture. Every repeated call asks.
target = _target.get


@contextmanager
def compiling_for(arch: str | None) -> Iterator[None]:
    """Choose and compile kernels as for a GPU of this architecture, on both backends; None changes nothing.

    CUDA C++ becomes PTX of that architecture, which the emulator runs, or the driver compiles for the GPU at hand. A
    kernel that does not run there is refused. Raises ArgumentError unless it is spelt `sm_80`.
    """
    token = _target.set(_target.get() if arch is None else check_arch(arch))
    try:
        yield
    finally:
        _target.reset(token)


def capability(arch: str) -> tuple[int, int]:
    """Return the compute capability of an architecture: (8, 0) for `sm_80`."""
    major, minor = divmod(int(re.sub(r"\D", "", arch)), 10)
    return major, minor


def why_not_compiled(arch: str | None, *, exact: bool = False) -> str | None:
    """Return why a kernel cannot be compiled for the target; None if it can, or if there is no target.

    Args:
        arch: lowest architecture that the kernel needs, `sm_80`; None: any.
        exact: the kernel is for that architecture only (`sm_90a`).
    """
    target_arch = target()
    if target_arch is None or arch is None or _fits(arch, target_arch, exact):
        return None
    return f"{needs(arch, exact)}, and kernels are compiled for {target_arch}"


def _fits(arch: str, target_arch: str, exact: bool) -> bool:
    return arch == target_arch if exact else capability(target_arch) >= capability(arch)


def needs(arch: str, exact: bool) -> str:
    """Return in words on which GPUs a kernel runs."""
    return f"it runs only on {arch}" if exact else f"it runs on {arch} or above"
