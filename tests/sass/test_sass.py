"""Machine code: parsing, pipes, and the cost of dequantising eight weights, pinned for the assembler of ptxlab[asm]."""

import pytest

from ptxlab import sass, sources, toolchain
from ptxlab.errors import ArgumentError, SourceError
from ptxlab.sass import harness
from ptxlab.sources import Source
from tests.support.alu_counts import PINNED

LISTING = """
	.section	.text.first,"ax",@progbits
.text.first:
	//## File ".nv_debug_ptx_txt", line 5
        /*0000*/                   LDC R1, c[0x0][0x28] ;
	//## File ".nv_debug_ptx_txt", line 9 inlined at "b.cu", line 3
        /*0010*/              @!P0 IMAD.MOV.U32 R4, RZ, RZ, R2 ;
        /*0020*/              @UP1 UIADD3 UR4, UR4, 0x1, URZ ;
.L_x_0:
        /*0030*/                   LDG.E.128 R8, desc[UR4][R2.64+0x10] ;
        /*0040*/               @P1 BRA `(.L_x_0) ;
        /*0050*/                   HFMA2.MMA R0, -RZ, RZ, 0, 0 ;
        /*0060*/                   NOP ;
        /*0070*/                   STG.E desc[UR4][R2.64], R8 ;
        /*0080*/                   EXIT ;
.L_x_1:
        /*0090*/                   BRA `(.L_x_1);
        /*00a0*/                   NOP;
        /*00b0*/                   NOP;
.text.second:
        /*0000*/                   EXIT ;
"""

# Opcodes per 8 weights on sm_90a with ptxas 13.2.86; the sums, of all kernels, are pinned in `test_counts`.
OPCODES = {
    "dequant_lqq": {"LOP3.LUT": 4, "SHF.R.U32.HI": 1, "IMAD": 2},
    "dequant_lqq_unsigned": {"LOP3.LUT": 2, "SHF.R.U32.HI": 1, "IMAD": 2},
    "dequant_qoq_vadd4": {"LOP3.LUT": 8, "SHF.R.U32.HI": 1, "IMAD": 2, "IMAD.IADD": 2},
    "dequant_qoq_vadd4_s32": {
        "PRMT": 46,
        "IMAD.IADD": 8,
        "IMAD.MOV.U32": 5,
        "IMAD": 2,
        "LOP3.LUT": 2,
        "SHF.R.U32.HI": 1,
    },
    "dequant_qoq_saturating": {
        "PRMT": 38,
        "I2I.S8.S32.SAT": 8,
        "IMAD.IADD": 8,
        "IMAD.MOV.U32": 3.25,
        "IMAD": 2,
        "LOP3.LUT": 2,
        "SHF.R.U32.HI": 1,
    },
    "dequant_qoq_channel": {"LOP3.LUT": 2, "SHF.R.U32.HI": 1},
    "dequant_comet": {"LOP3.LUT": 2, "IMAD.SHL.U32": 1},
    "dequant_u4_f16_subnormal": {"LOP3.LUT": 4, "SHF.R.U32.HI": 3},
}
ALL = [source for name in sources.names() if name.startswith("dequant_") for source in sources.sources_of_kernel(name)]


def test_parse() -> None:
    functions = sass.parse(LISTING)
    assert list(functions) == ["first", "second"]
    first = functions["first"]
    assert [i.name for i in first] == [
        *("LDC", "IMAD.MOV.U32", "UIADD3", "LDG.E.128", "BRA", "HFMA2.MMA", "NOP", "STG.E", "EXIT"),
    ]
    operands, path = ("R4", "RZ", "RZ", "R2"), ".nv_debug_ptx_txt"
    assert first[1] == sass.SassInstruction(0x10, "IMAD", ("MOV", "U32"), operands, "@!P0", 9, path)
    assert [i.guard for i in first if i.guard] == ["@!P0", "@UP1", "@P1"]
    assert [i.line for i in first][:3] == [5, 9, 9]
    assert first[3].operands == ("R8", "desc[UR4][R2.64+0x10]")
    assert [i.section for i in first] == [
        *("load", "arithmetic", "uniform", "load", "control", "arithmetic", "control", "store", "control"),
    ]
    assert [i.pipe for i in first][:6] == ["constant", "fmaheavy", "uniform", "lsu", "control", "fma"]


def test_branch_targets_and_loops() -> None:
    functions = sass.parse(LISTING)
    assert functions["first"][4].operands == ("0x30",)
    assert [i.address for i in sass.loop_of(functions["first"])] == [0x30, 0x40]
    assert sass.loop_of(functions["second"]) == []


def test_cuobjdump_reads_the_same() -> None:
    text = (
        "\n\tcode for sm_90a\n\t\tFunction : only\n"
        "        /*0000*/              @P0 BRA 0x0 ;                 /* 0xfffffffc00fc7947 */\n"
        "                                                            /* 0x000fc0000383ffff */\n"
        "        /*0010*/                  EXIT ;                    /* 0x000000000000794d */\n"
        "        /*0020*/                  BRA 0x20;                 /* 0xfffffffc00fc7947 */\n"
    )
    assert [(i.name, i.operands) for i in sass.parse(text)["only"]] == [("BRA", ("0x0",)), ("EXIT", ())]


def test_unknown_opcode_counts_as_arithmetic() -> None:
    (unknown,) = sass.parse(".text.f:\n        /*0000*/    QUX.ADD R1, R2 ;\n")["f"]
    assert (unknown.pipe, unknown.section) == ("other", "arithmetic")


def test_counts() -> None:
    first = sass.parse(LISTING)["first"]
    assert sass.opcode_counts([*first, first[3]])["LDG.E.128"] == 2
    assert sass.pipe_counts(first) == {"control": 3, "lsu": 2, "constant": 1, "fmaheavy": 1, "uniform": 1, "fma": 1}
    assert sass.by_pipe({"IMAD.MOV.U32": 2, "IMAD": 0.5, "LOP3.LUT": 1, "QUX": 3}) == {
        "fmaheavy": 2.5,
        "alu": 1,
        "other": 3,
    }


@pytest.mark.parametrize(
    ("pipes", "clocks", "pipe"),
    [
        ({"alu": 5, "fmaheavy": 2}, 5 / 64, "alu"),  # LQQ
        ({"alu": 3, "fmaheavy": 3}, 3 / 64, "alu"),
        ({"alu": 4, "fmaheavy": 6}, 6 / 64, "fmaheavy"),
        ({"alu": 2, "fmaheavy": 2, "fma": 7}, 11 / 128, "issue"),
        ({"fmaheavy": 1, "fma": 7}, 8 / 128, "fma"),
        ({"alu": 1, "xu": 1}, 1 / 16, "xu"),
    ],
)
def test_limit_is_the_fullest_pipe(pipes: dict[str, float], clocks: float, pipe: str) -> None:
    assert sass.pipe_limit(pipes) == (clocks, pipe)


@pytest.mark.default_cases("dequant_lqq.ptx")
@pytest.mark.parametrize("source", ALL, ids=lambda s: s.label)
def test_instructions_per_8_weights(source: Source) -> None:
    report = sass.report(source, "sm_90a")
    assert report.alu_per_8 == PINNED[source.label]
    if source.language == "ptx" and source.name in OPCODES:
        assert report.opcodes_per_8 == OPCODES[source.name]
    assert sum(report.pipes_per_8.values()) == report.alu_per_8 and "other" not in report.pipes_per_8
    assert (report.spill_stores, report.spill_loads, report.stack, report.warnings) == (0, 0, 0, ())
    assert "other" not in report.pipes


def test_report_is_json_ready_and_complete() -> None:
    report = sass.report(sources.sources_of_kernel("dequant_lqq")[0], "sm_90a").to_json()
    assert report["name"] == "dequant_lqq.ptx" and report["entry"] == "dequant_lqq" and report["arch"] == "sm_90a"
    assert report["tools"] == (f"ptxas {toolchain.version('ptxas')}", f"nvdisasm {toolchain.version('nvdisasm')}")
    assert sum(report["opcodes"].values()) == sum(report["pipes"].values()) == sum(report["sections"].values())
    assert report["opcodes"]["STG.E.EF.128"] == 1 and report["sections"]["store"] == 1
    assert 0 < report["registers"] <= 32


@pytest.mark.full
def test_saturation_is_dearer_still() -> None:
    """`.sat` on top of the signed spelling: 8 conversions more, as `h200.md` counts them."""
    (source,) = sources.sources_of_kernel("dequant_qoq_vadd4_s32")
    saturating = Source.from_text(source.text.replace("vadd4.s32.s32.s32", "vadd4.s32.s32.s32.sat"), "<sat>")
    per_8 = sass.count_per_8_weights(saturating, "sm_90a")
    assert per_8 is not None
    assert sum(per_8.values()) > 64 and sum(v for name, v in per_8.items() if name.startswith("I2I")) == 8


@pytest.mark.full
def test_file_without_a_marked_word() -> None:
    source = Source.from_text(
        'extern "C" __global__ void one(int* x) { *x = 1; }\nextern "C" __global__ void two(int* x) { *x = 2; }'
    )
    report = sass.report(source, "sm_90a", entry="two")
    assert report.alu_per_8 is None and report.opcodes_per_8 == {} and report.sections["store"] == 1
    with pytest.raises(ArgumentError, match=r"entry: one of two, one|entry: one of one, two"):
        sass.report(source, "sm_90a")
    with pytest.raises(ArgumentError, match=r"\(got three\)"):
        sass.report(source, "sm_90a", entry="three")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("in:%q0", "in:%q0,%q1"), ("out:%d0,%d1", "out:"), ("in:%q0", "in:q0"), ("    // @end word\n", "")],
)
def test_marker_that_cannot_be_read(right: str, wrong: str) -> None:
    source = sources.sources_of_kernel("dequant_lqq")[0]
    text = source.text.replace(right, wrong)
    assert text != source.text
    line = text[: text.index("@begin")].count("\n") + 1
    with pytest.raises(SourceError, match=rf"^<wrong>:{line}: the marker of a word is"):
        harness.counting_harness(Source("wrong", "<wrong>", "ptx", text), 8)


def test_word_is_what_the_kernel_runs() -> None:
    word = harness.word_of(sources.sources_of_kernel("dequant_lqq")[0])
    assert word is not None
    assert (word.input_register, word.result_registers, word.shared) == ("%q0", ("%d0", "%d1"), ("%scale", "%offset"))
    assert len(word.body.splitlines()) == 7 and "mad.lo.u32" in word.body
    assert word.header.split() == [".version", "6.5", ".target", "sm_75", ".address_size", "64"]


@pytest.mark.default_cases("dequant_comet.ptx", "dequant_int4_naive.ptx")
@pytest.mark.parametrize("source", [s for s in ALL if s.language == "ptx"], ids=lambda s: s.label)
def test_looping_harness_adds_only_its_feedback(source: Source) -> None:
    """The loop has 8 words, an IMAD per word and pair of results, a counter, a compare, a branch."""
    loop = harness.looping_harness(source)
    assert loop is not None
    functions = sass.parse(toolchain.disassemble(toolchain.build(loop, "sm_90a")))
    body = sass.loop_of(functions[harness.LOOPING])
    word = harness.word_of(source)
    assert word is not None and body[-1].opcode == "BRA"
    work = sum(i.section == "arithmetic" for i in body)
    feedback = harness.LOOP_WORDS * len(word.result_registers) // 2
    assert 0 <= work - feedback - harness.LOOP_WORDS * PINNED[source.label] <= harness.LOOP_WORDS
    assert not any(i.section in ("load", "store") for i in body)
