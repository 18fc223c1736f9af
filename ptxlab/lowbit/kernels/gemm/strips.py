"""W4A8 for weights in strips: one packing from one token to thousands, for LQQ, QoQ and QoQ per channel alike
(LiquidGEMM §4, §5.1; QServe §5.2.2).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit import layout
from ptxlab.lowbit.kernels.gemm import small_tiles, strips_tiles
from ptxlab.lowbit.kernels.gemm.common import (
    AFTER_SCALE,
    GROUPS,
    INT32,
    SUM_PAD,
    X_SCALE,
    GemmStep,
    check_sums,
    epilogue_arrays,
    example_channel,
    example_lqq,
    gemm,
    gemm_channel,
    per_channel,
    suits_all_sizes,
)
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch, Sizes, sizes_rows

SCHEMES, LAYOUT = ("lqq", "qoq", "qoq_channel"), "strips"


def _choose(s: Sizes) -> dict[str, int]:
    order = int("rows" in s)
    return {**strips_tiles.choose(s).constants, **group_constants(strips_tiles.group_of(s)), "ORDER": order}


def _launch(s: Sizes) -> Launch:
    """Return the launch of a block per tile, or of a cluster if K is split.

    Where a block can do several tiles, there are no more blocks than SMs.
    """
    tile, split = strips_tiles.StripTile(*(s[name] for name in strips_tiles.StripTile._fields)), s["SPLIT"]
    blocks = strips_tiles.count_tiles(s, tile.BM, s["STRIPS"]) * split
    if tile.WK == split == 1:
        blocks = min(blocks, strips_tiles.SMS)
    shared_memory = strips_tiles.shared_bytes(tile, s["STRIPS"], s["STAGES"], split, s["GROUP"])
    return Launch((blocks, 1, 1), (128 * (tile.WN * tile.WK + 1), 1, 1), shared_memory, (split, 1, 1))


def _choose_small(s: Sizes) -> dict[str, int]:
    return {**small_tiles.choose(s), **group_constants(strips_tiles.group_of(s)), "ORDER": 0, "SUM_PAD": SUM_PAD}


def group_constants(group: int) -> dict[str, int]:
    """Return the constants for a group.

    Without groups the zero points leave with the token sums. With groups weights are SIGNED, so that no offset of 128
    has to leave with the sums.
    """
    return {"GROUP": group, "OUT": INT32, "SIGNED": int(group != strips_tiles.NO_GROUPS)}


def _launch_small(s: Sizes) -> Launch:
    """Return the launch of as many blocks as are resident, each with its share of the strips; none without tokens."""
    tile = small_tiles.SmallTile(*(s[name] for name in small_tiles.SmallTile._fields))
    blocks = min(ceil_div(s["N"], 16), strips_tiles.SMS * tile.RESIDENT) if s["M"] else 0
    shared_memory = small_tiles.shared_bytes(tile, s["STAGES"], s)
    return Launch((blocks, 1, 1), (32 * (tile.ROWS * tile.SLICES + 2), 1, 1), shared_memory)


def _pack(logical: Arrays) -> Arrays:
    """Pack the weight in strips, and sum the tokens for variants that take the sums."""
    buffers = layout.pack(logical["weight"], LAYOUT).buffers
    x = logical["x"]
    return {
        "strips": buffers["strips"],
        "w_scale": buffers["channel_scale"],
        **({"w_zero": buffers["channel_zero"]} if "channel_zero" in buffers else {}),
        "x": x,
        "x_sum": x.sum(axis=1, dtype=np.int32),
        **epilogue_arrays(logical),
    }


def _pack_tiles(logical: Arrays) -> Arrays:
    """Pack as `_pack`, with the activations in swizzled tiles of `rows` tokens."""
    return {**_pack(logical), "x": layout.to_swizzled_tiles(logical["x"], logical["rows"])}


def _pack_fragments(logical: Arrays) -> Arrays:
    """Pack as `_pack`, with the activations in the order of the MMA's operand."""
    return {**_pack(logical), "x": layout.to_fragment_order(logical["x"])}


def _spec(name: str, summary: str, box: str, **fields: Any) -> KernelSpec:
    return KernelSpec(
        name=name,
        summary=summary,
        args=(
            Arg("strips", "uint8", ("ceil_div(N, 16)", "ceil_div(K, 128)", "1024 + 128//g*32")),
            Arg("w_scale", "float32", ("N",)),
            Arg("w_zero", "uint8", ("0",), optional=True),  # of weights without groups alone
            Arg("x", "int8", ("M", "K"), "tma", box=(box, "128"), swizzle=128),
            X_SCALE,
            Arg("x_sum", "int32", ("M",), optional=True, absent="SIGNED"),
            *AFTER_SCALE,
        ),
        operations="2*M*N*K",
        example=example_lqq,
        pack=_pack,
        reference=gemm,
        arch="sm_90a",
        exact_arch=True,
        agree=check_sums,
        after_wait=("x", "x_scale", "x_sum"),
        **fields,
    )


_RULES = (f"g in {GROUPS}", "K % g == 0", "N % 8 == 0", "1 <= K < 131072", "M*N < 2**31")

SMALL = _spec(
    "gemm_w4a8_small_sm90",
    "few tokens: activations resident, whole strips streamed past them, unsigned LiquidQuant, QoQ (LiquidGEMM §4)",
    box="M",
    rules=(*_RULES, "M <= 32", "ceil_div(M, 8)*8*ceil_div(K, 1024)*1024 <= 204800"),
    choose=_choose_small,
    launch=_launch_small,
    example_sizes=sizes_rows("M N K g", (1, 8, 32, 32), (5, 40, 1152, 128), (17, 200, 192, 64)),
)
LARGE = _spec(
    "gemm_w4a8_sm90",
    "unsigned LiquidQuant or QoQ under wgmma, tiles of evenly shared strips (LiquidGEMM §4, §5.1)",
    box="ceil_div(ceil_div(M, ceil_div(M, BM)), 8)*8",
    rules=_RULES,
    choose=_choose,
    launch=_launch,
    example_sizes=sizes_rows("M N K g", (1, 8, 32, 32), (5, 40, 256, 128), (17, 200, 192, 64)),
)


def _with_activations(spec: KernelSpec, x: Arg, **fields: Any) -> KernelSpec:
    """Build the same kernel on activations in another order; examples are drawn by the sizes of the spec itself."""
    return replace(spec, args=tuple(x if arg.name == "x" else arg for arg in spec.args), example_sizes=(), **fields)


SMALL_FRAGMENTS = _with_activations(
    SMALL,
    Arg("x", "int8", ("ceil_div(K, 64)", "ceil_div(M, 8)", "512"), "tma", box=("BM*SLICES", "128")),
    choose=lambda s: {**_choose_small(s), "ORDER": 1},
    pack=_pack_fragments,
)
LARGE_TILES = _with_activations(
    LARGE,
    Arg("x", "int8", ("ceil_div(M, rows)", "ceil_div(K, 128)", "128*rows"), "tma", box=("rows", "128")),
    rules=(*_RULES, f"rows in {strips_tiles.BMS}"),
    pack=_pack_tiles,
)


def _small_is_faster(s: Sizes) -> bool:
    """Tell if the kernel for few tokens is quicker.

    It takes up to 16 tokens, while all of X fits beside a ring worth having.
    """
    if s["M"] > 16 or ceil_div(s["M"], 8) * s["K"] > 24576:
        return False
    small_us = small_tiles.microseconds(small_tiles.quickest(s), s)
    return small_us <= strips_tiles.microseconds(strips_tiles.choose(s), s)


def _per_channel_form(spec: KernelSpec) -> KernelSpec:
    """Build the same kernel for weights per channel."""
    return per_channel(
        spec,
        Arg("strips", "uint8", ("ceil_div(N, 16)", "ceil_div(K, 128)", "1024")),
        Arg("w_zero", "uint8", ("N",)),
        example=example_channel,
        reference=gemm_channel,
    )


LARGE_CHANNEL, LARGE_CHANNEL_TILES = _per_channel_form(LARGE), _per_channel_form(LARGE_TILES)
SMALL_CHANNEL, SMALL_CHANNEL_FRAGMENTS = _per_channel_form(SMALL), _per_channel_form(SMALL_FRAGMENTS)


class StripKernel(NamedTuple):
    """A kernel on activations in one order: its spec for weights with groups and per channel, and where it suits."""

    order: str
    with_groups: KernelSpec
    channel: KernelSpec
    suits: Callable[[Sizes], bool] = suits_all_sizes


STRIP_KERNELS = (
    StripKernel("row_major", LARGE, LARGE_CHANNEL),
    StripKernel("tiles", LARGE_TILES, LARGE_CHANNEL_TILES),
    StripKernel("fragment", SMALL_FRAGMENTS, SMALL_CHANNEL_FRAGMENTS),
    StripKernel("row_major", SMALL, SMALL_CHANNEL, _small_is_faster),
)


def build_steps(kernels: tuple[StripKernel, ...]) -> tuple[GemmStep, ...]:
    """Build the steps for every scheme."""
    return tuple(
        GemmStep(
            kernel.channel if scheme == "qoq_channel" else kernel.with_groups,
            scheme,
            LAYOUT,
            kernel.order,
            kernel.suits,
        )
        for scheme in SCHEMES
        for kernel in kernels
    )


STEPS = build_steps(STRIP_KERNELS)
SPECS = (SMALL, LARGE)
