"""W4A4 as Atom does it: INT4 on the INT4 tensor cores, then outlier channels in INT8, then a scale per group (Atom §4);
and the same numbers on Hopper, which has no INT4 tensor cores.

K counts the INT4 channels, `outliers` the INT8 channels behind them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit import layout, quant, reference
from ptxlab.lowbit.kernels.gemm import w4a4_tiles
from ptxlab.lowbit.kernels.gemm.common import (
    EPILOGUE,
    F32,
    FLOATS,
    INT32,
    SUM_PAD,
    add_bias_and_round,
    bias_of,
    gemm_plain,
    output_args,
    pack_plain,
)
from ptxlab.lowbit.layout import atom
from ptxlab.lowbit.quant import AtomRows
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch, Sizes, sizes_rows

TOTALS = "sums are exact, and f32 additions have a fixed order: compared for equality"
_ROW = 64  # bytes of a stage


class W4A4Tile(NamedTuple):
    """Rows, a warp per 32, and tokens of a block; warps along the tokens; stages of the ring."""

    BN: int
    BM: int
    WM: int
    STAGES: int


# Up to so many tokens. Atom's code has the last one alone (128 x 128 x 128, eight warps, four stages); the others are
# for fewer tokens, and not measured: GPUs with INT4 tensor cores have not been at hand.
TILES = {16: W4A4Tile(64, 16, 1, 4), 32: W4A4Tile(64, 32, 1, 4), 64: W4A4Tile(128, 64, 1, 4)}
WIDEST = W4A4Tile(128, 128, 2, 4)


def choose(s: Sizes, **constants: int) -> dict[str, int]:
    """Choose the tile for so many tokens; add more constants."""
    return {**next((tile for tokens, tile in TILES.items() if s["M"] <= tokens), WIDEST)._asdict(), **constants}


def launcher(w_bytes: int, x_bytes: int, tail_bytes: int = 0) -> Callable[[Sizes], Launch]:
    """Return a function that makes the launch of one block per BN rows and BM tokens.

    A stage has `w_bytes` bytes of a row of W and `x_bytes` of X; `tail_bytes` bytes of a row lie behind the ring.
    """

    def launch(s: Sizes) -> Launch:
        blocks = ceil_div(s["M"], s["BM"]) * ceil_div(s["N"], s["BN"])
        shared_memory = s["STAGES"] * (s["BN"] * w_bytes + s["BM"] * x_bytes) + (s["BN"] + s["BM"]) * tail_bytes
        return Launch(
            (blocks, 1, 1), (s["BN"] * s["WM"], 1, 1), max(shared_memory, s["BM"] * (s["BN"] + s["SUM_PAD"]) * 4)
        )

    return launch


def _example_s4(rng: np.random.Generator, *, M: int, N: int, K: int) -> Arrays:
    """Draw random nibbles."""
    return {
        "w": rng.integers(-8, 8, (N, K), np.int8),
        "w_scale": rng.uniform(1e-2, 1e-1, N).astype(np.float32),
        "x": rng.integers(-8, 8, (M, K), np.int8),
        "x_scale": rng.uniform(1e-2, 1e-1, M).astype(np.float32),
        "bias": rng.standard_normal(N, dtype=np.float32),
    }


def _pack_s4(logical: Arrays) -> Arrays:
    return pack_plain(logical) | {name: layout.pack_pairs(logical[name]) for name in ("w", "x")}


def example_atom(rng: np.random.Generator, *, M: int, N: int, K: int, outliers: int, g: int | None = None) -> Arrays:
    """Draw random weights and activations and quantise them; outliers are thirty times the rest."""
    size = np.r_[np.ones(K, np.float32), np.full(outliers, 30, np.float32)]
    w = rng.standard_normal((N, K + outliers), dtype=np.float32)
    x = rng.standard_normal((M, K + outliers), dtype=np.float32) * size
    return {
        "w": quant.quantize_atom_weight(w, g, outliers),
        "x": quant.quantize_atom_activations(x, g, outliers),
        "bias": rng.standard_normal(N, dtype=np.float32),
    }


def _pack_atom(logical: Arrays) -> Arrays:
    """Pack both operands as rows."""
    buffers = bias_of(logical)
    for name in ("w", "x"):
        rows: AtomRows = logical[name]
        buffers |= {f"{name}4": layout.pack_pairs(rows.q4), f"{name}8": rows.q8, f"{name}_scale": atom.scale_rows(rows)}
    return buffers


def gemm_atom(
    w: AtomRows, x: AtomRows, bias: np.ndarray | None = None, OUT: int = F32, *, halves: bool = False
) -> np.ndarray:
    """Compute the reference: exact sums of groups and outliers, added up by fma in f32, one after the other.

    With `halves` the product of two scales is rounded to FP16 before, as in Atom's code.
    """
    sums = reference.gemm_group_sums(x.q4, w.q4, x.q8, w.q8, w.group)
    return add_bias_and_round(reference.gemm_add_groups(sums, x.scales, w.scales, halves=halves), bias, OUT)


def _operand(name: str, rows: str, scales: str) -> tuple[Arg, ...]:
    """Return the arguments of a weight or of the activations."""
    return (
        Arg(f"{name}4", "uint8", (rows, "K/2")),
        Arg(f"{name}8", "int8", (rows, "outliers")),
        Arg(f"{name}_scale", "float16", (rows, scales)),
    )


_OUTPUTS = output_args(FLOATS, "K", "outliers")


def _atom(name: str, summary: str, scales: str, **fields: Any) -> KernelSpec:
    return KernelSpec(
        name=name,
        summary=summary,
        args=(*_operand("w", "N", scales), *_operand("x", "M", scales), *_OUTPUTS),
        operations="2*M*N*(K + outliers)",
        example=example_atom,
        pack=_pack_atom,
        reference=gemm_atom,
        arch="sm_80",
        tolerance_reason=TOTALS,
        **fields,
    )


_ATOM_RULES = ("K % 64 == 0", f"outliers in {quant.ATOM_OUTLIERS}", "N % 8 == 0", "1 <= K < 131072", "M*N < 2**31")

S4 = KernelSpec(
    name="gemm_w4a4_s4_sm80",
    summary="both operands INT4: mma.m16n8k64 fed through cp.async and ldmatrix (Atom §5.4.2, pure INT4)",
    args=(
        Arg("w", "uint8", ("N", "K/2")),
        Arg("w_scale", "float32", ("N",)),
        Arg("x", "uint8", ("M", "K/2")),
        *EPILOGUE,
    ),
    launch=launcher(_ROW, _ROW),
    choose=lambda s: choose(s, OUT=INT32, SUM_PAD=SUM_PAD),
    rules=("K % 32 == 0", "N % 8 == 0", "1 <= K < 131072", "M*N < 2**31"),
    operations="2*M*N*K",
    example=_example_s4,
    pack=_pack_s4,
    reference=gemm_plain,
    arch="sm_80",
    example_sizes=sizes_rows("M N K", (1, 8, 32), (5, 40, 256), (17, 72, 224)),
)
OUTLIER = _atom(
    "gemm_w4a4_outlier_sm80",
    "INT4, and outlier channels in INT8 at the end of the same loop (Atom §4.1, mixed precision)",
    "8",
    launch=launcher(_ROW, _ROW, tail_bytes=4),
    choose=lambda s: choose(s, OUT=F32, SUM_PAD=SUM_PAD),
    rules=_ATOM_RULES,
    example_sizes=sizes_rows("M N K outliers", (1, 8, 64, 0), (5, 40, 256, 128), (17, 72, 192, 64)),
)
ATOM = _atom(
    "gemm_w4a4_atom_sm80",
    "INT4 in groups and INT8 outliers: every group's sum is scaled into an f32 accumulator (Atom §4.2, Fig. 8)",
    "ceil_div(K//g + 1, 8)*8",
    launch=launcher(_ROW + 4, _ROW + 4),
    choose=lambda s: choose(s, GROUP=s["g"], HALVES=0, OUT=F32, SUM_PAD=SUM_PAD),
    rules=(f"g in {quant.ATOM_GROUPS}", "K % g == 0", *_ATOM_RULES),
    example_sizes=sizes_rows("M N K outliers g", (1, 8, 64, 0, 64), (5, 40, 256, 128, 128), (17, 72, 192, 64, 64)),
)
ATOM_HALVES = replace(
    ATOM,
    form="halves",
    summary="gemm_w4a4_atom_sm80 as Atom's code has it: the product of two scales is rounded to FP16",
    choose=lambda s: choose(s, GROUP=s["g"], HALVES=1, OUT=F32, SUM_PAD=SUM_PAD),
    reference=partial(gemm_atom, halves=True),
)


def _pack_sm90(logical: Arrays) -> Arrays:
    """Pack the weight in strips, the activations as bytes."""
    x: AtomRows = logical["x"]
    return {
        "strips": layout.pack_atom_strips(logical["w"]),
        "x": np.concatenate([x.q4, x.q8], axis=1),
        "x_scale": atom.scale_rows(x),
        **bias_of(logical),
    }


_STRIP = f"ceil_div(K, 128)*(1024 + 128//g*32) + min(outliers, 1)*{atom.OUTLIER_BYTES}"
TOKENS = "ceil_div(ceil_div(M, ceil_div(M, BM)), 8)*8"  # of a tile
SM90 = KernelSpec(
    name="gemm_w4a4_sm90",
    summary="Atom's numbers on Hopper: INT4 as s8 under wgmma, scales on sums that begin at 1.5 * 2^23 (Atom §4)",
    args=(
        Arg("strips", "uint8", ("ceil_div(N, 16)", _STRIP)),
        Arg("x", "int8", ("M", "K + outliers"), "tma", box=(TOKENS, "128"), swizzle=128),
        Arg("x_scale", "float16", ("M", "ceil_div(K//g + 1, 8)*8"), "tma", box=(TOKENS, "8")),
        *_OUTPUTS,
    ),
    launch=partial(w4a4_tiles.launch, w4a4_tiles.W4A4),
    choose=lambda s: {
        **w4a4_tiles.choose(w4a4_tiles.W4A4, s, s["K"] + s["outliers"]),
        "GROUP": s["g"],
        "OUT": F32,
    },
    rules=ATOM.rules,
    operations=ATOM.operations,
    example=example_atom,
    pack=_pack_sm90,
    reference=gemm_atom,
    arch="sm_90a",
    exact_arch=True,
    tolerance_reason=TOTALS,
    example_sizes=ATOM.example_sizes,
    after_wait=("x", "x_scale"),
)
SPECS = (S4, OUTLIER, ATOM, SM90)
