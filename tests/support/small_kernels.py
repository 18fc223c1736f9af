"""Small kernels for the tests, and PTX from CUDA."""

import functools
from collections.abc import Callable

import numpy as np
import pytest

from ptxlab import emulator
from ptxlab.emulator import launch
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.core.wave import LaunchState
from ptxlab.errors import EmulationError

HEADER = ".version 8.1\n.target sm_90\n.address_size 64\n"


def kernel_text(body: str, params: str = ".param .u64 out", outside: str = "", directives: str = "") -> str:
    """Write a module with one entry `k` around a body.

    The registers %r, %s, %t (b32), %x, %y (b64), %f (f32), %p, %q are declared.
    """
    return (
        f"{HEADER}{outside}\n.visible .entry k({params}) {directives}\n{{\n"
        ".reg .b32 %r<20>, %s, %t; .reg .b64 %x<20>, %y; .reg .f32 %f<8>; .reg .pred %p, %q; .reg .b16 %h<4>;\n"
        f"{body}\n}}\n"
    )


STORE = """
    mov.u32 %t, %tid.x; mov.u32 %r18, %ctaid.x; mov.u32 %r19, %ntid.x; mad.lo.u32 %t, %r18, %r19, %t;
    ld.param.u64 %y, [out]; mul.wide.u32 %x19, %t, 4; add.u64 %y, %y, %x19; st.global.u32 [%y], %s;
    ret;
"""
# Where a thread copies 16 bytes from and to: %x1 of `a` and %r2 of `buf`, which begin at %x3 and %r6; %r5 is `bar`.
COPY_PROLOGUE = """mov.u32 %r0, %tid.x; shl.b32 %r1, %r0, 4; mov.u32 %r2, buf; add.u32 %r2, %r2, %r1; mov.u32 %r5, bar;
    ld.param.u64 %x1, [a]; mul.wide.u32 %x2, %r0, 16; add.u64 %x1, %x1, %x2; setp.eq.u32 %q, %r0, 0; mov.u32 %s, 0;
    mov.u32 %r6, buf; ld.param.u64 %x3, [a];
"""


def run_body(body: str, threads: int = 32, blocks: int = 1, **options) -> np.ndarray:
    """Run a body and return the final %s of each thread."""
    out = np.zeros(threads * blocks, np.uint32)
    emulator.run(
        kernel_text(body + STORE, outside=options.pop("outside", "")), "k", [out], grid=blocks, block=threads, **options
    )
    return out


def run_text(text: str, *args, threads: int = 32, blocks: int = 1, **options) -> emulator.Result:
    return emulator.run(emulator.parse(text, "k.ptx"), None, args, grid=blocks, block=threads, **options)


def record_options(monkeypatch: pytest.MonkeyPatch) -> list[emulator.EmulatorOptions]:
    """Return a list that gets the options of every emulator made from now on."""
    options: list[emulator.EmulatorOptions] = []

    class Recorder(Machine):
        def __init__(self, state: LaunchState, blocks: np.ndarray) -> None:
            super().__init__(state, blocks)
            options.append(state.options)

    monkeypatch.setattr(launch, "Machine", Recorder)
    return options


def findings_or_error(get_findings: Callable[[], list[str]]) -> str:
    """Run a function and return its findings, or the error that it ends with, as text."""
    try:
        return "\n".join(get_findings())
    except EmulationError as error:
        return str(error)


def line_of(text: str, part: str) -> int:
    """Return the number of the first line, from 1, that contains `part`."""
    return next(i for i, line in enumerate(text.split("\n"), 1) if part in line)


@functools.cache
def cuda_to_ptx(source: str, arch: str = "compute_90") -> str:
    """Compile a CUDA source to PTX by NVRTC."""
    from cuda.bindings import nvrtc
    from cuda.pathfinder import find_nvidia_header_directory

    def check(returned):
        status, *values = returned
        assert int(status) == 0, status
        return values[0] if values else None

    program = check(nvrtc.nvrtcCreateProgram(source.encode(), b"k.cu", 0, [], []))
    options = [f"-arch={arch}".encode(), f"-I{find_nvidia_header_directory('cudart')}".encode()]
    if int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0]):
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(log.decode())
    ptx = b" " * check(nvrtc.nvrtcGetPTXSize(program))
    nvrtc.nvrtcGetPTX(program, ptx)
    return ptx.decode().rstrip("\0 ")
