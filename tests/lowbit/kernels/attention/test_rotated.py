"""Caches whose keys are rotated: every byte that append writes, attention bit for bit, what is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ptxlab
from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.lowbit import reference
from ptxlab.lowbit.kernels.attention import exact, ladder
from ptxlab.lowbit.layout import HEAD_DIMS, KVCache, gather
from ptxlab.spec import Arrays
from tests.support import attention_problems as problems
from tests.support.append_problems import (
    BACKENDS,
    DTYPES,
    ON_GPU,
    RNG,
    FusedProblem,
    Problem,
    draw_rotations,
    gaussian_kv,
    make_problem,
)
from tests.support.attention_calls import assert_within_bound
from tests.support.attention_variants import AMPERE, HOPPER, Variant, parametrize_variants
from tests.support.axes import on_every_backend

SCHEMES = ("kv4", "kv8")
TRANSFERS = {"emulator": (np.asarray, np.asarray), "gpu": (gpu.to_device, gpu.to_host)}
CHUNK_KERNELS = ("attention_kv4_prefill_mma_sm80", "attention_kv4_prefill_sm90")
BY_TOKEN = tuple(variant for variant in (*AMPERE, *HOPPER) if not variant.channel)

ROTATE_HEAD = """
#include "hadamard.cuh"

extern "C" __global__ void rotate_heads(float* x) {  // of one warp: a lane's elements lie together
    float head[ELEMENTS];
    for (int i = 0; i < ELEMENTS; ++i) head[i] = x[threadIdx.x * ELEMENTS + i];
    ptxlab::rotate_head<IN_A_ROW, OF_HEAD>(head, threadIdx.x);
    for (int i = 0; i < ELEMENTS; ++i) x[threadIdx.x * ELEMENTS + i] = head[i];
}
"""


@pytest.mark.default_cases("64-16-4", "256-8-16")
@pytest.mark.parametrize(("D", "run", "lanes"), [(64, 16, 4), (128, 8, 8), (128, 32, 4), (128, 64, 2), (256, 8, 16)])
def test_every_bit_of_a_rotated_head(D: int, run: int, lanes: int) -> None:
    """The elements use all bits of float32, so that another order of sums gives other bits."""
    count, heads = D // lanes, 32 // lanes
    x = np.random.default_rng(0).standard_normal((heads, D), dtype=np.float32)
    i, lane = np.arange(count), np.arange(lanes)[:, None]
    dims = ((i // run * lanes + lane) * run + i % run).ravel()  # of a head, lane by lane
    on_lanes = x[:, dims].ravel()
    kernel = ptxlab.load(ROTATE_HEAD, defines={"ELEMENTS": count, "IN_A_ROW": run, "OF_HEAD": lanes})
    kernel(on_lanes, grid=1, block=32, backend="emulator")
    assert np.array_equal(on_lanes.reshape(heads, D), reference.rotate_heads(x)[:, dims])


def rotated_problem(
    tokens: int, heads: int, D: int, scheme: str, *, dtype: np.dtype = DTYPES[0], rope: bool = True, size: int = 16
) -> Problem:
    """Make tokens with an outlier channel, every fourth of which is padding, for a cache whose keys are rotated."""
    angles = draw_rotations(tokens, D, np.int32, positions=True) if rope else None
    problem = make_problem(*gaussian_kv(tokens, heads, D, dtype), scheme, size, rope=angles)
    return replace(problem, cache=replace(problem.cache, rotated=True))


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_byte_that_append_writes(scheme: str, D: int, backend: str) -> None:
    for dtype, rope in ((DTYPES[0], True), (DTYPES[1], True), (DTYPES[0], False)):
        rotated_problem(9, 3, D, scheme, dtype=dtype, rope=rope).check(backend)


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_byte_that_rope_append_writes(scheme: str, D: int, backend: str) -> None:
    """Queries and kept keys are behind RoPE alone."""
    for dtype in DTYPES:
        problem = rotated_problem(9, 2, D, scheme, dtype=dtype)
        FusedProblem((RNG.standard_normal((9, 4, D)) * 3).astype(dtype), problem).check(backend)


@pytest.mark.full
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_with_any_rows_of_a_thread(D: int, rows: int) -> None:
    """The problems have heads that no group of lanes takes whole, and tokens of padding; all checks are on."""
    problem = rotated_problem(7, 5, D, "kv4")
    pool, outcome = problem.run(rows=rows)
    assert np.array_equal(pool, problem.expected_pool) and outcome.findings == ()
    fused = FusedProblem(gaussian_kv(7, 10, D)[0], problem, with_keys=False)
    q, pool, outcome = fused.run(rows=rows)
    assert (
        np.array_equal(q, fused.expected_rows)
        and np.array_equal(pool, problem.expected_pool)
        and outcome.findings == ()
    )


@pytest.mark.long(20)
@pytest.mark.gpu
@ON_GPU
@given(
    tokens=st.integers(1, 70),
    heads=st.integers(1, 9),
    D=st.sampled_from(HEAD_DIMS),
    scheme=st.sampled_from(SCHEMES),
    dtype=st.sampled_from(DTYPES),
    rope=st.booleans(),
)
@settings(max_examples=100)
def test_every_byte_on_the_gpu(**drawn: Any) -> None:
    problem = rotated_problem(**drawn)
    problem.check("gpu")
    if drawn["rope"]:
        q = gaussian_kv(drawn["tokens"], 2 * drawn["heads"], drawn["D"], drawn["dtype"])[0]
        FusedProblem(q, problem).check("gpu")


def of_rotated(variant: Variant, *drawn: Any, **options: Any) -> tuple[Arrays, Arrays, dict[str, Any]]:
    """Make a variant's problem with a rotated cache: (logical inputs, arguments, sizes and constants)."""
    logical, arrays = variant.problem(*drawn, **options)
    logical["cache"] = replace(logical["cache"], rotated=True)
    sizes = variant.sizes(logical["window"], logical.get("blocks", 1))
    return logical, arrays, {"sizes": sizes, "config": {**variant.config, "ROTATED": 1}}


@pytest.mark.full
@on_every_backend
@parametrize_variants(*BY_TOKEN)
def test_attention_near_float64(variant: Variant, backend: str) -> None:
    """The reference takes the queries as float32 rotates them; all checks are on."""
    logical, arrays, options = of_rotated(variant, 1, (75, 0, 1, 130), problems.outlier_keys, blocks=2)
    problems.check_empty_sequence(variant, logical, problems.check(variant.spec, logical, backend, arrays, **options))


@pytest.mark.full
@on_every_backend
@parametrize_variants(*(variant for variant in BY_TOKEN if variant.tile))
def test_attention_bit_for_bit(variant: Variant, backend: str) -> None:
    logical, arrays, options = of_rotated(variant, 2, (130, 0, 20), window=100, blocks=3)
    outputs = problems.check(variant.spec, logical, backend, arrays, **options)
    put, back = TRANSFERS[backend]
    of = {name: logical[name] for name in ("softmax_scale", "window", "blocks")}
    cache = problems.map_arrays(logical["cache"], put)
    bits_of = exact.attention(put(arrays["q"]), cache, **of, config=options["config"])
    for name, right in zip(("out", "lse"), bits_of, strict=True):
        assert np.array_equal(outputs[name], back(right)), name


def test_the_oracle_refuses_constants_of_another_cache() -> None:
    variant = next(candidate for candidate in BY_TOKEN if candidate.tile)
    logical, arrays, _ = of_rotated(variant, 0, (5,))
    of = {name: logical[name] for name in ("cache", "softmax_scale", "window", "blocks")}
    with pytest.raises(ArgumentError, match="ROTATED must be 1 for these arrays \\(got 0\\)"):
        exact.attention(arrays["q"], **of, config=variant.config)


def fill_cache(rotated: bool, k: np.ndarray, v: np.ndarray, backend: str, scheme: str = "kv4") -> Any:
    """Append the tokens [T, Hkv, D] of one sequence to a cache, of NumPy or on the GPU."""
    T, Hkv, D = k.shape
    cache = KVCache.empty(1, 3, Hkv, D, scheme=scheme, rotated=rotated)
    cache.lengths[:] = T
    put, _ = TRANSFERS[backend]
    cache = problems.map_arrays(cache, put)
    ptxlab.append_kv4(put(k), put(v), cache, put(np.arange(T, dtype=np.int32)), backend=backend)
    return cache


@pytest.mark.full_cases("*-emulator")
@on_every_backend
@pytest.mark.parametrize("kernel", ["attention_kv4_mma_sm80", "attention_kv4_sm90", *CHUNK_KERNELS])
def test_calls_on_plain_and_rotated_caches_in_turn(kernel: str, backend: str) -> None:
    """Shapes are the same, plans are not; keys with an outlier channel give better scores from the rotated cache."""
    rng, (put, back) = np.random.default_rng(0), TRANSFERS[backend]
    q, k, v = (rng.standard_normal(shape).astype(np.float16) for shape in ((2, 4, 128), (150, 2, 128), (150, 2, 128)))
    k[..., 3] += 40
    options: dict[str, Any] = {"kernel": kernel, "backend": backend, "return_lse": True}
    if kernel in CHUNK_KERNELS:
        options["query_start_loc"] = put(np.array([0, 2], np.int32))
    else:
        q = q[None]
    caches = {rotated: fill_cache(rotated, k, v, backend) for rotated in (False, True)}
    _, right = reference.attention(q.reshape(2, 4, 128), k, v, scale=128**-0.5)
    error: dict[bool, float] = {}
    for rotated in (False, True, False, True):
        out, lse = map(back, ptxlab.attention_kv4(put(q), caches[rotated], **options))
        error[rotated] = float(np.abs(lse.reshape(right.shape) - right).mean())
        if "query_start_loc" not in options:
            assert_within_bound(q, problems.map_arrays(caches[rotated], back), out, lse)
    assert error[True] < 0.5 * error[False]


def test_teaching_steps_refuse_a_rotated_cache_and_name_kernels_that_take_it() -> None:
    cache = KVCache.empty(1, 1, 1, 128, rotated=True)
    for spec in ladder.SPECS[1:]:
        rule = "rotated only for attention_kv4_mma_sm80, attention_kv4_sm90"
        with pytest.raises(ArgumentError, match=f"cache: {rule} \\(got a rotated cache for {spec.name}\\)"):
            ptxlab.attention_kv4(np.zeros((1, 1, 128), np.float16), cache, kernel=spec.name, backend="emulator")


def test_a_key_that_is_not_finite_is_refused_by_its_place() -> None:
    k = np.zeros((2, 1, 64), np.float16)
    k[1, 0, 37] = np.nan
    with pytest.raises(ArgumentError, match=r"append_kv4: k: must be finite in float32 \(got k\[1, 0, 37\] is nan\)"):
        fill_cache(True, k, np.zeros_like(k), "emulator")


@pytest.mark.gpu
@ON_GPU
def test_a_key_that_is_not_finite_shows_on_the_gpu() -> None:
    k = np.zeros((2, 1, 64), np.float16)
    k[1, 0, 37] = np.inf
    keys = gather(fill_cache(True, k, np.zeros_like(k), "gpu"))[0][0]
    assert np.isfinite(gpu.to_host(keys.scale)).tolist() == [[True], [False]]
