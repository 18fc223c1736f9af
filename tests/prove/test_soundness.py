"""Claims that are false, and kernels that lead a prover to believe them. Each was proved once."""

from pathlib import Path

import pytest

from ptxlab.errors import ArgumentError, PtxlabError
from tests.support.small_kernels import HEADER

pytest.importorskip("z3", reason="z3-solver is not installed: it comes with the extra `prove`")

from ptxlab.prove import Claim, decide, loops, prove_kernel
from ptxlab.prove.execute import NotModelled
from ptxlab.prove.loop_claim import LoopClaim
from tests.support.proofs import entry_of, load_body, loop_text, loop_verdict

TWO = ".param .u64 x, .param .u64 out"


def test_a_carry_that_nothing_has_set_is_anything(tmp_path: Path) -> None:
    kernel = load_body(tmp_path, "addc.u32 %a, 7, 0; st.global.u32 [%o], %a;")
    assert prove_kernel(kernel, "out.u32[i] == 7").verdict == "refuted"
    assert prove_kernel(kernel, "7 <= out.u32[i] <= 8").verdict == "proved"


def test_an_assumption_is_on_what_lay_in_memory_before(tmp_path: Path) -> None:
    """A kernel in place: the assumption was on what it stores, so every claim that repeats it held."""
    body = "ld.param.u64 %x, [x]; ld.global.u8 %a, [%x]; shl.b32 %a, %a, 1;"
    body += " st.global.u8 [%x], %a; st.global.u8 [%o], %a;"
    kernel = load_body(tmp_path, body, TWO)
    refuted = prove_kernel(kernel, "x.u8[i] <= 100", assume="x.u8[i] <= 100")
    assert refuted.verdict == "refuted" and "before.x.u8[0] = " in str(refuted)
    assert prove_kernel(kernel, "x.u8[i] == 2 * before.x.u8[i]", assume="x.u8[i] <= 100").verdict == "proved"
    assert prove_kernel(kernel, "out.u8[i] == 3", assume="out.u8[i] == 3").verdict == "refuted"
    with pytest.raises(ArgumentError, match="other is none of"):
        prove_kernel(kernel, "out.u8[i] == other.out.u8[i]", assume="other.out.u8[i] == 0", equals=kernel)


def test_an_address_is_no_round_number(tmp_path: Path) -> None:
    kernel = load_body(tmp_path, "cvt.u32.u64 %a, %o; st.global.u32 [%o], %a;")
    assert prove_kernel(kernel, "out.u32[i] == 0").verdict == "refuted"


def test_nothing_lies_before_a_buffer(tmp_path: Path) -> None:
    kernel = load_body(tmp_path, "mov.u32 %a, 1; st.global.u32 [%o], %a; st.global.u32 [%o+-4], %a;")
    refuted = prove_kernel(kernel, "out.u32[i] == 1")
    assert refuted.verdict == "refuted" and "4 bytes at byte -4 of out" in str(refuted)


def test_all_elements_of_a_byte_are_claimed_about(tmp_path: Path) -> None:
    """The prover once looked at the lower of two nibbles in a byte only."""
    kernel = load_body(tmp_path, "mov.u32 %a, 0x21; st.global.u8 [%o], %a;")
    assert prove_kernel(kernel, "out.u4[i] == 1").verdict == "refuted"
    assert prove_kernel(kernel, "out.u4[i] == i + 1").verdict == "proved"


def test_assumptions_that_rule_out_one_word_are_refused(tmp_path: Path) -> None:
    """Nothing was claimed of elements 0 and 1, because the assumption admits no element 2."""
    kernel = load_body(tmp_path, "mov.u32 %a, 5; st.global.u32 [%o], %a; st.global.u32 [%o+4], %a;")
    with pytest.raises(ArgumentError, match="assumptions that some input satisfies"):
        prove_kernel(kernel, "out.u8[i] == 1 or i > 3", assume="i < 2 or i > 3")


def test_a_claim_that_comes_to_no_formula_is_refused() -> None:
    with pytest.raises(ArgumentError, match="something to decide"):
        decide(Claim("a loop", "dequantises", "", list))


def test_an_assumption_on_i_is_none_on_a_parameter_of_that_name(tmp_path: Path) -> None:
    """It was taken for a condition on the parameter, and as none met it the second store went nowhere."""
    body = """mov.u32 %a, 1; st.global.u32 [%o+12], %a; ld.param.u32 %a, [i]; and.b32 %a, %a, 1; mul.wide.u32 %x, %a, 4;
    add.u64 %o, %o, %x; mov.u32 %a, 9; st.global.u32 [%o+12], %a;"""
    kernel = load_body(tmp_path, body, ".param .u32 i, .param .u64 out")
    assert prove_kernel(kernel, "out.u32[i] == 1 or i == 4", assume="i >= 3").verdict == "refuted"


@pytest.mark.parametrize(
    ("claim", "why"),
    [
        ("q4.s8[i] >= -8", "q4 has elements of 4 bits, not 8"),
        ("scale.u4[i//g] <= 15", "scale has elements of 8 bits, not 4"),
        ("q4.u4[i + 1000000] >= 0", "lies outside the array"),
        ("qweight.u8[i + 1000000] >= 0", "out of bounds"),
    ],
)
def test_an_input_has_the_bits_that_it_has_and_no_more_elements(claim: str, why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        prove_kernel("dequant_lqq", claim)


def test_what_only_one_of_two_kernels_stores_is_no_equality(tmp_path: Path, cli) -> None:
    both = ".visible .entry k(.param .u64 a, .param .u64 b) { .reg .u64 %a, %b; .reg .u32 %r; mov.u32 %r, 1;\n"
    both += "ld.param.u64 %a, [a]; ld.param.u64 %b, [b]; st.global.u32 [%a], %r; st.global.u32 [%b], %r; ret; }"
    one, two = tmp_path / "one.ptx", tmp_path / "two.ptx"
    two.write_text(HEADER + both)
    one.write_text(HEADER + both.replace("st.global.u32 [%b], %r;", ""))
    assert cli("prove", str(two), "--equals", str(two))[0] == 0
    code, _, error = cli("prove", str(one), "--equals", str(two))
    assert code == 2 and "stores to a, b, as --equals does (got a)" in error


def test_lanes_that_no_thread_comes_to_are_not_proved(tmp_path: Path, cli) -> None:
    path = tmp_path / "mine.ptx"
    path.write_text(f"""{HEADER}.visible .entry mine(.param .u64 out) {{
        .reg .u32 %t, %d; .reg .u64 %o; .reg .pred %p; ld.param.u64 %o, [out];
        mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0;
        and.b32 %d, %t, 1;  // @lanes d:u8x4 a:u8x4 b:u8x4
        @%p bra done;
        mul.lo.u32 %d, %t, 0x01010100;  // @lanes d:u8x4 a:u8x4 b:u32
        done: st.global.u32 [%o], %d; ret; }}""")
    code, _, error = cli("prove", str(path))
    assert code == 2 and "threads that come to every instruction with // @lanes" in error and "mul.lo.u32" in error
    assert cli("prove", str(path), "--block", "2")[0] == 1  # it leaves its lane, b is no byte


def test_a_product_and_a_sum_that_ptxas_may_fuse_are_refused(tmp_path: Path) -> None:
    body = """ld.param.u64 %x, [x]; ld.global.f32 %f, [%x]; ld.global.f32 %g, [%x+4]; mul{0}.f32 %f, %f, %g;
    add{0}.f32 %f, %f, %g; st.global.f32 [%o], %f;"""
    with pytest.raises(NotModelled, match=r"ptxas may fuse it with a mul\.f32: write add\.rn\.f32"):
        prove_kernel(load_body(tmp_path, body.replace("{0}", ""), TWO), "out.f32[0] == x.f32[0] * x.f32[1] + x.f32[1]")
    unfused = load_body(tmp_path, body.replace("{0}", ".rn"), TWO)
    claim = "out.f32[i] == x.f32[0] * x.f32[1] + x.f32[1]"
    assert prove_kernel(unfused, claim, assume="0.5 < x.f32[0] < 0.6 and x.f32[1] == 3.0").verdict == "proved"


def test_a_shuffle_whose_mask_leaves_a_lane_out_is_refused(tmp_path: Path, cli) -> None:
    path = tmp_path / "mine.ptx"
    text = f"""{HEADER}.visible .entry mine(.param .u64 out) {{
        .reg .u32 %t, %d; .reg .u64 %o, %x; ld.param.u64 %o, [out]; mov.u32 %t, %tid.x;
        shfl.sync.bfly.b32 %d, %t, 1, 31, MASK;
        mul.wide.u32 %x, %t, 4; add.u64 %o, %o, %x; st.global.u32 [%o], %d; ret; }}"""
    for mask, status in (("3", 0), ("1", 2)):
        path.write_text(text.replace("MASK", mask))
        assert cli("prove", str(path), "--block", "2", "--claim", "out.u32[i] == i ^ 1")[0] == status


# Main loops

DOT = "ld.global.u32 %a, [%x]; mov.u32 %b, 0x01010101;"


def test_products_of_another_form_are_refused(tmp_path: Path) -> None:
    """The sums that such an instruction adds to were not among those that are claimed about."""
    body = "again: ld.global.u32 %a, [%x]; dp4a.s32.s32 %s, %a, %a, %s; dp2a.lo.s32.s32 %n, %a, %a, %n;"
    with pytest.raises(NotModelled, match="integer products of another form"):
        loop_verdict(loop_text(body), "sums_fit", LoopClaim(), 99999, tmp_path=tmp_path)


def test_of_two_ways_that_a_sum_may_take_the_longer_counts(tmp_path: Path) -> None:
    """Both counted: a step went over twice as many products as it does, and K came only half as far."""
    body = f"""again: {DOT} setp.gt.u32 %p, %n, 9; @%p bra other; dp4a.s32.s32 %s, %a, %b, %s; bra on;
    other: dp4a.s32.s32 %s, %a, %b, %s; on:"""
    (step,) = loops.steps_of(entry_of(loop_text(body), tmp_path))
    assert {loops._max_channels(bits, step.channels) for _, bits in loops._sums_after(step)} == {4}
    assert loop_verdict(loop_text(body), "sums_fit", LoopClaim(b=(1, 1)), 2**24, tmp_path=tmp_path) == "proved"


def test_sums_beyond_what_limits_can_tell_are_not_proved(tmp_path: Path) -> None:
    """Any sum that wraps lies within limits as far apart as INT32's again."""
    text = loop_text("again: ld.global.u32 %a, [%x]; dp4a.s32.s32 %s, %a, %a, %s;")
    assert loop_verdict(text, "sums_fit", LoopClaim((-128, 128), (-128, 128)), 2**17 - 1, tmp_path=tmp_path) == "proved"
    assert loop_verdict(text, "sums_fit", LoopClaim((-128, 128), (-128, 128)), 2**20, tmp_path=tmp_path) == "refuted"


def test_each_sum_is_converted_in_one_of_two_ways(tmp_path: Path) -> None:
    """The prover once passed over a sum if an instruction converted another."""
    body = """.reg .f32 %f; .reg .s32 %u; again: ld.global.u32 %a, [%x]; dp4a.s32.s32 %s, %a, %a, 0;
    dp4a.s32.s32 %u, %a, %a, START; cvt.rn.f32.s32 %f, %s; mov.s32 %s, 0;"""
    for start, expected in (("0x4b400000", "proved"), ("0", "refuted")):
        text = loop_text(body.replace("START", start))
        assert loop_verdict(text, "sums_are_exact", LoopClaim(sums="converted"), tmp_path=tmp_path) == expected


def test_every_annotated_instruction_of_a_step_is_looked_at(tmp_path: Path) -> None:
    """The prover once passed over an instruction that is not modelled; with no instruction nothing was refuted."""
    qoq = LoopClaim(packed="scaled")
    body = """again: ld.global.u32 %a, [%x]; and.b32 %a, %a, 0x0f0f0f0f; and.b32 %b, %n, 15;
    MUL
    dp4a.s32.s32 %s, %a, %a, %s;"""
    annotated = "mul.lo.u32 %a, %a, %b;  // @lanes d:u8x4 a:u8x4 b:u32"
    for mul, expected in ((annotated, "proved"), (annotated.partition("//")[0], "refuted")):
        text = loop_text(body.replace("MUL", mul))
        assert loop_verdict(text, "dequantises", qoq, tmp_path=tmp_path) == expected


def test_a_kernel_that_cannot_be_followed_is_refused_in_one_line(cli) -> None:
    for name, why in (
        ("gemm_w4a8_sm90", "its input weight is LQQWeight"),
        ("combine_experts", "results is float16|bfloat16"),
    ):
        code, _, error = cli("prove", f"{name}.cu", "--claim", "y[i] == 0")
        assert code == 2 and why in error and len(error.strip().splitlines()) == 1, error
    assert issubclass(NotModelled, PtxlabError)
