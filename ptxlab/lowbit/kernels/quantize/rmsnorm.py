"""`rmsnorm_quantize`: residual add, RMSNorm and INT8 of a row that is read once."""

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.hardware.words import F32
from ptxlab.lowbit import quant
from ptxlab.lowbit.kernels.quantize.specs import (
    DTYPES,
    FUSED_RULES,
    PACKED,
    block_geometry,
    draw_activations,
    layout_of,
    one_block_form,
    pack_results,
    row_geometry,
    row_launch,
)
from ptxlab.spec import Arg, Arrays, KernelSpec, Sizes, sizes_rows
from ptxlab.spec.dtypes import ByVariant, convert_to_dtype, round_to_dtype

_FLOAT = ByVariant("IN", DTYPES[:2])


def normalize_rows(v: F32, gamma: F32, eps: float) -> F32:
    """Compute v · gamma / sqrt(mean(v²) + eps) of every row of v f32 [M, K], in the kernel's order: its bits.

    v and gamma f32 [K] are what f16 or bf16 hold: products of two are exact then, but for those of bf16 below 2^-126.
    A thread adds its 16 squares one after the other, a warp by halves; words of warps likewise, 32 apart at first.
    """
    inverse_width = np.float32(1) / np.float32(v.shape[1])
    factor = np.float32(1) / np.sqrt(_squares(v) * inverse_width + np.float32(eps))
    y: F32 = (v * gamma) * factor[:, None]
    return y


def _squares(v: F32) -> F32:
    """Sum the squares of every row of v f32 [M, K], f32 [M]."""
    (M, K), geometry = v.shape, row_geometry(v.shape[1])
    threads = geometry["THREADS"] * geometry["CLUSTER"]
    squares = np.zeros((M, 16 * threads), np.float32)
    squares[:, :K] = v * v
    thread_sums = sum_in_order(squares.reshape(M, threads, 16), axis=2)
    warp_sums = sum_by_halves(thread_sums.reshape(M, threads // 32, 32))
    words = np.zeros((M, ceil_div(threads, 1024), 32), np.float32)
    words.reshape(M, -1)[:, : threads // 32] = warp_sums
    return sum_by_halves(sum_in_order(words, axis=1))


def sum_in_order(x: F32, axis: int) -> F32:
    """Sum along an axis, from its first element on."""
    total: F32 = np.zeros_like(x.take(0, axis))
    for i in range(x.shape[axis]):
        total = total + x.take(i, axis)
    return total


def sum_by_halves(x: F32) -> F32:
    """Sum the last axis of 32 as lanes add by shuffles: the upper half to the lower one, and so on."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def _choose(sizes: Sizes) -> dict[str, int]:
    constants = {"IN": 0, **layout_of(sizes), "RESIDUAL": int(sizes["added"]), "NORMED": int(sizes["kept"])}
    return constants | row_geometry(int(sizes["K"])) | {"CHUNKS": 1}


def _example(
    rng: np.random.Generator, *, M: int, K: int, rows: int, span: int, added: int, kept: int, eps: float
) -> Arrays:
    """Draw activations with outlier channels, and a token of zeros, also where a residual is added."""
    residual = draw_activations(rng, M, K)[: added * M]
    gamma = rng.uniform(0.5, 2, K).astype(np.float32)
    return {
        "x": draw_activations(rng, M, K),
        "residual": residual,
        "gamma": gamma,
        "eps": eps,
        "rows": rows,
        "span": span,
        "kept": kept,
    }


def rmsnorm_quantize_reference(
    x: F32, residual: F32, gamma: F32, eps: float, rows: int, span: int, kept: int, IN: int = 0
) -> tuple[np.ndarray, ...]:
    """Compute the reference of f32 [M, K] as IN stores them.

    Returns residual and y as IN stores them, or nothing, then x_q, scale and token_sum of y.
    """
    dtype = DTYPES[IN]
    v = round_to_dtype(x, dtype)
    if len(residual):
        v = residual = round_to_dtype(v + round_to_dtype(residual, dtype), dtype)
    y = normalize_rows(v, round_to_dtype(gamma, dtype), eps)
    quantized_rows = pack_results(quant.quantize_activations(y), rows, span)
    return convert_to_dtype(residual, dtype), convert_to_dtype(y[: kept * len(y)], dtype), *quantized_rows


RMSNORM = KernelSpec(
    name="rmsnorm_quantize",
    summary="residual add, RMSNorm and per-token INT8 with token sums in one pass over a row (QServe Fig. 11)",
    args=(
        Arg("x", _FLOAT, ("M", "K")),
        Arg("residual", _FLOAT, ("added*M", "K"), "inout"),
        Arg("gamma", _FLOAT, ("K",)),
        Arg("normed", _FLOAT, ("kept*M", "K"), "out"),
        *PACKED,
        Arg("eps", "float32", role="scalar"),
    ),
    launch=row_launch,
    choose=_choose,
    rules=(*FUSED_RULES, "added in (0, 1)", "kept in (0, 1)", "1e-30 <= eps <= 1"),
    example=_example,
    pack=lambda logical: {name: logical[name] for name in ("x", "residual", "gamma")},
    reference=rmsnorm_quantize_reference,
    arch="sm_90",
    tolerance_reason="every operation is IEEE's, and the reference adds in the kernel's order",
    example_sizes=sizes_rows(  # every order and choice; rows of one thread, one warp, a block, clusters of 2 and 4
        "M K rows span added kept eps",
        (1, 32, 1, 32, 0, 0, 1e-5),
        (3, 512, 1, 32, 1, 1, 1e-5),
        (2, 8224, 1, 32, 1, 0, 1e-5),
        (3, 96, 8, 64, 1, 1, 1e-5),
        (9, 1088, 8, 64, 0, 1, 1e-5),
        (5, 160, 16, 128, 1, 0, 1e-5),
        (2, 16512, 8, 128, 1, 1, 1e-5),
    ),
    after_wait=("x", "residual"),
    batch_sizes={"M": 64, "K": 8224, "rows": 1, "span": 32, "added": 1, "kept": 1, "eps": 1e-5},
)
RMSNORM_BLOCK = one_block_form(RMSNORM, block_geometry)
