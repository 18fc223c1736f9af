"""`silu_mul_quantize`: the gate of an FFN and INT8, of a row that is read once."""

from typing import Any

import numpy as np

from ptxlab.lowbit import reference
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
from ptxlab.lowbit.quant import QuantizedActivations
from ptxlab.lowbit.reference.attention import F64
from ptxlab.spec import Arg, Arrays, KernelSpec, Sizes, sizes_rows
from ptxlab.spec.dtypes import ByVariant, round_to_dtype


def _choose(sizes: Sizes) -> dict[str, int]:
    constants = {"IN": 0, **layout_of(sizes), "ACTIVATION": int(sizes["activation"])}
    return constants | row_geometry(int(sizes["K"])) | {"CHUNKS": 1}


def _example(rng: np.random.Generator, *, M: int, K: int, rows: int, span: int, activation: int) -> Arrays:
    """Draw gate and up, whose product is stored in tiles of `rows` tokens and `span` channels."""
    gate_up = draw_activations(rng, M, 2 * K)
    return {"gate_up": gate_up, "rows": rows, "span": span, "activation": activation}


def silu_mul_quantize_reference(
    gate_up: np.ndarray, rows: int, span: int, activation: int, IN: int = 0
) -> tuple[np.ndarray, ...]:
    """Compute the reference, in f64, of gate_up f32 [M, 2 K] as IN stores it: x_q, scale, token_sum."""
    quotient, scale, _ = _quotients(gate_up, activation, IN)
    return _pack_results(np.rint(quotient), scale, rows, span)


def error_bound(gate_up: np.ndarray, rows: int, span: int, activation: int, IN: int = 0) -> tuple[np.ndarray, ...]:
    """Bound the error of the results: x_q one step where the quotient is as near to a tie as its own error, else 0."""
    quotient, scale, relative = _quotients(gate_up, activation, IN)
    scale_error = (np.abs(quotient) * relative).max(axis=1) / 127 + 2.0**-23
    quotient_error = np.abs(quotient) * (relative + scale_error[:, None] + 2.0**-23) + 2.0**-100
    is_near_tie = np.abs(np.abs(quotient) % 1 - 0.5) <= quotient_error
    return _pack_results(is_near_tie, scale * scale_error, rows, span)


def _pack_results(q: np.ndarray, scale: Any, rows: int, span: int) -> tuple[np.ndarray, ...]:
    """Pack q, or its errors, in the order of `span`, with a scale f64, and their sums."""
    return pack_results(QuantizedActivations(q.astype(np.int8), scale, q.sum(axis=1)), rows, span)


def _quotients(gate_up: np.ndarray, activation: int, IN: int) -> tuple[F64, F64, F64]:
    """Compute h / scale [M, K], scale [M], and the relative error [M, K] that h may have, all f64."""
    gated, relative = compute_gate(gate_up, activation, IN)
    extent = np.abs(gated).max(axis=1)
    scale = np.where(extent < 127 * 2.0**-126, 1.0, extent / 127)
    return gated / scale[:, None], scale, relative


def compute_gate(gate_up: np.ndarray, activation: int, IN: int) -> tuple[F64, F64]:
    """Compute h [M, K], and the relative error [M, K] that it may have (the kernel's header), f64."""
    name, x = reference.ACTIVATIONS[activation], round_to_dtype(gate_up, DTYPES[IN])
    gated = reference.apply_gate(x, name)
    exponents = reference.exponent(x[:, : gated.shape[1]].astype(np.float64), name)
    return gated, 2.0**-20 + 2.0**-22 * np.maximum(exponents, 0)


SILU_MUL = KernelSpec(
    name="silu_mul_quantize",
    summary="SiLU or GELU of the gate times up, and per-token INT8 with token sums in one pass (QServe Fig. 11)",
    args=(Arg("gate_up", ByVariant("IN", DTYPES[:2]), ("M", "2*K")), *PACKED),
    launch=row_launch,
    choose=_choose,
    rules=(*FUSED_RULES, "activation in (0, 1)"),
    example=_example,
    pack=lambda logical: {"gate_up": logical["gate_up"]},
    reference=silu_mul_quantize_reference,
    arch="sm_90",
    bound=error_bound,
    tolerance_reason="exp and reciprocal are approximate: h has a relative error of 2^-20 and 2^-22 per unit of a "
    "positive exponent, which may change x_q by one step near a tie alone",
    example_sizes=sizes_rows(
        "M K rows span activation",
        (1, 32, 1, 32, 0),
        (3, 512, 1, 32, 1),
        (2, 8224, 1, 32, 0),
        (3, 96, 8, 64, 0),
        (5, 160, 16, 128, 1),
        (2, 16512, 8, 128, 0),
    ),
    after_wait=("gate_up",),
)
SILU_MUL_BLOCK = one_block_form(SILU_MUL, block_geometry)
