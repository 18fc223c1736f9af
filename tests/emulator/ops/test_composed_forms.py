"""Forms made of others: their results are those of the parts, put together."""

import numpy as np
import pytest

from ptxlab import emulator
from ptxlab.errors import UnknownInstruction
from tests.golden.cases import BLOCK_THREADS, Case
from tests.support.small_kernels import kernel_text, run_body, run_text


def draw(template: str) -> dict[str, np.ndarray]:
    """Draw inputs of a form: boundary values and random ones."""
    case = Case("k", template)
    return {name: array for name, array in case.inputs().items() if name not in case.outputs}


def compute(template: str, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Run a form: the destinations of all threads, as bits."""
    case = Case("k", template)
    rows = len(next(iter(inputs.values())))
    arrays = {name: inputs.get(name, np.zeros(rows, array.dtype)) for name, array in case.inputs().items()}
    emulator.run(case.ptx(), None, list(arrays.values()), grid=rows // BLOCK_THREADS, block=BLOCK_THREADS)
    return [arrays[name] for name in case.outputs]


def halves(words: np.ndarray) -> list[np.ndarray]:
    """Split registers into both parts, low ones first."""
    return list(np.ascontiguousarray(words).view(f"u{words.itemsize // 2}").reshape(-1, 2).T.copy())


def join(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.stack((low, high), axis=1).view(f"u{2 * low.itemsize}")[:, 0]


def operands(letters: str, t: str) -> str:
    return ", ".join(f"{{{letter}:{t}}}" for letter in letters)


@pytest.mark.parametrize("form", ["add.rz", "sub.ftz", "mul.rn.ftz", "fma.rp", "fma.rn.ftz"])
def test_pairs_of_f32(form: str) -> None:
    letters = "dabc" if form.startswith("fma") else "dab"
    single, pair = f"{form}.f32 {operands(letters, 'f32')};", f"{form}.f32x2 {operands(letters, 'u64')};"
    inputs = {name: join(array, array[::-1].copy()) for name, array in draw(single).items()}
    low, high = ({name: halves(array)[i] for name, array in inputs.items()} for i in (0, 1))
    (actual,) = compute(pair, inputs)
    assert np.array_equal(actual, join(*compute(single, low), *compute(single, high)))


@pytest.mark.parametrize("form", ["min", "max.ftz", "min.NaN", "max.ftz.NaN"])
@pytest.mark.parametrize("magnitude", ["", ".abs"])
def test_the_smallest_of_three(form: str, magnitude: str) -> None:
    inputs = draw(f"{form}.f32 {operands('dabc', 'f32')};")
    sizes = {name: array & np.uint32(0x7FFFFFFF) if magnitude else array for name, array in inputs.items()}
    two = f"{form}.f32 {operands('dab', 'f32')};"
    (first,) = compute(two, {"a": sizes["a"], "b": sizes["b"]})
    (actual,) = compute(f"{form}{magnitude}.f32 {operands('dabc', 'f32')};", inputs)
    assert np.array_equal(actual, *compute(two, {"a": first, "b": sizes["c"]}))


@pytest.mark.parametrize("boolean", ["and", "or", "xor"])
@pytest.mark.parametrize(("t", "one"), [("f16x2", 0x3C00), ("bf16x2", 0x3F80)])
def test_comparisons_of_pairs_beside_a_predicate(t: str, one: int, boolean: str) -> None:
    combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}[boolean]
    two, sources = "{p:pred}|{q:pred}", operands("ab", t)
    for order in ("eq", "neu", "lt", "nan"):
        form = f"{order}.{boolean}"
        inputs = draw(f"setp.{form}.{t} {two}, {sources}, {{c:pred}};")
        right = [combine(p, inputs["c"]) for p in compute(f"setp.{order}.{t} {two}, {sources};", inputs)]
        assert np.array_equal(compute(f"setp.{form}.{t} {two}, {sources}, {{c:pred}};", inputs), right)
        for t_d, true in ((t, one), ("u32", 0xFFFF), ("s32", 0xFFFF)):
            (actual,) = compute(f"set.{form}.{t_d}.{t} {{d:u32}}, {sources}, {{c:pred}};", inputs)
            assert np.array_equal(actual, join(*(np.where(p, true, 0).astype("u2") for p in right)))


@pytest.mark.parametrize(
    ("t_d", "true", "source"),
    [
        ("u16", 0xFFFF, "f16"), ("s16", 0xFFFF, "bf16"), ("s32", 0xFFFFFFFF, "bf16"), ("bf16", 0x3F80, "f16"),
        ("f16", 0x3C00, "f64"), ("bf16", 0x3F80, "f32"), ("f16", 0x3C00, "s32"), ("bf16", 0x3F80, "u64"),
    ],
)  # fmt: skip
def test_results_of_set(t_d: str, true: int, source: str) -> None:
    sources, d = operands("ab", source), f"{{d:{'u32' if t_d == 's32' else 'u16'}}}"
    inputs = draw(f"setp.lt.and.{source} {{p:pred}}, {sources}, !{{c:pred}};")
    (right,) = compute(f"setp.lt.and.{source} {{p:pred}}, {sources}, !{{c:pred}};", inputs)
    (actual,) = compute(f"set.lt.and.{t_d}.{source} {d}, {sources}, !{{c:pred}};", inputs)
    assert np.array_equal(actual, np.where(right, true, 0))


@pytest.mark.parametrize("form", ["rn", "rz", "rn.relu", "rz.relu"])
@pytest.mark.parametrize(("t", "infinity"), [("f16", 0x7C00), ("bf16", 0x7F80)])
def test_halves_without_infinity(t: str, infinity: int, form: str) -> None:
    plain = f"cvt.{form}.{t}.f32 {{d:{t}}}, {{a:f32}};"
    inputs = draw(plain)
    (right,) = compute(plain, inputs)
    right -= (right & 0x7FFF == infinity).astype("u2")
    assert np.array_equal(*compute(f"cvt.{form}.satfinite.{t}.f32 {{d:{t}}}, {{a:f32}};", inputs), right)
    both = {"a": inputs["a"], "b": inputs["a"][::-1].copy()}
    (pair,) = compute(f"cvt.{form}.satfinite.{t}x2.f32 {{d:{t}x2}}, {{a:f32}}, {{b:f32}};", both)
    assert np.array_equal(pair, join(right[::-1], right))


@pytest.mark.parametrize("t", ["f16", "bf16"])
def test_what_lies_outside_a_tensor_adds_nothing(t: str) -> None:
    one, minus = (0x3C00, 0xBC00) if t == "f16" else (0x3F80, 0xBF80)
    a, b = np.resize([one, 0x7FF7, one, 0xFFF7, 0x7FFF, minus], 64), np.resize([one, one, 0xFFF7, one, one, one], 64)
    inputs = {name: x.astype("u2") for name, x in zip("abc", (a, b, np.full(64, minus)), strict=True)}
    right = np.resize([0, 0, 0, 0, 0x7FFF, minus + (0x400 if t == "f16" else 0x80)], 64)
    assert np.array_equal(*compute(f"fma.rn.oob.{t} {operands('dabc', t)};", inputs), right)
    pairs = {name: join(x, x[::-1].copy()) for name, x in inputs.items()}
    clamped = np.where(right & 0x8000, 0, right).astype("u2")
    (actual,) = compute(f"fma.rn.oob.relu.{t}x2 {operands('dabc', f'{t}x2')};", pairs)
    assert np.array_equal(actual, join(clamped, clamped[::-1].copy()))


@pytest.mark.parametrize(
    ("form", "mask", "expected"),
    [
        ("min", "0xFFFFFFFF", -31.0), ("max", "0xFFFFFFFF", 30.0), ("max.abs", "0xFFFFFFFF", 31.0),
        ("min.abs", "0xFFFFFFFF", 1.0), ("max", "0x0000FFFF", 14.0), ("max.NaN", "0x0000FFFF", 14.0),
        ("max.abs.NaN", "0xFFFFFFFF", np.nan), ("min", "1", np.nan),
    ],
)  # fmt: skip
def test_floats_of_a_warp(form: str, mask: str, expected: float) -> None:
    """Lane i has i, negative where it is odd; lane 16 has a NaN, lane 0 one where it is alone."""
    body = f"""mov.u32 %r1, %tid.x; cvt.rn.f32.u32 %f1, %r1; and.b32 %r2, %r1, 1; setp.ne.u32 %p, %r2, 0;
    @%p neg.f32 %f1, %f1; setp.eq.u32 %p, %r1, 16; @%p mov.f32 %f1, 0fFFC00001; setp.eq.u32 %p, %r1, 0;
    @%p mov.f32 %f1, {"0f7FC00001" if mask == "1" else "0fC0000000" if "abs" not in form else "0f40000000"};
    mov.b32 %s, 0; mov.u32 %r3, {mask}; shr.u32 %r4, %r3, %r1; and.b32 %r4, %r4, 1; setp.ne.u32 %p, %r4, 0;
    @%p redux.sync.{form}.f32 %f2, %f1, %r3; @%p mov.b32 %s, %f2;"""
    actual = run_body(body)[: bin(int(mask, 0)).count("1")].view(np.float32)
    assert np.array_equal(actual, np.full(len(actual), expected, np.float32), equal_nan=True)


@pytest.mark.parametrize(
    "form",
    [
        "add.sat.f32x2 %x1, %x2, %x3", "mad.rn.f32x2 %x1, %x2, %x3, %x4", "min.f32x2 %x1, %x2, %x3",
        "max.abs.f64 %x1, %x2, %x3, %x4", "redux.sync.add.f32 %f1, %f2, -1", "redux.sync.min.abs.s32 %r1, %r2, -1",
    ],
)  # fmt: skip
def test_forms_that_ptxas_refuses_for_sm_100(form: str) -> None:
    with pytest.raises(UnknownInstruction):
        run_text(kernel_text(f"{form};"), np.zeros(1))
