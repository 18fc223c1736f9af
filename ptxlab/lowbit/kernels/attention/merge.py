"""`attention_merge`: what several blocks found of one unit, put together exactly and in a fixed order."""

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit.kernels.attention.common import Pair
from ptxlab.lowbit.kernels.attention.roundings import HALF, SINGLE
from ptxlab.lowbit.kernels.attention.sm80 import DTYPES
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch, Sizes, sizes_rows
from ptxlab.spec.dtypes import ByVariant, convert_to_dtype, numbers

_BFLOAT16 = 2.0**-8


def _example(
    rng: np.random.Generator, *, B: int, T: int, Hq: int, Hkv: int, D: int, blocks: int, columns: int, tile: int
) -> Arrays:
    """Draw units that begin in a block and go on through some more; parts that no block has written are NaN."""
    units = B * Hkv * ceil_div(ceil_div(Hq, Hkv) * T, tile)
    segments = np.zeros((blocks, 2), np.int32)
    partial = np.full((blocks, 2, columns, D), np.nan, np.float32)
    stats = np.full((blocks, 2, columns, 2), np.nan, np.float32)
    block, free_units = 0, iter(rng.permutation(units))
    while block < blocks - 1:
        count, unit = int(rng.integers(2, blocks - block + 1)), next(free_units, None)
        if unit is None:
            break
        segments[block] = unit, count
        for i in range(count):
            partial[block + i, int(i == 0)] = rng.standard_normal((columns, D), dtype=np.float32)
            stats[block + i, int(i == 0), :, 0] = rng.uniform(-30, 30, columns)
            stats[block + i, int(i == 0), :, 1] = rng.uniform(1, 1000, columns)
        block += count - 1
    first = segments[:, 1].argmax()
    stats[first, 1, 0, 0], partial[first, 1, 0], stats[first, 1, 0, 1] = -1e30, 0, 0  # a part in which nothing is seen
    initial_out = rng.standard_normal((B, T, Hq, D), dtype=np.float32)
    return {
        "partial": partial,
        "stats": stats,
        "segments": segments,
        "out": initial_out,
        "lse": initial_out[..., 0].copy(),
        "Hkv": Hkv,
        "tile": tile,
    }


def _merge(logical: Arrays, BF16: int) -> tuple[Pair, Pair]:
    """Compute ((out, lse), their bounds) in float64."""
    out = numbers(convert_to_dtype(logical["out"], DTYPES[BF16]), DTYPES[BF16])
    lse = logical["lse"].astype(np.float64)
    bounds = np.zeros_like(out), np.zeros_like(lse)
    partial, stats = logical["partial"].astype(np.float64), logical["stats"].astype(np.float64)
    T, Hq, tile = out.shape[1], out.shape[2], logical["tile"]
    group = Hq // logical["Hkv"]
    splits = ceil_div(group * T, tile)
    for block, (unit, count) in enumerate(logical["segments"].tolist()):
        if not count:
            continue
        parts = [(block, 1), *((block + i, 0) for i in range(1, count))]
        sequence, head, split = unit // splits // logical["Hkv"], unit // splits % logical["Hkv"], unit % splits
        for c in range(min(tile, group * T - split * tile)):
            t, head_in_group = divmod(split * tile + c, group)
            row = sequence, t, head * group + head_in_group
            largest, sums = (np.array([stats[part][c, i] for part in parts]) for i in (0, 1))
            weight = np.exp2(largest - largest.max())
            values, total = np.array([partial[part][c] for part in parts]), weight @ sums
            out[row], lse[row] = weight @ values / total, (largest.max() + np.log2(total)) * np.log(2)
            weight_error = (32 + 2 * count) * SINGLE  # 2^x of x down to -60 is off by its rounding; sums; rescaling
            magnitude = weight @ np.abs(values) / total
            bounds[0][row] = 2 * weight_error * magnitude + (_BFLOAT16 if BF16 else HALF) * np.abs(out[row]) + 2.0**-25
            bounds[1][row] = weight_error + 2.0**-22 * (1 + abs(lse[row]))
    return (out, lse), bounds


def _reference(BF16: int = 0, **logical: np.ndarray) -> Pair:
    return _merge(logical, BF16)[0]


def _bound(BF16: int = 0, **logical: np.ndarray) -> Pair:
    return _merge(logical, BF16)[1]


def _launch(s: Sizes) -> Launch:
    """Return the launch of a block per block of the kernel before, a warp per column."""
    return Launch((s["blocks"], 1, 1), (32 * s["COLUMNS"], 1, 1))


MERGE = KernelSpec(
    name="attention_merge",
    summary="split-KV: parts of a unit put together in the order of its tokens",
    args=(
        Arg("partial", "float32", ("blocks", "2", "columns", "D")),
        Arg("stats", "float32", ("blocks", "2", "columns", "2")),
        Arg("segments", "int32", ("blocks", "2")),
        Arg("out", ByVariant("BF16", DTYPES), ("B", "T", "Hq", "D"), "inout"),
        Arg("lse", "float32", ("B", "T", "Hq"), "inout"),
        *(Arg(size, "int32", role="scalar") for size in ("T", "Hq", "Hkv")),
    ),
    launch=_launch,
    choose=lambda s: {"HEAD_DIM": s["D"], "BF16": 0, "COLUMNS": s["tile"]},
    rules=(
        "D in (64, 128, 256)",
        "Hq % Hkv == 0",
        "tile in (8, 16)",
        "columns == min(tile, Hq//Hkv*T)",
    ),
    operations="4*blocks*columns*D",
    example=_example,
    pack=lambda logical: {name: logical[name] for name in ("partial", "stats", "segments", "out", "lse")},
    reference=_reference,
    bound=_bound,
    tolerance_reason="in float64 on the very parts; a weight 2^x is off by a rounding of x, down to -60, and its own",
    arch="sm_80",
    after_wait=("partial", "stats", "segments", "out", "lse"),
    example_sizes=sizes_rows(
        "B T Hq Hkv D blocks columns tile",
        (2, 1, 4, 2, 128, 5, 2, 8),
        (3, 2, 10, 2, 64, 9, 8, 8),
        (1, 4, 8, 1, 256, 4, 16, 16),
    ),
)
SPECS = (MERGE,)
