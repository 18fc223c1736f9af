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
    """A bell in everything."""


def equal_scores(rng: np.random.Generator, q: np.ndarray, k: Tokens, v: Tokens) -> None:
    for keys in k:
        keys[:] = keys[:1]


def one_dominant_score(rng: np.random.Generator, q: np.ndarray, k: Tokens, v: Tokens) -> None:
    """The key of some token is the query itself, times five."""
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
    """One element of a query is an ordinary one, the others are subnormal; and a query is zero."""
    q[..., 1:] *= 2.0**-20
    q[0] = 0


def outlier_keys(rng: np.random.Generator, q: np.ndarray, k: Tokens, v: Tokens) -> None:
    for keys in k:
        keys[..., 5::32] *= 100
        keys[..., 7::32] *= 10


def large_and_small_values(rng: np.random.Generator, q: np.ndarray, k: Tokens, v: Tokens) -> None:
    """Up to a quarter of FP16's range in the first sequence; scales that are subnormal in FP16 in the others."""
    for b, values in enumerate(v):
        values *= 4000 if b == 0 else 1e-5


def rising_scores(rng: np.random.Generator, q: np.ndarray, k: Tokens, v: Tokens) -> None:
    """Every tile has a larger score than those before it, so that sums so far are scaled down again and again."""
    for queries, keys in zip(q, k, strict=True):
        heads, D = keys.shape[1:]
        mine = queries.reshape(-1, heads, queries.shape[-2] // heads, D)[-1, :, 0]
        keys[:] = mine * np.linspace(0, 1, len(keys), dtype=np.float32)[:, None, None]


def a_sign_per_tile(rng: np.random.Generator, q: np.ndarray, k: Tokens, v: Tokens) -> None:
    """All tokens count alike, and values of a tile have a sign and size of their own: whichever is missing shows."""
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


def at_edges(page_size: int) -> tuple[int, ...]:
    """Lengths at which the first page or the second tile is just full, lacks a token, or is followed by one more."""
    return tuple(edge + beside for edge in (page_size, 2 * TILE) for beside in (-1, 0, 1))


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
    """(q f32 [B, T, Hq, D], cache) with `spare` pages and table entries that no sequence uses, all of them wild."""
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


def moved(cache: KVCache, to: Any) -> KVCache:
    """Its arrays sent there one by one."""
    fields: dict[str, Any] = {name: to(getattr(cache, name)) for name in ("pool", "block_table", "lengths")}
    channels = {name: getattr(cache, name) for name in ("k_channel", "v_channel")}
    return replace(cache, **fields | {name: both and tuple(map(to, both)) for name, both in channels.items()})


def check(
    spec: KernelSpec,
    logical: Arrays,
    backend: str = "emulator",
    inputs: Arrays | None = None,
    runs: int = 1,
    **how: Any,
) -> Arrays:
    """Run it with all checks, and hold every output against the reference within its bound; returns the outputs.

    With `runs` it runs again so often, and must give the same bits.
    """
    sizes = {name: value for name, value in logical.items() if isinstance(value, (int, float))} | how.pop("sizes", {})
    how = {"config": None, "checks": emulator.CHECKS if backend == "emulator" else (), **how}
    source, packed = registry.find(spec.name)[1][0], inputs or spec.pack(logical)
    first, *others = (run_spec(spec, source, packed, sizes=sizes, backend=backend, **how) for _ in range(runs))
    assert [str(finding) for outcome in (first, *others) for finding in outcome.findings] == []
    compare(spec, first.outputs, logical, how["config"])
    for outcome in others:
        for name, output in first.outputs.items():
            assert np.array_equal(output, outcome.outputs[name], equal_nan=True), f"{name}: another run, other bits"
    return first.outputs


def check_the_unseen(variant: Any, logical: Arrays, outputs: Arrays) -> None:
    """The second sequence is empty: nothing comes out; elsewhere numbers do, and a logarithm where a token is seen."""
    assert not outputs["out"][1].any() and np.isneginf(outputs["lse"][1]).all()
    assert np.isfinite(numbers(outputs["out"], variant.dtype)).all()
    seen = logical["cache"].lengths[:, None] - variant.T + np.arange(variant.T) >= 0
    assert np.array_equal(np.isfinite(outputs["lse"]), np.broadcast_to(seen[..., None], outputs["lse"].shape))
