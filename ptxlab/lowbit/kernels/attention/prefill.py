"""KV4 attention of any number of queries on Hopper: prompts in chunks, and behind a cached prefix.

The cache is that of QServe §5.1; no document describes attention of prompts over 4 bits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit.kernels.attention import common
from ptxlab.lowbit.kernels.attention.append import pad_rows, pitch_rules
from ptxlab.lowbit.kernels.attention.bound import BY_CHANCE
from ptxlab.lowbit.kernels.attention.common import Pair
from ptxlab.lowbit.kernels.attention.roundings import HALF, SINGLE, Roundings
from ptxlab.lowbit.kernels.attention.sm80 import BFLOAT16, DTYPES
from ptxlab.lowbit.layout import KVCache
from ptxlab.lowbit.layout.pages import PageView, page_bytes
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch, Sizes, sizes_rows
from ptxlab.spec.dtypes import ByVariant, round_to_dtype

ROWS, WARP_GROUP = 128, 128  # of a tile; threads
STAGES = 2  # blocks of keys, and of values, that are restored
HEADROOM = 8  # a weight is at most 2 to this: FP16 has room, and sums are seldom scaled down
PART_BLOCKS, MOST_PARTS = 4, 16  # blocks of keys of a part at least; parts of a tile at most
CHUNKED = ("kv4",)  # schemes of caches that the kernels for chunks of queries read
OWN_FORM = "own"  # of kernels that are given the queries' own keys and values
OWN_CONSTANTS: Mapping[str, int] = {"OWN": 1}
ITEMS = 4  # work items per block of the launch, at most, where tiles are cut into parts
_BEGIN, _MERGE = 2.0, 0.4  # what a work item costs besides its blocks, and a part where all are added up, in blocks


def keys_per_block(head_dim: int) -> int:
    """Return the tokens of a block of keys: as many as leave room for two of keys and two of values."""
    return 64 if head_dim == 256 else 128


def page_stages(head_dim: int) -> int:
    """Return the blocks of pages that are copied ahead."""
    return 2 if head_dim == 256 else 3


def tiles_of(s: Sizes) -> int:
    """Return the tiles that a call has at most: how its queries are spread over sequences is not known on the host."""
    return int((ceil_div(s["N"] * (s["Hq"] // s["Hkv"]), ROWS) + max(0, min(s["B"], s["N"]) - 1)) * s["Hkv"])


def choose_parts(s: Sizes, *, has_own_kv: bool = False) -> int:
    """Choose into how many parts a tile is cut, so that `blocks` blocks are busy: the fewest of those that cost least.

    A tile of few blocks of keys is cut into fewer by the kernel, which knows the lengths. Tiles stay whole with heads
    of 256 in pages of less than 64 tokens, and with heads of 128 and more where queries have their own keys and values
    (`has_own_kv`): registers would spill.
    """
    if (has_own_kv and s["D"] > 64) or (s["D"] == 256 and s["page"] < 64):
        return 1
    tiles, keys = tiles_of(s), keys_per_block(s["D"])
    most_tokens = s["P"] * s["page"]
    if s["window"]:
        most_tokens = min(most_tokens, s["window"] + ROWS // (s["Hq"] // s["Hkv"]) + keys)
    blocks_of_keys = ceil_div(most_tokens, keys)
    max_parts = min(MOST_PARTS, blocks_of_keys // PART_BLOCKS, ITEMS * s["blocks"] // max(tiles, 1))

    def cost(parts: int) -> float:
        rounds = ceil_div(tiles * parts, s["blocks"])
        merge = _MERGE * parts if parts > 1 else 0.0
        return float(rounds * (blocks_of_keys / parts + _BEGIN) + merge)

    return min(range(1, max(1, max_parts) + 1), key=cost)


def shared_bytes(s: Sizes) -> int:
    """Return the dynamic shared memory of a block: queries, restored keys and values, copied pages."""
    restored_bytes = 2 * s["D"] * (ROWS + 2 * s["STAGES"] * s["KEYS"])
    copied_bytes = s["PAGE_STAGES"] * 2 * s["KEYS"] // s["page"] * page_bytes("kv4", s["page"], s["D"])
    return int(restored_bytes + copied_bytes)


def _choose(s: Sizes) -> dict[str, int]:
    producers = 1 if s["D"] == 256 else 2  # wide heads leave no registers for a second warp group
    ring = {"KEYS": keys_per_block(s["D"]), "STAGES": STAGES, "PAGE_STAGES": page_stages(s["D"])}
    split_constants = {"SPLIT": 1, "PART_BLOCKS": PART_BLOCKS} if s["parts"] > 1 else {}
    return {
        "HEAD_DIM": s["D"],
        "PAGE": s["page"],
        "BF16": 0,
        **ring,
        "PRODUCERS": producers,
        "HEADROOM": HEADROOM,
        **split_constants,
    }


def _example(
    rng: np.random.Generator,
    *,
    N: int,
    B: int,
    Hq: int,
    Hkv: int,
    D: int,
    P: int,
    pages: int,
    page: int,
    window: int,
    blocks: int,
    parts: int,
    softmax_scale: float,
    **_: Any,
) -> Arrays:
    """Draw ragged chunks, one of them empty, behind contexts of any length; one sequence is all new."""
    cuts = np.sort(rng.integers(0, N + 1, B - 1))
    starts = np.concatenate([[0], cuts, [N]]).astype(np.int32)
    new_tokens = np.diff(starts)
    lengths = np.minimum(new_tokens + rng.integers(0, P * page + 1, B), P * page)
    if B > 1:
        lengths[int(new_tokens.argmax())] = new_tokens.max()
    while ceil_div(lengths, page).sum() > pages:
        cached_lengths = lengths - new_tokens
        lengths[cached_lengths.argmax()] -= min(page, cached_lengths.max())
    return {
        "q": rng.standard_normal((N, Hq, D), dtype=np.float32),
        "cache": common.draw_cache(rng, lengths, Hkv=Hkv, P=P, pages=pages, D=D, page_size=page),
        "starts": starts,
        "softmax_scale": softmax_scale,
        "window": window,
        "blocks": blocks,
        "parts": parts,
    }


def _pack(logical: Arrays) -> Arrays:
    arrivals = _no_arrivals(logical["blocks"], logical["parts"])
    return {
        "q": logical["q"],
        **common.cache_arrays(logical["cache"]),
        "starts": logical["starts"],
        "arrivals": arrivals,
    }


def _no_arrivals(blocks: int, parts: int) -> np.ndarray:
    """Return the counters of parts as every launch finds and leaves them."""
    return np.zeros((int(parts > 1) * ITEMS * blocks, ROWS // 16), np.int32)


def _chunks(q: np.ndarray, cache: KVCache, starts: np.ndarray) -> Iterator[tuple[slice, np.ndarray, KVCache]]:
    """Yield every sequence that has queries: their rows, the queries [1, T, Hq, D], and a cache of it alone."""
    for b, (begin, end) in enumerate(pairwise(starts.tolist())):
        if begin < end:
            alone = replace(cache, block_table=cache.block_table[b : b + 1], lengths=cache.lengths[b : b + 1])
            yield slice(begin, end), q[None, begin:end], alone


def attend(
    q: np.ndarray,
    cache: KVCache,
    starts: np.ndarray,
    softmax_scale: float,
    window: int = 0,
    BF16: int = 0,
    k: np.ndarray | None = None,
    v: np.ndarray | None = None,
    **_: Any,
) -> Pair:
    """Attend in float64: out [N, Hq, D] and lse [N, Hq] of q [N, Hq, D], whose chunks begin at `starts`.

    k and v [N, Hkv, D] are the queries' own keys and values; without them these are the cache's.
    """
    out, lse = np.zeros(q.shape), np.full(q.shape[:-1], -np.inf)
    for rows, queries, sequence in _chunks(round_to_dtype(q, DTYPES[BF16]), cache, starts):
        pair = common.attention(queries, sequence, softmax_scale, window, _own_kv_of(rows, k, v, BF16))
        out[rows], lse[rows] = (array[0] for array in pair)
    return out, lse


def _own_kv_of(rows: slice, k: np.ndarray | None, v: np.ndarray | None, BF16: int) -> Pair | None:
    """Return a chunk's own keys and values as the variant stores them; None if these are the cache's."""
    if k is None or v is None:
        return None
    return round_to_dtype(k[rows], DTYPES[BF16]), round_to_dtype(v[rows], DTYPES[BF16])


def _reference(blocks: int, parts: int, **logical: Any) -> tuple[np.ndarray, ...]:
    return (*attend(**logical), _no_arrivals(blocks, parts))


def roundings_of(D: int, rotated: bool = False) -> Roundings:
    """State the roundings of a kernel that multiplies keys and values of FP16."""
    return Roundings(
        # A key is rounded to FP16, and a rotated query.
        score=(D // 16 + 1) * 34 * SINGLE + 8 * SINGLE + (2 if rotated else 1) * HALF,
        query=2.0**-25,  # of elements below the normal range of FP16, beside the largest
        weight=200 * SINGLE,
        sum=2 * HALF,  # a weight, a value
        adding=34 * SINGLE,
        serial=1,
        rescaled=2 * SINGLE,
        floor=2.0**-25,
    )


def bound_chunks(
    q: np.ndarray,
    cache: KVCache,
    starts: np.ndarray,
    softmax_scale: float,
    window: int = 0,
    BF16: int = 0,
    k: np.ndarray | None = None,
    v: np.ndarray | None = None,
    **_: Any,
) -> Pair:
    """Return the error that `attend` may have of each element, by `roundings_of`."""
    out, lse = np.zeros(q.shape), np.zeros(q.shape[:-1])
    stored_to, roundings = BFLOAT16 if BF16 else HALF, roundings_of(cache.head_dim, cache.rotated)
    for rows, queries, sequence in _chunks(round_to_dtype(q, DTYPES[BF16]), cache, starts):
        own_kv = _own_kv_of(rows, k, v, BF16)
        errors = common.bound_error(queries, sequence, softmax_scale, roundings, window, stored_to, own_kv)
        out[rows], lse[rows] = (error.per_element[0] for error in errors)
    return out, lse


def _bound(blocks: int, parts: int, **logical: Any) -> tuple[np.ndarray, ...]:
    return (*bound_chunks(**logical), _no_arrivals(blocks, parts))


_ITEMS = f"(parts > 1)*{ITEMS}*blocks"

PREFILL = KernelSpec(
    name="attention_kv4_prefill_sm90",
    summary="any number of queries: keys and values restored to f16 once for 128 rows, products by wgmma",
    args=(
        Arg("q", ByVariant("BF16", DTYPES), ("N", "Hq", "D")),
        Arg("pool", "uint8", ("pages", "2", "Hkv", "page*(D//2 + 4)")),
        Arg("table", "int32", ("B", "P")),
        Arg("lengths", "int32", ("B",)),
        Arg("starts", "int32", ("B + 1",)),
        Arg("out", ByVariant("BF16", DTYPES), ("N", "Hq", "D"), "out"),
        Arg("lse", "float32", ("N", "Hq"), "out"),
        Arg("partial", "float32", (_ITEMS, "8", "D//8 + 1", "128"), "scratch"),
        Arg("arrivals", "int32", (_ITEMS, "8"), "inout"),
        Arg("softmax_scale", "float32", role="scalar"),
        *(Arg(size, "int32", role="scalar") for size in ("B", "Hq", "Hkv", "P", "window", "parts")),
    ),
    launch=lambda s: Launch((s["blocks"], 1, 1), ((s["PRODUCERS"] + 2) * WARP_GROUP, 1, 1), shared_bytes(s)),
    choose=_choose,
    rules=(
        "D in (64, 128, 256)",
        "page in (16, 32, 64)",
        "Hq % Hkv == 0",
        "1 <= Hq//Hkv <= 16",
        "window >= 0",
        "P*page < 2**31",
        "blocks >= 1",
        "parts >= 1",
        "parts == 1 or D < 256 or page == 64",
        f"parts == 1 or (-(-N*(Hq//Hkv)//{ROWS}) + max(0, min(B, N) - 1))*Hkv*parts <= {ITEMS}*blocks",
    ),
    value_rules=("lengths >= 0", "lengths <= P*page", "starts >= 0", "starts <= N"),
    operations="4*N*Hq*P*page*D",
    example=_example,
    pack=_pack,
    reference=_reference,
    bound=_bound,
    tolerance_reason="in float64 on the dequantised integers; keys, values and weights are rounded to FP16, and an MMA "
    "truncates each of 17 terms to 24 bits of the largest" + BY_CHANCE,
    arch="sm_90a",
    exact_arch=True,
    after_wait=("q", "pool", "table", "lengths", "starts", "arrivals"),
    batch="",
    example_sizes=sizes_rows(
        "N B Hq Hkv D P pages page window blocks parts softmax_scale",
        (70, 2, 4, 2, 128, 4, 8, 64, 0, 2, 1, 0.088),
        (150, 3, 4, 1, 64, 9, 20, 32, 100, 3, 1, 0.125),
        (40, 2, 6, 2, 256, 8, 14, 16, 0, 1, 1, 0.0625),
        (20, 1, 2, 1, 64, 34, 34, 64, 0, 3, 4, 0.125),
    ),
)
SPECS = (PREFILL,)
ROTATED = common.rotated_form(PREFILL)


def own_form(spec: KernelSpec, *rules: str) -> KernelSpec:
    """Return the form that takes keys and values of the queries' own tokens in 16 bits, by these `rules` besides."""

    def example(rng: np.random.Generator, *, k_pitch: int, v_pitch: int, **sizes: Any) -> Arrays:
        logical = spec.example(rng, **sizes)
        k, v = rng.standard_normal((2, sizes["N"], sizes["Hkv"], sizes["D"]), dtype=np.float32)
        cache = forget_own(logical["cache"], logical["starts"])
        return {**logical, "cache": cache, "k": k, "v": v, "k_pitch": k_pitch, "v_pitch": v_pitch}

    def pack(logical: Arrays) -> Arrays:
        own_rows = {name: pad_rows(logical[name], logical[f"{name}_pitch"]) for name in "kv"}
        return {**spec.pack(logical), **own_rows}

    names = [arg.name for arg in spec.args]
    position, dtype = names.index("starts") + 1, ByVariant("BF16", DTYPES)
    own_args = (Arg("k", dtype, ("N", "k_pitch")), Arg("v", dtype, ("N", "v_pitch")))
    pitches = (Arg("k_pitch", "int32", role="scalar"), Arg("v_pitch", "int32", role="scalar"))
    return replace(
        spec,
        form=OWN_FORM,
        summary=f"{spec.summary}; keys and values of the queries' own tokens in 16 bits",
        args=(*spec.args[:position], *own_args, *spec.args[position:], *pitches),
        choose=lambda s: {**spec.config_for(s), **OWN_CONSTANTS},
        rules=(*spec.rules, *pitch_rules("k_pitch", "Hkv*D"), *pitch_rules("v_pitch", "Hkv*D"), *rules),
        example=example,
        pack=pack,
        after_wait=(*spec.after_wait, "k", "v"),
        example_sizes=tuple(
            {**sizes, "k_pitch": sizes["Hkv"] * sizes["D"] + 8 * i, "v_pitch": sizes["Hkv"] * sizes["D"] + 24}
            for i, sizes in enumerate(spec.example_sizes)
        ),
    )


def forget_own(cache: KVCache, starts: np.ndarray) -> KVCache:
    """Return a cache that has no number where the last tokens of each sequence lie, as many as it has queries."""
    cache = replace(cache, pool=cache.pool.copy())
    constants = PageView.of(cache.pool, cache.scheme, cache.page_size, cache.head_dim).constants
    assert constants is not None
    for b, queries in enumerate(np.diff(starts)):
        slots = cache.slots(b)[max(0, cache.lengths[b] - queries) :]
        constants[slots // cache.page_size, :, :, slots % cache.page_size] = np.nan
    return cache


OWN = own_form(PREFILL, "parts == 1 or D == 64")
OWN_ROTATED = common.rotated_form(OWN)
