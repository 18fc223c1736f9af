"""KV4 attention on tensor cores from Ampere on: the whole contract.

Attention of QServe §5.1 runs in FP16 on CUDA cores; here products are on tensor cores, which read and unpack a
key once for all queries that share it. No document shares its work out over blocks.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ptxlab.lowbit.kernels.attention import common
from ptxlab.lowbit.kernels.attention.bound import BY_CHANCE
from ptxlab.lowbit.kernels.attention.common import Pair
from ptxlab.lowbit.kernels.attention.roundings import HALF, SINGLE, Roundings
from ptxlab.lowbit.layout import KVCache
from ptxlab.lowbit.quant import KV_SCHEMES
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch, Sizes, sizes_rows
from ptxlab.spec.dtypes import ByVariant, round_to_dtype
from ptxlab.spec.tolerance import Allowed

DTYPES = ("float16", "bfloat16")  # by BF16
BFLOAT16 = 2.0**-8  # one rounding to bfloat16
TOKENS = 32  # of a slice
SUM_PAD = 4  # floats between rows of sums in shared memory: lanes of a row and of the next use other banks
_ALIGNED = 2.0**-24  # an A100 cuts off what is below this, of the largest power of two


class AttentionTileSm80(NamedTuple):
    """Queries of a unit, warps of a block, stages of a warp's ring."""

    COLUMNS: int
    WARPS: int
    STAGES: int


def _choose_tile(s: Sizes) -> AttentionTileSm80:
    """Choose the tile by bytes of a row: an SM of an A100 holds two blocks, an SM with 99 KiB one."""
    row = s["D"] * s["bits"] // 8
    columns = 16 if s["D"] < 256 and s["Hq"] // s["Hkv"] * s["T"] > 8 else 8
    return AttentionTileSm80(columns, 4 if row <= 64 else 2, {256: 2}.get(row, 3))


def _choose(s: Sizes) -> dict[str, int]:
    return {
        "HEAD_DIM": s["D"],
        "PAGE": s["page"],
        "BITS": s["bits"],
        "CHANNEL": s["channel"],
        "BF16": 0,
        "FUSED": 0,
        "TOKENS": TOKENS,
        "SUM_PAD": SUM_PAD,
        **_choose_tile(s)._asdict(),
    }


def _launch(s: Sizes) -> Launch:
    """Return the launch of blocks that share out the work evenly.

    Shared memory holds the warps' rings, sums and statistics.
    """
    warps, columns = s["WARPS"], min(s["COLUMNS"], s["Hq"] // s["Hkv"] * s["T"])
    row = s["D"] * s["BITS"] // 8
    stage = 2 * s["TOKENS"] * (row + (0 if s["CHANNEL"] else 4))
    shared_memory = warps * (s["STAGES"] * stage + columns * ((s["D"] + s["SUM_PAD"]) * 4 + 16))
    return Launch((s["blocks"], 1, 1), (32 * warps, 1, 1), shared_memory)


def scheme_of(bits: int, channel: int) -> str:
    """Return the quantiser's name of `bits` with constants per token and head, or per channel."""
    return f"kv{bits}_channel" if channel else f"kv{bits}"


def _example(
    rng: np.random.Generator,
    *,
    B: int,
    T: int,
    Hq: int,
    Hkv: int,
    D: int,
    P: int,
    pages: int,
    page: int,
    bits: int,
    channel: int,
    window: int,
    blocks: int,
    softmax_scale: float,
) -> Arrays:
    """Draw queries and a cache of random lengths; the number of blocks changes nothing."""
    lengths = common.draw_lengths(rng, B, P * page, pages, page)
    scheme = scheme_of(bits, channel)
    return {
        "q": rng.standard_normal((B, T, Hq, D), dtype=np.float32),
        "cache": common.draw_cache(rng, lengths, Hkv=Hkv, P=P, pages=pages, D=D, page_size=page, scheme=scheme),
        "softmax_scale": softmax_scale,
        "window": window,
    }


def _pack(logical: Arrays) -> Arrays:
    """Return the array arguments: the queries, and the packed cache's pool, table, lengths and channel constants."""
    cache = logical["cache"]
    return {"q": logical["q"], **common.cache_arrays(cache), **common.channel_constants(cache)}


def _reference(q: np.ndarray, cache: KVCache, softmax_scale: float, window: int = 0, BF16: int = 0) -> Pair:
    return common.attention(round_to_dtype(q, DTYPES[BF16]), cache, softmax_scale, window)


_REASON = (
    "in float64 on the dequantised integers; an MMA truncates each of 17 terms to 24 bits of the largest, and takes a "
    "subnormal integer for 2^10 in that; to FP16 are rounded a weight times its value's scale, or by channel the "
    "weight and a query times the keys' scale"
) + BY_CHANCE


def roundings_of(D: int, channel: bool, rotated: bool = False) -> Roundings:
    """Return the roundings of tensor cores with FP16 operands and subnormal integers."""
    has_half_queries = channel or rotated  # rounded to FP16 are queries that are not as they come
    return Roundings(
        score=(D // 16 + 1) * 34 * SINGLE + 8 * SINGLE + (HALF if has_half_queries else 0),
        query=2.0**-25
        if has_half_queries
        else 2.0**-35,  # of the largest after scaling; the 16 of high nibbles is taken off it
        weight=200 * SINGLE + (HALF if channel else 0),
        sum=0 if channel else HALF,
        adding=34 * SINGLE,
        serial=1,
        rescaled=2 * SINGLE,
        floor=2.0**-25,
        zero_at_end=True,
        aligned=_ALIGNED,
        warps=2,
    )


def _bound(
    q: np.ndarray,
    cache: KVCache,
    softmax_scale: float,
    window: int = 0,
    BF16: int = 0,
    roundings: Callable[[int, bool, bool], Roundings] = roundings_of,
) -> tuple[Allowed, Allowed]:
    kernel_roundings = roundings(cache.head_dim, KV_SCHEMES[cache.scheme].by_channel, cache.rotated)
    stored_to = BFLOAT16 if BF16 else HALF
    return common.bound_error(
        round_to_dtype(q, DTYPES[BF16]), cache, softmax_scale, kernel_roundings, window, stored_to
    )


_COLUMNS = "min(16, Hq//Hkv*T)"

MMA = KernelSpec(
    name="attention_kv4_mma_sm80",
    summary="tensor cores, keys as operand A, the queries of a group together, split evenly over blocks",
    args=(
        Arg("q", ByVariant("BF16", DTYPES), ("B", "T", "Hq", "D")),
        Arg("pool", "uint8", ("pages", "2", "Hkv", "page*(D*bits//8 + 4*(1-channel))")),
        Arg("table", "int32", ("B", "P")),
        Arg("lengths", "int32", ("B",)),
        *(
            Arg(f"{x}_{constant}", "float32", ("Hkv", "D"), optional=True)
            for x in "kv"
            for constant in ("scale", "zero")
        ),
        Arg("out", ByVariant("BF16", DTYPES), ("B", "T", "Hq", "D"), "out"),
        Arg("lse", "float32", ("B", "T", "Hq"), "out"),
        Arg("partial", "float32", ("blocks", "2", _COLUMNS, "D"), "scratch"),
        Arg("stats", "float32", ("blocks", "2", _COLUMNS, "2"), "scratch"),
        Arg("segments", "int32", ("blocks", "2"), "scratch"),
        Arg("softmax_scale", "float32", role="scalar"),
        *(Arg(size, "int32", role="scalar") for size in ("B", "T", "Hq", "Hkv", "P", "window")),
    ),
    launch=_launch,
    choose=_choose,
    rules=(
        "D in (64, 128, 256)",
        "page in (16, 32, 64)",
        "bits in (4, 8)",
        "channel in (0, 1)",
        "1 <= T <= 8",
        "Hq % Hkv == 0",
        "1 <= Hq//Hkv <= 16",
        "window >= 0",
        "P*page < 2**31",
        "blocks >= 1",
    ),
    value_rules=("lengths >= 0", "lengths <= P*page"),
    operations="4*B*T*Hq*P*page*D",
    example=_example,
    pack=_pack,
    reference=_reference,
    bound=_bound,
    tolerance_reason=_REASON,
    arch="sm_80",
    example_sizes=sizes_rows(
        "B T Hq Hkv D P pages page bits channel window blocks softmax_scale",
        (3, 1, 4, 2, 128, 3, 8, 64, 4, 0, 0, 1, 0.088),
        (2, 2, 6, 1, 64, 5, 11, 16, 8, 0, 0, 1, 0.125),
        (4, 3, 4, 1, 128, 4, 14, 32, 4, 1, 50, 1, 0.088),
        (2, 1, 2, 2, 256, 4, 7, 32, 8, 1, 0, 1, 0.0625),
    ),
)
SPECS = (MMA,)
ROTATED = common.rotated_form(MMA)

# The same in one launch: the last block that has part of a unit puts it together. Counters are 0 before, and after it.
FUSED = replace(
    MMA,
    args=tuple(replace(a, shape=("blocks", _COLUMNS), role="inout") if a.name == "segments" else a for a in MMA.args),
    choose=lambda s: {**_choose(s), "FUSED": 1},
)
