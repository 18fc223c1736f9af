"""A kernel of the ladder that waits for the one before it: ImFP, with griddepcontrol written into its source."""

from dataclasses import replace

import pytest

from ptxlab import plan
from ptxlab.kernels.gemm import face, ladder
from ptxlab.kernels.gemm.common import Step
from ptxlab.sources import Source, of_kernel
from ptxlab.spec import KernelSpec

NAME = "gemm_w4a8_lqq_imfp_sm90"
AFTER_WAIT = ("x", "x_scale")
_TOP = "    extern __shared__ __align__(1024) unsigned char ring[];\n"
_LOADS = "            for (int tile = blockIdx.x / CLUSTER; tile < tiles; tile += gridDim.x / CLUSTER) {\n"
_LOADED = "        __syncwarp();\n"


def source(*, late: bool = False) -> Source:
    """One thread of a block waits, before it has anything copied; `late`: once it has."""
    (plain,) = of_kernel(NAME)
    text = plain.text
    wait = "ptxlab::wait_for_predecessors();\n"
    at, both = (_LOADED, f"        if (threadIdx.x == 0) {wait}{_LOADED}") if late else (_LOADS, wait + _LOADS)
    for old, new in ((_TOP, f"{_TOP}    ptxlab::launch_dependents();\n"), (at, both)):
        assert text.count(old) == 1
        text = text.replace(old, new)
    return replace(plain, text=f'#include "griddep.cuh"\n{text}')


def spec() -> KernelSpec:
    """Its spec, which says so."""
    return replace(_step().spec, after_wait=AFTER_WAIT)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `gemm_w4a8` know this kernel by the plain one's name."""
    waiting = source()
    for module in (plan, face):
        monkeypatch.setattr(module, "of_kernel", lambda name: (waiting,) if name == NAME else of_kernel(name))
    monkeypatch.setattr(ladder, "LADDER", (*ladder.LADDER, replace(_step(), spec=spec())))


def _step() -> Step:
    return next(step for step in ladder.LADDER if (step.spec.name, step.order) == (NAME, "row_major"))
