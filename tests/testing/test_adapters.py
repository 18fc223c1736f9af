"""`emulate` on kernels of other libraries: the libraries themselves where they are, and stand-ins for them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ptxlab.errors import PtxlabError, UnavailableError

CUDA = 'extern "C" __global__ void f(float* a, float s) { a[threadIdx.x] *= s * X; }'
PTX = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 a)
{
    .reg .u64 %p, %o; .reg .u32 %i;
    ld.param.u64 %p, [a]; mov.u32 %i, %tid.x; mul.wide.u32 %o, %i, 4; add.u64 %p, %p, %o;
    st.global.u32 [%p], %i;
    ret;
}
"""
ONES = np.ones(32, np.float32)


def stand_in(library: str, kind: str, /, **facts: Any) -> Any:
    """Make an object of a class of that name, from a module of that library."""
    return type(kind, (SimpleNamespace,), {"__module__": f"{library}.somewhere"})(**facts)


def raw_kernel(code: str = CUDA, options: tuple[str, ...] = ("-DX=2", "-std=c++17"), **attributes: Any) -> Any:
    facts = {"code": code, "name": "f", "options": options, "backend": "nvrtc", "file_path": None, **attributes}
    return stand_in("cupy", "RawKernel", **facts)


def test_a_raw_kernel_of_cupy(emulate: Any) -> None:
    assert (emulate(raw_kernel(), grid=1, block=32, a=ONES, s=2.0).a == 4).all()
    module = stand_in("cupy", "RawModule", code=CUDA, options=(), backend="nvrtc", file_path=None)
    assert (emulate(module, ONES, 2.0, grid=1, block=32, entry="f", defines={"X": 3}).a == 6).all()


def test_cupy_itself(emulate: Any) -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed: it comes with the extras `cu13` and `cu12`")
    kernel = cupy.RawKernel(CUDA, "f", options=("-DX=2",))
    assert (emulate(kernel, grid=1, block=32, a=ONES, s=2.0).a == 4).all()
    module = cupy.RawModule(code=CUDA)
    assert (emulate(module, ONES, 2.0, grid=1, block=32, entry="f", defines={"X": 3}).a == 6).all()


def test_object_code_of_cuda_core(emulate: Any) -> None:
    code = stand_in("cuda", "ObjectCode", code_type="ptx", code=PTX.encode() + b"\0", name="")
    assert (emulate(code, np.zeros(32, np.uint32), grid=1, block=32).a == np.arange(32)).all()


def test_cuda_core_itself(emulate: Any) -> None:
    core = pytest.importorskip("cuda.core", reason="cuda.core is not installed: it comes with the extra `dev`")
    code = core.ObjectCode.from_ptx(PTX.encode())
    assert (emulate(code, np.zeros(32, np.uint32), grid=1, block=32).a == np.arange(32)).all()


@pytest.mark.full
def test_numba_itself(emulate: Any) -> None:
    cuda = pytest.importorskip("numba.cuda", reason="numba-cuda is not installed: it comes with the extra `dev`")

    @cuda.jit
    def scale_and_add(a, s, b):
        i = cuda.grid(1)
        if i < a.size:
            a[i] = a[i] * s + b[0, 1]

    b = np.arange(6, dtype=np.float32).reshape(2, 3)
    out = emulate(scale_and_add, np.ones(100, np.float32), 2.0, b, grid=1, block=128)
    assert (out.a == 3).all() and (out.b == b).all()

    @cuda.jit
    def racy(a):
        a[cuda.threadIdx.x // 2] = cuda.threadIdx.x

    with pytest.raises(AssertionError, match=r"racy: 1 finding .*\nrace: .*test_adapters\.py:\d+: .*argument 0 \(a\)"):
        emulate(racy, np.ones(64, np.int64), grid=1, block=128)


def no_driver() -> None:
    raise OSError("there is no driver\nat all")


REFUSED = {
    "machine code": (
        stand_in("cuda", "ObjectCode", code_type="cubin", code=b"", name="x"),
        "kernel: an ObjectCode of PTX (ObjectCode.from_ptx, Program.compile('ptx')): the emulator runs no machine code"
        " (got cubin)",
    ),
    "a program without a driver": (
        stand_in("cuda", "Program", compile=lambda kind: no_driver()),
        "cuda.core's Program: there is no driver; without a driver give its source text",
    ),
    "a module of machine code": (
        raw_kernel(code=None, file_path="x.cubin"),
        "kernel: CuPy's from source code for NVRTC (got x.cubin)",
    ),
    "options": (raw_kernel(options=("-I/usr",)), "kernel: options -D alone (got -I/usr)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_had_without_a_gpu(case: str, emulate: Any) -> None:
    kernel, message = REFUSED[case]
    with pytest.raises(PtxlabError) as error:
        emulate(kernel, grid=1)
    assert str(error.value) == message
    assert isinstance(error.value, UnavailableError) == ("driver" in case)
