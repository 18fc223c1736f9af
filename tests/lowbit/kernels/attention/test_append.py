"""New keys and values in a KV cache: every byte of the pool as the quantiser and the reference's rotation have it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptxlab import gpu, registry
from ptxlab.errors import EmulationError
from ptxlab.hardware.floats import fma
from ptxlab.lowbit.kernels.attention.append import APPEND
from ptxlab.lowbit.layout import HEAD_DIMS, PAGE_SIZES
from ptxlab.lowbit.quant import KV_SCHEMES
from ptxlab.sources import Source
from ptxlab.spec import Launch
from tests.support.append_problems import (
    BACKENDS,
    DTYPES,
    ON_GPU,
    RNG,
    Problem,
    draw_beyond_the_levels,
    draw_rotated_ties,
    draw_rotations,
    draw_scales,
    draw_ties,
    extreme_constants_problem,
    gaussian_kv,
    huge_quotients_problem,
    make_problem,
    near_ties_problem,
    replace_in_source,
)
from tests.support.strategies import floats

MOST = 2e5  # beyond it scales may not be finite in float16

RECIPROCALS = Source.from_text(
    """
#include "reciprocal.cuh"

extern "C" __global__ void reciprocals(unsigned long long* wrong) {  // of every x, 2^-126 <= x <= 2^126
    const unsigned first = 0x00800000, last = 0x7e800000;
    unsigned long long here = 0, tried = 0;
    for (unsigned i = first + blockIdx.x * blockDim.x + threadIdx.x; i <= last; i += gridDim.x * blockDim.x) {
        const float x = __uint_as_float(i);
        here += ptxlab::reciprocal(x) != __frcp_rn(x) || ptxlab::reciprocal(-x) != -__frcp_rn(x), ++tried;
    }
    atomicAdd(wrong, here), atomicAdd(wrong + 1, tried);
}
""",
    "<reciprocals>",
)


@st.composite
def problems(draw: st.DrawFn, tokens: int, heads: int) -> Problem:
    dtype, index = draw(st.sampled_from(DTYPES)), draw(st.sampled_from((np.int32, np.int64)))
    shape = draw(st.integers(1, tokens)), draw(st.integers(1, heads)), draw(st.sampled_from(HEAD_DIMS))
    k, v = (draw(floats(dtype, shape)) for _ in "kv")
    # Rows within one exponent of each other, so that more than one value of a row matters.
    if draw(st.booleans()):
        k, v = (np.ldexp(np.frexp(x.astype(np.float32))[0], 3).astype(dtype) for x in (k, v))
    k, v = (np.where(np.abs(np.float32(x)).max(axis=-1, keepdims=True) < MOST, x, np.zeros_like(x)) for x in (k, v))
    rope = draw_rotations(shape[0], shape[2], index, draw(st.booleans())) if draw(st.booleans()) else None
    scheme, page_size = draw(st.sampled_from(sorted(KV_SCHEMES))), draw(st.sampled_from(PAGE_SIZES))
    return make_problem(k, v, scheme, page_size, index=index, rope=rope)


@pytest.mark.full
@given(problem=problems(tokens=9, heads=3))
@settings(max_examples=30)
def test_every_byte_in_the_emulator(problem: Problem) -> None:
    pool, outcome = problem.run()
    assert np.array_equal(pool, problem.expected_pool) and outcome.findings == ()


@pytest.mark.long(40)
@pytest.mark.gpu
@ON_GPU
@given(problem=problems(tokens=70, heads=9))
@settings(max_examples=400)
def test_every_byte_on_the_gpu(problem: Problem) -> None:
    problem.check("gpu")


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("scheme", KV_SCHEMES)
def test_every_scheme_head_dim_and_page_size(scheme: str, D: int, backend: str) -> None:
    for page_size, dtype in zip(PAGE_SIZES, (*DTYPES, DTYPES[0]), strict=True):
        rope = draw_rotations(21, D, np.int32, positions=page_size == 16)
        make_problem(*gaussian_kv(21, 3, D, dtype), scheme, page_size, pages=3, rope=rope).check(backend)


@pytest.mark.default_cases("kv8_channel-16-emulator")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", PAGE_SIZES)
@pytest.mark.parametrize("scheme", KV_SCHEMES)
def test_the_first_and_last_slots_of_pages(scheme: str, size: int, backend: str) -> None:
    """The slots are those of the pool's first page, of its last one, and on both sides of a page boundary."""
    slots = np.array([0, size - 1, size, 2 * size - 1, 3 * size - 1], np.int32)
    problem = make_problem(*gaussian_kv(len(slots), 2, 64), scheme, size, pages=3)
    replace(problem, slots=slots).check(backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (2, 40), (64, 8), (7, 33)])
def test_more_heads_than_a_block_has_and_fewer(tokens: int, heads: int, backend: str) -> None:
    make_problem(*gaussian_kv(tokens, heads, 128), "kv4", 64, rope=draw_rotations(tokens, 128, np.int32, True)).check(
        backend
    )


@pytest.mark.default_cases("1-kv4")
@pytest.mark.parametrize("scheme", KV_SCHEMES)
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_rows_that_a_thread_keeps(rows: int, scheme: str) -> None:
    """Heads of each size take turns."""
    D = HEAD_DIMS[(rows // 2 + list(KV_SCHEMES).index(scheme)) % len(HEAD_DIMS)]
    for T in (1, 5, 8):
        problem = make_problem(*gaussian_kv(T, 3, D), scheme, 16, rope=draw_rotations(T, D, np.int32, False))
        pool, outcome = problem.run(rows=rows)
        assert np.array_equal(pool, problem.expected_pool) and outcome.findings == ()


@pytest.mark.default_cases("kv4-bfloat16-emulator")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", ["kv4", "kv8"])
def test_quotients_are_those_of_an_ieee_division(scheme: str, dtype: np.dtype, backend: str) -> None:
    """Two parts of a reciprocal must round like a division does, and a rotation like its single operations."""
    rows, bits = 128 if backend == "emulator" else 8192, KV_SCHEMES[scheme].bits
    exact = max(1, {DTYPES[0]: 11, DTYPES[1]: 8}[dtype] - bits)
    k, v = (draw_ties(draw_scales(rows, exact), 64, bits).astype(dtype)[:, None] for _ in "kv")
    make_problem(k, v, scheme, 16).check(backend)
    x, rope = draw_rotated_ties(rows, bits)
    make_problem(x, x, scheme, 16, rope=rope).check(backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", ["kv4", "kv8"])
def test_levels_are_clipped(scheme: str, backend: str) -> None:
    x = draw_beyond_the_levels(60, KV_SCHEMES[scheme].bits)
    make_problem(x, np.abs(x), scheme, 16).check(backend)


@pytest.mark.default_cases("of any size-kv8_channel-emulator", "with infinite quotients-kv8_channel-emulator")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", ["kv4_channel", "kv8_channel"])
@pytest.mark.parametrize(
    "drawn", [extreme_constants_problem, huge_quotients_problem], ids=["of any size", "with infinite quotients"]
)
def test_constants_by_channel(drawn: Callable[[str], Problem], scheme: str, backend: str) -> None:
    drawn(scheme).check(backend)


@pytest.mark.full
def test_what_padding_brings_does_not_matter() -> None:
    """Its positions may even lie outside the tables, where a stray read would show."""
    k, v = gaussian_kv(8, 2, 64)
    problem = make_problem(k, v, "kv4", 16, rope=draw_rotations(8, 64, np.int32, True))
    padding = problem.slots < 0
    assert padding.sum() == 2
    k[padding], problem.rope[2][padding] = np.nan, 2**31 - 1
    for rows in (1, 2, 4):
        assert np.array_equal(problem.run(rows=rows)[0], problem.expected_pool)
    problem.check("emulator")


@pytest.mark.default_cases("inf-False", "-inf-False", "1e+38-False", "-inf-True", "1e+38-True")
@pytest.mark.parametrize("rope", [False, True])
@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 1e38])
def test_tokens_that_no_host_lets_through_show_in_their_scale(wrong: float, rope: bool) -> None:
    k, v = gaussian_kv(5, 2, 64, DTYPES[1])
    problem = make_problem(k, v, "kv4", 16, pages=1, rope=draw_rotations(5, 64, np.int32, False) if rope else None)
    problem = replace(problem, slots=np.arange(5, dtype=np.int32))
    expected_pool = problem.expected_pool
    v[0, 1, 60] = k[2, 0, 5] = wrong
    pool, _ = problem.run()
    scales, expected = (
        page[0, :, :, 16 * 32 :].copy().view(np.uint16).reshape(2, 2, 16, 2)[..., 0] for page in (pool, expected_pool)
    )
    bad = np.zeros((2, 2, 16), bool)
    bad[1, 1, 0] = bad[0, 0, 2] = True
    assert not np.isfinite(scales.view(np.float16)[bad]).any()
    assert np.array_equal(scales[~bad], expected[~bad])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scheme", ["kv4_channel", "kv8_channel"])
def test_quotients_by_channel_are_those_of_an_ieee_division(scheme: str, backend: str) -> None:
    for tiny in (False, True):
        near_ties_problem(scheme, tiny, 64 if backend == "emulator" else 4096).check(backend)


def close_calls(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw x and s, f32 integers of 24 bits, whose quotients are next to a tie of the rounding.

    x * 2^bits = m * s + n with m, odd, half-way between two floats, and a small n.
    """
    s = RNG.integers(2**22, 2**23, rows, dtype=np.int64) * 2 + 1
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    for bits in (24, 25):  # quotients from 1 on, and below
        inverse = s.copy()
        for _ in range(5):
            inverse = inverse * (2 - s * inverse) % 2**bits
        for n in [n for n in range(-7, 8) if n % 2]:
            m = -n * inverse % 2**bits
            m += 2**24 * (m < 2**24)
            x = (m * s + n) >> bits
            fits = ((m * s + n) % 2**bits == 0) & (x >= 2**23) & (x < 2**24)
            pairs.append((x[fits], s[fits]))
    x, s = (np.concatenate(parts).astype(np.float32) for parts in zip(*pairs, strict=True))
    return x, s


def test_one_correction_makes_a_quotient_right() -> None:
    """The kernel's `Corrected` rests on this, here in the hardest cases; a reciprocal next to the right one fails."""
    x, s = close_calls(200_000)
    right, r = x / s, np.float32(1) / s
    assert len(x) > 300_000 and ((near := x * r) != right).any()
    assert np.array_equal(fma(fma(-near, s, x), r, near), right)
    off = np.nextafter(r, np.float32(0))
    assert not np.array_equal(fma(fma(-(x * off), s, x), off, x * off), right)


@pytest.mark.gpu
@ON_GPU
def test_reciprocals_without_a_branch_are_those_of_ieee() -> None:
    """The test needs a GPU: in the emulator rcp.approx is a rounded quotient anyway."""
    wrong = gpu.to_device(np.zeros(2, np.uint64))
    gpu.launch(gpu.load(RECIPROCALS, "reciprocals"), [wrong], Launch((1024, 1, 1), (256, 1, 1)))
    assert gpu.to_host(wrong).tolist() == [0, 0x7E800000 - 0x00800000 + 1]


# Would anybody notice? Small mistakes in the source.
CHANGES = {
    "a reciprocal of one part": ("fmaf(x, high, __fmul_rn(x, low))", "__fmul_rn(x, high)"),
    "a quotient that is not corrected": ("return fmaf(fmaf(-near, s, x), r, near);", "return near;"),
    "a quotient that is not cut off": ("fminf(__fmul_rn(x, r), 0x1p100f)", "__fmul_rn(x, r)"),
    "a reciprocal for tiny scales": ("return largest_offset <= high - low;", "return true;"),
    "a scale by a reciprocal": ("float(kLevels)))", "1.0f) * (1.0f / kLevels))"),
    "a scale rounded down": ("__float2half_rn(__f", "__float2half_rz(__f"),
    "a range without 0": ("range.include({0, 0});", ""),
    "a scale of 0": ("__half2float(rounded_scale) == 0 ?", "false ?"),
    "no upper bound": (
        "max(min(round_to_level(quotient) + zero, kLevels), 0)",
        "max(round_to_level(quotient) + zero, 0)",
    ),
    "no lower bound": (
        "max(min(round_to_level(quotient) + zero, kLevels), 0)",
        "min(round_to_level(quotient) + zero, kLevels)",
    ),
    "a fused difference": ("__fsub_rn(__fmul_rn(x[i], cos[i]), __f", "fmaf(x[i], cos[i], -__f"),
    "a fused sum": ("__fadd_rn(__fmul_rn(x[kPairs + i], cos[i]), __f", "fmaf(x[kPairs + i], cos[i], __f"),
    "tokens beyond the last": ("slot[i] = t < tokens ? slots[t] : -1", "slot[i] = slots[t]"),
    "positions of padding": ("min(size_t(position[i]), size_t(turns - 1))", "position[i]"),
    "positions beyond the last": ("positions && t < tokens ?", "positions ?"),
    "heads beyond the last": ("row_slot < 0 || head + i / kTokens >= heads", "row_slot < 0"),
    "constants of heads beyond the last": ("slot >= 0 && head + answered_row < heads", "slot >= 0"),
    "no lower bound by channel": ("fmaxf(quotient[j](rows[i][j]), -127.0f)", "quotient[j](rows[i][j])"),
    "half of a neighbour's word": ("odd ? first_word : second_word", "odd ? second_word : first_word"),
    "no wait for the kernel before": ("ptxlab::wait_for_predecessors();", ""),
}


@pytest.mark.default_cases("a reciprocal of one part")
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_kernel_is_noticed(change: str) -> None:
    (source,) = registry.find(APPEND.name)[1]
    assert any(is_killed(problem, replace_in_source(source, *CHANGES[change])) for problem in battery())


def battery() -> list[Problem]:
    """Make problems of which a wrong kernel fails at least one."""
    x = draw_ties(draw_scales(64, 7), 64, 4).astype(np.float16)[:, None]
    turned, rope = draw_rotated_ties(128, 4)
    beyond = draw_beyond_the_levels(40, 4)
    padded = make_problem(*gaussian_kv(9, 3, 64), "kv4", 16, rope=draw_rotations(9, 64, np.int32, True))
    padded.rope[2][padded.slots < 0] = 2**31 - 1
    full = make_problem(*gaussian_kv(9, 3, 64), "kv4", 16, pages=1)
    full = replace(full, slots=np.arange(9, dtype=np.int32) + 7)
    return [
        make_problem(x, np.abs(x), "kv4", 16),
        make_problem(beyond, beyond, "kv4", 16),
        make_problem(turned, turned, "kv4", 16, rope=rope),
        extreme_constants_problem("kv4_channel"),
        huge_quotients_problem("kv4_channel"),
        near_ties_problem("kv4_channel", tiny=False),
        near_ties_problem("kv4_channel", tiny=True),
        padded,
        full,
    ]


def is_killed(problem: Problem, source: Any) -> bool:
    try:
        pool, outcome = problem.run(source, rows=4)
    except EmulationError:  # a stray access
        return True
    return bool(outcome.findings) or not np.array_equal(pool, problem.expected_pool)


@pytest.mark.full
def test_the_kernel_itself_passes() -> None:
    (source,) = registry.find(APPEND.name)[1]
    assert not any(is_killed(problem, source) for problem in battery())
