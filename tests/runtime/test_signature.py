"""What a kernel's parameters take: arguments held against the signature of a `.cu`, the accesses of a `.ptx`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import registry, sources
from ptxlab.errors import ArgumentError, MemoryFault
from ptxlab.runtime.signature import Parameter, cuda_parameters
from ptxlab.spec.dtypes import storage

AXPY = """extern "C" __global__ void axpy(const float* __restrict__ x, float* y, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}"""
SCALE = """.version 6.5
.target sm_75
.address_size 64
.visible .entry scale(.param .u64 x, .param .u64 y, .param .f32 a, .param .u32 n) {
    .reg .u64 %p<2>; .reg .u64 %o; .reg .b32 %v, %w; .reg .f32 %a; .reg .u32 %i, %n; .reg .pred %q;
    ld.param.u64 %p0, [x]; ld.param.u64 %p1, [y]; ld.param.f32 %a, [a]; ld.param.u32 %n, [n];
    mov.u32 %i, %tid.x; setp.ge.u32 %q, %i, %n; @%q ret;
    mul.wide.u32 %o, %i, 4; add.u64 %p0, %p0, %o; add.u64 %p1, %p1, %o;
    ld.global.b32 %v, [%p0]; mul.f32 %w, %v, %a; st.global.b32 [%p1], %w; ret;
}"""


def call_emulated(source: str, *args: Any) -> ptxlab.Outcome:
    return ptxlab.load(source)[1, 32](*args, backend="emulator")


@pytest.mark.parametrize(("source", "add"), [(AXPY, 1), (SCALE, 0)])
def test_python_numbers_become_what_the_parameter_is(source: str, add: int) -> None:
    x, y = np.arange(32, dtype=np.float32), np.full(32, add, np.float32)
    assert call_emulated(source, x, y, 3, 32).outputs["y"] is y
    assert np.array_equal(y, 3 * x + add)
    old_y = y.copy()
    call_emulated(
        source, x.view(np.uint8), y.view(np.uint8), np.float32(2), np.uint32(32)
    )  # bytes; scalars of its own width
    assert np.array_equal(y, 2 * x + add * old_y)


@pytest.mark.parametrize(
    ("source", "change", "message"),
    [
        (AXPY, {0: np.zeros(32)}, "axpy: x: float* takes an array of float32, or bytes (.view(np.uint8)) (got f"),
        (AXPY, {1: np.zeros(32, np.int32)}, "axpy: y: float* takes an array of float32, or bytes"),
        (AXPY, {1: np.zeros(32, np.float16)}, "(got float16)"),
        (AXPY, {0: 5}, "axpy: x: an array for float*, null (None in Python) or an address (np.uint64) (got 5)"),
        (AXPY, {0: np.float32(5)}, "axpy: x: an array for float* (got float32 5.0)"),
        (AXPY, {0: {}}, "axpy: x: an array, a tensor map, a number or bytes (got dict)"),
        (AXPY, {2: None}, "axpy: a: a number for float (got None)"),
        (SCALE, {3: None}, "scale: n: a number for .param .u32 (got None)"),
        (AXPY, {0: [1.0]}, "(got list)"),
        (AXPY, {0: np.zeros(32, ">f4")}, "axpy: x: numbers in native byte order (got >f4)"),
        (AXPY, {0: np.zeros(32, object)}, "axpy: x: numbers in native byte order (got object)"),
        (AXPY, {0: np.ma.masked_less(np.zeros(32, np.float32), 1)}, "axpy: x: an array without a mask"),
        (AXPY, {2: np.int32(3)}, "axpy: a: float takes float32 (got int32 3)"),
        (AXPY, {2: np.float64(3)}, "axpy: a: float takes float32 (got float64 3.0)"),
        (AXPY, {2: 1e300}, "axpy: a: float has to be finite in float32 (got 1e+300)"),
        (AXPY, {2: np.zeros(1, np.float32)}, "axpy: a: a number for float (got an array of float32[1])"),
        (AXPY, {3: 32.0}, "axpy: n: an integer for int (got 32.0)"),
        (AXPY, {3: 2**31}, "axpy: n: int lies in -2147483648..2147483647 (got 2147483648)"),
        (AXPY, {3: np.int64(32)}, "axpy: n: int takes 32-bit integers (got int64 32)"),
        (SCALE, {0: np.zeros(32)}, "scale: x: the kernel accesses it as f32, or give bytes (.view(np.uint8)) (got "),
        (SCALE, {1: np.zeros(32, np.float16)}, "scale: y: the kernel accesses it as f32"),
        (SCALE, {0: np.arange(32)}, "(got int64)"),
        (SCALE, {0: 7}, "scale: x: an array for .param .u64"),
        (SCALE, {2: np.int32(3)}, "scale: a: .param .f32 takes float32 (got int32 3)"),
        (SCALE, {3: -1}, "scale: n: .param .u32 lies in 0..4294967295 (got -1)"),
        (SCALE, {3: np.float32(1)}, "scale: n: .param .u32 takes 32-bit integers (got float32 1.0)"),
    ],
)  # fmt: skip
def test_what_the_kernel_would_take_for_something_else_is_refused(source: str, change: dict, message: str) -> None:
    args = [np.ones(32, np.float32), np.full(32, 9, np.float32), 3.0, 32]
    for place, argument in change.items():
        args[place] = argument
    with pytest.raises(ArgumentError) as raised:
        call_emulated(source, *args)
    assert message in str(raised.value) and "\n" not in str(raised.value)


OPTIONAL = """extern "C" __global__ void k(int* y, const int* bias) {
    y[threadIdx.x] = bias ? bias[threadIdx.x] : 7;
}"""


def test_none_is_a_null_pointer() -> None:
    y = np.zeros(32, np.int32)
    call_emulated(OPTIONAL, y, None)
    assert (y == 7).all()
    with pytest.raises(MemoryFault, match="null pointer"):
        call_emulated(OPTIONAL, None, None)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_a_matrix_is_the_array_that_it_is() -> None:
    x, y = np.arange(32, dtype=np.float32), np.asmatrix(np.zeros(32, np.float32))
    call_emulated(AXPY, np.asmatrix(x), y, 2.0, 32)
    assert np.array_equal(np.asarray(y)[0], 2 * x)


SIGNATURE = """
typedef float real; using halves = float; struct S { int a; }; template <class T> struct P { T* p; };
#define WORD unsigned
extern "C" __global__ void __launch_bounds__(32) k(%s) {}
"""


@pytest.mark.parametrize(
    ("declaration", "accepted", "refused"),
    [
        ("const float* __restrict__ x", "float32 complex64 uint8", "float64 float16 int32 uint32 bool int8"),
        ("float x[4]", "float32", "float64"),
        ("float const *const x", "float32", "float64"),
        ("float4* x", "float32 float16 uint8 int8", "float64 int32"),
        ("double* x", "float64 complex128", "float32"),
        ("__half* x", "float16", "float32 uint16"),
        ("const half2 *x", "float16", "float32"),
        ("const __nv_bfloat16* x", "uint16 int16", "float16 float32"),
        ("void* x", "float64 int8 uint32 float16", ""),
        ("char* x", "int8 uint8 bool", "float32 int64 uint32"),
        ("unsigned char* x", "uint8 int8 bool", "float32 int64"),
        ("const std::int8_t* x", "int8 uint8", "int32 float16"),
        ("const uint32_t* x", "uint32 int32 uint8 int8", "int64 float32 uint16"),
        ("unsigned x[]", "uint32 int32", "int64"),
        ("unsigned long long int* x", "uint64 int64", "int32"),
        ("short unsigned int* x", "uint16 int16 float16", "float32 int32"),
        ("short* x", "int16 uint16", "float16"),
        ("std::byte* x", "uint8 float32 int64", ""),
        ("const uint4* __restrict__ x", "uint32 float16 int64 float64", ""),
        ("[[maybe_unused]] const int* x", "int32", "int64"),
        ("float** x", "uint64", "float32"),
        # What a name cannot be seen to mean is not compared.
        ("real* x", "float64 int32", ""),
        ("S* x", "float64 int32", ""),
        ("P<float> x", "float64", ""),
        ("const WORD* x", "float64", ""),
        ("MACRO* x", "float64", ""),
        ("float& x", "float64", ""),
    ],
)  # fmt: skip
def test_arrays_for_a_pointer_of_c(declaration: str, accepted: str, refused: str) -> None:
    (parameter,) = cuda_parameters(SIGNATURE % declaration, "k", ["x"], ["MACRO"])

    def refuses(dtype: str) -> bool:
        try:
            parameter.accept("x", np.zeros(4, dtype), dtype)
        except ArgumentError:
            return True
        return False

    assert [dtype for dtype in accepted.split() if refuses(dtype)] == []
    assert [dtype for dtype in refused.split() if not refuses(dtype)] == []


@pytest.mark.parametrize(
    ("declaration", "number", "scalar"),
    [
        ("int n = 3", -5, np.int32(-5)),
        ("const unsigned long long n", 2**64 - 1, np.uint64(2**64 - 1)),
        ("size_t n", 7, np.uint64(7)),
        ("bool n", True, np.True_),
        ("char n", -1, np.int8(-1)),
        ("__half n", 0.5, np.float16(0.5)),
        ("double n", 3, np.float64(3)),
        ("float n", float("inf"), np.float32(np.inf)),
    ],
)
def test_numbers_for_a_parameter_of_c(declaration: str, number: Any, scalar: np.generic) -> None:
    (parameter,) = cuda_parameters(SIGNATURE % declaration, "k", ["n"], [])
    assert parameter.accept("n", number, "").tobytes() == scalar.tobytes()
    assert parameter.accept("n", scalar, "") is scalar


def test_a_number_for_what_is_not_known_needs_its_width() -> None:
    with pytest.raises(ArgumentError, match=r"^n: a NumPy scalar, whose dtype says how wide .* \(got 3\)$"):
        cuda_parameters(SIGNATURE % "real n", "k", ["n"], [])[0].accept("n", 3, "")


def test_signatures_that_the_preprocessor_chooses_are_not_compared() -> None:
    text = '#ifdef A\nextern "C" __global__ void k(float* x) {}\n#else\nextern "C" __global__ void k(int* x) {}\n#endif'
    assert cuda_parameters(text, "k", ["x"], []) == (Parameter("x"),)


def test_numbers_in_a_file_have_no_width_of_their_own(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from ptxlab.cli.app import build_app

    (tmp_path / "axpy.cu").write_text(AXPY)
    x = np.ones(32, np.float32)
    np.savez(tmp_path / "in.npz", x=x, y=x, a=3.0, n=32)
    command = ["run", str(tmp_path / "axpy.cu"), "--in", str(tmp_path / "in.npz"), "--backend", "emulator"]
    assert CliRunner().invoke(build_app("run"), [*command, "--out", str(tmp_path / "out.npz")]).exit_code == 0
    assert (np.load(tmp_path / "out.npz")["y"] == 4).all()
    np.savez(tmp_path / "in.npz", x=np.ones(32), y=x, a=3.0, n=32)
    assert CliRunner().invoke(build_app("run"), command).exit_code != 0


@pytest.mark.parametrize(
    ("declared", "name"),
    [
        ("using {} [[maybe_unused]] = unsigned long long;", "uint"),
        ("using mine::{};", "half"),
        ("typedef unsigned long long {}, *pointer;", "uint"),
        ("typedef float {}[4];", "uint"),
        ("typedef void (*{})(int);", "uint"),
        ("typedef struct {{ float a; float b; }} {};", "half"),
        ("struct alignas(8) {} {{ float a; float b; }};", "half"),
        ("struct __align__(8) {} {{ float a; float b; }};", "float2"),
        ("template <int N, typename T> struct A {{}}; enum class {} : long {{}};", "uint"),
    ],
)
def test_names_of_other_libraries_that_a_source_declares_itself_are_not_compared(declared: str, name: str) -> None:
    text = f'{declared.format(name)} extern "C" __global__ void k({name}* x, {name} y, float* z) {{}}'
    x, y, z = cuda_parameters(text, "k", ["x", "y", "z"], [])
    assert (x.number, x.is_pointer, y.number, y.is_pointer) == (None, True, None, None)
    assert z.number is not None


@pytest.mark.parametrize("type_", ["float2", "__half2", "nv_bfloat162", "cuComplex", "int4"])
def test_a_number_for_a_vector_needs_its_width(type_: str) -> None:
    """A single number would be passed for several."""
    (parameter,) = cuda_parameters(SIGNATURE % f"{type_} x", "k", ["x"], [])
    with pytest.raises(ArgumentError, match=r"^x: a NumPy scalar, whose dtype says how wide"):
        parameter.accept("x", 2, "")
    pair = np.zeros(1, [("x", "f4"), ("y", "f4")])[0]
    assert parameter.accept("x", pair, "") is pair


def test_the_projects_kernels_take_by_signature_what_their_specs_say() -> None:
    compared, refused = 0, []
    for name, spec in registry.specs().items():
        names = [arg.name for arg in spec.args]
        for source in (source for source in sources.sources_of_kernel(name) if source.language == "cu"):
            for arg, parameter in zip(spec.args, cuda_parameters(source.text, name, names, []), strict=True):
                for dtype in (arg.dtype,) if isinstance(arg.dtype, str) else arg.dtype.dtypes:
                    array = np.zeros(1, storage(dtype))
                    try:
                        parameter.accept(arg.name, array if arg.shape else array[0], dtype)
                    except ArgumentError as error:
                        refused.append(f"{name}: {error}")
                    compared += parameter.number is not None
    assert refused == [] and compared > 100
