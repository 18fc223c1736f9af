"""W4Ax, COMET's GEMM: activations in blocks of 128 channels, INT4 or INT8, weights in INT4 (COMET §4).

K4 counts the channels of INT4 blocks, K8 those of the INT8 blocks behind them.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit import quant, reference
from ptxlab.lowbit.kernels.gemm import w4a4_tiles
from ptxlab.lowbit.kernels.gemm.common import F32, FLOATS, SUM_PAD, add_bias_and_round, bias_of, output_args
from ptxlab.lowbit.kernels.gemm.w4a4 import TOKENS, TOTALS, choose, launcher
from ptxlab.lowbit.layout import atom
from ptxlab.lowbit.layout.atom import strip_bytes
from ptxlab.lowbit.quant import BlockRows
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch, Sizes, sizes_rows


def _example(rng: np.random.Generator, *, M: int, N: int, K4: int, K8: int) -> Arrays:
    """Draw random weights and activations; those of the INT8 blocks are twenty times the rest."""
    size = np.r_[np.ones(K4, np.float32), np.full(K8, 20, np.float32)]
    return {
        "w": quant.quantize_block_weight(rng.standard_normal((N, K4 + K8), dtype=np.float32)),
        "x": quant.quantize_blocks(rng.standard_normal((M, K4 + K8), dtype=np.float32) * size, K8 // 128),
        "bias": rng.standard_normal(N, dtype=np.float32),
    }


def _pack(logical: Arrays) -> Arrays:
    """Pack both operands as rows, the weight in the order that the activations' blocks ask for."""
    w: BlockRows = logical["w"]
    x: BlockRows = logical["x"]
    return {
        "w": atom.pack_comet_rows(w, x.int8),
        "w_scale": atom.pad_scales(w.scale),
        "x4": atom.pairs_of(x),
        "x8": x.q[:, x.channels4 :].copy(),
        "x_scale": atom.pad_scales(x.scale),
        **bias_of(logical),
    }


def gemm_blocks(w: BlockRows, x: BlockRows, bias: np.ndarray | None = None, OUT: int = F32) -> np.ndarray:
    """Compute the reference: exact sums of all blocks, added up by fma in f32, one after the other."""
    spans = (slice(k, k + 128) for k in range(0, x.shape[1], 128))
    sums = (reference.gemm_accumulators(x.q[:, span], w.q[:, span].astype(np.int32)) for span in spans)
    total = reference.gemm_add_groups(sums, x.scale, w.scale)
    return add_bias_and_round(total, bias, OUT)


_SCALES = "ceil_div((K4 + K8)//128, 8)*8"
NAIVE = KernelSpec(
    name="gemm_w4ax_naive_sm80",
    summary="tiles of INT4 and INT8 activations in the order of the grid; location switch, zero extension (COMET §4)",
    args=(
        Arg("w", "uint8", ("N", "(K4 + K8)//2")),
        Arg("w_scale", "float16", ("N", _SCALES)),
        Arg("x4", "uint8", ("M", "K4/2")),
        Arg("x8", "int8", ("M", "K8")),
        Arg("x_scale", "float16", ("M", _SCALES)),
        *output_args(FLOATS, "K4", "K8"),
    ),
    launch=launcher(64 + 4, 2 * 64 + 4),  # two scales of every row
    choose=lambda s: choose(s, STAGES=3, OUT=F32, SUM_PAD=SUM_PAD),  # COMET has the widest tile alone
    rules=("K4 % 128 == 0", "K8 % 128 == 0", "N % 8 == 0", "1 <= K4 + K8 < 131072", "M*N < 2**31"),
    operations="2*M*N*(K4 + K8)",
    example=_example,
    pack=_pack,
    reference=gemm_blocks,
    arch="sm_80",
    tolerance_reason=TOTALS,
    example_sizes=sizes_rows("M N K4 K8", (1, 8, 128, 0), (5, 40, 0, 128), (17, 72, 256, 128)),
)


def _example_shared(rng: np.random.Generator, *, blocks: int, **sizes: int) -> Arrays:
    return {**_example(rng, **sizes), "blocks": blocks}


def _pack_shared(logical: Arrays) -> Arrays:
    return {**_pack(logical), "counted": _counters(logical["w"], logical["x"])}


def _gemm_shared(w: BlockRows, x: BlockRows, blocks: int, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Compute the reference, however many blocks share the tiles; the counters are 0 again."""
    return gemm_blocks(w, x, **options), _counters(w, x)


def _counters(w: BlockRows, x: BlockRows) -> np.ndarray:
    return np.zeros_like(x.q, dtype=np.uint32, shape=(len(x.q), ceil_div(len(w.q), 64)))


def _launch_shared(s: Sizes) -> Launch:
    """Return the launch of as many blocks as are asked for, each with a ring of operands."""
    threads = s["BN"] * s["WM"]
    return Launch((s["blocks"], 1, 1), (threads, 1, 1), s["STAGES"] * 64 * (s["BN"] + 2 * s["BM"]))


def _choose_shared(s: Sizes) -> dict[str, int]:
    """Choose tiles whose quarters have 8 tokens for each warp."""
    return choose({**s, "M": max(s["M"], 32)}, STAGES=3, RATIO=2, OUT=F32)


_, _Y, *_SCALARS = output_args(FLOATS, "K4", "K8")
REMAP = replace(
    NAIVE,
    name="gemm_w4ax_remap_sm80",
    summary="tiles of both kinds shared out among SMs along K too, INT8 first, who is free first next (COMET §4.4)",
    args=(
        *NAIVE.inputs,
        _Y,
        Arg("counted", "uint32", ("M", "ceil_div(N, 64)"), "inout"),
        Arg("sums", "int32", ("M", "(K4 + K8)//128", "N"), "scratch"),
        *_SCALARS,
    ),
    launch=_launch_shared,
    choose=_choose_shared,
    rules=(*NAIVE.rules, "1 <= blocks <= 65536"),
    example=_example_shared,
    pack=_pack_shared,
    reference=_gemm_shared,
    example_sizes=sizes_rows("M N K4 K8 blocks", (1, 8, 128, 0, 1), (5, 40, 0, 128, 2), (17, 200, 256, 128, 5)),
)
INORDER = replace(
    REMAP,
    name="gemm_w4ax_inorder_sm80",
    summary="tiles of both kinds go round the SMs in the order of the grid, no barrier between rounds (COMET §4.4)",
    choose=lambda s: {name: size for name, size in _choose_shared(s).items() if name != "RATIO"},
)
COMET = replace(
    REMAP,
    name="gemm_w4ax_comet_sm80",
    summary="remapped, and idle SMs take quarters of the last round's tiles, fixed beforehand (COMET §4.4)",
)


def _pack_stolen(logical: Arrays) -> Arrays:
    packed_arrays = _pack_shared(logical)
    return {**packed_arrays, "taken": np.zeros_like(packed_arrays["counted"], shape=logical["blocks"])}


def _gemm_stolen(w: BlockRows, x: BlockRows, blocks: int, **options: Any) -> tuple[np.ndarray, ...]:
    """Return the reference, whoever takes what; the counters are 0 again."""
    y, counts = _gemm_shared(w, x, blocks, **options)
    return y, counts, np.zeros_like(counts, shape=blocks)


STEAL = replace(
    REMAP,
    name="gemm_w4ax_steal_sm80",
    summary="remapped, and whoever is idle steals quarters of the last round's tiles at run time (COMET §4.4)",
    args=(*REMAP.args[: -len(_SCALARS)], Arg("taken", "uint32", ("blocks",), "inout"), *_SCALARS),
    pack=_pack_stolen,
    reference=_gemm_stolen,
)


def _pack_sm90(logical: Arrays) -> Arrays:
    """Pack the weight in strips; of every token the pairs, then the bytes."""
    x: BlockRows = logical["x"]
    return {
        "strips": atom.pack_comet_strips(logical["w"], x.int8),
        "x": atom.join_blocks(x),
        "x_scale": atom.pad_scales(x.scale),
        **bias_of(logical),
    }


SM90 = replace(
    NAIVE,
    name="gemm_w4ax_sm90",
    summary="COMET's numbers on Hopper: INT4 activations travel packed, and become s8 for wgmma (COMET §4)",
    args=(
        Arg("strips", "uint8", ("ceil_div(N, 16)", f"(K4 + K8)//128*{strip_bytes(128, 0, 128)}")),
        Arg("x", "uint8", ("M", "K4//2 + K8"), "tma", box=(TOKENS, "64"), swizzle=64),
        Arg("x_scale", "float16", ("M", _SCALES), "tma", box=(TOKENS, "8")),
        *output_args(FLOATS, "K4", "K8"),
    ),
    launch=partial(w4a4_tiles.launch, w4a4_tiles.W4AX),
    choose=lambda s: {**w4a4_tiles.choose(w4a4_tiles.W4AX, s, s["K4"] + s["K8"]), "OUT": F32},
    pack=_pack_sm90,
    arch="sm_90a",
    exact_arch=True,
    after_wait=("x", "x_scale"),
)
SPECS = (NAIVE, INORDER, REMAP, COMET, STEAL, SM90)
