"""Main loops in machine code: of the real kernels, and of a control flow whose loops are known."""

import json
from pathlib import Path

import pytest

from ptxlab import registry, sass, toolchain
from ptxlab.lowbit.bench import counts
from ptxlab.lowbit.bench.gemm.problem import sizes_at, variant
from ptxlab.lowbit.bench.shapes import DISSECTED, DISSECTED_TOKENS
from ptxlab.lowbit.kernels.gemm import STEPS
from ptxlab.sass import mainloop
from ptxlab.spec import KernelSpec

# Two loops, the second within the first; a slow path behind the end that goes back into the inner one.
NESTED = """
.text.nested:
        /*0000*/                   MOV R0, 0x1 ;
.L_outer:
        /*0010*/                   LOP3.LUT R1, R2, 0xf0f0f0f, RZ, 0xc0, !PT ;
        /*0020*/              @!P1 BRA `(.L_skip) ;
        /*0030*/                   IADD3 R3, R3, 0x1, RZ ;
.L_skip:
        /*0040*/                   LOP3.LUT R4, R5, 0xf0f0f0f, RZ, 0xc0, !PT ;
.L_inner:
        /*0050*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R6], R7 ;
        /*0060*/              @!P0 BRA `(.L_slow) ;
        /*0070*/                   IMMA.16832.S8.S8 R8, R4, R12, R8 ;
        /*0080*/              @!P2 BRA `(.L_outer) ;
        /*0090*/                   EXIT ;
.L_slow:
        /*00a0*/                   NANOSLEEP 0x20 ;
        /*00b0*/                   BRA `(.L_inner) ;
"""


def loops(text: str) -> mainloop.MainLoop | None:
    return mainloop.main_loop(next(iter(sass.parse(text).values())))


def test_what_every_iteration_executes_once() -> None:
    loop = loops(NESTED)
    assert loop is not None
    assert loop.weights == 8
    assert loop.opcodes == {"LOP3.LUT": 2, "BRA": 2, "IMMA.16832.S8.S8": 1}
    assert loop.beside == 5, "the skipped IADD3; the loop that waits, with its branch, its slow path and the way back"
    assert loop.per_weight == 5 / 8


def test_without_unpacking_there_is_no_main_loop() -> None:
    assert loops(NESTED.replace("0xf0f0f0f", "0xff")) is None
    conditional = NESTED.replace("LOP3.LUT R1, R2, 0xf0f0f0f", "MOV R1, R2, 0x1").replace(
        "LOP3.LUT R4, R5, 0xf0f0f0f", "MOV R4, R5, 0x1"
    )
    assert loops(conditional.replace("IADD3 R3, R3, 0x1, RZ", "LOP3.LUT R3, R3, 0xf0f0f0f, RZ, 0xc0, !PT")) is None


@pytest.mark.full
@pytest.mark.parametrize("M", DISSECTED_TOKENS)
def test_first_step(M: int) -> None:
    """64 or 128 weights per thread and iteration, 13 ALU instructions per 8 of them and little else."""
    spec, (source, *_) = registry.find("gemm_w4a8_qoq_sm80")
    sizes = sizes_at(spec, DISSECTED, M)
    constants = variant(spec, sizes)
    image = toolchain.build(source, "sm_90a", defines=constants)
    loop = mainloop.main_loop(sass.parse(toolchain.disassemble(image))[spec.name])
    assert loop is not None
    warps = constants["WN"] * constants["WM"] * constants["WK"]
    assert loop.weights == constants["BN"] * constants["BK"] * constants["WM"] // warps // 32
    # IMMA m16n8k32: 16 weights of a thread against 8 tokens.
    assert loop.pipes["tensor"] * 16 == loop.weights * constants["BM"] // constants["WM"] // 8
    arithmetic = loop.pipes["alu"] + loop.pipes["fmaheavy"]
    assert 13 / 8 <= arithmetic / loop.weights < 1.4 * 13 / 8


@pytest.mark.parametrize("spec", STEPS, ids=lambda s: s.name)
def test_every_step_has_its_main_loop_in_the_record(spec: KernelSpec) -> None:
    for source in registry.find(spec.name)[1]:
        loops_by_tokens = counts.load()["main_loops"][source.label]
        assert set(loops_by_tokens) == {str(M) for M in DISSECTED_TOKENS}
        assert all(loop and loop["weights"] % 32 == 0 for loop in loops_by_tokens.values())


# Sums are scaled on two ways: with the MMAs of INT4, and alone behind those of INT8.
SCALING = """
.text.scaling:
        /*0000*/                   I2FP.F32.S32 R0, R1 ;
.L_loop:
        /*0010*/               @P0 BRA `(.L_int8) ;
        /*0020*/                   IMMA.16864.S4.S4 R8, R4, R12, R8 ;
        /*0030*/                   {convert} R1, R8 ;
        /*0040*/                   LDSM.16.M88.4 R4, [R20] ;
        /*0050*/                   FFMA R2, R1, R3, R2 ;
        /*0060*/                   BRA `(.L_next) ;
.L_int8:
        /*0070*/                   {convert} R1, R8 ;
        /*0080*/                   {convert} R5, R9 ;
        /*0090*/                   FFMA R2, R1, R3, R2 ;
        /*00a0*/                   BRA `(.L_next) ;
.L_next:
        /*00b0*/               @P1 BRA `(.L_loop) ;
        /*00c0*/                   EXIT ;
"""


@pytest.mark.parametrize(("convert", "pipe"), [("I2F", "xu"), ("I2FP.F32.S32", "alu")])
def test_what_scaling_a_sum_takes(convert: str, pipe: str) -> None:
    """Counted where no MMA is fed; the conversion before the loop does not count."""
    (code,) = sass.parse(SCALING.replace("{convert}", convert)).values()
    assert mainloop.pipes_per_sum(code) == {pipe: 1, "fma": 0.5, "control": 0.5}
    assert mainloop.pipes_beside_mma(code) == {pipe: 3, "fma": 2, "lsu": 1, "control": 4}
    (nested,) = sass.parse(NESTED).values()
    assert mainloop.pipes_per_sum(nested) == {} and mainloop.pipes_beside_mma(nested[:2]) == {}


@pytest.mark.full
@pytest.mark.parametrize("arch", counts.MMA_ARCHS)
def test_the_shipped_loops_on_mma_sync_are_those_of_the_tools_here(arch: str) -> None:
    assert counts.mma_loops(arch) == counts.load_mma_loops()["archs"][arch]
    assert counts.load_mma_loops()["tools"] == toolchain.versions()


@pytest.mark.full
def test_recording_writes_both_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = counts.load_mma_loops()
    monkeypatch.setattr(counts, "measure", lambda: {"schema": 1})
    monkeypatch.setattr(counts, "record_path", lambda name=counts.ARCH: tmp_path / f"{name}.json")
    assert counts.save() == [tmp_path / "sm_90a.json", tmp_path / "mma_sync.json"]
    assert json.loads((tmp_path / "mma_sync.json").read_text()) == shipped
    assert json.loads((tmp_path / "sm_90a.json").read_text()) == {"schema": 1}
