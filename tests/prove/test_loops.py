"""Main loops as invariants: what one step of a loop does to INT32 sums, from any registers and any memory."""

from pathlib import Path

import pytest

from ptxlab import registry
from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.lowbit.claims.main_loops import MAIN_LOOPS
from ptxlab.prove.loop_claim import LoopClaim

pytest.importorskip("z3", reason="z3-solver is not installed: it comes with the extra `prove`")

from tests.support.proofs import loop_text, loop_verdict

TILE = "gemm_tile_lqq_sm80"
SUMS = "{%s, %d0, %d1, %d2}"
LONGER = "dp4a.s32.s32 %d, %a, %a, %d;"


def tile(old: str = "", new: str = "") -> str:
    text = registry.find(TILE)[1][0].text
    assert old in text
    return text.replace(old, new, 1) if old else text


@pytest.mark.default_cases("%o1, %*", "    ad*")
@pytest.mark.parametrize(
    ("old", "new", "claim"),
    [
        ("%a1, %q1, 0x0f0f0f0f", "%a1, %q1, 0x1f0f0f0f", "dequantises"),  # five bits of a nibble
        ("%o1, %pair, 0, 0x1111", "%o1, %pair, 0, 0x1101", "dequantises"),  # another byte among the offsets
        ("ld.global.nc.u16 %pair", "ld.global.nc.u32 %pair", "dequantises"),  # s1 has more than a byte
        ("xor.b32         %a3, %a3, 0x80808080", "xor.b32         %a3, %a3, 0x80808000", "dequantises"),
        ("{%b0, %b1}, {%c0, %c1, %c2, %c3};", "{%b0, %b1}, {%c1, %c0, %c2, %b2};", "sums_fit"),  # c3 from anything
        ("    add.u32         %step, %step, 1;\n    add.u64", "    shl.b32 %c0, %c0, 1;\n    add.u64", "sums_fit"),
    ],
)
def test_a_mistake_in_the_body_is_refuted(old: str, new: str, claim: str, tmp_path: Path) -> None:
    loop = MAIN_LOOPS[TILE]
    bounds = (loop.max_products,) if claim == "sums_fit" else ()
    assert loop_verdict(tile(), claim, loop, *bounds, tmp_path=tmp_path) == "proved"
    assert loop_verdict(tile(old, new), claim, loop, *bounds, tmp_path=tmp_path) == "refuted"


def test_a_sum_has_room_for_as_many_products_as_said_and_no_more(tmp_path: Path) -> None:
    loop = MAIN_LOOPS[TILE]
    assert (loop.product, loop.max_products) == ((-16256, 16384), 131071)
    whole = loop.max_products // 64 * 64  # K goes by 64
    assert loop_verdict(tile(), "sums_fit", loop, whole, tmp_path=tmp_path) == "proved"
    assert loop_verdict(tile(), "sums_fit", loop, whole + 64, tmp_path=tmp_path) == "refuted"


def test_operands_have_to_be_what_is_claimed_of_them(tmp_path: Path) -> None:
    """dp4a by ones: what the second operand is decides how much a step adds."""
    body = "again: ld.global.u32 %a, [%x]; mov.u32 %b, 0x01010101; dp4a.s32.s32 %s, %a, %b, %s;"
    ones = LoopClaim(b=(1, 1))
    text = loop_text(body)
    assert loop_verdict(text, "sums_fit", ones, ones.max_products, tmp_path=tmp_path) == "proved"
    two = text.replace("0x01010101", "0x01010201")
    assert loop_verdict(two, "sums_fit", ones, ones.max_products, tmp_path=tmp_path) == "refuted"
    assert loop_verdict(two, "sums_fit", LoopClaim(), LoopClaim().max_products, tmp_path=tmp_path) == "proved"


@pytest.mark.default_cases("mma u8 s8")
@pytest.mark.parametrize(
    ("product", "a", "b"),
    [
        ("dp4a.u32.s32 %s, %a, %b, %s;", (0, 255), (-128, 127)),
        ("dp4a.s32.u32 %s, %a, %b, %s;", (-128, 127), (0, 255)),
        (f"mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {SUMS}, {{%a, %a, %a, %a}}, {{%b, %b}}, {SUMS};",
         (0, 255), (-128, 127)),
        (f"mma.sync.aligned.m16n8k64.row.col.s32.s4.u4.s32 {SUMS}, {{%a, %a, %a, %a}}, {{%b, %b}}, {SUMS};",
         (-8, 7), (0, 15)),
    ],
    ids=["dp4a u8 s8", "dp4a s8 u8", "mma u8 s8", "mma s4 u4"],
)  # fmt: skip
def test_each_operand_has_a_type_of_its_own(
    product: str, a: tuple[int, int], b: tuple[int, int], tmp_path: Path
) -> None:
    """The type bounds the elements: signed or not, of 4 bits or 8."""
    text = loop_text(f".reg .s32 %d<3>; again: ld.global.u32 %a, [%x]; ld.global.u32 %b, [%x+4]; {product}")
    claims = LoopClaim(a=a, b=b), LoopClaim(a=(a[0] + 1, a[1]), b=b), LoopClaim(a=a, b=(b[0], b[1] - 1))
    verdicts = [loop_verdict(text, "sums_fit", loop, 64, tmp_path=tmp_path) for loop in claims]
    assert verdicts == ["proved", "refuted", "refuted"]


def test_sums_that_are_converted_begin_at_zero(tmp_path: Path) -> None:
    body = """.reg .f32 %f; again: ld.global.u32 %a, [%x]; dp4a.s32.s32 %s, %a, %a, %s;
    cvt.rn.f32.s32 %f, %s; mov.s32 %s, 0;"""
    loop = LoopClaim(sums="converted")
    assert loop_verdict(loop_text(body), "sums_are_exact", loop, tmp_path=tmp_path) == "proved"
    unreset = body.replace("mov.s32 %s, 0;", "")
    assert loop_verdict(loop_text(unreset), "sums_are_exact", loop, tmp_path=tmp_path) == "refuted"
    from_offset = "again: mov.s32 %s, 0x4b400000; ld.global.u32 %a, [%x]; dp4a.s32.s32 %b, %a, %a, %s;"
    assert loop_verdict(loop_text(from_offset), "sums_are_exact", loop, tmp_path=tmp_path) == "proved"
    from_offset = from_offset.replace("0x4b400000", "0x4b400001")
    assert loop_verdict(loop_text(from_offset), "sums_are_exact", loop, tmp_path=tmp_path) == "refuted"


@pytest.mark.parametrize(("products", "expected"), [(7, "proved"), (8, "refuted")])
@pytest.mark.parametrize(("kind", "a"), [("s8", (-128, 0)), ("u8", (0, 128))], ids=["above", "below"])
def test_a_shifted_sum_stays_within_the_numbers_that_a_float_tells_apart(
    kind: str, a: tuple[int, int], products: int, expected: str, tmp_path: Path
) -> None:
    """256 products of +-128 by -128 reach +-2^22, where the float that begins at 0x4b400000 goes by twos."""
    body = ".reg .s32 %d<3>; again: ld.global.u32 %a, [%x]; and.b32 %a, %a, 0x80808080; mov.s32 %s, 0x4b400000;"
    body += "".join(f"mov.s32 %d{i}, %s;" for i in range(3))
    product = f"mma.sync.aligned.m16n8k32.row.col.s32.{kind}.s8.s32 {SUMS}, {{%a, %a, %a, %a}}, {{%a, %a}}, {SUMS};"
    loop = LoopClaim(a=a, b=(-128, 0), sums="converted")
    text = loop_text(f"{body} {product * products} mov.s32 %b, %s;")
    assert loop_verdict(text, "sums_are_exact", loop, tmp_path=tmp_path) == expected


@pytest.mark.default_cases("-proved", "mov*")
@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ("", "proved"),
        ("add.s32 %s, %s, 1;", "refuted"),
        ("add.u32 %b, %b, 1;", "refuted"),
        ("mov.u32 %b, %c; mov.u32 %c, 1;", "refuted"),
    ],
)
def test_what_an_inner_loop_writes_is_anything_behind_it(inner: str, expected: str, tmp_path: Path) -> None:
    """The sum itself, and a number that is added to it, whether written by its first step or by the second."""
    body = f""".reg .u32 %j, %c; .reg .pred %q;
    again: ld.global.u32 %a, [%x]; mov.u32 %b, 0; mov.u32 %c, 0; mov.u32 %j, 0;
    inner: {inner} add.u32 %j, %j, 1; setp.lt.u32 %q, %j, %n; @%q bra inner;
    dp4a.s32.s32 %s, %a, %a, %s; add.s32 %s, %s, %b;"""
    loop = LoopClaim()
    assert loop_verdict(loop_text(body), "sums_fit", loop, loop.max_products, tmp_path=tmp_path) == expected


@pytest.mark.default_cases("*-proved", "shl*")
@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        ("@%q bra over; mov.s32 %s, 0; over:", "proved"),
        ("shl.b32 %s, %s, 1; @%q bra over; mov.s32 %s, 0; over:", "refuted"),
        ("@%q bra other; mov.s32 %s, 0; bra.uni over; other: shl.b32 %s, %s, 1; over:", "refuted"),
        ("@%q bra other; shl.b32 %s, %s, 1; bra.uni over; other: mov.s32 %s, 0; over:", "refuted"),
    ],
)
def test_each_way_of_a_branch_counts(ways: str, expected: str, tmp_path: Path) -> None:
    """A sum that one way sets to 0 is still what the other way leaves."""
    body = f""".reg .pred %q; again: ld.global.u32 %a, [%x]; setp.gt.s32 %q, %a, 0; {ways}
    dp4a.s32.s32 %s, %a, %a, %s;"""
    loop = LoopClaim()
    assert loop_verdict(loop_text(body), "sums_fit", loop, loop.max_products, tmp_path=tmp_path) == expected


@pytest.mark.parametrize(
    ("longest", "channels", "expected"),
    [
        (f"{LONGER} {LONGER}", 131064, "proved"),
        (f"{LONGER} {LONGER}", 131072, "refuted"),
        (f"@%q bra over; {LONGER} over: {LONGER}", 131064, "proved"),
        (f"@%q bra over; {LONGER} over: {LONGER}", 131072, "refuted"),
    ],
    ids=["two-131064", "two-131072", "one more at times-131064", "one more at times-131072"],
)
def test_a_step_has_the_products_of_its_longest_sum(longest: str, channels: int, expected: str, tmp_path: Path) -> None:
    body = f""".reg .s32 %d; .reg .pred %q; again: ld.global.u32 %a, [%x]; setp.gt.s32 %q, %a, 0;
    dp4a.s32.s32 %s, %a, %a, %s; {longest}"""
    assert loop_verdict(loop_text(body), "sums_fit", LoopClaim(), channels, tmp_path=tmp_path) == expected


@pytest.mark.parametrize(("third", "expected"), [("mov.s32 %e, %s;", "proved"), ("add.s32 %e, %s, %d;", "refuted")])
def test_a_sum_that_the_step_leaves_elsewhere_fits_too(third: str, expected: str, tmp_path: Path) -> None:
    """Two sums have no room beside each other in a third register, to which nothing is added from step to step."""
    body = f""".reg .s32 %d, %e; again: ld.global.u32 %a, [%x]; dp4a.s32.s32 %s, %a, %a, %s;
    dp4a.s32.s32 %d, %a, %a, %d; {third}"""
    loop = LoopClaim()
    assert loop_verdict(loop_text(body), "sums_fit", loop, loop.max_products, tmp_path=tmp_path) == expected


@pytest.mark.parametrize(
    ("a", "expected"),
    [
        ((-(2**29), 127), "proved"),
        ((-(2**29) - 1, 127), "refuted"),
        ((-128, 2**29 - 1), "proved"),
        ((-128, 2**29), "refuted"),
    ],
)
def test_four_products_of_one_step_fit(a: tuple[int, int], expected: str, tmp_path: Path) -> None:
    """The first step fills an s32: no sum of a step before it can show that there is no room."""
    text = loop_text("again: ld.global.u32 %a, [%x]; and.b32 %b, %a, 0x01010101; dp4a.s32.s32 %s, %a, %b, %s;")
    assert loop_verdict(text, "sums_fit", LoopClaim(a=a, b=(0, 1)), 4, tmp_path=tmp_path) == expected


@pytest.mark.parametrize(
    ("b", "expected"), [((-128, 127), "proved"), ((-127, 127), "refuted"), ((-128, 126), "refuted")]
)
def test_elements_behind_a_descriptor_are_known_by_their_type(
    b: tuple[int, int], expected: str, tmp_path: Path
) -> None:
    """Operands of wgmma in shared memory may be anything of their type, and no code bounds them."""
    body = f".reg .s32 %d<3>; again: wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {SUMS}, %x, %x, 1;"
    text = loop_text(body).replace("sm_90", "sm_90a")
    assert loop_verdict(text, "sums_fit", LoopClaim(b=b), 64, tmp_path=tmp_path) == expected


@pytest.mark.parametrize(
    ("mask", "shift", "expected"),
    [
        ("0xf0f0f0f0", 4, "proved"),
        ("0xf0f0f8f0", 4, "refuted"),
        ("0xf0f0f0f0", 3, "refuted"),
        ("0xf0e0f0f0", 4, "refuted"),
    ],
)
def test_int4_becomes_the_upper_half_of_bytes(mask: str, shift: int, expected: str, tmp_path: Path) -> None:
    body = f"""again: ld.global.u32 %a, [%x]; ld.global.u32 %b, [%x+4]; shl.b32 %n, %a, {shift}; and.b32 %n, %n, {mask};
    and.b32 %a, %a, 0xf0f0f0f0; dp4a.s32.s32 %s, %a, %b, %s; dp4a.s32.s32 %s, %n, %b, %s;"""
    loop = LoopClaim(packed="s4")
    assert loop_verdict(loop_text(body), "converts", loop, tmp_path=tmp_path) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("selp.b32 %w, %u, %a, %q; selp.b32 %y, %v, %b, %q;", "proved"),
        ("selp.b32 %w, %u, %a, %q; selp.b32 %y, %v, %b, %t;", "refuted"),
        ("selp.b32 %w, %u, %a, %q; mov.b32 %y, %v;", "refuted"),
        ("mov.b32 %w, %u; mov.b32 %y, %v;", "proved"),
        ("mov.b32 %w, %a; mov.b32 %y, %b;", "refuted"),
        ("selp.b32 %w, %a, %b, %q; selp.b32 %y, %b, %a, %q;", "refuted"),  # INT8 alone
    ],
)
def test_words_of_an_operand_are_int4_or_int8_together(words: str, expected: str, tmp_path: Path) -> None:
    """%u and %v are the low nibbles of the loaded %a and %b; %q and %t any conditions."""
    body = f""".reg .u32 %u, %v, %w, %y; .reg .s32 %d<3>; .reg .pred %q, %t;
    again: ld.global.u32 %a, [%x]; ld.global.u32 %b, [%x+4]; setp.gt.u32 %q, %i, 5; setp.gt.u32 %t, %i, 6;
    shl.b32 %u, %a, 4; and.b32 %u, %u, 0xf0f0f0f0; shl.b32 %v, %b, 4; and.b32 %v, %v, 0xf0f0f0f0; {words}
    mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {SUMS}, {{%w, %y, %w, %y}}, {{%n, %n}}, {SUMS};"""
    assert loop_verdict(loop_text(body), "converts", LoopClaim(packed="s4"), tmp_path=tmp_path) == expected


@pytest.mark.parametrize(
    ("offset", "step", "expected"),
    [
        ("0", "mul.lo.u32 %a, %a, %b; // @lanes d:u8x4 a:u8x4 b:u32", "proved"),
        ("0", "mul.lo.u32 %a, %a, %n; // @lanes d:u8x4 a:u8x4 b:u32", "refuted"),  # any scale
        ("0", "mad.lo.u32 %a, %a, %b, %c; // @lanes d:u8x4 a:u8x4 b:u32 c:u8x4", "proved"),
        ("0x01010101", "mad.lo.u32 %a, %a, %b, %c; // @lanes d:u8x4 a:u8x4 b:u32 c:u8x4", "refuted"),  # 15*17 + 1
    ],
)
def test_scales_up_to_17_keep_products_of_nibbles_apart(offset: str, step: str, expected: str, tmp_path: Path) -> None:
    body = f""".reg .u32 %c; again: ld.global.u32 %a, [%x]; ld.global.nc.u8 %b, [%x+4]; and.b32 %a, %a, 0x0f0f0f0f;
    mov.u32 %c, {offset};
    {step}
    dp4a.u32.s32 %s, %a, %n, %s;"""
    assert loop_verdict(loop_text(body), "dequantises", LoopClaim(packed="scaled"), tmp_path=tmp_path) == expected


def test_a_kernel_without_such_a_loop_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="a loop that multiplies integers"):
        loop_verdict(registry.find("dequant_lqq")[1][0].text, "sums_fit", LoopClaim(), 1, tmp_path=tmp_path)


@pytest.mark.parametrize("name", [name for name, loop in MAIN_LOOPS.items() if loop.sums == "grow"])
def test_the_rules_of_kernels_admit_no_longer_sums(name: str) -> None:
    """`sum_activations_s8` admitted K up to 2^31, and wrapped from 2^24 * 128/127 on."""
    spec, loop = registry.find(name)[0], MAIN_LOOPS[name]
    sizes = {k: int(v) for k, v in spec.example_sizes[0].items()}
    beyond = ceil_div(loop.max_products + 1, 1024) * 1024
    with pytest.raises(ArgumentError, match="K"):
        spec.check_sizes({**sizes, "K": beyond})
