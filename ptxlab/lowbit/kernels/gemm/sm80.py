"""The steps of the ladder that run on every architecture from sm_80 on (QServe §5.2, LiquidGEMM §4)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit import layout
from ptxlab.lowbit.kernels.gemm.common import (
    AFTER_SCALE,
    EPILOGUE,
    GROUPS,
    INT32,
    MANY,
    QSERVE,
    SUM_PAD,
    X_SCALE,
    GemmStep,
    check_sums,
    epilogue_arrays,
    example_channel,
    example_lqq,
    example_qoq,
    gemm,
    gemm_channel,
    look_up_tile,
)
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch, Sizes, sizes_rows


class GemmTileSm80(NamedTuple):
    """Rows, tokens and channels of a block; its warps along each of them; stages of its ring."""

    BN: int
    BM: int
    BK: int
    WN: int
    WM: int
    WK: int
    STAGES: int


# Up to so many tokens: rows of W up to which the first tile is better, and the tiles. From a sweep over the layers of
# LLaMA-2-7B and -70B on an H200: within 1-9% of the best of all tiles in the mean. None takes more than the 99 KiB of
# shared memory that every architecture from sm_80 on has.
_TILES: dict[int, tuple[int, GemmTileSm80, GemmTileSm80]] = {
    8: (4096, GemmTileSm80(32, 8, 512, 1, 1, 8, 6), GemmTileSm80(32, 8, 512, 1, 1, 4, 6)),
    16: (12288, GemmTileSm80(32, 16, 512, 1, 1, 4, 4), GemmTileSm80(64, 16, 512, 2, 1, 2, 3)),
    32: (12288, GemmTileSm80(32, 32, 512, 1, 1, 4, 3), GemmTileSm80(64, 32, 128, 2, 1, 2, 8)),
    64: (4096, GemmTileSm80(32, 64, 512, 1, 2, 4, 2), GemmTileSm80(64, 64, 256, 2, 1, 2, 3)),
    128: (12288, GemmTileSm80(64, 64, 256, 2, 1, 2, 3), GemmTileSm80(64, 128, 128, 2, 2, 1, 3)),
    MANY: (4096, GemmTileSm80(64, 64, 256, 2, 1, 2, 3), GemmTileSm80(64, 128, 128, 2, 2, 1, 3)),
}


def _choose(sizes: Sizes) -> dict[str, int]:
    """Choose the tile by tokens and rows.

    With few tokens strips are narrow, so that every SM has one, and the warps split K.
    """
    return {**look_up_tile(_TILES, sizes)._asdict(), "OUT": INT32, "SUM_PAD": SUM_PAD}


def _choose_groups(sizes: Sizes) -> dict[str, int]:
    return {**_choose(sizes), "GROUP": sizes["g"]}


def _launch(sizes: Mapping[str, int]) -> Launch:
    """Return the launch of one block per BN rows and BM tokens; `sizes` has the constants of the variant too."""
    strips, steps = sizes["BN"] // 32, sizes["BK"] // 32
    constant_bytes = (
        max(1, sizes["BK"] // sizes["GROUP"]) * 64 if "GROUP" in sizes else 0
    )  # per strip: 32 scales, 32 offsets a group
    stage_bytes = strips * steps * 512 + sizes["BM"] * sizes["BK"] + strips * constant_bytes
    result_bytes = sizes["BM"] * (sizes["BN"] + sizes["SUM_PAD"]) * 4
    blocks = ceil_div(sizes["M"], sizes["BM"]) * ceil_div(sizes["N"], sizes["BN"])
    threads = 32 * sizes["WN"] * sizes["WM"] * sizes["WK"]
    return Launch((blocks, 1, 1), (threads, 1, 1), max(sizes["STAGES"] * stage_bytes, result_bytes))


def _pack_groups(logical: Arrays) -> Arrays:
    """Pack the weight in QServe's order."""
    buffers = layout.pack(logical["weight"], "qserve").buffers
    return {
        "qweight": buffers["qweight"],
        "scale": buffers["scale"],
        "offset": buffers["offset"],
        "w_scale": buffers["channel_scale"],
        "x": logical["x"],
        **epilogue_arrays(logical),
    }


def _pack_channel(logical: Arrays) -> Arrays:
    """Pack the weight in QServe's order; missing token sums are computed from the activations."""
    buffers = layout.pack(logical["weight"], "qserve").buffers
    x = logical["x"]
    return {
        "qweight": buffers["qweight"],
        "w_scale": buffers["channel_scale"],
        "w_zero": buffers["channel_zero"],
        "x": x,
        "x_sum": logical.get("x_sum", x.sum(axis=1, dtype=np.int32)),
        **epilogue_arrays(logical),
    }


QOQ = KernelSpec(
    name="gemm_w4a8_qoq_sm80",
    summary="QServe's main loop: mma.sync, cp.async, reordered weights, multiply then vadd4 (QServe §5.2)",
    args=(
        *QSERVE,
        Arg("w_scale", "float32", ("N",)),
        Arg("x", "int8", ("M", "K")),
        *EPILOGUE,
    ),
    launch=_launch,
    choose=_choose_groups,
    rules=(f"g in {GROUPS}", "K % g == 0", "N % 8 == 0", "1 <= K < 131072", "M*N < 2**31"),
    operations="2*M*N*K",
    example=example_qoq,
    pack=_pack_groups,
    reference=gemm,
    arch="sm_80",
    example_sizes=sizes_rows("M N K g", (1, 8, 32, 32), (5, 40, 256, 128), (17, 72, 192, 64)),
)

LQQ = replace(
    QOQ,
    name="gemm_w4a8_lqq_sm80",
    summary="the same loop with LiquidQuant: a multiply-add and a XOR for four weights (LiquidGEMM §4, QServe §5.2)",
    example=example_lqq,
)

CHANNEL = KernelSpec(
    name="gemm_w4a8_qoq_channel_sm80",
    summary="no level 2: unpacking alone, the zero point leaves in the epilogue by the token sum (QServe §5.2.2)",
    args=(
        QSERVE[0],
        Arg("w_scale", "float32", ("N",)),
        Arg("w_zero", "uint8", ("N",)),
        Arg("x", "int8", ("M", "K")),
        X_SCALE,
        Arg("x_sum", "int32", ("M",)),
        *AFTER_SCALE,
    ),
    launch=_launch,
    choose=_choose,
    rules=("K % 32 == 0", "N % 8 == 0", "1 <= K < 131072", "M*N < 2**31"),
    value_rules=("w_zero <= 15",),
    operations="2*M*N*K",
    example=example_channel,
    pack=_pack_channel,
    reference=gemm_channel,
    agree=check_sums,
    arch="sm_80",
    example_sizes=sizes_rows("M N K", (1, 8, 32), (5, 40, 256), (17, 72, 224)),
)

STEPS = (GemmStep(QOQ, "qoq", "qserve"), GemmStep(LQQ, "lqq", "qserve"), GemmStep(CHANNEL, "qoq_channel", "qserve"))
SPECS = tuple(step.spec for step in STEPS)
