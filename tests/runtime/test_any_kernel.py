"""Kernels as people have them: seven files in the ordinary style, found by their C++ names, run on the emulator."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab.errors import ArgumentError, CompileError, MemoryFault
from ptxlab.sources import Source
from ptxlab.toolchain import NO_DEFINES, compile_cuda, find, nvcc, pytorch
from ptxlab.toolchain.kernels import Kernels

PLAIN = """__global__ void scale(float* x, float by, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = x[i] > 1e30f ? INFINITY : x[i] * by * float(M_PI / M_PI);
}
"""
NAMESPACES = """namespace ops { namespace detail {
__device__ float twice(float x) { return 2 * x; }
}
__global__ void twice(float* out, const float* in) { out[threadIdx.x] = detail::twice(in[threadIdx.x]); }
}
namespace {
__global__ void negate(float* x) { x[threadIdx.x] = -x[threadIdx.x]; }
}
"""
TEMPLATE = """template <typename T, int N>
__global__ void rotate(T* out, const T* in) {
    __shared__ T tile[N];
    tile[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = tile[(threadIdx.x + 1) % N];
}
template __global__ void rotate<float, 32>(float*, const float*);
"""
OVERLOADS = """__global__ void fill(float* x, float value) { x[threadIdx.x] = value; }
__global__ void fill(double* x, double value) { x[threadIdx.x] = value + 1; }
"""
WITH_MAIN = """#include <cstdio>
#include <iostream>
#include <vector>
#include <cuda_runtime.h>
constexpr int kBlock = 32;
template <typename T>
__global__ void add(const T* a, const T* b, T* out, int n) {
    int i = blockIdx.x * kBlock + threadIdx.x;
    if (i < n) out[i] = a[i] + b[i];
}
static void check(cudaError_t error) { if (error != cudaSuccess) std::cerr << "failed" << std::endl; }
int main() {
    std::vector<float> host(100, 1.0f);
    float *a, *out;
    check(cudaMalloc(&a, 400));
    check(cudaMalloc(&out, 400));
    check(cudaMemcpy(a, host.data(), 400, cudaMemcpyHostToDevice));
    add<float><<<4, kBlock>>>(a, a, out, 100);
    std::printf("%d\\n", int(cudaDeviceSynchronize()));
    return 0;
}
"""
INCLUDING = (
    '#include "lib/math.cuh"\n__global__ void cube(int* x) { x[threadIdx.x] = lib::cube(x[threadIdx.x]) + OFFSET; }\n'
)
HEADER = "namespace lib { template <class T> __device__ T cube(T x) { return x * x * x; } }\n"
STRUCT = """struct Params { int n; float a; double* out; };
__global__ void write(Params p) { if (threadIdx.x < p.n) p.out[threadIdx.x] = p.a; }
struct Pair { int n; float a; };
__global__ void saxpy(Pair p, const float* x, float* y) {
    if (threadIdx.x < p.n) y[threadIdx.x] += p.a * x[threadIdx.x];
}
"""


def run(kernel: ptxlab.Kernel, *args: Any, grid: int = 1, block: int = 32) -> ptxlab.Outcome:
    outcome = kernel(*args, grid=grid, block=block, backend="emulator", checks="all")
    assert outcome.findings == ()
    return outcome


def test_a_plain_kernel_is_the_only_one_of_its_file_and_has_what_nvcc_includes() -> None:
    kernel = ptxlab.load(PLAIN)
    assert (kernel.name, kernel.parameters) == ("scale", ("x", "by", "n"))
    x = np.array([1, 2, 2e30], np.float32)
    assert run(kernel, x, 3, 3).written == ("x",)
    assert np.array_equal(x, np.array([3, 6, np.inf], np.float32))
    with pytest.raises(ArgumentError, match=r"^scale: x: float\* takes an array of float32"):
        run(kernel, np.zeros(3), 3, 3)


@pytest.mark.parametrize("name", ["ops::twice", "twice", "::ops::twice", "_ZN3ops5twiceEPfPKf"])
def test_names_in_namespaces(name: str) -> None:
    x, out = np.arange(32, dtype=np.float32), np.zeros(32, np.float32)
    run(ptxlab.load(NAMESPACES, name), out, x)
    assert np.array_equal(out, 2 * x)


def test_what_a_file_has_is_listed_where_the_name_is_missing_or_wrong() -> None:
    with pytest.raises(ArgumentError, match=r"^<text>: name one: ops::twice, negate$"):
        ptxlab.load(NAMESPACES)
    with pytest.raises(ArgumentError, match=r"entry: one of ops::twice, negate \(got thrice\); nearest: ops::twice$"):
        ptxlab.load(NAMESPACES, "thrice")
    assert ptxlab.load(NAMESPACES, "negate").parameters == ("x",)


@pytest.mark.parametrize(
    ("name", "dtype", "count"),
    [
        (None, "f4", 32),
        ("rotate", "f4", 32),
        ("rotate<float, 32>", "f4", 32),
        ("rotate<long long,16>", "i8", 16),
        ("_Z6rotateIiLi16EEvPT_PKS0_", "i4", 16),
    ],
)
def test_instances_of_a_template(name: str | None, dtype: str, count: int) -> None:
    """The one that the file instantiates needs no arguments; any other is made."""
    kernel = ptxlab.load(TEMPLATE, name)
    assert kernel.parameters == ("out", "in")
    x = np.arange(count, dtype=dtype)
    out = np.zeros_like(x)
    run(kernel, out, x, block=count)
    assert np.array_equal(out, np.roll(x, -1))


def test_a_template_names_its_parameters_where_its_arguments_are_missing_or_wrong() -> None:
    text = TEMPLATE.rpartition("template __global__")[0]
    with pytest.raises(ArgumentError, match=r"a template with its arguments, of rotate<typename T, int N> \(got nothi"):
        ptxlab.load(text)
    with pytest.raises(ArgumentError, match=r"entry: a kernel of this file \(.*\) \(got rotate<float, nope>\)$"):
        ptxlab.load(text, "rotate<float, nope>")


def test_overloads_are_told_apart_by_their_parameters() -> None:
    with pytest.raises(ArgumentError, match=r"one of fill\(float\*, float\), fill\(double\*, double\) \(got fill\)$"):
        ptxlab.load(OVERLOADS, "fill")
    x = np.zeros(32)
    run(ptxlab.load(OVERLOADS, "fill(double *,double)"), x, 2.0)
    assert (x == 3).all()


@pytest.mark.full
def test_a_file_with_main_and_host_headers_needs_no_host_compiler() -> None:
    kernel = ptxlab.load(WITH_MAIN)  # what it launches
    assert (kernel.name, kernel.source.build.compiler) == ("add<float>", "nvrtc")
    a, out = np.arange(100, dtype=np.float32), np.zeros(100, np.float32)
    run(kernel, a, a, out, 100, grid=4)
    assert np.array_equal(out, 2 * a)
    assert ptxlab.load(WITH_MAIN, "add<int>").name == "add<int>"


@pytest.mark.full
def test_lines_stay_those_of_the_file_where_host_code_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "add.cu"
    path.write_text(WITH_MAIN.replace("if (i < n) ", ""))
    with pytest.raises(ptxlab.PtxlabError, match=rf"{path}:9: .* out of bounds|{path}:9: .*past its end"):
        run(ptxlab.load(path), *[np.zeros(100, np.float32)] * 3, 100, grid=4)


CONSTEXPR = """constexpr int ceildiv(int a, int b) { return (a + b - 1) / b; }
int of_host(int x) { return x; }
constexpr int next(int x) { return x > 0 ? x + 1 : of_host(x); }  // for the host alone
template <int kBlock> __global__ void blocks(int* x, int n) { x[threadIdx.x] = ceildiv(n, kBlock); }
#define LAUNCH(block) blocks<block><<<1, block>>>(nullptr, 0)
void launch() { LAUNCH(32); LAUNCH(64); LAUNCH(96); LAUNCH(128); LAUNCH(256); next(1); }
"""


def test_kernels_call_constexpr_functions_of_the_host_and_launches_in_macros_are_listed() -> None:
    """Only nvcc compiled such a file: Marlin's."""
    with pytest.raises(ArgumentError, match=r"name one: blocks<32> \(the first of 5\), or a template"):
        ptxlab.load(CONSTEXPR)
    with pytest.raises(ArgumentError, match=r"entry: one of blocks<32>, blocks<64>, .*, blocks<256> \(got blocks\)"):
        ptxlab.load(CONSTEXPR, "blocks")
    kernel, x = ptxlab.load(CONSTEXPR, "blocks<32>"), np.zeros(32, np.int32)
    run(kernel, x, 65)
    assert (x == 3).all() and kernel.source.build.compiler == "nvrtc"


def test_all_of_cub_is_taken_and_its_own_kernels_are_not_listed(tmp_path: Path) -> None:
    """The headers of cub refuse NVRTC by an #error that names a macro, and bring a kernel. Theirs take seconds."""
    (tmp_path / "cub.cuh").write_text(
        "#ifndef CCCL_DISABLE_CUB_NVRTC_COMPATIBILITY_CHECK\n"
        '#error "Not supported with NVRTC. Define CCCL_DISABLE_CUB_NVRTC_COMPATIBILITY_CHECK to disable this."\n'
        "#endif\nnamespace cub { __global__ void theirs() {} }\n"
    )
    assert ptxlab.load("#include <cub.cuh>\n" + PLAIN, include=[tmp_path]).name == "scale"


TORCH_HEADER = """#if __cplusplus < 202002L
#error C++20 or later compatible compiler is required to use PyTorch.
#endif
namespace torch { struct Tensor { float* data; }; }
"""
EXTENSION = """#include <torch/extension.h>
__global__ void twice(float* x) { x[threadIdx.x] *= 2; }
torch::Tensor run(torch::Tensor x) { twice<<<1, 32>>>(x.data); return x; }
"""


@pytest.mark.full
@pytest.mark.skipif(not find("nvcc") or not shutil.which("g++"), reason="nvcc and a compiler of the host are needed")
def test_an_extension_of_pytorch_is_compiled_with_its_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "extension.h").write_text(TORCH_HEADER)
    monkeypatch.setattr(pytorch, "folders", lambda: (str(tmp_path),))
    x = np.ones(32, np.float32)
    run(ptxlab.load(EXTENSION), x)
    assert (x == 2).all()


def test_without_pytorch_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytorch, "folders", lambda: ())
    monkeypatch.setattr(nvcc, "require_host_compiler", lambda: None)
    with pytest.raises(CompileError, match=r':1: .*"torch/extension.h".*\(PyTorch\'s headers: not found'):
        ptxlab.load(EXTENSION)


def test_a_host_function_that_a_kernel_calls_is_named() -> None:
    text = "float half(float x) { return x / 2; }\n__global__ void k(float* x) { x[0] = half(x[0]); }\n"
    with pytest.raises(CompileError, match=r":2: half is declared for the host: write __device__ before it"):
        ptxlab.load(text)


@pytest.mark.full
@pytest.mark.skipif(find("nvcc") is None or shutil.which("g++") is None, reason="nvcc needs a host compiler")
def test_an_instance_that_host_code_launches_is_found_by_a_typedef() -> None:
    """Kernels of libraries are none of the file's, and nvcc spells `half` as `__half`."""
    text = (
        "#include <cuda_fp16.h>\n"
        "namespace cub { template <class T> __global__ void empty() {} template __global__ void empty<int>(); }\n"
        "template <class T> __global__ void relu(T* x) { x[0] = x[0] * T(2); }\n"
        "void launch(half* x) { relu<half><<<1, 1>>>(x); }\n"
    )
    assert find_by_nvcc(text, "relu<half>") == "_Z4reluI6__halfEvPT_"
    assert find_by_nvcc(text, "relu<float>") == "_Z4reluIfEvPT_"
    text += "void launch(float* x) { relu<float><<<1, 1>>>(x); }\n"
    rule = r"entry: as nvcc spells it, one of relu<(float|__half)>, relu<(float|__half)> \(got relu<half>\)"
    with pytest.raises(ArgumentError, match=rule):
        find_by_nvcc(text, "relu<half>")


def find_by_nvcc(text: str, name: str) -> str:
    source = Source.from_text(text)
    by_nvcc = replace(source, build=replace(source.build, compiler="nvcc"))
    return Kernels(by_nvcc, "sm_80", NO_DEFINES).find(name)[1]


@pytest.mark.full
@pytest.mark.skipif(find("nvcc") is None or shutil.which("g++") is None, reason="nvcc needs a host compiler")
def test_host_code_that_nvrtc_cannot_do_without_is_compiled_by_nvcc(tmp_path: Path) -> None:
    """A template's argument is a type of the host's library."""
    path = tmp_path / "host.cu"
    path.write_text(
        "#include <vector>\nstruct Holder { std::vector<int> values; static constexpr int kOf = 3; };\n"
        "template <class T> __global__ void k(int* x) {\n    x[threadIdx.x] = T::kOf;\n}\n"
        "int main() { k<Holder><<<1, 32>>>(nullptr); }\n"
    )
    kernel = ptxlab.load(path)
    assert (kernel.name, kernel.source.build.compiler, kernel.parameters) == ("k<Holder>", "nvcc", ("x",))
    x = np.zeros(32, np.int32)
    run(kernel, x)
    assert (x == 3).all()
    with pytest.raises(ptxlab.PtxlabError, match=r"host\.cu:4: .*past its end"):
        run(kernel, x[:8].copy())


@pytest.mark.full
@pytest.mark.parametrize(
    "text",
    [
        "#include <cmath>\n__global__ void k(float* x) { x[0] = M_PI + INFINITY; }\n",
        "__global__ void k(float* x) { x[0] = INFINITY; }\nint main() { std::size_t n = 4; return n; }\n",
    ],
)
def test_constants_of_math_are_defined_once(text: str) -> None:
    assert compile_cuda(Source.from_text(text), "sm_80", output="ptx").warnings == ()


def test_without_a_host_compiler_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC_CCBIN", "no-such-compiler")
    cause = r"nvcc: needs a C\+\+ compiler of the host, and no-such-compiler is not on the PATH"
    text = "#include <vector>\nstruct S { std::vector<int> v; };\n__global__ void k(S* x) {}\nint main() {}\n"
    with pytest.raises(CompileError, match=rf"^<text>:2: {cause}; NVRTC does not compile this host code: `struct S "):
        ptxlab.load(text)
    (tmp_path / "host.cuh").write_text("inline int three() { return 3; }\n")
    (tmp_path / "host.cu").write_text('#include "host.cuh"\n__global__ void k(int* x) {}\n')
    with pytest.raises(CompileError, match=rf"host\.cuh:1: {cause}; NVRTC does not compile this host code: `inline "):
        ptxlab.load(tmp_path / "host.cu")
    wrong = "__global__ void k(int* x) { x[0] = one; }\nint main() {}\n"
    with pytest.raises(CompileError, match=rf':1: identifier "one" is undefined: .*may need nvcc \({cause}\)'):
        ptxlab.load(wrong)


def test_folders_to_include_defines_and_the_language(tmp_path: Path) -> None:
    (tmp_path / "include" / "lib").mkdir(parents=True)
    (tmp_path / "include" / "lib" / "math.cuh").write_text(HEADER)
    x = np.arange(4, dtype=np.int32)
    kernel = ptxlab.load(INCLUDING, defines={"OFFSET": 1}, include=[tmp_path / "include"], std="c++20")
    run(kernel, x, block=4)
    assert x.tolist() == [1, 2, 9, 28]
    with pytest.raises(CompileError, match=r"lib/math\.cuh.*; -I FOLDER, in Python include=, adds a folder"):
        ptxlab.load(INCLUDING)
    with pytest.raises(ArgumentError, match=r"^include: a folder that exists \(got .*nowhere\)$"):
        ptxlab.load(INCLUDING, include=[tmp_path / "nowhere"])
    with pytest.raises(ArgumentError, match=r"^std: a version of C\+\+, such as c\+\+17 or c\+\+20 \(got 20\)$"):
        ptxlab.load(INCLUDING, std="20")


PAIR = np.array((3, 2.0), [("n", "i4"), ("a", "f4")])


@pytest.mark.parametrize(
    "pair", [PAIR, PAIR[()], PAIR.tobytes(), np.frombuffer(PAIR.tobytes(), np.uint8)], ids=lambda p: type(p).__name__
)
def test_a_struct_by_value_is_its_bytes_however_they_come(pair: Any) -> None:
    """Eight bytes of uint8 were taken for a pointer, which is as wide."""
    x, y = np.ones(32, np.float32), np.zeros(32, np.float32)
    outcome = run(ptxlab.load(STRUCT, "saxpy"), pair, x, y)
    assert y.tolist() == [2.0] * 3 + [0.0] * 29 and [*outcome.outputs] == ["x", "y"]


@pytest.mark.parametrize(("pair", "shown"), [(np.zeros(3), "24 bytes of float64"), (b"1234", "4 bytes"), (5, "5")])
def test_other_bytes_for_a_struct_are_refused(pair: Any, shown: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^saxpy: p: Pair is passed by value, as its 8 bytes .* \(got {shown}\)$"):
        ptxlab.load(STRUCT, "saxpy").arguments([pair, np.zeros(1, np.float32), np.zeros(1, np.float32)])


def test_arrays_without_axes_are_numbers() -> None:
    x = np.ones(3, np.float32)
    run(ptxlab.load(PLAIN), x, np.array(3.0), np.array(3))
    assert (x == 3).all()


def test_symbols_of_ptx_are_found_and_shown_by_name(tmp_path: Path) -> None:
    image = ptxlab.load(TEMPLATE).module
    kernel = ptxlab.load(image.text, "rotate<float, 32>")
    assert kernel.name == "rotate<float, 32>"
    with pytest.raises(ArgumentError, match=r"entry: one of rotate<float, 32> \(got turn\)$"):
        ptxlab.load(image.text, "turn")
    with pytest.raises(ArgumentError, match=r"^rotate<float, 32>: args: 2 arguments"):
        kernel.arguments([])


def test_ptx_with_line_information_names_the_lines_of_its_source() -> None:
    """Read PTX as `nvcc -ptx -lineinfo` leaves it: `.loc` was ignored unless ptxlab had compiled the source itself."""
    text = ptxlab.load(NAMESPACES, "negate").module.text
    with pytest.raises(ptxlab.PtxlabError, match=r"^<text>:7: "):
        run(ptxlab.load(text, "negate"), np.zeros(4, np.float32))


def test_a_fault_names_the_argument_as_the_source_does() -> None:
    """The PTX of a kernel that is not `extern "C"` calls it `_Z4copyPKfPf_param_0`."""
    kernel = ptxlab.load(
        "__global__ void copy(const float* source, float* y) { y[threadIdx.x] = source[threadIdx.x]; }"
    )
    with pytest.raises(MemoryFault, match=r"of argument 0 \(source\), 4 bytes past its end"):
        kernel(np.zeros(31, np.float32), np.zeros(32, np.float32), grid=1, block=32, backend="emulator")


@pytest.mark.skipif(not find("nvcc") or not shutil.which("g++"), reason="nvcc and a compiler of the host are needed")
def test_nvcc_lets_kernels_call_constexpr_functions() -> None:
    """PyTorch compiles extensions with --expt-relaxed-constexpr; Marlin's kernel needs that."""
    text = "constexpr int ceildiv(int a, int b) { return (a + b - 1) / b; }\n"
    text += "__global__ void k(int* y, int n) { y[threadIdx.x] = ceildiv(n, blockDim.x); }\n"
    ptx, _ = nvcc.run(find("nvcc"), Source("k", "k.cu", "cu", text), "ptx", ["-arch=compute_80"])
    kernel, y = ptxlab.load(ptx.decode()), np.zeros(32, np.int32)
    kernel(y, 65, grid=1, block=32, backend="emulator")
    assert (y == 3).all()
