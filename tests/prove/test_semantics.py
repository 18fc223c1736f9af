"""Symbolic instructions against the emulator, and against what a GPU has recorded."""

import re
import zlib
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ptxlab import emulator
from ptxlab.emulator.front.opcode import UnknownOpcode
from ptxlab.emulator.front.types import DTYPES, bits_of
from ptxlab.emulator.ops.alu import alu_operation
from tests.golden.cases import BLOCK_THREADS, OUTPUTS, Case, cases, rows_that_agree
from tests.support.small_kernels import HEADER

z3 = pytest.importorskip("z3", reason="z3-solver is not installed: it comes with the extra `prove`")

from ptxlab.prove.bitvectors import constant  # noqa: E402
from ptxlab.prove.execute import Buffer, NotModelled, execute  # noqa: E402
from ptxlab.prove.semantics import computation  # noqa: E402

VECTORS = Path(__file__).parents[1] / "golden" / "vectors.npz"
CASES = cases()
ROWS = 1  # of each instruction; the emulator, which random words are held against, repeats all of them
# Families of which nothing is modelled, and forms of the others.
ABSENT = {
    "activemask", "atom", "red", "redux", "match", "vote", "testp", "rcp", "sqrt", "rsqrt", "sin", "cos",
    "lg2", "ex2", "tanh",
}  # fmt: skip
ABSENT_FORMS = (
    "elect.",
    "ftz",
    "sat",
    "relu",
    "satfinite",
    "xorsign",
    "approx",
    "full",
    "f16x2",
    "f32",
    "f64",
    "bf16",
    "f16",
)


def symbolic(case: Case, rows: list[int]) -> dict[str, np.ndarray]:
    """Compute the outputs of a case's rows by symbolic execution on constants."""
    module, inputs = emulator.parse(case.ptx(), f"{case.name}.ptx"), case.inputs()
    buffers = [Buffer(name, array.nbytes, initial=octets(array)) for name, array in inputs.items()]
    threads = [((row // BLOCK_THREADS, 0, 0), (row % BLOCK_THREADS, 0, 0)) for row in rows]
    blocks = len(next(iter(inputs.values()))) // BLOCK_THREADS
    execute(module.entries[case.name], buffers, grid=(blocks, 1, 1), block=(BLOCK_THREADS, 1, 1), threads=threads)
    outputs = {}
    for buffer, (name, array) in zip(buffers, inputs.items(), strict=True):
        if name in OUTPUTS:
            places = [range(r * array.itemsize, (r + 1) * array.itemsize) for r in rows]
            octet = [[z3.simplify(buffer.content[at]).as_long() for at in place] for place in places]
            outputs[name] = np.array(octet, np.uint8).view(array.dtype)[:, 0]
    return outputs


def octets(array: np.ndarray):
    flat = array.view(np.uint8)
    return lambda at: constant(int(flat[at]), 8)


@pytest.fixture(scope="module")
def vectors() -> dict[str, np.ndarray]:
    with np.load(VECTORS) as archive:
        return dict(archive)


@pytest.mark.default_cases(
    "add", "fma", "lop3", "mad", "mul", "prmt", "set", "vadd4", "vset4",
    "bfe", "bfi", "bmsk", "clz", "dp4a", "selp", "shf", "shl", "shr", "slct", "vset", "vshl", "vshr",
)  # fmt: skip
@pytest.mark.parametrize("family", sorted({case.name.split("_")[0] for case in CASES} - ABSENT))
def test_recorded_on_a_gpu(family: str, vectors) -> None:
    wrong_cases, modelled = [], 0
    for case in CASES:
        if case.name.split("_")[0] != family:
            continue
        count = len(vectors[f"{case.name}.{case.outputs[0]}"])
        rng = np.random.default_rng(zlib.crc32(case.name.encode()))
        rows = list(range(32)) if family == "shfl" else sorted(map(int, rng.choice(count, ROWS, replace=False)))
        try:
            outputs = symbolic(case, rows)
        except NotModelled:
            if not any(form in case.template for form in ABSENT_FORMS):
                wrong_cases.append(f"{case.template}: not modelled")
            continue
        modelled += 1
        for name, got in outputs.items():
            expected = vectors[f"{case.name}.{name}"][rows]
            if not rows_that_agree(case, name, expected, got).all():
                wrong_cases.append(f"{case.template}: {name} is {got}, not {expected}")
    assert not wrong_cases, "\n".join(wrong_cases)
    assert modelled, "nothing of this family is modelled: say so in ABSENT"


def plain(case: Case) -> bool:
    """Tell whether a case is a single register-to-register instruction without selectors, which the table knows."""
    opcode = case.template.split(" ")[0]
    if case.template.count(";") > 1 or "]." in case.template or "}." in case.template or "!" in case.template:
        return False
    return knows(alu_operation, opcode) and knows(computation, opcode) and "cc" not in alu_operation(opcode).sources


def knows(table: Callable[[str], object], opcode: str) -> bool:
    try:
        table(opcode)
    except (UnknownOpcode, ValueError):
        return False
    return True


PLAIN = sorted({case.template.split(" ")[0] for case in CASES if plain(case)})


def test_what_is_not_modelled_is_of_floats() -> None:
    opcodes = {case.template.split(" ")[0] for case in CASES if case.name.split("_")[0] not in ABSENT}
    missing = [opcode for opcode in opcodes if knows(alu_operation, opcode) and not knows(computation, opcode)]
    assert missing and not [opcode for opcode in missing if not re.search(r"\.b?f(16|32|64)", opcode)]


@pytest.mark.parametrize("minus", [False, True])
@pytest.mark.parametrize(
    ("a", "b"),
    [(0, 1), (1 << 95, 1 << 95), ((1 << 96) - 1, 1), (1 << 64, 1), (1 << 32, 1 << 64), (0xFFFFFFFF << 32, 1 << 32)],
)
def test_a_carry_goes_through_words(a: int, b: int, minus: bool) -> None:
    """96 bits in three words, and whether a fourth would change."""
    name = "sub" if minus else "add"
    body = f"""{name}.cc.u32 %r0, %r0, %r4; {name}c.cc.u32 %r1, %r1, %r5; {name}c.cc.u32 %r2, %r2, %r6;
    {name}c.u32 %r3, 0, 0;"""
    loads = "".join(f"ld.global.u32 %r{i}, [%x+{4 * i}];" for i in (0, 1, 2, 4, 5, 6))
    stores = "".join(f"st.global.u32 [%x+{4 * i}], %r{i};" for i in range(4))
    text = f"""{HEADER}.visible .entry k(.param .u64 x) {{ .reg .u32 %r<8>; .reg .u64 %x;
    ld.param.u64 %x, [x]; {loads} {body} {stores} ret; }}"""
    words = np.frombuffer(a.to_bytes(16, "little") + b.to_bytes(16, "little"), np.uint32)
    buffer = Buffer("x", words.nbytes, initial=octets(words))
    entry = emulator.parse(text, "k.ptx").entries["k"]
    execute(entry, [buffer], grid=(1, 1, 1), block=(1, 1, 1), threads=[((0, 0, 0), (0, 0, 0))])
    stored = bytes(z3.simplify(buffer.content[offset]).as_long() for offset in range(16))
    assert int.from_bytes(stored, "little") == (a - b if minus else a + b) % 2**128


@pytest.mark.parametrize(
    "opcode",
    ["slct.u32.f32", "setp.eq.f64", "setp.lt.f16x2", "set.eq.f16.f16", "set.eq.bf16.bf16", "cvt.sat.f32.f32",
     "cvt.rn.f64.f32", "cvt.f32.f64", "cvt.rni.f32.f16", "cvt.rzi.s32.f32", "cvt.rni.sat.u8.f32", "cvt.rn.f16x2.f32"],
)  # fmt: skip
def test_forms_without_a_model_are_refused(opcode: str) -> None:
    """They would be taken for others of their family."""
    with pytest.raises(UnknownOpcode):
        computation(opcode)


SPECIAL = {  # zeros, one, the largest and the smallest, infinities, a NaN
    "f16": (0, 0x8000, 0x3C00, 0xBC00, 0x7BFF, 1, 0x7C00, 0xFC00, 0x7E01),
    "bf16": (0, 0x8000, 0x3F80, 0xBF80, 0x7F7F, 1, 0x7F80, 0xFF80, 0x7FC1),
    "f32": (0, 1 << 31, 0x3F800000, 0xBF800000, 0x7F7FFFFF, 1, 0x7F800000, 0xFF800000, 0x7FC00001),
}


@pytest.mark.default_cases("min.f32", "max.f16", "min.NaN.bf16", "setp.le.f32")
@pytest.mark.parametrize(
    "opcode", [one for one in PLAIN if re.match(r"(min|max|add|sub|mul|setp?)\..*\bb?f(16|32)$", one)]
)
def test_special_numbers_as_in_the_emulator(opcode: str) -> None:
    """Pairs of all, in both orders."""
    for pair in product(SPECIAL[opcode.split(".")[-1]], repeat=2):
        compare(opcode, [*pair, 0, 0])


@pytest.mark.parametrize("third", [0, 5, 1 << 31, 0xFFFFFFFF])
@pytest.mark.parametrize("signed", ["u32", "s32"])
def test_a_word_that_is_shifted_by_32_is_compared_as_64_bits(signed: str, third: int) -> None:
    """They are signed, whatever the operands are, and their lower word is 0."""
    for word, second in product((0xFFFFFFFF, 0x80000000, 1, 0), ("min", "max", "add")):
        compare(f"vshl.{signed}.{signed}.u32.clamp.{second}", [word, 32, third, 0])


WORDS = st.lists(
    st.one_of(st.integers(0, 2**64 - 1), st.sampled_from((0, 2**64 - 1, 0x8080808080808080, 0x7F7F7F7F7F7F7F7F, 31))),
    min_size=4, max_size=4,
)  # fmt: skip


@pytest.mark.full
@settings(max_examples=8, phases=[Phase.generate])  # every example is all instructions: shrinking takes minutes
@given(WORDS)
def test_random_words_as_in_the_emulator(words: list[int]) -> None:
    for opcode in PLAIN:
        compare(opcode, words)


def compare(opcode: str, words: list[int]) -> None:
    """Give the same words to an instruction of the emulator and of the prover, and compare the results."""
    operation = alu_operation(opcode)
    arrays, terms = [], []
    for t, drawn in zip(operation.sources, words, strict=False):
        bits = bits_of(t)
        word = drawn & (255 if opcode.startswith("lop3") and len(arrays) == 3 else (1 << bits) - 1)
        arrays.append(np.array([word], bool if t == "pred" else f"u{bits // 8}").view(DTYPES[t]))
        terms.append(z3.BoolVal(bool(word)) if t == "pred" else constant(word, bits))
    with np.errstate(all="ignore"):
        expected, got = operation.compute(*arrays), computation(opcode)(*terms)
    expected = expected if isinstance(expected, tuple) else (expected,)
    got = got if isinstance(got, tuple) else (got,)
    for t, expected_value, term in zip(operation.out, expected, got, strict=False):
        simplified = z3.simplify(term)
        if t in ("pred", "cc"):
            assert z3.is_true(simplified) == bool(np.asarray(expected_value).reshape(-1)[0])
            continue
        expected_value = np.asarray(expected_value).reshape(-1)[:1]
        expected_value = (
            expected_value.astype(DTYPES[t]) if expected_value.dtype.itemsize != DTYPES[t].itemsize else expected_value
        )
        raw = int(expected_value.view(f"u{expected_value.dtype.itemsize}")[0])
        assert simplified.as_long() == raw, (opcode, [hex(int(a.view(f"u{a.itemsize}")[0])) for a in arrays])


def test_enough_is_held_against_the_emulator() -> None:
    assert len(PLAIN) > 300 and {"vadd4.u32.u32.u32", "prmt.b32", "mad.lo.u32", "fma.rn.f16x2"} <= {*PLAIN}
