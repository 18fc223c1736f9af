"""New keys and values in a KV cache: every byte of the pool as the quantiser and the reference's rotation have it."""

from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ptxlab
from ptxlab import emulator, gpu, kernels, quant, reference
from ptxlab.errors import EmulationError
from ptxlab.kernels.attention.append import APPEND
from ptxlab.layout import HEAD_DIMS, PAGE_SIZES, KVCache, page_bytes, write_slots
from ptxlab.quant import KV_SCHEMES
from ptxlab.runtime import run_spec
from tests.strategies import floats

ON_GPU = pytest.mark.skipif(gpu.why_not("sm_90") is not None, reason="the kernel runs on sm_90")
BACKENDS = ("emulator", pytest.param("gpu", marks=[pytest.mark.gpu, ON_GPU]))
DTYPES = (np.dtype("float16"), np.dtype(ml_dtypes.bfloat16))
RNG = np.random.default_rng(0)
MOST = 2e5  # beyond it scales may not be finite in float16


@dataclass(frozen=True, eq=False)
class Problem:
    """A call, on the host."""

    k: np.ndarray
    v: np.ndarray
    cache: KVCache
    slots: np.ndarray
    rope: tuple[np.ndarray, ...] | None = None

    @property
    def wanted(self) -> np.ndarray:
        """The pool afterwards."""
        here, cache = self.slots >= 0, replace(self.cache, pool=self.cache.pool.copy())
        k, v = self.k.astype(np.float32)[here], self.v.astype(np.float32)[here]
        if self.rope is not None:
            cos, sin, *positions = self.rope
            at = (positions[0] if positions else np.arange(len(here)))[here]
            k = reference.rope(k, cos[at], sin[at])
        keys, values = (quant.quantize_kv(x, cache.scheme, c) for x, c in ((k, cache.k_channel), (v, cache.v_channel)))
        write_slots(cache, keys, values, self.slots[here])
        pool: np.ndarray = cache.pool
        return pool

    def check(self, backend: str) -> None:
        """By the face; whatever else is in the pool stays."""
        cache = replace(self.cache, pool=self.cache.pool.copy())
        ptxlab.append_kv4(self.k, self.v, cache, self.slots, rope=self.rope, backend=backend)
        assert np.array_equal(cache.pool, self.wanted)

    def run(self, source: Any = None, rows: int = 0, **options: Any) -> tuple[np.ndarray, emulator.Result]:
        """The pool and what the emulator says, with all its checks, of another source or other rows per thread."""
        cache, known = self.cache, KV_SCHEMES[self.cache.scheme]
        bits = [x.view(np.uint16) if x.dtype == DTYPES[1] else x for x in (self.k, self.v)]
        inputs = {"k": bits[0], "v": bits[1], "slots": self.slots}
        inputs |= dict(zip(("cos", "sin", "positions"), self.rope or (), strict=False))
        for name, channel in (("k", cache.k_channel), ("v", cache.v_channel)):
            inputs |= dict(zip((f"{name}_scale", f"{name}_zero"), channel or (), strict=False))
        T, H, D = self.k.shape
        sizes = {"T": T, "H": H, "D": D, "pages": cache.pages, "size": cache.page_size, "bits": known.bits}
        sizes |= {"channel": int(known.by_channel), "R": 0 if self.rope is None else len(self.rope[0])}
        config = APPEND.config_for(sizes) | {"BF16": DTYPES.index(self.k.dtype)}
        config |= {"INDEX": int(self.slots.dtype == np.int64)} | ({"ROWS": rows} if rows else {})
        outcome = run_spec(
            APPEND,
            source or kernels.find(APPEND.name)[1][0],
            inputs,
            sizes=sizes,
            out={"pool": (pool := cache.pool.copy())},
            backend="emulator",
            checks=("race", "init", "lanes"),
            config=config,
            **options,
        )
        return pool, outcome


def problem_of(
    k: np.ndarray, v: np.ndarray, scheme: str, size: int, *, pages: int = 0, index: Any = np.int32, rope: Any = None
) -> Problem:
    """Tokens, every fourth of which is padding, to slots at random in a pool of anything."""
    T, H, D = k.shape
    pages = pages or -(-T // size) + 1
    slots = RNG.permutation(pages * size)[:T].astype(index)
    slots[RNG.permutation(T)[: T // 4]] = -RNG.integers(1, 2**30)
    pool = RNG.integers(0, 256, (pages, 2, H, page_bytes(scheme, size, D)), dtype=np.uint8)
    constants: list[Any] = [None, None]
    if KV_SCHEMES[scheme].by_channel:
        some = RNG.standard_normal((2, 9, H, D), dtype=np.float32)  # other ones: values are beyond them, and ties
        constants = [quant.calibrate_kv(np.rint(x * 4) / 4, scheme) for x in some]
    table, lengths = np.zeros((1, 1), np.int32), np.zeros(1, np.int32)
    cache = KVCache(
        pool=pool,
        block_table=table,
        lengths=lengths,
        page_size=size,
        head_dim=D,
        scheme=scheme,
        k_channel=constants[0],
        v_channel=constants[1],
    )
    return Problem(k, v, cache, slots, rope)


def rotations(T: int, D: int, index: Any, positions: bool) -> tuple[np.ndarray, ...]:
    rows = 50 if positions else T + 1
    angles = RNG.uniform(-9, 9, (rows, D // 2)).astype(np.float32)
    at = (RNG.integers(0, rows, T).astype(index),) if positions else ()
    return (np.cos(angles), np.sin(angles), *at)


@st.composite
def problems(draw: st.DrawFn, tokens: int, heads: int) -> Problem:
    dtype, index = draw(st.sampled_from(DTYPES)), draw(st.sampled_from((np.int32, np.int64)))
    shape = draw(st.integers(1, tokens)), draw(st.integers(1, heads)), draw(st.sampled_from(HEAD_DIMS))
    k, v = (draw(floats(dtype, shape)) for _ in "kv")
    # Rows within one exponent of each other, so that more than one value of a row matters.
    if draw(st.booleans()):
        k, v = (np.ldexp(np.frexp(x.astype(np.float32))[0], 3).astype(dtype) for x in (k, v))
    k, v = (np.where(np.abs(np.float32(x)).max(axis=-1, keepdims=True) < MOST, x, np.zeros_like(x)) for x in (k, v))
    rope = rotations(shape[0], shape[2], index, draw(st.booleans())) if draw(st.booleans()) else None
    scheme, page_size = draw(st.sampled_from(sorted(KV_SCHEMES))), draw(st.sampled_from(PAGE_SIZES))
    return problem_of(k, v, scheme, page_size, index=index, rope=rope)


@given(problem=problems(tokens=9, heads=3))
@settings(max_examples=30)
def test_every_byte_in_the_emulator(problem: Problem) -> None:
    pool, outcome = problem.run()
    assert np.array_equal(pool, problem.wanted) and outcome.findings == ()


@pytest.mark.gpu
@ON_GPU
@given(problem=problems(tokens=70, heads=9))
@settings(max_examples=400)
def test_every_byte_on_the_gpu(problem: Problem) -> None:
    problem.check("gpu")


def normal(T: int, H: int, D: int, dtype: np.dtype = DTYPES[0]) -> tuple[np.ndarray, np.ndarray]:
    k, v = RNG.standard_normal((2, T, H, D), dtype=np.float32)
    k[:, :, 3] *= 40
    return k.astype(dtype), v.astype(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("scheme", KV_SCHEMES)
def test_every_scheme_head_dim_and_page_size(scheme: str, D: int, backend: str) -> None:
    for page_size, dtype in zip(PAGE_SIZES, (*DTYPES, DTYPES[0]), strict=True):
        rope = rotations(21, D, np.int32, positions=page_size == 16)
        problem_of(*normal(21, 3, D, dtype), scheme, page_size, pages=3, rope=rope).check(backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (2, 40), (64, 8), (7, 33)])
def test_more_heads_than_a_block_has_and_fewer(tokens: int, heads: int, backend: str) -> None:
    problem_of(*normal(tokens, heads, 128), "kv4", 64, rope=rotations(tokens, 128, np.int32, True)).check(backend)


@pytest.mark.parametrize("scheme", KV_SCHEMES)
@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_rows_that_a_thread_keeps(rows: int, D: int, scheme: str) -> None:
    for T in (1, 5, 8):
        problem = problem_of(*normal(T, 3, D), scheme, 16, rope=rotations(T, D, np.int32, False))
        pool, outcome = problem.run(rows=rows)
        assert np.array_equal(pool, problem.wanted) and outcome.findings == ()


def scales(rows: int, precision: int) -> np.ndarray:
    """f32 [rows], numbers of so many bits."""
    significand = RNG.integers(2 ** (precision - 1), 2**precision, rows)
    return np.ldexp(significand, RNG.integers(-14, 1, rows) - precision + 1).astype(np.float32)


def ties(scale: np.ndarray, D: int, bits: int) -> np.ndarray:
    """f32 [rows, D]: a half and an integer times the row's scale, which by its extremes is the one that it gets."""
    below = 2 ** (bits - 1) - 1
    quotients = RNG.integers(-below, below, (len(scale), D)) + np.float32(0.5)
    quotients[:, 0], quotients[:, 1] = -below, below + 1
    x: np.ndarray = quotients.astype(np.float32) * scale[:, None]
    return x


def rotated_to_ties(rows: int, bits: int) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """f16 [rows, 1, 64], equal within pairs, that a rotation makes ties of an f16 scale, or what lies next to ties."""
    scale = scales(rows, 11)
    x, wanted = RNG.uniform(1, 2, (rows, 32)).astype(np.float16), ties(scale, 32, bits)
    sin = (wanted * RNG.integers(-6, 7, wanted.shape) * 2.0**-26).astype(np.float32)
    x[:, :2], sin[:, :2] = 1, 0  # the extremes stay
    cos = (wanted / x.astype(np.float32)).astype(np.float32)
    half, between = rows // 2, np.ldexp(np.float32(0.5), np.frexp(scale)[1] - 11)
    cos[half:, 2:] = np.abs(cos[half:, 2:])  # of the others the scale itself is a tie of f16
    cos[half:, 0], cos[half:, 1] = 0, ((scale + between) * (2**bits - 1))[half:]
    return np.concatenate([x, x], axis=1)[:, None], (cos, sin)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", ["kv4", "kv8"])
def test_quotients_are_those_of_an_ieee_division(scheme: str, dtype: np.dtype, backend: str) -> None:
    """Two parts of a reciprocal must round like a division does, and a rotation like its single operations."""
    rows, bits = 128 if backend == "emulator" else 8192, KV_SCHEMES[scheme].bits
    exact = max(1, {DTYPES[0]: 11, DTYPES[1]: 8}[dtype] - bits)
    k, v = (ties(scales(rows, exact), 64, bits).astype(dtype)[:, None] for _ in "kv")
    problem_of(k, v, scheme, 16).check(backend)
    x, rope = rotated_to_ties(rows, bits)
    problem_of(x, x, scheme, 16, rope=rope).check(backend)


def beyond_the_levels(rows: int, bits: int) -> np.ndarray:
    """f16 [rows, 1, 64]: scales so small that they are rounded by up to a half of themselves, so that the zero and what
    lies at the other end are clipped; extremes that are both rounded up; and zeros."""
    levels = 2**bits - 1
    kinds = [
        RNG.integers(-int(1.49 * levels), 1, (rows, 64)) * 2.0**-24,
        np.clip(RNG.integers(-levels, levels + 1, (rows, 64)), -levels / 2, levels / 2) * 0.25,
        np.zeros((rows, 64)),
    ]
    kinds[0][:, :2] = -int(1.49 * levels) * 2.0**-24, 0
    x: np.ndarray = np.choose(np.arange(rows)[:, None] % 3, kinds).astype(np.float16)[:, None]
    return x


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", ["kv4", "kv8"])
def test_levels_are_clipped(scheme: str, backend: str) -> None:
    x = beyond_the_levels(60, KV_SCHEMES[scheme].bits)
    problem_of(x, np.abs(x), scheme, 16).check(backend)


def any_constants(scheme: str) -> Problem:
    """Quotients by channel that are infinite, tiny, or ties."""
    k, v = normal(40, 2, 64)
    scale = np.exp2(RNG.integers(-126, 120, (2, 64))).astype(np.float32)
    scale[:, ::2] = scales(64, 6).reshape(2, 32)
    for x, by in ((k, scale), (v, scale[::-1])):
        x[:, :, ::2] = (RNG.integers(-31, 32, (40, 2, 32)) / 2 * by[:, ::2]).astype(np.float16)
    zero = RNG.integers(0, 16, (2, 64)).astype(np.float32) * (scheme == "kv4_channel")
    problem = problem_of(k, v, scheme, 16)
    cache = replace(problem.cache, k_channel=(scale, zero), v_channel=(scale[::-1].copy(), zero))
    return replace(problem, cache=cache)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", ["kv4_channel", "kv8_channel"])
def test_constants_by_channel_of_any_size(scheme: str, backend: str) -> None:
    any_constants(scheme).check(backend)


def test_what_padding_brings_does_not_matter() -> None:
    """Not even positions outside the tables, which a stray read would show."""
    k, v = normal(8, 2, 64)
    problem = problem_of(k, v, "kv4", 16, rope=rotations(8, 64, np.int32, True))
    padding = problem.slots < 0
    assert padding.sum() == 2
    k[padding], problem.rope[2][padding] = np.nan, 2**31 - 1
    for rows in (1, 2, 4):
        assert np.array_equal(problem.run(rows=rows)[0], problem.wanted)
    problem.check("emulator")


@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e38])
def test_tokens_that_no_host_lets_through_show_in_their_scale(wrong: float, rope: bool) -> None:
    k, v = normal(5, 2, 64, DTYPES[1])
    problem = problem_of(k, v, "kv4", 16, pages=1, rope=rotations(5, 64, np.int32, False) if rope else None)
    problem = replace(problem, slots=np.arange(5, dtype=np.int32))
    right = problem.wanted
    v[0, 1, 60] = k[2, 0, 5] = wrong
    pool, _ = problem.run()
    scales, wanted = (
        page[0, :, :, 16 * 32 :].copy().view(np.uint16).reshape(2, 2, 16, 2)[..., 0] for page in (pool, right)
    )
    bad = np.zeros((2, 2, 16), bool)
    bad[1, 1, 0] = bad[0, 0, 2] = True
    assert not np.isfinite(scales.view(np.float16)[bad]).any()
    assert np.array_equal(scales[~bad], wanted[~bad])


def huge(scheme: str) -> Problem:
    """Quotients by channel beyond any f32, of both signs."""
    k, v = (x * np.float32(1e38) for x in np.where(RNG.random((2, 9, 2, 64)) < 0.5, -3, 3))
    problem = problem_of(k.astype(DTYPES[1]), v.astype(DTYPES[1]), scheme, 16)
    constants = (np.full((2, 64), 2.0**-90, np.float32), np.zeros((2, 64), np.float32))
    return replace(problem, cache=replace(problem.cache, k_channel=constants, v_channel=constants))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", ["kv4_channel", "kv8_channel"])
def test_quotients_by_channel_that_are_infinite(scheme: str, backend: str) -> None:
    huge(scheme).check(backend)


def next_to_ties(scheme: str, tiny: bool, tokens: int = 64) -> Problem:
    """By channel, keys that a rotation makes any f32 next to a tie of their channel's scale."""
    known, heads = KV_SCHEMES[scheme], 2
    exponents = np.full(64, -126) if tiny else RNG.integers(-99, 99, 64)
    scale = RNG.uniform(1, 2, (heads, 64)).astype(np.float32) * np.exp2(exponents).astype(np.float32)
    scale[:, 32:] = scale[:, :32] = scale[:1, :32]  # pairs and heads have one cosine
    zero = np.float32(known.high // 2) * np.ones_like(scale) * (known.low == 0)
    quotients = RNG.integers(-(known.high // 2), known.high // 2, (tokens, 32)) + 0.5
    cos = (quotients * scale[0, :32]).astype(np.float32)
    cos = (cos.view(np.int32) + RNG.integers(-1, 2, cos.shape, dtype=np.int32)).view(np.float32)
    one = np.ones((tokens, heads, 64), np.float16)
    problem = problem_of(one, one, scheme, 16, rope=(cos, np.zeros_like(cos)))
    return replace(problem, cache=replace(problem.cache, k_channel=(scale, zero), v_channel=(scale, zero)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", ["kv4_channel", "kv8_channel"])
def test_quotients_by_channel_are_those_of_an_ieee_division(scheme: str, backend: str) -> None:
    for tiny in (False, True):
        next_to_ties(scheme, tiny, 64 if backend == "emulator" else 4096).check(backend)


def close_calls(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """x and s, f32 integers of 24 bits, with quotients next to where rounding turns.

    x * 2^bits = m * s + n with m, odd, half-way between two floats, and a small n.
    """
    s = RNG.integers(2**22, 2**23, rows, dtype=np.int64) * 2 + 1
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for bits in (24, 25):  # quotients from 1 on, and below
        inverse = s.copy()
        for _ in range(5):
            inverse = inverse * (2 - s * inverse) % 2**bits
        for n in [n for n in range(-7, 8) if n % 2]:
            m = -n * inverse % 2**bits
            m += 2**24 * (m < 2**24)
            x = (m * s + n) >> bits
            fits = ((m * s + n) % 2**bits == 0) & (x >= 2**23) & (x < 2**24)
            found.append((x[fits], s[fits]))
    x, s = (np.concatenate(parts).astype(np.float32) for parts in zip(*found, strict=True))
    return x, s


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """In f32. A longdouble may round the sum as well, but by less than what parts it from where that of f32 turns."""
    exact: np.ndarray = (a.astype(np.longdouble) * b + c).astype(np.float32)
    return exact


def test_one_correction_makes_a_quotient_right() -> None:
    """What the kernel's `Corrected` rests on, where it is hardest; a reciprocal next to the right one is not enough."""
    x, s = close_calls(200_000)
    right, r = x / s, np.float32(1) / s
    assert len(x) > 300_000 and ((near := x * r) != right).any()
    assert np.array_equal(fma(fma(-near, s, x), r, near), right)
    off = np.nextafter(r, np.float32(0))
    assert not np.array_equal(fma(fma(-(x * off), s, x), off, x * off), right)


# --- would anybody notice? -------------------------------------------------------------------------------------------

CHANGES = {
    "a reciprocal of one part": ("fmaf(x, high, __fmul_rn(x, low))", "__fmul_rn(x, high)"),
    "a quotient that is not corrected": ("return fmaf(fmaf(-near, s, x), r, near);", "return near;"),
    "a quotient that is not cut off": ("fminf(__fmul_rn(x, r), 0x1p100f)", "__fmul_rn(x, r)"),
    "a reciprocal for tiny scales": ("return most <= high - low;", "return true;"),
    "a scale by a reciprocal": ("float(LEVELS)))", "1.0f) * (1.0f / LEVELS))"),
    "a scale rounded down": ("__float2half_rn(__f", "__float2half_rz(__f"),
    "a range without 0": ("range.include({0, 0});", ""),
    "a scale of 0": ("__half2float(rounded) == 0 ?", "false ?"),
    "no upper bound": ("max(min(rounded(quotient) + zero, LEVELS), 0)", "max(rounded(quotient) + zero, 0)"),
    "no lower bound": ("max(min(rounded(quotient) + zero, LEVELS), 0)", "min(rounded(quotient) + zero, LEVELS)"),
    "a fused difference": ("__fsub_rn(__fmul_rn(x[i], cos[i]), __f", "fmaf(x[i], cos[i], -__f"),
    "a fused sum": ("__fadd_rn(__fmul_rn(x[PAIRS + i], cos[i]), __f", "fmaf(x[PAIRS + i], cos[i], __f"),
    "tokens beyond the last": ("slot[i] = t < tokens ? slots[t] : -1", "slot[i] = slots[t]"),
    "positions of padding": ("min(size_t(position[i]), size_t(turns - 1))", "position[i]"),
    "positions beyond the last": ("positions && t < tokens ?", "positions ?"),
    "heads beyond the last": ("at < 0 || head + i / TOKENS >= heads", "at < 0"),
    "constants of heads beyond the last": ("slot[0] >= 0 && head + own < heads", "slot[0] >= 0"),
    "no lower bound by channel": ("fmaxf(quotient[j](rows[i][j]), -127.0f)", "quotient[j](rows[i][j])"),
    "half of a neighbour's word": ("odd ? first : second", "odd ? second : first"),
    "no wait for the kernel before": ("ptxlab::wait_for_predecessors();", ""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_kernel_is_noticed(change: str) -> None:
    (source,) = kernels.find(APPEND.name)[1]
    old, new = CHANGES[change]
    assert source.text.count(old) == 1
    changed = replace(source, text=source.text.replace(old, new))
    assert any(is_killed(problem, changed) for problem in battery())


def battery() -> list[Problem]:
    """Problems of which a wrong kernel fails one."""
    x, (turned, rope) = ties(scales(64, 7), 64, 4).astype(np.float16)[:, None], rotated_to_ties(128, 4)
    beyond = beyond_the_levels(40, 4)
    padded = problem_of(*normal(9, 3, 64), "kv4", 16, rope=rotations(9, 64, np.int32, True))
    padded.rope[2][padded.slots < 0] = 2**31 - 1
    full = problem_of(*normal(9, 3, 64), "kv4", 16, pages=1)
    full = replace(full, slots=np.arange(9, dtype=np.int32) + 7)
    return [
        problem_of(x, np.abs(x), "kv4", 16),
        problem_of(beyond, beyond, "kv4", 16),
        problem_of(turned, turned, "kv4", 16, rope=rope),
        any_constants("kv4_channel"),
        huge("kv4_channel"),
        next_to_ties("kv4_channel", tiny=False),
        next_to_ties("kv4_channel", tiny=True),
        padded,
        full,
    ]


def is_killed(problem: Problem, source: Any) -> bool:
    try:
        pool, outcome = problem.run(source, rows=4)
    except EmulationError:  # a stray access
        return True
    return bool(outcome.findings) or not np.array_equal(pool, problem.wanted)


def test_the_kernel_itself_passes() -> None:
    (source,) = kernels.find(APPEND.name)[1]
    assert not any(is_killed(problem, source) for problem in battery())
