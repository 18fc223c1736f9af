"""W8A8. On Hopper it is the sibling of gemm_w4a8_sm90 that has nothing to dequantise, for what dequantisation costs; on
other GPUs a loop on mma.sync, for INT8 LM heads."""

import numpy as np

from ptxlab.lowbit.kernels.gemm import strips_tiles, w4a4, w8a8_tiles
from ptxlab.lowbit.kernels.gemm.common import EPILOGUE, INT32, SUM_PAD, draw_activations, gemm_plain, pack_plain
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch, Sizes, sizes_rows


def _choose(s: Sizes) -> dict[str, int]:
    return {**w8a8_tiles.choose(s).constants, "OUT": INT32}


def _launch(s: Sizes) -> Launch:
    """Return the launch of persistent blocks, or of a cluster per tile if K is split."""
    tile, split = w8a8_tiles.W8A8Tile(*(s[name] for name in w8a8_tiles.W8A8Tile._fields)), s["SPLIT"]
    tiles = w8a8_tiles.count_tiles(s, tile)
    blocks = tiles * split if split > 1 else min(tiles, strips_tiles.SMS)
    shared_memory = w8a8_tiles.shared_bytes(tile, s["STAGES"], split)
    return Launch((blocks, 1, 1), (128 * (tile.WN + 1), 1, 1), shared_memory, (split, 1, 1))


def _example(rng: np.random.Generator, *, M: int, N: int, K: int) -> Arrays:
    """Draw random bytes."""
    w_scale = rng.uniform(1e-3, 1e-2, N).astype(np.float32)
    return {"w": rng.integers(-128, 128, (N, K), np.int8), "w_scale": w_scale, **draw_activations(rng, M, N, K)}


W8A8 = KernelSpec(
    name="gemm_w8a8_sm90",
    summary="8-bit weights: wgmma from shared memory, nothing to dequantise: what W4A8 is measured against",
    args=(
        Arg("w", "int8", ("N", "K"), "tma", box=("64*WN", "128"), swizzle=128),
        Arg("w_scale", "float32", ("N",)),
        Arg("x", "int8", ("M", "K"), "tma", box=("ceil_div(ceil_div(M, ceil_div(M, BM)), 8)*8", "128"), swizzle=128),
        *EPILOGUE,
    ),
    launch=_launch,
    choose=_choose,
    rules=("K % 16 == 0", "N % 8 == 0", "1 <= K < 131072", "M*N < 2**31"),
    operations="2*M*N*K",
    example=_example,
    pack=pack_plain,
    reference=gemm_plain,
    arch="sm_90a",
    exact_arch=True,
    example_sizes=sizes_rows("M N K", (1, 8, 16), (5, 40, 272), (17, 200, 192), (130, 264, 144)),
    after_wait=("x", "x_scale"),
)

W8A8_SM80 = KernelSpec(
    name="gemm_w8a8_sm80",
    summary="8-bit weights on mma.sync: what an INT8 LM head takes before Hopper",
    args=(
        Arg("w", "int8", ("N", "K")),
        Arg("w_scale", "float32", ("N",)),
        Arg("x", "int8", ("M", "K")),
        *EPILOGUE,
    ),
    launch=w4a4.launcher(64, 64),
    choose=lambda sizes: w4a4.choose(sizes, OUT=INT32, SUM_PAD=SUM_PAD),
    rules=W8A8.rules,
    operations=W8A8.operations,
    example=_example,
    pack=pack_plain,
    reference=gemm_plain,
    arch="sm_80",
    example_sizes=W8A8.example_sizes,
)

SPECS = (W8A8, W8A8_SM80)
