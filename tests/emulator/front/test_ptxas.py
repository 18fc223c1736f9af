"""What ptxas refuses, the emulator refuses, and what it takes, the emulator takes: snippets, judged by both."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ptxlab import emulator, toolchain
from ptxlab.errors import EmulationError, SourceError, UnknownInstruction

HEAD = ".version 8.8\n.target sm_90\n.address_size 64\n.visible .entry k(.param .u64 out) {\n"
REGISTERS = ("b8", "b16", "u16", "s16", "f16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64")
DECLARED = " ".join(f".reg .{t} %{t};" for t in REGISTERS) + " .reg .pred %p, %q; .shared .align 16 .b8 sm[64];\n"

# One instruction of each kind; each of its registers is tried in every other type.
TYPED = """
add.u32 %u32, %u32, %u32; add.s64 %s64, %s64, %s64; add.f16 %f16, %f16, %f16; fma.rn.f32 %f32, %f32, %f32, %f32;
add.u16x2 %b32, %b32, %b32; mul.wide.u32 %u64, %u32, %u32; mad.lo.s32 %s32, %s32, %s32, %s32; and.b32 %b32, %b32, %b32;
and.pred %p, %p, %p; shl.b32 %b32, %b32, %u32; shr.s16 %s16, %s16, %u32; setp.eq.u32 %p, %u32, %u32;
setp.lt.f32 %p, %f32, %f32; set.eq.u32.f32 %u32, %f32, %f32; selp.b32 %b32, %b32, %b32, %p; mov.u32 %u32, %u32;
mov.b64 %b64, %b64; mov.f32 %f32, %f32; cvt.u32.u16 %u32, %u16; cvt.s8.s32 %s32, %s32; cvt.rn.f32.s32 %f32, %s32;
cvt.rzi.u32.f32 %u32, %f32; cvt.f32.f16 %f32, %f16; cvt.rn.bf16.f32 %b16, %f32; popc.b64 %u32, %b64;
bfi.b32 %b32, %b32, %b32, %u32, %u32; prmt.b32 %b32, %b32, %b32, %b32; dp4a.u32.u32 %u32, %u32, %u32, %u32;
ex2.approx.f32 %f32, %f32; rem.s64 %s64, %s64, %s64; cvta.to.global.u64 %u64, %u64; ld.shared.u8 %u32, [sm];
ld.shared.f32 %f32, [sm]; ld.shared.b64 %b64, [sm]; st.shared.u16 [sm], %u16; st.shared.f32 [sm], %f32;
atom.shared.add.u32 %u32, [sm], %u32; red.shared.add.f32 [sm], %f32; atom.shared.cas.b32 %b32, [sm], %b32, %b32;
"""
# Right ones among wrong ones: judged line by line, in one run of ptxas.
LINES = """
add.u32 %u32, %u32, 4294967295; add.u32 %u32, %u32, 1.0; add.u32 %u32, %u32, 0f3F800000; add.f32 %f32, %f32, 1;
add.f32 %f32, %f32, 1.0; add.f32 %f32, %f32, 0d3FF0000000000000; add.f16 %f16, %f16, 0x3C00; mov.b32 %b32, 0f3F800000;
mov.u32 %u32, 0f3F800000; mov.f32 %f32, 0; mov.b64 %b64, 1.0; mov.b64 %b64, 0f3F800000; st.shared.f32 [sm], 0;
st.shared.b32 [sm], 0f00000000; st.shared.u32 [sm], %tid.x; setp.lt.f32 %p, %f32, 0; atom.shared.add.f32 %f32, [sm], 1;
cvt.rzi.s32.f32 %s32, 1; cvt.rn.f32.s32 %f32, 1; cvt.u64.u32 %u64, %tid.x; add.u32 %u32, %tid.x, 1;
mov.u32 %u32, %tid.x; mov.u64 %u64, %tid.x; mov.u32 %u32, %clock64; mov.u64 %u64, %clock64;
setp.eq.u32 %p|_, %u32, %u32; lop3.b32 %b32, %b32, %b32, %b32, %b32;
bfe.u32 %u32, %u32, 255, 1; ret %u32; ret 1; exit 1; membar; membar.cta; membar.gl; membar.sys;
add.u32 %u32, %u32; add.u32 %u32, %u32, %u32, %u32; mov.u32 %u32; ld.shared.u32 %u32; ld.shared.u32 %u32, %u32;
st.shared.u32 [sm]; st.shared.u32 [sm], %u32, %u32; st.shared.u32 %u32, [sm]; ld.shared.v2.u32 %u32, [sm];
ld.shared.v2.u32 {%u32, %u32, %u32}, [sm]; ld.shared.v2.u32 {%u32, _}, [sm]; atom.shared.cas.b32 %b32, [sm], %b32;
atom.shared.add.u32 %u32, [sm], %u32, %u32; ld.param.u32 %u32, [sm]; ld.global.u32 %u32, [sm];
mov.u32 %u32, 1+2; mov.u32 %u32, (1+2)*3; mov.u32 %u32, 4*(1+2); mov.u32 %u32, 7 % 2; mov.u32 %u32, ~0; bar.sync 1+1;
mov.u32 %u32, - -1; mov.u32 %u32, -(1+2); mov.u32 %u32, 2*WARP_SZ; ld.shared.u32 %u32, [sm+4*8]; mov.u32 %u32, sm+4*8;
ld.shared.u32 %u32, [sm+(4+4)]; add.f32 %f32, %f32, 1+2;
fence.acquire.gpu; fence.acquire.sync_restrict::shared::cluster.cluster; fence.acquire; fence.proxy.async::generic;
fence.release.sync_restrict::shared::cta.cluster; createpolicy.cvt.L2.b64 %b64, %b64;
fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster; createpolicy.whole.L2::evict_last.b64 %b64;
fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster; createpolicy.fractional.L2::evict_first.b64 %b64;
createpolicy.fractional.L2::evict_last.b64 %b64, 0.5; createpolicy.range.global.L2::evict_last.b64 %b64, [%u64], 16, 32;
set.lt.u16.f16 %u16, %f16, %f16; set.lt.s32.bf16 %s32, %b16, %b16; set.lt.f32.f16 %f32, %f16, %f16;
set.lt.bf16.f16 %b16, %f16, %f16; set.lt.f16.bf16 %f16, %b16, %b16; set.lt.u16.f32 %u16, %f32, %f32;
set.lt.f16.s32 %f16, %s32, %s32; set.lt.bf16.u64 %b16, %u64, %u64; set.lt.u16.u16 %u16, %u16, %u16;
set.lt.and.f16x2.f16x2 %b32, %b32, %b32, %p; set.lt.xor.s32.bf16x2 %s32, %b32, %b32, !%p;
set.lt.f16.f16x2 %f16, %b32, %b32; set.lt.u16.f16x2 %u16, %b32, %b32; setp.lt.or.f16x2 %p|%q, %b32, %b32, %q;
cvt.rn.satfinite.f16.f32 %f16, %f32; cvt.rz.relu.satfinite.bf16x2.f32 %b32, %f32, %f32;
cvt.rm.satfinite.f16.f32 %f16, %f32; cvt.rn.satfinite.f16.f64 %f16, %f64; cvt.rn.ftz.satfinite.f16.f32 %f16, %f32;
cvt.rna.satfinite.f16.f32 %f16, %f32; cvt.rn.satfinite.f32.f64 %f32, %f64; fns.b32 %b32, %b32, %u32, %s32;
fns.b64 %b64, %b64, %u32, %s32; fma.rn.oob.f16 %f16, %f16, %f16, %f16; fma.rn.oob.relu.bf16x2 %b32, %b32, %b32, %b32;
fma.rn.ftz.oob.f16 %f16, %f16, %f16, %f16; fma.rn.oob.f32 %f32, %f32, %f32, %f32;
max.abs.f32 %f32, %f32, %f32; max.xorsign.f32 %f32, %f32, %f32; max.xorsign.abs.f32 %f32, %f32, %f32;
vmad.s32.s32.u32.sat.shr7 %s32, -%s32.b1, %u32.h0, %s32; vmad.u32.u32.u32.po.shr15 %u32, %u32, 3, %u32;
vmad.s32.s32.s32 %s32, -%s32, -%s32, -%s32; vmad.s32.s32.s32 %s32, -%s32, %s32, -%s32;
vmad.s32.s32.s32.po %s32, -%s32, %s32, %s32; vmad.s32.s32.s32 %s32.b0, %s32, %s32, %s32;
vmad.s32.s32.s32 %s32, %s32, %s32, %s32.h1; vadd.s32.s32.s32 %s32, -%s32, %s32; vadd.u32.u32.u32 %u32, %u32, %u32.b3;
vadd4.u32.u32.u32 %u32, %u32, %u32, %u32.b0; vadd.u32.u32.u32 %u32, %u32, %u32.h2; add.u32 %u32, -%u32, %u32;
elect.sync %u32|_, -1; elect.sync _|%p, -1; elect.sync %u32, -1; shfl.sync.idx.b32 %u32|_, %u32, 0, 31, -1;
match.any.sync.b32 %u32|%p, %u32, -1; match.all.sync.b32 %u32|_, %u32, -1; atom.shared.add.s64 %s64, [sm], %s64;
atom.shared.min.s64 %s64, [sm], %s64; atom.shared.and.u32 %u32, [sm], %u32; atom.shared.inc.s32 %s32, [sm], %s32;
atom.shared.exch.u32 %u32, [sm], %u32; atom.shared.cas.u32 %u32, [sm], %u32, %u32; atom.shared.min.f32 %f32, [sm], %f32;
atom.shared.cas.b16 %b16, [sm], %b16, %b16; atom.shared.add.u16 %u16, [sm], %u16; atom.shared.add.f16 %f16, [sm], %f16;
atom.shared.add.noftz.f16 %f16, [sm], %f16; atom.shared.exch.f32 %f32, [sm], %f32; atom.shared.min.b32 %b32, [sm], %b32;
mov.u32 %u32, %u32.b0; st.shared.u32 [sm], %u32.b0; atom.shared.f32.add %f32, [sm], %f32;
"""
# Each alone, between bars: an error of one of these hides others.
ALONE = """
.reg .u32 a; .reg .u32 a; | .reg .u32 a, a; | .reg .u32 a<4>; .reg .u32 a2; | .reg .u32 a<4>, a4; mov.u32 a4, 1;
.reg .u32 a; { .reg .u32 a; mov.u32 a, 1; } | .reg.b32 a<2>; .reg.b16 b; mov.b32 a1, 1;
.shared .b32 z[4]; .reg .b32 z; | L: mov.u32 %u32, 1; L: ret; | L: { L: ret; } | .shared .align 0 .b32 z[4];
.shared .align 3 .b32 z[4]; | .shared.align 8 .b32 z[4]; | .shared .b32 z[0]; | .shared .b32 z[2*4];
.reg .b32 w<2+2>; | .local .b32 z[]; | mov.u32 %u32, 08; | mov.u32 %u32, 7%2; | mov.u32 %u32, 1/0;
mov.u32 %u32, sm*2; | bfe.u32 %u32, %u32, 2*200, 1; | add.u32 %u32, %u32, 2*; | add.u32 %u32, %u32, (2*3;
ld.shared.u32 %u32, [sm]+1; | mov.u32 %u32, %nowhere; | bra NOWHERE; | { { mov.u32 %u32, 1; } { } }
add.u32 _, %u32, %u32; | ld.shared.u32 _, [sm]; | bfe.u32 %u32, %u32, 256, 1; | bfi.b32 %b32, %b32, %b32, -1, 1;
fma.f32 %f32, %f32, %f32, %f32; | fma.f16 %f16, %f16, %f16, %f16; | div.f64 %f64, %f64, %f64; | sqrt.f32 %f32, %f32;
rcp.f32 %f32, %f32; | cvt.u32.f32 %u32, %f32; | cvt.f32.u32 %f32, %u32; | cvt.f64.u32 %f64, %u32;
cvt.f16.f32 %f16, %f32; | cvt.f32.f64 %f32, %f64; | cvt.rn.f64.f32 %f64, %f32; | cvt.rn.u32.u16 %u32, %u16;
cvt.rzi.f32.f16 %f32, %f16; | cvt.rni.f32.f32 %f32, %f32; | cvt.f32.bf16 %f32, %b16;
red.shared.exch.b32 [sm], %b32;
"""


def variants(instruction: str) -> list[str]:
    """List the instruction, and with one of its registers in the place of each other type."""
    registers = [*re.finditer(r"%\w+", instruction)]
    replacements = [(m, f"%{t}") for m in registers for t in [*REGISTERS, "p"] if m[0] != f"%{t}"]
    return [
        instruction,
        *(instruction[: m.start()] + replacement + instruction[m.end() :] for m, replacement in replacements),
    ]


def refused_by_ptxas(snippets: list[str], folder: Path) -> set[str]:
    """Return the snippets, a line each, that ptxas has an error about."""
    path = folder / "k.ptx"
    path.write_text(HEAD + DECLARED + "\n".join(snippets) + "\nret;\n}\n")
    command = [str(toolchain.find("ptxas")), "-arch=sm_90", str(path), "-o", str(folder / "k.cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    first = (HEAD + DECLARED).count("\n") + 1
    lines = re.findall(r"line (\d+); (?:error|fatal)", done.stderr)
    assert bool(lines) == bool(done.returncode), done.stderr
    return {snippets[int(line) - first] for line in lines}


def refused_by_emulator(snippet: str) -> bool:
    text = f"{HEAD}{DECLARED}{snippet}\nret;\n}}\n"
    try:
        emulator.run(emulator.parse(text), "k", [np.zeros(64, np.uint32)], grid=1, block=1, max_steps=1000)
    except (SourceError, UnknownInstruction):
        return True
    except EmulationError:  # it ran
        return False
    return False


def statements(text: str) -> list[str]:
    return [f"{statement.strip()};" for statement in text.split(";") if statement.strip()]


@pytest.mark.default_cases("lines")
@pytest.mark.parametrize("which", ["types", "lines"])
def test_operands_are_judged_as_by_ptxas(which: str, tmp_path: Path) -> None:
    snippets = statements(LINES)
    if which == "types":
        snippets = [variant for instruction in statements(TYPED) for variant in variants(instruction)]
    by_ptxas, by_emulator = refused_by_ptxas(snippets, tmp_path), {s for s in snippets if refused_by_emulator(s)}
    assert len(snippets) // 4 < len(by_ptxas) < len(snippets)
    assert sorted(by_ptxas - by_emulator) == [] and sorted(by_emulator - by_ptxas) == []


@pytest.mark.parametrize("snippet", re.split(r" \| |\n", ALONE.strip()))
def test_statements_are_judged_as_by_ptxas(snippet: str, tmp_path: Path) -> None:
    assert refused_by_emulator(snippet) == (snippet in refused_by_ptxas([snippet], tmp_path))
