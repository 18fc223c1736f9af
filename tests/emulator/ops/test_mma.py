"""mma.sync: exact integers, bounded floats, straight lines as one product, and what it refuses.

(Results of single instructions: tests/golden.)
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ptxlab
from ptxlab import emulator
from ptxlab.emulator.ops import mma
from ptxlab.emulator.ops.narrow_floats import to_narrow
from ptxlab.errors import Deadlock, EmulationError, SourceError
from ptxlab.hardware import fragments
from tests.support.axes import on_every_backend
from tests.support.small_kernels import HEADER, line_of, run_text

BITS = {"s8": 8, "u8": 8, "s4": 4, "u4": 4, "f16": 16}
RANGES = {"s8": (-128, 127), "u8": (0, 255), "s4": (-8, 7), "u4": (0, 15)}
FORMS = [
    *((k, a, b) for k in (16, 32) for a in ("s8", "u8") for b in ("s8", "u8")),
    *((k, a, b) for k in (32, 64) for a in ("s4", "u4") for b in ("s4", "u4")),
]


def braces(register: str, first: int, count: int) -> str:
    return "{" + ", ".join(f"%{register}{first + i}" for i in range(count)) + "}"


def mma_line(k: int, types: str = "s32.s8.s8.s32", satfinite: bool = False, depth: int = 2, count: int = 4) -> str:
    """Write an m16n8 MMA of registers %a, %b and %d."""
    opcode, d = f"mma.sync.aligned.m16n8k{k}.row.col{'.satfinite' * satfinite}.{types}", braces("d", 0, count)
    return f"{opcode} {d}, {braces('a', 0, 2 * depth)}, {braces('b', 0, depth)}, {d};"


def kernel(body: str, a: int = 4, b: int = 2, d: int = 4) -> str:
    """Write a kernel on registers: u32 [threads, a] and [threads, b] are read, [threads, d] are read and written."""
    lines = []
    for name, count in (("a", a), ("b", b), ("d", d)):
        lines.append(f"ld.param.u64 %p{name}, [{name}]; mad.wide.u32 %p{name}, %t, {4 * count}, %p{name};")
        lines += [f"ld.global.u32 %{name}{i}, [%p{name}+{4 * i}];" for i in range(count)]
    stores = [f"st.global.u32 [%pd+{4 * i}], %d{i};" for i in range(d)]
    loads, stored = "\n".join(lines), "\n".join(stores)
    return f"""{HEADER}.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 d) {{
.reg .b32 %a<{a}>, %b<{b}>, %d<{d}>, %t, %u, %n; .reg .b64 %pa, %pb, %pd; .reg .pred %p;
mov.u32 %t, %tid.x; mov.u32 %u, %ctaid.x; mov.u32 %n, %ntid.x; mad.lo.u32 %t, %u, %n, %t; mov.u32 %u, 0;
{loads}
{body}
{stored}
ret; }}
"""


def matrices(warps: int, k: int, low: int, high: int, extreme: bool, seed: int, rows: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if extreme:
        return rng.choice([low, high], (warps, rows, k), p=rng.choice([0, 0.5, 1]) * np.array([1, -1]) + [0, 1])
    return rng.integers(low, high + 1, (warps, rows, k))


def scatter_registers(fragment: fragments.Fragment, matrix: np.ndarray, depth: int) -> np.ndarray:
    """Distribute matrices over the registers of all warps; one of half the depth is the left half of the fragment's."""
    padded = np.zeros((len(matrix), *fragment.shape), np.uint8)
    padded[:, : matrix.shape[1], : matrix.shape[2]] = matrix.astype(np.uint8) & (15 if fragment.bits == 4 else 255)
    count = fragment.registers * depth // 2
    return np.ascontiguousarray(fragment.scatter(padded)[..., :count]).reshape(-1, count)


@pytest.mark.parametrize("satfinite", [False, True])
@pytest.mark.parametrize(("k", "a_type", "b_type"), FORMS)
@settings(max_examples=3, deadline=None)
@given(warps=st.integers(1, 3), extreme=st.booleans(), seed=st.integers(0, 2**32))
def test_integers(k, a_type, b_type, satfinite, warps, extreme, seed):
    """Any operands, extremes among them, onto accumulators at the ends of int32: equal to int64, wrapped or clamped."""
    bits, depth = BITS[a_type], k * BITS[a_type] // 128
    a = matrices(warps, k, *RANGES[a_type], extreme, seed, 16)
    b = matrices(warps, k, *RANGES[b_type], extreme, seed + 1, 8)
    rng = np.random.default_rng(seed)
    near = rng.choice([-(2**31), 0, 2**31 - 1], (warps, 16, 8))
    c = (rng.integers(-(2**21), 2**21, near.shape) + near).clip(-(2**31), 2**31 - 1)
    full = 256 // bits
    registers_a = scatter_registers(fragments.mma_a(full), a, depth)
    registers_b = scatter_registers(fragments.mma_b(full), b.swapaxes(1, 2), depth)
    d = fragments.mma_c().scatter(c.astype(np.int32)).reshape(-1, 4)
    text = kernel(mma_line(k, f"s32.{a_type}.{b_type}.s32", satfinite, depth), a=2 * depth, b=depth)
    assert not run_text(text, registers_a, registers_b, d, threads=32 * warps, checks=emulator.CHECKS).findings
    exact = c + a @ b.swapaxes(1, 2)
    expected = exact.clip(-(2**31), 2**31 - 1) if satfinite else exact
    product = fragments.mma_c().gather(d.reshape(warps, 32, 4), np.int32)
    np.testing.assert_array_equal(product, expected.astype(np.int32))


def test_extremes():
    """The largest sums that there are: -128 and 255 everywhere, onto the ends of int32."""
    for a_type, b_type, a, b in (("s8", "s8", -128, -128), ("u8", "u8", 255, 255), ("u8", "s8", 255, -128)):
        text = kernel(mma_line(32, f"s32.{a_type}.{b_type}.s32"))
        for c in (2**31 - 1, -(2**31)):
            d = np.full((32, 4), c, np.int32)
            run_text(text, np.full((32, 16), a & 255, np.uint8), np.full((32, 8), b & 255, np.uint8), d)
            assert (d == np.array([c + 32 * a * b]).astype(np.int32)).all()


def test_depths_of_floats():
    """m16n8k8 is the left half of m16n8k16."""
    half = np.random.default_rng(0).integers(-8, 9, (32, 2, 2)).astype(np.float16).view(np.uint32)[..., 0]
    b = half[::-1, :1].copy()
    one_step, two = np.zeros((2, 32, 4), np.float32)
    run_text(kernel(mma_line(8, "f32.f16.f16.f32", depth=1), a=2, b=1), half, b, one_step)
    run_text(kernel(mma_line(16, "f32.f16.f16.f32")), np.pad(half, ((0, 0), (0, 2))), np.pad(b, ((0, 0), (0, 1))), two)
    assert np.array_equal(one_step, two) and one_step.any()


@pytest.mark.parametrize("d_type", ["f32", "f16"])
def test_floats_are_rounded_once(d_type):
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((4, 16, 16)).astype(np.float16), rng.standard_normal((4, 16, 8)).astype(np.float16)
    dtype, fragment = {"f32": (np.float32, fragments.mma_c()), "f16": (np.float16, fragments.mma_c(16))}[d_type]
    c = rng.standard_normal((4, 16, 8)).astype(dtype)
    a[0, 0, 0], b[1, 0, 0], c[2, 0, 0], c[3, 0, 0] = np.inf, np.nan, -np.inf, np.finfo(dtype).max
    a[3, 0], b[3, :, 0] = 200, 200
    count = fragment.registers
    d = fragment.scatter(c).reshape(-1, count)
    text = kernel(mma_line(16, f"{d_type}.f16.f16.{d_type}", count=count), d=count)
    operands = fragments.mma_a(16).scatter(a).reshape(-1, 4), fragments.mma_b(16).scatter(b).reshape(-1, 2)
    run_text(text, *operands, d, threads=128)
    with np.errstate(all="ignore"):
        expected = (c + a.astype(np.float64) @ b.astype(np.float64)).astype(dtype)
    product = fragment.gather(d.reshape(4, 32, count), dtype)
    np.testing.assert_array_equal(product, expected)
    raw, nan = product.view(f"u{dtype().itemsize}"), np.isnan(expected)
    assert nan[1].any() and set(raw[nan].tolist()) == {0x7FFF if d_type == "f16" else 0x7FFFFFFF}
    assert np.isinf(product[2, 0, 0]) and (np.isinf(product[3, 0, 0]) == (d_type == "f16"))


def test_constants_as_operands():
    text = mma_line(32).replace("}, {%d0, %d1, %d2, %d3};", "}, {0, 1, 2, -3};").replace("{%b0, ", "{0x01010101, ")
    a, b, d = np.full((32, 16), 1, np.uint8), np.zeros((32, 2), np.uint32), np.zeros((32, 4), np.int32)
    run_text(kernel(text), a, b, d)
    assert (d == [16, 17, 18, 13]).all()


# Straight lines


def line(d: int, a: int, b: int, c: int) -> str:
    first = f"mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {braces('d', d, 4)}"
    a_register = braces("a", a, 4) if a < 12 else braces("d", a - 12, 4)
    return f"{first}, {a_register}, {braces('b', b, 2)}, {braces('d', c, 4)};\n"


def outcome(body: str, warps: int, monkeypatch, fused: bool) -> tuple[np.ndarray, list[int]]:
    sizes: list[int] = []
    group = mma.group
    with monkeypatch.context() as patch:
        patch.setattr(mma, "group", lambda *arguments: sizes.append(group(*arguments) - arguments[1]) or (
            group(*arguments) if fused else arguments[1] + 1))  # fmt: skip
        rng = np.random.default_rng(5)
        a, b, d = (rng.integers(0, 2**32, (32 * warps, n), np.uint32) for n in (12, 8, 16))
        run_text(kernel(body, a=12, b=8, d=16), a, b, d, threads=32 * warps)
    return d, sizes


def test_a_grid_of_operands_is_one_product(monkeypatch):
    body = "".join(line(4 * i + 8 * j, 4 * i, 2 * j, 4 * i + 8 * j) for j in range(2) for i in range(2))
    fused, sizes = outcome(body, 3, monkeypatch, True)
    assert sizes == [4]
    assert np.array_equal(fused, outcome(body, 3, monkeypatch, False)[0])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (line(0, 0, 0, 0) + line(0, 4, 2, 0), [1, 1]),  # a chain: no grid
        (line(0, 0, 0, 0) + line(0, 0, 2, 0) + line(0, 0, 4, 4), [3]),  # of one A by three B
        (line(0, 0, 0, 0) + "L:\n" + line(4, 0, 2, 4), [2]),  # a label that nobody goes to
        (line(0, 0, 0, 0) + "L:\n" + line(4, 0, 2, 4) + "add.u32 %u, %u, 1; setp.lt.u32 %p, %u, 3; @%p bra L;", [1, 1]),
        (line(0, 0, 0, 0) + line(4, 12, 0, 4), [1, 1]),  # its A is the result before it
        (line(0, 0, 0, 0) + "setp.ge.u32 %p, %t, 32;\n@%p " + line(4, 0, 2, 4) + line(8, 0, 4, 8), [1, 1, 1]),
    ],
)
def test_where_a_group_ends(body, expected, monkeypatch):
    fused, sizes = outcome(body, 2, monkeypatch, True)
    assert sizes == expected
    assert np.array_equal(fused, outcome(body, 2, monkeypatch, False)[0])


@pytest.mark.full
@settings(max_examples=30, deadline=None)
@given(
    program=st.lists(
        st.tuples(*map(st.sampled_from, ([0, 4, 8, 12], [0, 4, 8, 12, 16], [0, 2, 4], [0, 1, 4]))),
        min_size=2,
        max_size=20,
    )
)
def test_any_straight_line(program):
    body = "".join(line(*operands) for operands in program)
    with pytest.MonkeyPatch.context() as patch:
        fused, one_by_one = (outcome(body, 1, patch, fused)[0] for fused in (True, False))
    assert np.array_equal(fused, one_by_one)


# Lanes


def test_some_of_the_warps():
    """Warps 0 and 2 of three, by a branch; and by a guard."""
    body = "shr.u32 %u, %t, 5; setp.eq.u32 %p, %u, 1;\n"
    for text in (body + "@%p bra L;\n" + mma_line(32) + "\nL:\n", body + "@!%p " + mma_line(32)):
        d = np.zeros((96, 4), np.int32)
        run_text(kernel(text), np.full((96, 16), 1, np.uint8), np.full((96, 8), 2, np.uint8), d, threads=96)
        assert (d.reshape(3, -1) == [[64], [0], [64]]).all()


def test_many_warps():
    """More than are taken at a time, with blocks whose last warps have ended."""
    body = "setp.lt.u32 %p, %t, 40000; @!%p ret;\n" + "".join(line(4 * i, 0, 2 * i, 4 * i) for i in range(3))
    a, b = np.full((65536, 12 * 4), 255, np.uint8), np.full((65536, 8 * 4), 3, np.uint8)
    d = np.zeros((65536, 16), np.int32)
    run_text(kernel(body, a=12, b=8, d=16), a, b, d, threads=64, blocks=1024)
    assert (d[:40000, :12] == -96).all() and not d[40000:].any() and not d[:, 12:].any()


@pytest.mark.parametrize(
    ("change", "threads", "error", "message"),
    [
        ("", 40, EmulationError, "not all 32 threads of the warp are there"),
        ("setp.eq.u32 %p, %t, 5; @%p ret;\n", 32, EmulationError, "not all 32 threads of the warp are there"),
        ("setp.eq.u32 %p, %t, 5; @%p bar.sync 1;\n", 32, Deadlock, "waits for the rest of its warp"),
        ("setp.ne.u32 %p, %t, 5;\n@%p ", 32, EmulationError, "not all 32 threads of the warp are there"),
    ],
)
def test_an_mma_of_part_of_a_warp_is_refused(change, threads, error, message):
    text = kernel(change + mma_line(32))
    arrays = (np.zeros((threads, n), np.uint32) for n in (4, 2, 4))
    with pytest.raises(error, match=message) as raised:
        run_text(text, *arrays, threads=threads)
    assert f"k.ptx:{line_of(text, 'mma.sync')}: " in str(raised.value)


def test_uninitialised_registers():
    body = "".join(line(4 * i, 0, 2 * i, 4 * i) for i in range(2)).replace("%b2", "%x").replace("{%d4,", "{%y,", 1)
    text = kernel(".reg .b32 %x, %y;\n" + body, a=12, b=8, d=16)
    arrays = (np.zeros((32, n), np.uint32) for n in (12, 8, 16))
    findings = run_text(text, *arrays, checks=["init"]).findings
    assert [(f.line, f.message, f.count) for f in findings] == [
        (line_of(text, "%x, %b3"), "%x is read, but never written", 32)
    ]


@pytest.mark.parametrize("change", [("%a0, ", ""), ("%b0, %b1", "%b0"), (", {%a0, %a1, %a2, %a3}", ""), ("%d0", "%p")])
def test_wrong_operands(change):
    text = kernel(mma_line(32).replace(*change))
    with pytest.raises(SourceError) as raised:
        run_text(text, *(np.zeros((32, n), np.uint32) for n in (4, 2, 4)))
    assert f"k.ptx:{line_of(text, 'mma.sync')}: " in str(raised.value)


@on_every_backend
@pytest.mark.parametrize("k", [16, 32])
@pytest.mark.parametrize(("d_type", "total"), [("f16", 2048.0), ("f32", 2051.0)])
def test_fp8_is_rounded_as_two_mma_of_f16_and_an_addition(d_type: str, total: float, k: int, backend: str) -> None:
    """2049 of the lower bytes, 1 of the upper ones, and 1: each sum that is an f16 is a tie, and becomes 2048."""
    words = k // 4
    factors = np.array([16, 0.5, 0.5, 0]), np.array([2048 / words / 16, 2 / words, 2 / words, 0])
    a, b = (
        np.tile(to_narrow(x, "e4m3").view(np.uint32), (32, count)) for x, count in zip(factors, (4, 2), strict=True)
    )
    d = np.ones((32, 4), {"f16": np.float16, "f32": np.float32}[d_type])
    count = 2 if d_type == "f16" else 4
    text = kernel(mma_line(k, f"{d_type}.e4m3.e4m3.{d_type}", depth=k // 16, count=count), d=count)
    words_of_d = d.view(np.uint32)
    ptxlab.load(text.replace(".version 8.1", ".version 8.7"))(a, b, words_of_d, grid=1, block=32, backend=backend)
    assert (words_of_d.view(d.dtype) == total).all()
