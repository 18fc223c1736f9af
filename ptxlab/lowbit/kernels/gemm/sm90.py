"""The steps of the ladder for Hopper: wgmma with the weights from registers (LiquidGEMM §5, §7.3).

Compute warp groups of LiquidGEMM §5.1 fetch their tasks when they are free, as those of `_dynamic` do. In the step
before each of the two has 64 rows of every stage, whose sums it keeps in registers, and they have equally much to do.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit import layout
from ptxlab.lowbit.cost import SHEETS
from ptxlab.lowbit.kernels.gemm.common import (
    EPILOGUE,
    GROUPS,
    INT32,
    MANY,
    GemmStep,
    epilogue_arrays,
    example_lqq,
    example_qoq,
    gemm,
    look_up_tile,
)
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch, Sizes, sizes_rows

_SMS = SHEETS["h200"].sms  # where the tables below were measured
_SM_SHARED = 233_472  # bytes of an SM; a block can have 232,448, and takes 2 KiB beside its dynamic ones
_STATIC_SHARED = 2048
_STORE = {"STORE_TOKENS": 32, "STORE_PITCH": 68}  # of the tile through which results are stored: tokens, int32 of one
_MOST_STAGES = 12


@dataclass(frozen=True)
class GemmTileSm90:
    """Tokens x 64-row tiles of a block, channels of a stage, blocks that an SM is to hold."""

    BM: int
    WN: int
    BK: int
    resident: int


# Up to so many tokens: rows of W up to which the first tile is better, and the tiles. From sweeps over the layers of
# LLaMA-2-7B, -70B and Mixtral on an H200: within 1-7% of the best of all tiles, stages and clusters in the mean.
Table = dict[int, tuple[int, GemmTileSm90, GemmTileSm90]]
_QOQ: Table = {
    8: (28672, GemmTileSm90(8, 2, 256, 3), GemmTileSm90(8, 1, 256, 3)),
    16: (22016, GemmTileSm90(16, 1, 256, 3), GemmTileSm90(16, 2, 256, 3)),
    32: (22016, GemmTileSm90(32, 1, 256, 3), GemmTileSm90(32, 2, 256, 3)),
    64: (22016, GemmTileSm90(64, 1, 256, 3), GemmTileSm90(64, 2, 256, 2)),
    128: (8192, GemmTileSm90(128, 1, 256, 2), GemmTileSm90(128, 1, 128, 3)),
    MANY: (8192, GemmTileSm90(128, 1, 256, 2), GemmTileSm90(256, 1, 128, 2)),
}
_LQQ: Table = {
    8: (28672, GemmTileSm90(8, 2, 256, 3), GemmTileSm90(8, 2, 256, 2)),
    16: (22016, GemmTileSm90(16, 1, 256, 3), GemmTileSm90(16, 2, 256, 2)),
    32: (22016, GemmTileSm90(32, 1, 256, 3), GemmTileSm90(32, 2, 256, 2)),
    64: (22016, GemmTileSm90(64, 1, 256, 3), GemmTileSm90(64, 2, 256, 2)),
    128: (12288, GemmTileSm90(128, 1, 256, 2), GemmTileSm90(128, 2, 128, 2)),
    MANY: (8192, GemmTileSm90(128, 1, 256, 2), GemmTileSm90(128, 1, 128, 3)),
}
_EXCP: Table = {
    8: (8192, GemmTileSm90(8, 2, 128, 1), GemmTileSm90(8, 2, 128, 2)),
    16: (8192, GemmTileSm90(16, 1, 128, 2), GemmTileSm90(16, 2, 128, 2)),
    32: (8192, GemmTileSm90(32, 1, 128, 1), GemmTileSm90(32, 2, 128, 2)),
    64: (4096, GemmTileSm90(64, 1, 128, 1), GemmTileSm90(64, 1, 128, 2)),
    128: (4096, GemmTileSm90(128, 1, 128, 1), GemmTileSm90(128, 2, 128, 1)),
    MANY: (4096, GemmTileSm90(256, 1, 128, 1), GemmTileSm90(256, 1, 128, 1)),
}
_IMFP: Table = {
    8: (12288, GemmTileSm90(8, 2, 256, 1), GemmTileSm90(8, 2, 256, 2)),
    16: (4096, GemmTileSm90(16, 2, 256, 1), GemmTileSm90(16, 2, 256, 1)),
    32: (4096, GemmTileSm90(32, 2, 256, 1), GemmTileSm90(32, 2, 256, 1)),
    64: (4096, GemmTileSm90(64, 2, 256, 1), GemmTileSm90(64, 2, 256, 1)),
    128: (4096, GemmTileSm90(64, 2, 256, 1), GemmTileSm90(128, 2, 256, 1)),
    MANY: (8192, GemmTileSm90(128, 2, 256, 1), GemmTileSm90(256, 2, 128, 1)),
}


def _tiles(s: Sizes, tile: GemmTileSm90) -> int:
    return int(ceil_div(s["M"], tile.BM) * ceil_div(s["N"], 64 * tile.WN))


def _shared_bytes(tile: GemmTileSm90, stages: int, cluster: int, group: int, dequantised_tiles: int = 0) -> int:
    """Count dynamic shared memory: the ring, dequantised tiles, and the epilogue's receive and store buffers."""
    weights = tile.BK * 32 + tile.BK // group * 128  # 64 rows in the dual-MMA layout
    stage = ceil_div(tile.BM * tile.BK + tile.WN * weights, 1024) * 1024
    received = (cluster - 1) * (tile.WN * tile.BM // 8 // cluster) * 2048
    stored_bytes = tile.WN * min(tile.BM, _STORE["STORE_TOKENS"]) * _STORE["STORE_PITCH"] * 4
    return stages * stage + dequantised_tiles * 64 * tile.WN * 128 + received + stored_bytes


def _chooser(table: Table, names: tuple[str, ...], dequantised_tiles: int = 0) -> Callable[[Sizes], dict[str, int]]:
    """Return a function that chooses a kernel's constants: the tile by tokens and rows, then cluster and stages."""

    def choose(s: Sizes) -> dict[str, int]:
        tile = look_up_tile(table, s)
        if s["g"] == 32 and tile.BM == 8:  # the constants of so many groups do not fit two blocks' share of registers
            tile = replace(tile, resident=1)
        return _choose_constants(tile, s, names, dequantised_tiles)

    return choose


def _choose_constants(
    tile: GemmTileSm90, s: Sizes, names: tuple[str, ...], dequantised_tiles: int = 0
) -> dict[str, int]:
    """Choose clusters of two if all blocks are resident even so, and as many stages as fit.

    Returns the constants that all kernels have and those of `names`.
    """
    cluster = 2 if 2 * _tiles(s, tile) <= _SMS * tile.resident else 1
    room_bytes = min(_SM_SHARED // tile.resident, _SM_SHARED - 1024) - _STATIC_SHARED
    sizes = [_shared_bytes(tile, n, cluster, s["g"], dequantised_tiles) for n in range(1, _MOST_STAGES + 1)]
    constants = {
        "BM": tile.BM, "WN": tile.WN, "BK": tile.BK, "CLUSTER": cluster,
        "STAGES": sum(size <= room_bytes for size in sizes),
        "TILES": dequantised_tiles, "RESIDENT": tile.resident, "GROUP": s["g"], "OUT": INT32,
    }  # fmt: skip
    return {name: constants[name] for name in (*names, "BM", "STAGES", "CLUSTER", "GROUP", "OUT")} | _STORE


def _launcher(threads: int = 0, persistent: bool = False) -> Callable[[Sizes], Launch]:
    """Return a function that makes the launch: a cluster per tile, of `threads` or a warp group per 64 rows.

    A `persistent` launch has no more blocks than are resident.
    """

    def launch(s: Sizes) -> Launch:
        tile = GemmTileSm90(s["BM"], s.get("WN", 2), s.get("BK", 128), s.get("RESIDENT", 1))
        blocks = _tiles(s, tile) * s["CLUSTER"]
        if persistent and s["CLUSTER"] == 1:
            blocks = min(blocks, _SMS * tile.resident)
        shared_memory = _shared_bytes(tile, s["STAGES"], s["CLUSTER"], s["GROUP"], s.get("TILES", 0))
        return Launch((blocks, 1, 1), (threads or 128 * tile.WN, 1, 1), shared_memory, (s["CLUSTER"], 1, 1))

    return launch


def _task_bytes(s: Sizes, stages: int) -> int:
    """Count dynamic shared memory for tasks of 64 rows: the ring, sums from group to group, tiles to store through."""
    stage = ceil_div(s["BM"] * s["BK"] + s["BK"] * 32 + s["BK"] // s["GROUP"] * 128, 1024) * 1024
    stored_bytes = 2 * min(s["BM"], _STORE["STORE_TOKENS"]) * _STORE["STORE_PITCH"] * 4
    return int(stages * stage + 64 * s["BM"] * 4 + stored_bytes)


def _choose_tasks(s: Sizes) -> dict[str, int]:
    """Choose ImFP's tokens and channels, in tiles of 64 rows without clusters; not from a sweep of their own."""
    tile = look_up_tile(_IMFP, s)
    constants = {"BM": tile.BM, "BK": tile.BK, "RESIDENT": tile.resident, "GROUP": s["g"], "OUT": INT32}
    room_bytes = min(_SM_SHARED // tile.resident, _SM_SHARED - 1024) - _STATIC_SHARED
    fitting_stages = (n for n in range(1, _MOST_STAGES + 1) if _task_bytes(constants, n) <= room_bytes)
    return {**constants, "STAGES": max(fitting_stages), **_STORE}


def _launch_tasks(s: Sizes) -> Launch:
    """Return the launch of no more blocks than are resident: each goes on from tile to tile."""
    tiles = int(ceil_div(s["M"], s["BM"]) * ceil_div(s["N"], 64))
    return Launch((min(tiles, _SMS * s["RESIDENT"]), 1, 1), (384, 1, 1), _task_bytes(s, s["STAGES"]))


def _pack(logical: Arrays) -> Arrays:
    """Pack the weight in the dual-MMA layout."""
    buffers = layout.pack(logical["weight"], "dual_mma").buffers
    return {
        "blocks": buffers["blocks"],
        "w_scale": buffers["channel_scale"],
        "x": logical["x"],
        **epilogue_arrays(logical),
    }


def _pack_tiles(logical: Arrays) -> Arrays:
    """Pack as `_pack`, with the activations in swizzled tiles of `rows` tokens."""
    return {**_pack(logical), "x": layout.to_swizzled_tiles(logical["x"], logical["rows"])}


_BLOCK_K = "max(64, g)"  # channels of a block of weights


def _spec(name: str, summary: str, *, teaching: bool = True, **fields: Any) -> KernelSpec:
    """Build the spec of one kernel; a `teaching` one takes groups of 64 and 128 only."""
    groups = (64, 128) if teaching else GROUPS
    return KernelSpec(
        name=name,
        summary=summary,
        args=(
            Arg(
                "blocks", "uint8", ("ceil_div(N, 64)", f"ceil_div(K, {_BLOCK_K})", f"{_BLOCK_K}*32 + {_BLOCK_K}//g*128")
            ),
            Arg("w_scale", "float32", ("N",)),
            Arg("x", "int8", ("M", "K"), "tma", box=("BM", "128"), swizzle=128),
            *EPILOGUE,
        ),
        rules=(f"g in {groups}", "K % g == 0", "N % 8 == 0", "1 <= K < 131072", "M*N < 2**31"),
        operations="2*M*N*K",
        pack=_pack,
        reference=gemm,
        arch="sm_90a",
        exact_arch=True,
        example_sizes=sizes_rows("M N K g", (1, 8, groups[0], groups[0]), (5, 40, 256, 128), (17, 200, 192, 64)),
        **fields,
    )


QOQ, LQQ, EXCP, IMFP, DYNAMIC = (
    _spec(
        "gemm_w4a8_qoq_sm90",
        "wgmma, weights dequantised by multiply and vadd4, one thing after the other (LiquidGEMM §7.3, baseline)",
        choose=_chooser(_QOQ, ("WN", "BK")),
        launch=_launcher(),
        example=example_qoq,
    ),
    _spec(
        "gemm_w4a8_lqq_sm90",
        "the baseline with LiquidQuant: one multiply-add and one XOR per four weights (LiquidGEMM §4, +LQQ)",
        choose=_chooser(_LQQ, ("WN", "BK")),
        launch=_launcher(),
        example=example_lqq,
    ),
    _spec(
        "gemm_w4a8_lqq_excp_sm90",
        "explicit coarse-grained pipeline: warp groups load, dequantise, multiply (LiquidGEMM §5.1, +ExCP)",
        choose=_chooser(_EXCP, ("WN", "TILES", "RESIDENT"), dequantised_tiles=2),
        launch=_launcher(384),
        example=example_lqq,
    ),
    _spec(
        "gemm_w4a8_lqq_imfp_sm90",
        "implicit fine-grained pipeline: two warp groups dequantise under each other's wgmma (LiquidGEMM §5.1, +ImFP)",
        teaching=False,
        choose=_chooser(_IMFP, ("BK", "RESIDENT")),
        launch=_launcher(384, persistent=True),
        example=example_lqq,
    ),
    _spec(
        "gemm_w4a8_lqq_dynamic_sm90",
        "ImFP whose warp groups take the next task, 64 rows of a stage, when they are free (LiquidGEMM §5.1)",
        choose=_choose_tasks,
        launch=_launch_tasks,
        example=example_lqq,
    ),
)

_WGMMA_TOKENS = (8, 16, 32, 64, 128, 256)


def _choose_tiles(s: Sizes) -> dict[str, int]:
    """Choose the constants for activations in tiles of `rows` tokens."""
    tile = GemmTileSm90(s["rows"], 2, 256 if s["rows"] <= 128 else 128, 1)
    return {**_choose_constants(tile, s, ("BK", "RESIDENT")), "ORDER": 1}


# ImFP on activations in swizzled tiles: the same source, another variant, and x as it lies in memory.
IMFP_TILES = replace(
    IMFP,
    args=tuple(
        Arg("x", "int8", ("ceil_div(M, rows)", "ceil_div(K, 128)", "128*rows"), "tma", box=("rows", "128"))
        if arg.name == "x"
        else arg
        for arg in IMFP.args
    ),
    rules=(*IMFP.rules, f"rows in {_WGMMA_TOKENS}"),
    choose=_choose_tiles,
    pack=_pack_tiles,
    example_sizes=(),  # an example is drawn by the sizes of IMFP; `rows` only say how it is packed
)

STEPS = (
    GemmStep(QOQ, "qoq", "dual_mma"),
    GemmStep(LQQ, "lqq", "dual_mma"),
    GemmStep(EXCP, "lqq", "dual_mma", suits=lambda s: False),  # the way through shared memory never pays
    GemmStep(IMFP_TILES, "lqq", "dual_mma", "tiles"),
    # From the sweep of the tables above: from 9 to 64 tokens more and smaller blocks hide as much, and share better.
    GemmStep(IMFP, "lqq", "dual_mma", suits=lambda s: s["g"] == 32 or not 8 < s["M"] <= 64 or s["K"] > s["N"]),
    GemmStep(DYNAMIC, "lqq", "dual_mma", suits=lambda s: False),  # not measured yet
)
SPECS = (QOQ, LQQ, EXCP, IMFP, DYNAMIC)
