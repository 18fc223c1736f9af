"""`reorder_quantize` from its PTX: mistakes in what NVRTC made of it are refuted, each by the claim on it."""

import re
from collections.abc import Iterator
from functools import cache

import pytest

from ptxlab import emulator, registry, toolchain

pytest.importorskip("z3", reason="z3-solver is not installed: it comes with the extra `prove`")

from ptxlab.lowbit.claims import reordering
from ptxlab.prove.solve import Query, ask, distinct_queries

pytestmark = pytest.mark.skipif("nvrtc" in toolchain.missing(), reason="NVRTC is not installed")
SPEC, (SOURCE, *_) = registry.find("reorder_quantize")
SIZES = {"M": 3, "K": 64, "outliers": 0, "g": 64, "pairs": 1, "code": 1, "clip": 0.9}


@cache
def compile_ptx(code: int) -> str:
    defines = SPEC.config_for({**SIZES, "code": code})
    return toolchain.compile_cuda(SOURCE, SPEC.arch, output="ptx", defines=defines).data.decode()


def queries(claim: str, code: int, text: str) -> Iterator[Query]:
    sizes = {**SIZES, "code": code}
    entry = emulator.parse(text, "changed.ptx").entries[SPEC.name]
    row = reordering.row_of(entry, SPEC, {**sizes, **SPEC.config_for(sizes)})
    yield from getattr(reordering, claim)([row])


@pytest.mark.full
@pytest.mark.parametrize(
    ("claim", "code", "old", "new"),
    [
        ("rounds", 1, r"(%f\d+, )0f4B400000;", r"\g<1>0f4B400001;"),  # 1.5 * 2^23
        ("rounds", 1, "cvt.rzi.f32.f32", "cvt.rni.f32.f32"),
        ("rounds", 1, ", 17440;", ", 17424;"),  # the bytes of two pairs
        ("rounds", 0, "0fC1000000", "0fC0E00000"),  # -8
        ("divides", 1, r"\+4\];", "+8];"),
        ("divides", 0, "neg.f32", "abs.f32"),
        ("scales", 0, ", 15360, ", ", 15361, "),  # 1, of a group of zeros
        ("scales", 0, "max.NaN.f32", "min.f32"),
        (
            "scales",
            0,
            r"15360, (%rs\d+),([\s\S]*?cvt.f32.f16 %f\d+, )%rs\d+;",
            r"15360, \1,\2\1;",
        ),  # another divides
        ("sends", 0, r"(ld.global[.\w]*.v4.u32 .*)\+16\];", r"\1];"),
    ],
)
def test_a_mistake_in_the_code_is_refuted(claim: str, code: int, old: str, new: str) -> None:
    changed, count = re.subn(old, new, compile_ptx(code), count=1)
    assert count == 1
    assert any(ask(query).verdict == "refuted" for query in queries(claim, code, changed))


@pytest.mark.full
@pytest.mark.parametrize("claim", ["rounds", "scales"])
def test_what_the_quick_half_leaves_out_is_proved_of_one_group(claim: str) -> None:
    assert {ask(query).verdict for query in distinct_queries([*queries(claim, 0, compile_ptx(0))])} == {"proved"}
