"""The steps of the ladder for Hopper: wgmma with the weights from registers (LiquidGEMM §5, §7)."""

from collections.abc import Callable, Mapping

import numpy as np

from ptxlab import layout, quant, reference
from ptxlab.kernels.gemm.common import EPILOGUE, INT32, example_qoq
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch, Sizes

_SHARED = 232_448 - 1024  # bytes of a block on Hopper, less the barriers and the alignment of the ring
_STORE_PITCH = 68  # int32 per token of the tile through which results are stored (epilogue_sm90.cuh)
_CHUNK = 32  # tokens of it

_ARGS = (
    Arg("blocks", "uint8", ("ceil_div(N, 64)", "ceil_div(K, max(64, g))", "32*max(64, g) + 128*max(64, g)/g")),
    Arg("w_scale", "float32", ("N",)),
    Arg("x", "int8", ("M", "K"), "tma"),
    *EPILOGUE,
)


def weight_bytes(channels: int, group: int) -> int:
    """Bytes of 64 rows and so many channels in the dual-MMA layout, constants included."""
    return channels * 32 + channels // group * 128


def shared_bytes(config: Mapping[str, int], row_tiles: int, *, behind: int = 0) -> int:
    """Dynamic shared memory: the ring, what lies `behind` it, and what the epilogue receives and stores through."""
    BM, BK, cluster = config["BM"], config.get("BK", 128), config["CLUSTER"]
    stage = BM * BK + row_tiles * weight_bytes(BK, config["GROUP"])
    received = (cluster - 1) * (row_tiles * BM // 8 // cluster) * 2048
    stored = row_tiles * min(BM, _CHUNK) * _STORE_PITCH * 4
    return config["STAGES"] * (-(-stage // 1024) * 1024) + behind + received + stored


def _tiles(s: Sizes, row_tiles: int) -> int:
    return -(-s["M"] // s["BM"]) * -(-s["N"] // (64 * row_tiles))


def _launch_in_turn(s: Sizes) -> Launch:
    """WN warp groups; one tile per cluster."""
    blocks = _tiles(s, s["WN"]) * s["CLUSTER"]
    return Launch((blocks, 1, 1), (128 * s["WN"], 1, 1), shared_bytes(s, s["WN"]), (s["CLUSTER"], 1, 1))


def _launch_excp(s: Sizes) -> Launch:
    """Three warp groups; one tile per cluster."""
    blocks, tiles = _tiles(s, s["WN"]) * s["CLUSTER"], s["TILES"] * 64 * s["WN"] * 128
    return Launch((blocks, 1, 1), (384, 1, 1), shared_bytes(s, s["WN"], behind=tiles), (s["CLUSTER"], 1, 1))


def _launch_imfp(s: Sizes) -> Launch:
    """Three warp groups; blocks take tile after tile, unless a cluster shares each."""
    blocks = _tiles(s, 2) * s["CLUSTER"]
    if s["CLUSTER"] == 1:
        blocks = min(blocks, s["BLOCKS"])
    return Launch((blocks, 1, 1), (384, 1, 1), shared_bytes(s, 2), (s["CLUSTER"], 1, 1))


SPECS: tuple[KernelSpec, ...] = ()
