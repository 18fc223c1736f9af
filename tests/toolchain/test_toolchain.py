"""Compilers and disassembler: real compiles, errors with their line, the cache's key, missing tools."""

import re
from pathlib import Path

import pytest

from ptxlab import toolchain
from ptxlab.errors import ArgumentError, CompileError, UnavailableError
from ptxlab.sources import Source
from ptxlab.toolchain import cache, headers, kernels, nvrtc

PTX = """.version 6.5
.target sm_75
.address_size 64
.visible .entry flip(.param .u64 words)
{
    .reg .b64 %p;
    .reg .b32 %w;
    ld.param.u64 %p, [words];
    ld.global.u32 %w, [%p];
    xor.b32 %w, %w, 0x80808080;
    st.global.u32 [%p], %w;
    ret;
}
"""
CUDA = """#include "flip.cuh"
extern "C" __global__ void flip(unsigned* words) {
    __shared__ unsigned tile[32];
    tile[threadIdx.x] = flip_signs(words[threadIdx.x]);
    __syncthreads();
    words[threadIdx.x] = tile[31 - threadIdx.x];
}
"""
HEADER = "__device__ inline unsigned flip_signs(unsigned w) { return w ^ MASK; }\n"
MASK = {"MASK": "0x80808080u"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))


@pytest.fixture
def ptx() -> Source:
    return Source.from_text(PTX, "flip.ptx")


@pytest.fixture
def cuda(tmp_path: Path) -> Source:
    (tmp_path / "flip.cuh").write_text(HEADER)
    (tmp_path / "flip.cu").write_text(CUDA)
    return Source.read(tmp_path / "flip.cu")


def test_ptx_to_cubin(ptx: Source) -> None:
    image = toolchain.assemble(ptx, "sm_90a")
    assert image.data.startswith(b"\x7fELF")
    assert image.kind == "cubin" and image.arch == "sm_90a" and image.tool.startswith("ptxas 1")
    used = image.resources["flip"]
    assert 0 < used.registers <= 32
    assert used == toolchain.Resources(used.registers, stack=0, spill_stores=0, spill_loads=0, shared=0)
    assert image.warnings == ()


def test_cuda_to_cubin(cuda: Source) -> None:
    image = toolchain.compile_cuda(cuda, "sm_80", defines=MASK)
    assert image.data.startswith(b"\x7fELF")
    assert image.resources["flip"].shared == 128
    assert image.resources["flip"].registers > 0


def test_cuda_to_ptx(cuda: Source) -> None:
    image = toolchain.compile_cuda(cuda, "sm_90a", output="ptx", defines=MASK)
    text = image.data.decode()
    assert ".entry flip(" in text and ".target sm_90a" in text and ".loc" in text
    assert text.endswith("\n") and "\0" not in text


def test_cuda_headers_are_found() -> None:
    source = Source.from_text(
        "#include <cuda_fp16.h>\n#include <cuda/std/cstdint>\n"
        'extern "C" __global__ void halve(__half2* x) { x[0] = __hmul2(x[0], __float2half2_rn(0.5f)); }'
    )
    assert toolchain.compile_cuda(source, "sm_90a").resources.keys() == {"halve"}


def test_spills_and_stack_are_reported() -> None:
    body = "".join(f"a[{i}] = x[{i} * n]; " for i in range(64)) + "for (int i = 0; i < n; ++i) x[i] = a[i & 63];"
    source = Source.from_text(
        f'extern "C" __global__ void __launch_bounds__(32) heavy(float* x, int n) {{ float a[64]; {body} }}'
    )
    assert toolchain.compile_cuda(source, "sm_90a").resources["heavy"].stack >= 256
    report = (
        "ptxas info    : Compiling entry function 'a' for 'sm_90a'\nptxas info    : Function properties for a\n"
        "    40 bytes stack frame, 36 bytes spill stores, 44 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 3 barriers, 40 bytes cumulative stack size, 1024 bytes smem\n"
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
    )
    image = toolchain.Image("cubin", "sm_90a", "ptx", Path("unused"), "ptxas", report)
    assert image.resources == {"a": toolchain.Resources(168, stack=40, spill_stores=36, spill_loads=44, shared=1024)}
    assert len(image.warnings) == 1 and "C7510" in image.warnings[0]


@pytest.mark.parametrize(
    ("wrong", "line", "problem"),
    [
        (PTX.replace("xor.b32", "xorr.b32"), 10, "Not a name of any known instruction: 'xorr'"),
        (PTX.replace("ld.global.u32 %w", "ld.global.u32 %nope"), 9, "Unknown symbol '%nope'"),
        (PTX.replace("ret;", "ret"), 13, "syntax error"),
    ],
)
def test_ptx_error_shows_its_line(wrong: str, line: int, problem: str) -> None:
    with pytest.raises(CompileError) as raised:
        toolchain.assemble(Source.from_text(wrong, "wrong.ptx"), "sm_90a")
    assert raised.value.line == line
    assert str(raised.value).startswith(f"wrong.ptx:{line}: ") and "\n" not in str(raised.value)
    assert problem in raised.value.log
    assert wrong.splitlines()[line - 1].strip() in str(raised.value)


def test_ptx_for_a_newer_gpu_is_refused_in_words(ptx: Source) -> None:
    newer = Source.from_text(PTX.replace("6.5", "8.0").replace("sm_75", "sm_90a"), "flip.ptx")
    with pytest.raises(CompileError, match=r"^flip.ptx: SM version specified by .target is higher .* \(sm_80\)$"):
        toolchain.assemble(newer, "sm_80")


def test_cuda_error_shows_its_line(cuda: Source) -> None:
    with pytest.raises(CompileError) as raised:
        toolchain.compile_cuda(cuda, "sm_90a")  # MASK is not defined: the error is in the header
    assert raised.value.line == 1
    assert str(raised.value).endswith(f'flip.cuh:1: identifier "MASK" is undefined: `{HEADER.strip()}`')

    wrong = Source.from_text(CUDA.replace("[31 - threadIdx.x]", "[31 - thread]").replace("#include", "//"), "<cell>")
    with pytest.raises(CompileError, match=r'^<cell>:\d: identifier ".*" is undefined: `.*`$'):
        toolchain.compile_cuda(wrong, "sm_90a")


def test_error_in_inline_assembly_shows_statement_and_line() -> None:
    source = Source.from_text(
        'extern "C" __global__ void flip(unsigned* words) {\n'
        "    unsigned w = words[threadIdx.x];\n"
        '    asm("xorr.b32 %0, %0, 1;" : "+r"(w));\n'
        "    words[threadIdx.x] = w;\n}\n",
        "flip.cu",
    )
    with pytest.raises(CompileError, match=r"flip.cu:3: Not a name of any known instruction: 'xorr': `xorr.b32"):
        toolchain.compile_cuda(source, "sm_90a")


@pytest.mark.parametrize("arch", ["90a", "sm_90x", "compute_90", "sm_10", ""])
def test_unknown_arch(ptx: Source, cuda: Source, arch: str) -> None:
    for source in (ptx, cuda):
        with pytest.raises(ArgumentError, match=r"^arch: .*\(got .*\)$"):
            toolchain.build(source, arch)


def test_arguments(ptx: Source, cuda: Source) -> None:
    with pytest.raises(ArgumentError, match=r"defines: none, since flip\S* is PTX"):
        toolchain.build(ptx, "sm_90a", defines=MASK)
    with pytest.raises(ArgumentError, match=r"defines: names of macros \(got A B\)"):
        toolchain.build(cuda, "sm_90a", defines={"A B": 1})


@pytest.mark.smoke
def test_cache_key_covers_everything(cuda: Source, tmp_path: Path) -> None:
    first = toolchain.compile_cuda(cuda, "sm_90a", defines=MASK)
    assert toolchain.compile_cuda(cuda, "sm_90a", defines=MASK) == first
    images = [
        toolchain.compile_cuda(cuda, "sm_90a", defines={"MASK": "1u"}),
        toolchain.compile_cuda(cuda, "sm_80", defines=MASK),
        toolchain.compile_cuda(cuda, "sm_90a", output="ptx", defines=MASK),
    ]
    (tmp_path / "flip.cuh").write_text(HEADER.replace("^", "|"))
    images.append(toolchain.compile_cuda(cuda, "sm_90a", defines=MASK))
    assert len({image.path for image in [first, *images]}) == 5


def test_compiles_once_and_keeps_the_log(cuda: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    first = toolchain.compile_cuda(cuda, "sm_90a", defines=MASK)
    monkeypatch.setattr(nvrtc, "run", lambda *_: pytest.fail("compiled again"))
    again = toolchain.compile_cuda(cuda, "sm_90a", defines=MASK)
    assert again.resources == first.resources != {}


@pytest.mark.full
def test_disassembly_names_lines(ptx: Source, cuda: Source) -> None:
    text = toolchain.disassemble(toolchain.assemble(ptx, "sm_90a"))
    assert "LOP3.LUT" in text and "line 10" in text
    text = toolchain.disassemble(toolchain.compile_cuda(cuda, "sm_90a", defines=MASK))
    assert 'flip.cu", line 4' in text


@pytest.mark.full
def test_machine_code_says_where_an_indirect_jump_leads() -> None:
    places = "ABCD"
    branches = "\n".join(f"{name}: st.global.u32 [%out+{4 * i}], %i; bra E;" for i, name in enumerate(places))
    text = f"""
.version 8.0
.target sm_90a
.address_size 64
.visible .entry jumps(.param .u64 out, .param .u32 i) {{
.reg .b32 %i;
.reg .b64 %out;
ld.param.u32 %i, [i];
ld.param.u64 %out, [out];
to: .branchtargets {", ".join(places)};
brx.idx %i, to;
{branches}
E: ret;
}}
"""
    code = toolchain.disassemble(toolchain.assemble(Source.from_text(text, "jumps.ptx"), "sm_90a"))
    (jump,) = (line for line in code.splitlines() if "BRX" in line)
    assert re.search(r'BRANCH_TARGETS (\.\w+,?){4}"', jump)


KERNEL = 'extern "C" __global__ void {}(int* out) {{ out[0] = 1; }}\n'


@pytest.mark.full
def test_entries_are_those_that_the_compiler_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    away = "#if 0\n" + KERNEL.format("away") + "#endif\n"
    hopper = "#if __CUDA_ARCH__ >= 900\n" + KERNEL.format("hopper") + "#endif\n"
    both = Source.from_text(away + KERNEL.format("here") + hopper)
    assert kernels.entries(both) == ["here", "hopper"]
    assert kernels.entries(both, "sm_80") == ["here"]
    defined = Source.from_text("#ifdef WITH\n" + KERNEL.format("k") + "#endif\n")
    assert kernels.entries(defined, defines={"WITH": 1}) == ["k"]

    with pytest.raises(ArgumentError, match=r'entry: a kernel \(extern "C" __global__\) that the prep.* \(got away\)'):
        kernels.entries(Source.from_text(away))
    assert kernels.entries(Source.from_text("__global__ void k(int* out) { out[0] = 1; }")) == ["k"]
    with pytest.raises(ArgumentError, match=r"entry: a kernel \(__global__\) \(got nothing\)"):
        kernels.find_kernel(Source.from_text("__device__ int x;"), None)
    with pytest.raises(CompileError, match=r":1: #error directive: not here"):
        kernels.entries(Source.from_text("#error not here\n" + KERNEL.format("k")))

    def no_library() -> None:
        raise UnavailableError("NVRTC: not found")

    monkeypatch.setattr(nvrtc, "_library", no_library)
    assert kernels.entries(both) == ["away", "here", "hopper"]


def test_versions_and_missing_tools(ptx: Source, cuda: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(toolchain.versions()) == set(toolchain.TOOLS) and toolchain.missing() == {}
    for cached in (toolchain.find, toolchain.version):
        monkeypatch.setattr(toolchain, cached.__name__, cached.__wrapped__)
    monkeypatch.setattr(toolchain, "find", lambda tool: None)

    def no_library() -> None:
        raise UnavailableError(f"NVRTC: needed to compile CUDA C++ and not found; {nvrtc.INSTALL}")

    monkeypatch.setattr(nvrtc, "_library", no_library)
    assert toolchain.versions() == {} and set(toolchain.missing()) == set(toolchain.TOOLS)
    with pytest.raises(UnavailableError, match=r"^ptxas: not found .*pip install 'ptxlab\[asm\]'$"):
        toolchain.assemble(ptx, "sm_90a")
    with pytest.raises(UnavailableError, match=r"^NVRTC: .*pip install 'ptxlab\[asm\]'$"):
        toolchain.compile_cuda(cuda, "sm_90a", defines=MASK)


@pytest.mark.full
def test_headers_of_the_standard_library() -> None:
    """The headers are those that kernels include, though NVRTC has none.

    A header compiles alone, and its names of `std` are those of CUDA.
    """
    every = "".join(f"#include <{name}>\n" for name in headers.BY_NAME)
    body = """
    extern "C" __global__ void k(uint32_t* a, std::uint64_t n, float* f) {
        static_assert(sizeof(CUtensorMap) == 128 && std::is_same_v<std::uint32_t, uint32_t>);
        assert(n > 0);
        a[0] = std::min(a[1], UINT32_MAX);
        f[0] = std::sqrt(f[1]) + std::numeric_limits<float>::min();
        std::printf("%d", int(n));
    }
    """
    source = Source.from_text(every + body, "k.cu")
    ptx = toolchain.compile_cuda(source, "sm_90", output="ptx").data
    assert b"sqrt" in ptx
    for name in ("cstdint", "assert.h", "cuda.h"):
        kernel = f'#include <{name}>\nextern "C" __global__ void k() {{}}\n'
        toolchain.compile_cuda(Source.from_text(kernel, "k.cu"), "sm_90", output="ptx")


def test_headers_for_the_host_alone() -> None:
    text = '#include <cstdint>\n#include <{}>\nextern "C" __global__ void k() {{}}\n'
    stand_in = Source.from_text(text.format("iostream"), "k.cu")
    assert b".entry k" in toolchain.compile_cuda(stand_in, "sm_90", output="ptx").data
    with pytest.raises(
        CompileError, match=r'^k.cu:2: cannot open source file "boost/any.hpp"; -I FOLDER, .*: `#include <boost/any'
    ):
        toolchain.compile_cuda(Source.from_text(text.format("boost/any.hpp"), "k.cu"), "sm_90", output="ptx")


def test_a_header_of_the_project_comes_before_those_of_the_standard_library(tmp_path: Path) -> None:
    (tmp_path / "cstdint").write_text("typedef unsigned mine;\n")
    (tmp_path / "k.cu").write_text('#include <cstdint>\nextern "C" __global__ void k(mine* a) { a[0] = 1; }\n')
    toolchain.compile_cuda(Source.read(tmp_path / "k.cu"), "sm_90", output="ptx")
