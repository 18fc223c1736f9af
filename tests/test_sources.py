"""Sources: what can be read as one, and what cannot."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest

from ptxlab import sources, toolchain
from ptxlab.errors import FileError
from ptxlab.lowbit.kernels import gemm
from ptxlab.lowbit.kernels.attention import steps as attention_steps
from ptxlab.lowbit.kernels.attention.append import APPEND, ROPE_APPEND
from ptxlab.lowbit.kernels.attention.prefill import PREFILL
from ptxlab.lowbit.kernels.attention.prefill_sm80 import PREFILL_SM80
from ptxlab.lowbit.kernels.gemm.grouped import GROUPED
from ptxlab.lowbit.kernels.gemm.w4a4 import SM90 as W4A4
from ptxlab.lowbit.kernels.gemm.w4ax import SM90 as W4AX
from ptxlab.sources import Source


@pytest.mark.timeout(20)
@pytest.mark.parametrize("suffix", [".cu", ".ptx"])
@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_only_regular_files_are_read(tmp_path: Path, suffix: str, put: object) -> None:
    """Opening a FIFO waits for a writer; /dev/zero never ends."""
    path = tmp_path / f"k{suffix}"
    put(path)  # type: ignore[operator]
    with pytest.raises(FileError, match=rf"k\{suffix}: not a regular file$"):
        Source.read(path)


def test_text_is_utf8(tmp_path: Path) -> None:
    path = tmp_path / "k.cu"
    path.write_bytes("// größer\n".encode("latin-1"))
    with pytest.raises(FileError, match=r"k\.cu: not a text file in UTF-8 \(byte 0xf6 at 5\)$"):
        Source.read(path)


def test_a_name_is_one_file() -> None:
    """The stem alone names a kernel, so no two folders may share one; a `.ptx` and a `.cu` may."""
    files = [path for root in (sources.ptx_dir(), sources.cuda_dir()) for path in root.rglob("*.*")]
    names = Counter(path.name for path in files)
    assert [name for name, count in names.items() if count > 1] == []
    assert {path.stem for path in files if path.suffix != ".cuh"} == set(sources.names())


def test_the_family_is_the_first_folder() -> None:
    """Also of a teaching step, which lies one folder below."""
    for name in sources.names():
        assert sources.family_of(name) in ("dequant", "load", "gemm", "attention", "quantize", "moe")
    (step,) = sources.sources_of_kernel("gemm_w4a8_lqq_sm90")
    assert Path(step.path).parent.name == "steps" and sources.family_of(step.name) == "gemm"


def test_production_kernels_are_what_the_public_calls_launch() -> None:
    """The public calls launch them by default, for a weight in the packing that its GPU has.

    All other kernels of a family are steps, and siblings.
    """
    # LM heads: `gemm_w8a8`, which the bench compares with, too, and `gemm_f16`
    head_kernels = {"gemm_w8a8_sm90", "gemm_w8a8_sm80", "gemm_f16_sm80"}
    launched = {step.spec.name for step in gemm.LADDER if step.packing in ("qserve", "strips")}
    launched |= {step.spec.name for step in attention_steps.STEPS if step.blocks} | {
        GROUPED.name,
        W4A4.name,
        W4AX.name,
        APPEND.name,
        PREFILL.name,
        PREFILL_SM80.name,
        ROPE_APPEND.name,
    }
    for family in ("gemm", "attention"):
        family_kernels = {path.stem for path in (sources.cuda_dir() / family).glob("*.cu")}
        assert {name for name in launched if sources.family_of(name) == family} == family_kernels - head_kernels


@pytest.mark.parametrize("family", ["dequant", "load", "gemm", "attention", "quantize", "moe"])
def test_the_guide_names_every_kernel_and_constant(family: str) -> None:
    """A family's page names its kernels, and what `-D` may set of them."""
    page = (sources.ptx_dir().parent / "notebooks" / "guide" / f"kernels_{family}.md").read_text()
    named = set(re.findall(r"`(\w+)(?:\.ptx)?`", page))
    all_sources = [source for name in sources.names() for source in sources.sources_of_kernel(name)]
    for source in (source for source in all_sources if sources.family_of(source.name) == family):
        constants = re.search(r"^#ifndef.*?^#endif", source.text, re.DOTALL | re.MULTILINE)
        names = re.findall(r"^#define (\w+)", constants[0], re.MULTILINE) if constants else []
        assert {source.name, *names} <= named, source.label


HEADERS = sorted(path.name for path in (sources.cuda_dir() / "include").glob("*.cuh"))


def including(*headers: str) -> Source:
    """Return a source that includes nothing but these headers, and defines no macro."""
    lines = [*(f'#include "{header}"' for header in headers), 'extern "C" __global__ void empty() {}', ""]
    return Source("empty", str(sources.cuda_dir() / "gemm" / "empty.cu"), "cu", "\n".join(lines))


def test_headers_expect_no_macros_of_who_includes_them() -> None:
    """They get along with each other, too."""
    assert toolchain.build(including(*HEADERS), "sm_90a").data


@pytest.mark.full
@pytest.mark.parametrize("header", HEADERS)
def test_a_header_includes_what_it_uses(header: str) -> None:
    assert toolchain.build(including(header), "sm_90a").data


KERNEL_LINES = 80  # of a body
BY_ROLES = [
    *sorted((sources.cuda_dir() / "attention").glob("*.cu")),
    *(
        sources.cuda_dir() / "gemm" / f"gemm_{name}_sm90.cu"
        for name in ("w4a8", "w4a8_grouped", "w4a8_small", "w4ax", "w8a8")
    ),
]


@pytest.mark.parametrize("path", BY_ROLES, ids=lambda path: path.stem)
def test_bodies_of_kernels_by_roles_are_short(path: Path) -> None:
    """Roles are functions; what the kernel itself does fits a screen."""
    text = path.read_text()
    bodies = [
        text[kernel.end() :].partition("\n}")[0] for kernel in re.finditer(r"__global__.*?\) \{\n", text, re.DOTALL)
    ]
    assert bodies and all(body.count("\n") < KERNEL_LINES for body in bodies)
