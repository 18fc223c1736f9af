"""The family's calls: from the floats of any array library to what `gemm_w4a8` takes, in one launch each."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import F32
from ptxlab.io.dynamo import break_graph
from ptxlab.lowbit import quant, reference
from ptxlab.lowbit.kernels.options import document_options
from ptxlab.lowbit.kernels.quantize.call import Fitted, Quantizer, matrix_shape
from ptxlab.lowbit.kernels.quantize.gated import SILU_MUL, SILU_MUL_BLOCK
from ptxlab.lowbit.kernels.quantize.options import GateOptions, NormOptions, QuantizeOptions
from ptxlab.lowbit.kernels.quantize.rmsnorm import RMSNORM, RMSNORM_BLOCK, normalize_rows
from ptxlab.lowbit.kernels.quantize.specs import QUANTIZE
from ptxlab.lowbit.layout import PackedActivations
from ptxlab.lowbit.quant.inputs import extremes, row_scales
from ptxlab.spec.dtypes import round_to_dtype


@break_graph
@document_options(QuantizeOptions)
def quantize_activations(
    x: Any,
    *,
    layout: str = "row_major",
    rows: int | None = None,
    out: PackedActivations | None = None,
    backend: str | None = None,
    programmatic: bool = False,
) -> PackedActivations:
    """Quantise each token to symmetric INT8 (QServe §6.1), and sum its integers.

    scale is max|x| / 127, and x_q is x / scale, rounded half to even.

    On the GPU a call only enqueues, on the caller's stream, and nothing looks at the values: a token with a NaN or an
    infinity gets a scale that is not finite, and one below 1.5e-36 counts as zeros. On the host both are refused. A
    token of zeros has scale 1.

    Args:
        x: [M, K], K a multiple of 32, of float16, bfloat16 (also as its bits, uint16) or float32; NumPy, CuPy, PyTorch
            or JAX: the results are of the same kind.
        out: activations of the same M, K, layout and rows to write into; needed while a CUDA graph is captured.
        {options}

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched. On the host also for NaN, infinity,
            or a token whose scale is not a normal float32, with the place of the first.
        UnavailableError: no GPU backend here, or one below sm_80.
    """
    return _QUANTIZE(QuantizeOptions.of(backend, programmatic, layout, rows), {"x": x}, out)


@break_graph
@document_options(NormOptions)
def rmsnorm_quantize(
    x: Any,
    gamma: Any,
    *,
    residual: Any = None,
    eps: float = 1e-5,
    layout: str = "row_major",
    rows: int | None = None,
    normed: Any = None,
    out: PackedActivations | None = None,
    backend: str | None = None,
    programmatic: bool = False,
) -> PackedActivations:
    """Add a residual, apply RMSNorm and quantise as `quantize_activations`, in one launch.

    RMSNorm is y = v / sqrt(mean(v²) + eps) · gamma in float32.

    v is x, or with a residual the sum of both, rounded to their dtype, which replaces the residual. y is not rounded
    before it is quantised. The bits of a row do not depend on the batch or on the layout.

    Args:
        x: [M, K], K a multiple of 32 up to 32768, of float16 or bfloat16 (also as its bits, uint16); NumPy, CuPy,
            PyTorch or JAX: the results are of the same kind.
        gamma: [K], of x's dtype. No kernel that may still run writes it: it is read ahead of the wait.
        residual: like x, updated in place, or None.
        normed: like x, for y rounded to x's dtype (routers and LM heads read it), or None.
        out: as `quantize_activations` takes it. No two of x, residual and normed may share memory.
        {options}

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched. On the host also for NaN, infinity,
            or a row of y whose scale is not a normal float32. On the GPU such a row gets a scale that is not finite, or
            counts as zeros.
        UnavailableError: no GPU backend here, or one below sm_80.
    """
    options = NormOptions.of(backend, programmatic, layout, rows, eps)
    return _RMSNORM(options, normed_arrays(x, gamma, residual, normed), out)


@break_graph
@document_options(GateOptions)
def silu_mul_quantize(
    gate_up: Any,
    *,
    activation: str = "silu",
    layout: str = "row_major",
    rows: int | None = None,
    out: PackedActivations | None = None,
    backend: str | None = None,
    programmatic: bool = False,
) -> PackedActivations:
    """Apply the gate of an FFN and quantise as `quantize_activations`, in one launch.

    The gate is h = act(gate) · up in float32, then h is quantised to INT8.

    h has a relative error of 2^-20, and of 2^-22 more per unit of -gate (gelu_tanh: of its exponent) where that is
    positive; above 87, h is 0. h is not rounded before it is quantised. The bits of a row do not depend on the batch or
    on the layout.

    Args:
        gate_up: [M, 2·K], gate in the first K columns and up in the others, K a multiple of 32 up to 32768, of float16
            or bfloat16 (also as its bits, uint16); NumPy, CuPy, PyTorch or JAX: the results are of the same kind.
        out: as `quantize_activations` takes it.
        {options}

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched. On the host also for NaN, infinity,
            or a row of h whose scale is not a normal float32. On the GPU such a row gets a scale that is not finite, or
            counts as zeros.
        UnavailableError: no GPU backend here, or one below sm_80.
    """
    return _SILU_MUL(GateOptions.of(backend, programmatic, layout, rows, activation), {"gate_up": gate_up}, out)


def normed_arrays(x: Any, gamma: Any, residual: Any, normed: Any) -> dict[str, Any]:
    """Return the floats of an RMSNorm by the kernel's names, without those that are None."""
    beside_x = {"residual": residual, "normed": normed}
    return {"x": x, **{name: array for name, array in beside_x.items() if array is not None}, "gamma": gamma}


def fit_plain(name: str, arrays: Mapping[str, Any], options: Any) -> Fitted:
    """Return the sizes of x alone; raises ArgumentError where that is no matrix."""
    shape = matrix_shape(name, "x", arrays["x"])
    return Fitted(*shape, {"x": shape})


def fit_normed(name: str, arrays: Mapping[str, Any], options: Any) -> Fitted:
    """Return the sizes of an RMSNorm of these arrays; raises ArgumentError for x that is no matrix."""
    shape = matrix_shape(name, "x", arrays["x"])
    shapes = {array_name: shape for array_name in ("x", "residual", "normed") if array_name in arrays} | {
        "gamma": shape[1:]
    }
    flags = {"added": int("residual" in arrays), "kept": int("normed" in arrays)}
    return Fitted(*shape, shapes, {**flags, "eps": float(options.eps)})


def fit_gated(name: str, arrays: Mapping[str, Any], options: Any) -> Fitted:
    """Return the sizes of the gate of an FFN; raises ArgumentError for what is no matrix [M, 2·K]."""
    M, width = matrix_shape(name, "gate_up", arrays["gate_up"])
    if width % 2:
        raise ArgumentError(f"{name}: gate_up", "must be a matrix [M, 2·K]", f"shape {(M, width)}")
    activation = reference.ACTIVATIONS.index(options.activation)
    return Fitted(M, width // 2, {"gate_up": (M, width)}, {"activation": activation})


def _check_values(numbers: dict[str, np.ndarray], sizes: Mapping[str, Any]) -> None:
    quant.token_scales(numbers["x"])


def normed_numbers(numbers: dict[str, np.ndarray], sizes: Mapping[str, Any]) -> F32:
    """Compute y f32 of an RMSNorm's inputs; raise ArgumentError if any of them is not finite."""
    for name in ("x", "residual", "gamma"):
        if name in numbers:
            extremes(name, numbers[name])
    v = numbers["x"]
    if "residual" in numbers:
        with np.errstate(over="ignore"):  # what is not finite is refused by name
            v = round_to_dtype(v + numbers["residual"], sizes["dtype"])
        extremes("x + residual", v)
    return normalize_rows(v, numbers["gamma"], sizes["eps"])


def _check_normed(numbers: dict[str, np.ndarray], sizes: Mapping[str, Any]) -> None:
    row_scales("y", np.abs(normed_numbers(numbers, sizes)).max(axis=1), 127)


def gated_numbers(numbers: dict[str, np.ndarray], sizes: Mapping[str, Any]) -> F32:
    """Compute h f32 of the gate of an FFN; raise ArgumentError if an input is not finite."""
    extremes("gate_up", numbers["gate_up"])
    gated: F32 = reference.apply_gate(numbers["gate_up"], reference.ACTIVATIONS[sizes["activation"]]).astype(np.float32)
    return gated


def _check_gated(numbers: dict[str, np.ndarray], sizes: Mapping[str, Any]) -> None:
    row_scales("h", np.abs(gated_numbers(numbers, sizes)).max(axis=1), 127)


_QUANTIZE = Quantizer("quantize_activations", (QUANTIZE,), fit_plain, _check_values)
_RMSNORM = Quantizer(
    "rmsnorm_quantize", (RMSNORM, RMSNORM_BLOCK), fit_normed, _check_normed, disjoint=("x", "residual", "normed")
)
_SILU_MUL = Quantizer("silu_mul_quantize", (SILU_MUL, SILU_MUL_BLOCK), fit_gated, _check_gated, parts=2)
