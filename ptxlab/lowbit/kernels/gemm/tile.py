"""The main loop of one warp in hand-written PTX, for reading and for the emulator's lane check (LiquidGEMM §4)."""

import numpy as np

from ptxlab.lowbit import layout
from ptxlab.lowbit.kernels.gemm.common import GROUPS, QSERVE, example_lqq, gemm
from ptxlab.lowbit.quant import LQQWeight
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch, Sizes, sizes_rows


def _launch(sizes: Sizes) -> Launch:
    """Return the launch of one warp per 16 rows and 8 tokens."""
    return Launch((sizes["N"] // 16, sizes["M"] // 8, 1), (32, 1, 1))


def _pack(logical: Arrays) -> Arrays:
    """Pack the weight in QServe's order, the activations in fragment order."""
    buffers = layout.pack(logical["weight"], "qserve", unchecked=True).buffers  # a test shows what overflow does
    weight = {name: buffers[name] for name in ("qweight", "scale", "offset")}
    return {**weight, "x": layout.to_fragment_order(logical["x"])}


def _example(rng: np.random.Generator, *, M: int, N: int, K: int, g: int) -> Arrays:
    logical = example_lqq(rng, M=M, N=N, K=K, g=g)
    return {name: logical[name] for name in ("weight", "x")}


def _reference(weight: LQQWeight, x: np.ndarray) -> np.ndarray:
    return gemm(weight, x)


TILE = KernelSpec(
    name="gemm_tile_lqq_sm80",
    summary="one warp's main loop: LiquidQuant's mad and xor feed mma.sync, to be read (LiquidGEMM §4)",
    args=(
        *QSERVE,
        Arg("x", "int8", ("K/64", "M/8", "512")),
        Arg("y", "int32", ("M", "N"), "out"),
        Arg("N", "uint32", role="scalar"),
        Arg("K", "uint32", role="scalar"),
        Arg("shift", "uint32", role="scalar", value="log2(g/32)"),
    ),
    launch=_launch,
    rules=(
        f"g in {GROUPS}",
        "K % g == 0",
        "K % 64 == 0",
        "N % 16 == 0",
        "M % 8 == 0",
        "1 <= K < 131072",
        "N*K < 2**31",
        "M < 2**19",
    ),
    value_rules=("scale >= 1", "scale <= 16"),
    operations="2*M*N*K",
    example=_example,
    pack=_pack,
    reference=_reference,
    arch="sm_80",
    example_sizes=sizes_rows("M N K g", (8, 16, 64, 32), (8, 48, 256, 128), (24, 64, 192, 64)),
)
SPECS = (TILE,)
