"""KV4 attention on Hopper: bulk copies, and blocks that share out ragged work evenly. No document has either."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit.kernels.attention import common, sm80
from ptxlab.lowbit.kernels.attention.bound import BY_CHANCE
from ptxlab.lowbit.kernels.attention.common import Pair
from ptxlab.lowbit.kernels.attention.roundings import SINGLE, Roundings
from ptxlab.lowbit.kernels.attention.sm80 import MMA, SUM_PAD, scheme_of
from ptxlab.lowbit.layout import KVCache
from ptxlab.lowbit.layout.pages import page_bytes
from ptxlab.spec import Arg, Arrays, Launch, Sizes, sizes_rows

COLUMNS, TILE = 8, 64  # of a unit at most; tokens
PART, MOST_PARTS = 16, 32  # tiles after which a unit is cut by its own length; parts at most, longer for more tiles
LARGEST = 32512  # of a query's integers: two signed bytes
EXTRA, SLACK = 4, 4  # tiles: cost of a unit of few tiles beside them; that a block may get beyond its share
SLOTS = 2  # units whose sums are in shared memory; twice as many are in flight
PROMOTE = 256  # tokens of a warp after which what its MMAs have added up, truncating, is added to FP32 sums
SMS = 132  # of an H200, for which tiles are chosen
_SHARED, _RESERVED, _STATIC = 233472, 1024, 1024  # bytes of an SM; kept back of every block; of barriers and records
_FEW_TILES, _LITTLE_WORK = 256, 4096  # tiles altogether
_ALIGNED = 2.0**-25  # Hopper cuts off what is below this, of the largest power of two: it keeps a bit more than Ampere
# `-D` constants that are the same in every variant: what is counted with here as well is written here alone.
FIXED = {
    "TILE_TOKENS": TILE, "SLOTS": SLOTS, "LARGEST": LARGEST, "SUM_PAD": SUM_PAD, "EXTRA": EXTRA, "SLACK": SLACK,
}  # fmt: skip


class AttentionTileSm90(NamedTuple):
    """Tokens of a warp, warps that multiply, stages of the ring, blocks per SM."""

    TOKENS: int
    WARPS: int
    STAGES: int
    RESIDENT: int

    @property
    def groups(self) -> int:
        """Tiles that the warps multiply at a time."""
        return self.WARPS * self.TOKENS // TILE


def columns_of(s: Sizes) -> int:
    """Return the queries of a unit: at most COLUMNS."""
    return min(COLUMNS, int(s["Hq"] // s["Hkv"] * s["T"]))


def compiled_columns(columns: int) -> int:
    """Return the number of columns of a unit that the kernel is compiled for."""
    return 4 if columns <= 4 else COLUMNS


def shared_bytes(tile: AttentionTileSm90, s: Sizes) -> int:
    """Count a block's dynamic shared memory: the ring, queries of the units in flight, the warps' sums."""
    stage = 2 * TILE // s["page"] * page_bytes(scheme_of(s["bits"], s["channel"]), s["page"], s["D"])
    query = s.get("COLUMNS", compiled_columns(columns_of(s))) * (s["D"] * 2 + 8)
    sums, slots = tile.WARPS * columns_of(s) * (16 + 4 * (s["D"] + SUM_PAD)), s.get("SLOTS", SLOTS)
    return int(tile.STAGES * stage + 2 * slots * query + slots * sums)


def query_warps(s: Sizes) -> int:
    """Count the warps that quantise queries: two where one would go on to other columns, and registers allow it."""
    return 2 if s["RESIDENT"] == 1 and s["COLUMNS"] * s["D"] > 256 else 1


def blocks_for(s: Sizes, sms: int = SMS) -> int:
    """Count the resident blocks: the workspace has parts for each, and a launch has no more."""
    return sms * choose_tile(s).RESIDENT


def invariant_blocks(s: Sizes, sms: int = SMS) -> int:
    """Count the resident blocks of the variant whose results do not depend on the batch."""
    return sms * invariant_tile(s).RESIDENT


def choose_tile(s: Sizes) -> AttentionTileSm90:
    """Choose the tile by measured rules.

    Two small blocks per SM hide each other's ends where there are many units; one large block has fewer parts to
    combine. With little work, or more of long and light units, two warps share a tile, so that its last tiles are done
    sooner; with few tiles four warps do. Heavy units are better off with one large block than with two small ones.
    Rings are short: tiles come sooner if fewer are asked for at once.
    """
    units = s["B"] * s["Hkv"] * ceil_div(ceil_div(s["Hq"], s["Hkv"]) * s["T"], COLUMNS)
    tiles = units * ceil_div(s["P"] * s["page"], TILE)
    columns = columns_of(s)
    # Up to so many units whose tiles are light, small blocks pay however many tiles there are.
    light_units = tiles if columns == 1 else 512 if columns <= 4 else 0
    has_long_units = _LITTLE_WORK < tiles <= 2 * _LITTLE_WORK and tiles >= 16 * units
    shapes = []  # by preference: tokens, warps, blocks per SM, rounds of all groups in the ring at most
    if tiles <= _FEW_TILES:
        shapes.append((16, 8, 1, 2))
    if has_long_units:
        shapes.append((32, 8, 1, 3) if columns <= 4 else (64, 8, 1, 2))
    if units >= 256 and (tiles < 50_000 or units <= light_units):
        shapes.append((64, 4, 2, 2))
    if tiles > _LITTLE_WORK:
        shapes.append((64, 8, 1, 2))
    shapes += [(32, 8, 1, 2), (16, 8, 1, 2), (16, 4, 1, 2)]  # for little work, or where wider ones do not fit
    return _first_that_fits(shapes, s)


def invariant_tile(s: Sizes) -> AttentionTileSm90:
    """Choose the tile by head dim, scheme and columns alone.

    The order of sums depends on the tile, so neither batch nor table may choose it.
    """
    return _first_that_fits([(64, 4, 2, 2), (64, 8, 1, 2), (32, 8, 1, 2), (16, 8, 1, 2), (16, 4, 1, 2)], s)


def _first_that_fits(shapes: list[tuple[int, int, int, int]], s: Sizes) -> AttentionTileSm90:
    """Return the first shape that fits shared memory, with as many rounds as fit.

    A shape is (tokens, warps, blocks per SM, rounds of all groups in the ring at most).
    """
    for tokens, warps, resident, max_rounds in shapes:
        tile = AttentionTileSm90(tokens, warps, 0, resident)
        room_bytes = _SHARED // resident - _RESERVED - _STATIC
        stage = shared_bytes(tile._replace(STAGES=1), s) - shared_bytes(tile, s)
        rounds = min(max_rounds, (room_bytes - shared_bytes(tile, s)) // stage // tile.groups)
        if rounds > 0:
            break
    return tile._replace(STAGES=rounds * tile.groups)


def _choose(s: Sizes) -> dict[str, int]:
    """Choose the constants: the tile by the work, and sums promoted only where a warp may have many tokens."""
    tile = choose_tile(s)
    # Tokens of a warp, if one block has all of a unit.
    most_tokens = ceil_div(s["P"] * s["page"], TILE * tile.groups) * tile.TOKENS
    promote = {"PROMOTE": PROMOTE if most_tokens > 2 * PROMOTE else 0}
    return _constants(s, tile) | promote


def _choose_invariant(s: Sizes) -> dict[str, int]:
    """Choose the constants that no batch or table changes."""
    return _constants(s, invariant_tile(s)) | {"PROMOTE": PROMOTE, "PART": PART, "MOST_PARTS": MOST_PARTS}


def _constants(s: Sizes, tile: AttentionTileSm90) -> dict[str, int]:
    contract = {"HEAD_DIM": s["D"], "PAGE": s["page"], "BITS": s["bits"], "CHANNEL": s["channel"], "BF16": 0}
    return {**contract, **FIXED, "COLUMNS": compiled_columns(columns_of(s)), **tile._asdict()}


def _launch(s: Sizes) -> Launch:
    tile = AttentionTileSm90(*(s[name] for name in AttentionTileSm90._fields))
    return Launch((s["blocks"], 1, 1), (32 * (tile.WARPS + 1 + query_warps(s)), 1, 1), shared_bytes(tile, s))


def _exchange_buffers(q: np.ndarray, cache: KVCache, blocks: int) -> Pair:
    """Build the zeros in which blocks hand over parts; they are 0 before a launch, and after it."""
    _, T, Hq, D = q.shape
    columns = columns_of({"T": T, "Hq": Hq, "Hkv": cache.num_kv_heads})
    return np.zeros((blocks, columns, D), np.uint32), np.zeros((blocks, columns, 2), np.uint32)


def _example(rng: np.random.Generator, **sizes: Any) -> Arrays:
    return {**MMA.example(rng, **sizes), "blocks": sizes["blocks"]}


def _pack(logical: Arrays, *, parts: int = 1) -> Arrays:
    sums, stats = _exchange_buffers(logical["q"], logical["cache"], logical["blocks"] * parts)
    return {**MMA.pack(logical), "partial": sums, "stats": stats}


def _reference(q: np.ndarray, cache: KVCache, blocks: int, *, parts: int = 1, **options: Any) -> tuple[np.ndarray, ...]:
    return (*MMA.reference(q, cache, **options), *_exchange_buffers(q, cache, blocks * parts))


def _bound(q: np.ndarray, cache: KVCache, blocks: int, *, parts: int = 1, **options: Any) -> tuple[Any, ...]:
    assert MMA.bound is not None
    return (*MMA.bound(q, cache, **options, roundings=roundings_of), *_exchange_buffers(q, cache, blocks * parts))


def roundings_of(D: int, channel: bool, rotated: bool = False) -> Roundings:
    """Return the roundings for queries as integers of 16 bits; high nibbles of values are summed in their bytes."""
    return replace(
        sm80.roundings_of(D, channel, rotated),
        score=((D // 4 if channel else 0) + 16) * SINGLE,
        query=0.51 / LARGEST,  # a half, and what the reciprocal of the unit adds to the largest
        aligned=_ALIGNED,
        in_bytes=True,
        levels=LARGEST,
        promoted=2 * PROMOTE,  # of tables so short that a warp has no more, it takes all at once
    )


_HANDED_OVER = {"partial": ("blocks", "min(8, Hq//Hkv*T)", "D"), "stats": ("blocks", "min(8, Hq//Hkv*T)", "2")}

_REASON = (
    f"in float64 on the dequantised integers; a query is rounded to 1/{LARGEST} of its largest element, scores are "
    "exact sums of integers; an MMA of values truncates each of 17 terms to 25 bits of the largest, and takes a "
    "subnormal integer for 2^10 in that; a weight times its value's scale, or by channel the weight, is rounded to FP16"
) + BY_CHANCE

_SM90 = replace(
    MMA,
    name="attention_kv4_sm90",
    summary="bulk copies, ragged batches in equal pieces, parts handed to the block where a unit begins",
    args=tuple(
        replace(arg, dtype="uint32", shape=_HANDED_OVER[arg.name], role="inout") if arg.name in _HANDED_OVER else arg
        for arg in MMA.args
        if arg.name != "segments"
    ),
    launch=_launch,
    choose=_choose,
    example=_example,
    pack=_pack,
    reference=_reference,
    bound=_bound,
    tolerance_reason=_REASON,
    arch="sm_90a",
    exact_arch=True,
    after_wait=("q", "pool", "partial", "stats"),
    example_sizes=sizes_rows(
        "B T Hq Hkv D P pages page bits channel window blocks softmax_scale",
        (3, 1, 4, 2, 128, 3, 8, 64, 4, 0, 0, 2, 0.088),
        (2, 2, 6, 1, 64, 5, 11, 16, 8, 0, 0, 1, 0.125),
        (4, 3, 4, 1, 128, 4, 14, 32, 4, 1, 50, 3, 0.088),
        (2, 1, 2, 2, 256, 4, 7, 32, 8, 1, 0, 2, 0.0625),
    ),
)


def _enlarge(arg: Arg) -> Arg:
    """Widen the memory in which blocks hand over parts, to as many parts as a unit has."""
    return replace(arg, shape=(f"{MOST_PARTS}*blocks", *arg.shape[1:])) if arg.name in _HANDED_OVER else arg


_PARTS: Sizes = {"B": 5, "T": 1, "Hq": 2, "Hkv": 1, "D": 64, "P": 20, "pages": 60, "page": 64, "bits": 4, "channel": 0}
_PARTS = {**_PARTS, "window": 0, "blocks": 3, "softmax_scale": 0.125}  # one sequence is longer than a part

INVARIANT = replace(
    _SM90,
    form="batch_invariant",
    summary="the same kernel, units cut by their own length: the same bits for a sequence whatever is in the batch",
    args=tuple(map(_enlarge, _SM90.args)),
    choose=_choose_invariant,
    pack=partial(_pack, parts=MOST_PARTS),
    reference=partial(_reference, parts=MOST_PARTS),
    bound=partial(_bound, parts=MOST_PARTS),
    example_sizes=(*_SM90.example_sizes, _PARTS),
    batch="B",
    batch_sizes=_PARTS,
)
SM90 = replace(_SM90, invariant=INVARIANT)
SPECS = (SM90,)
ROTATED = common.rotated_form(SM90)
