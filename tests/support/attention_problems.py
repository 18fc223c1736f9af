"""Problems of decode attention, and what must hold of every kernel's answer."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ptxlab import emulator, registry
from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit.kernels.attention import common
from ptxlab.lowbit.layout import KVCache
from ptxlab.runtime import run_spec
from ptxlab.runtime.verify import compare
from ptxlab.spec import Arrays, KernelSpec
from ptxlab.spec.dtypes import numbers

TILE = 64  # tokens that the kernels take at a time
Tokens = list[np.ndarray]
Change = Callable[[np.random.Generator, np.ndarray, Tokens, Tokens], None]  # of queries, keys, values, in place


def nothing(rng: np.random.Generator, q: np.ndarray, k: Tokens, v: Tokens) -> None:
    """Leave queries, keys and values Gaussian."""


def equal_scores(rng: np.random.Generator, q: np.ndarray, k: Tokens, v: Tokens) -> None:
    for keys in k:
        keys[:] = keys[:1]


def one_dominant_score(rng: np.random.Generator, q: np.ndarray, k: Tokens, v: Tokens) -> None:
    """Set one key of each sequence to five times the query."""
    for queries, keys in zip(q, k, strict=True):
        heads = keys.shape[1]
        keys[len(keys) // 2 :][:1] = (
            5 * queries.reshape(-1, heads, queries.shape[-2] // heads, keys.shape[-1])[-1:, :, 0]
        )


def scores_beyond_fp16(rng: np.random.Generator, q: np.ndarray, k: Tokens, v: Tokens) -> None:
    q *= 5000
    sums = [np.abs(keys).sum(axis=-1).max() for keys in k if len(keys)]
    assert not sums or max(sums) * 5000 > 65504


def queries_below_fp16(rng: np.random.Generator, q: np.ndarray, k: Tokens, v: Tokens) -> None:
    """Make all but one element of each query subnormal in FP16, and one query zero."""
    q[..., 1:] *= 2.0**-20
    q[0] = 0


def outlier_keys(rng: np.random.Generator, q: np.ndarray, k: Tokens, v: Tokens) -> None:
    for keys in k:
        keys[..., 5::32] *= 100
        keys[..., 7::32] *= 10


def large_and_small_values(rng: np.random.Generator, q: np.ndarray, k: Tokens, v: Tokens) -> None:
    """Scale the values of the first sequence up to a quarter of FP16's range.

    In the others, the scales of values become subnormal in FP16.
    """
    for b, values in enumerate(v):
        values *= 4000 if b == 0 else 1e-5


def rising_scores(rng: np.random.Generator, q: np.ndarray, k: Tokens, v: Tokens) -> None:
    """Make every tile's largest score exceed those of the tiles before it.

    So the partial sums are scaled down again and again.
    """
    for queries, keys in zip(q, k, strict=True):
        heads, D = keys.shape[1:]
        last_queries = queries.reshape(-1, heads, queries.shape[-2] // heads, D)[-1, :, 0]
        keys[:] = last_queries * np.linspace(0, 1, len(keys), dtype=np.float32)[:, None, None]


def a_sign_per_tile(rng: np.random.Generator, q: np.ndarray, k: Tokens, v: Tokens) -> None:
    """Give the values of each tile a sign and size of their own, under equal scores.

    So it shows in the result if any tile is missing.
    """
    equal_scores(rng, q, k, v)
    for values in v:
        tiles = ceil_div(len(values), TILE)
        factors = rng.permutation(np.arange(1, tiles + 1) * 4 - 2 * tiles)
        values[:] = np.abs(values) * np.repeat(factors, TILE)[: len(values), None, None]


CASES = (
    nothing,
    equal_scores,
    one_dominant_score,
    scores_beyond_fp16,
    queries_below_fp16,
    outlier_keys,
    large_and_small_values,
)


def edge_lengths(page_size: int) -> tuple[int, ...]:
    """List lengths at which the first page or the second tile is just full, lacks a token, or has one token more."""
    return tuple(edge + offset for edge in (page_size, 2 * TILE) for offset in (-1, 0, 1))


def problem(
    seed: int,
    lengths: tuple[int, ...],
    change: Change = nothing,
    *,
    Hq: int,
    Hkv: int,
    scheme: str,
    T: int = 1,
    D: int = 128,
    page_size: int = 64,
    spare: int = 2,
) -> tuple[np.ndarray, KVCache]:
    """Make (q f32 [B, T, Hq, D], cache).

    The cache has `spare` pages and table entries that no sequence uses, all with random contents.
    """
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((len(lengths), T, Hq, D), dtype=np.float32)
    keys, values = ([rng.standard_normal((n, Hkv, D), dtype=np.float32) for n in lengths] for _ in range(2))
    change(rng, q, keys, values)
    used = [ceil_div(n, page_size) for n in lengths]
    empty = common.draw_cache(
        rng,
        np.array(lengths),
        Hkv=Hkv,
        P=max(used) + spare,
        pages=max(1, sum(used) + spare),
        D=D,
        page_size=page_size,
        scheme=scheme,
    )
    cache = common.cache_of(keys, values, empty.pool, empty.block_table, page_size=page_size, scheme=scheme)
    return q, cache


def map_arrays(cache: KVCache, convert: Any) -> KVCache:
    """Send the arrays of a cache one by one, by `convert`."""
    fields: dict[str, Any] = {name: convert(getattr(cache, name)) for name in ("pool", "block_table", "lengths")}
    channels = {name: getattr(cache, name) for name in ("k_channel", "v_channel")}
    return replace(
        cache, **fields | {name: constants and tuple(map(convert, constants)) for name, constants in channels.items()}
    )


def check(
    spec: KernelSpec,
    logical: Arrays,
    backend: str = "emulator",
    inputs: Arrays | None = None,
    runs: int = 1,
    **options: Any,
) -> Arrays:
    """Run it with all checks, and hold every output against the reference within its bound; returns the outputs.

    With `runs` it runs again so often, and must give the same bits.
    """
    sizes = {name: number for name, number in logical.items() if isinstance(number, (int, float))} | options.pop(
        "sizes", {}
    )
    options = {"config": None, "checks": emulator.CHECKS if backend == "emulator" else (), **options}
    source, packed = registry.find(spec.name)[1][0], inputs or spec.pack(logical)
    first, *repeats = (run_spec(spec, source, packed, sizes=sizes, backend=backend, **options) for _ in range(runs))
    assert [str(finding) for outcome in (first, *repeats) for finding in outcome.findings] == []
    compare(spec, first.outputs, logical, options["config"])
    for outcome in repeats:
        for name, output in first.outputs.items():
            assert np.array_equal(output, outcome.outputs[name], equal_nan=True), f"{name}: another run, other bits"
    return first.outputs


def check_empty_sequence(variant: Any, logical: Arrays, outputs: Arrays) -> None:
    """Assert that the second sequence, which is empty, gives zeros, and that the other results are finite.

    The logarithm is finite for each query that sees a token.
    """
    assert not outputs["out"][1].any() and np.isneginf(outputs["lse"][1]).all()
    assert np.isfinite(numbers(outputs["out"], variant.dtype)).all()
    seen = logical["cache"].lengths[:, None] - variant.T + np.arange(variant.T) >= 0
    assert np.array_equal(np.isfinite(outputs["lse"]), np.broadcast_to(seen[..., None], outputs["lse"].shape))
