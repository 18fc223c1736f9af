"""`gemm_w8a8`: 8-bit weights and activations on any array library, in eager calls and in CUDA graphs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ptxlab.errors import ArgumentError
from ptxlab.io.dynamo import break_graph
from ptxlab.lowbit.kernels.gemm.options import IntegerProductOptions, require_scale, resolve_dtype
from ptxlab.lowbit.kernels.gemm.w8a8 import W8A8, W8A8_SM80
from ptxlab.lowbit.kernels.operation import CallArray, Operation
from ptxlab.lowbit.kernels.options import document_options
from ptxlab.lowbit.kernels.spec_call import SpecCall, choose_spec
from ptxlab.lowbit.layout import PackedActivations
from ptxlab.lowbit.quant import Level1Weight
from ptxlab.validate import shape_of

NAME = "gemm_w8a8"


@break_graph
@document_options(IntegerProductOptions)
def gemm_w8a8(
    x: PackedActivations,
    weight: Level1Weight,
    *,
    bias: Any = None,
    out: Any = None,
    out_dtype: Any = None,
    backend: str | None = None,
    programmatic: bool = False,
) -> Any:
    """Compute Y = X Wᵀ of INT8 activations and weights: exact integers, scaled once.

    A row's bits depend on that row alone.

    On the GPU a call only enqueues, on the caller's stream; after the first call of a shape it allocates nothing but
    the result, if `out` does not provide that.

    Args:
        x: activations [M, K], M >= 0, row-major. Arrays of NumPy, CuPy, PyTorch or JAX: the result is of the same kind.
        weight: s8 [N, K] with a scale per row, where the activations are, on the host or on the GPU.
        bias: f32 [N] or None.
        out: [M, N] to write into; it is what is returned.
        {options}

    Returns:
        Y [M, N].

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched.
        UnavailableError: the kernel does not run here.
    """
    options = IntegerProductOptions.of(backend, programmatic, out_dtype)
    if not isinstance(weight, Level1Weight):
        raise ArgumentError(f"{NAME}: weight", "must be a Level1Weight (quant.quantize_level1)", type(weight).__name__)
    if not isinstance(x, PackedActivations) or x.layout != "row_major":
        got = x.layout if isinstance(x, PackedActivations) else type(x).__name__
        raise ArgumentError(f"{NAME}: x", "must be row-major PackedActivations (ptxlab.quantize_activations)", got)
    arrays = {"x": x.x_q, "x_scale": x.scale, "w": weight.q8, "w_scale": weight.scale, "bias": bias, "y": out}

    outputs = _GEMM(options, x.description, arrays, x, weight)
    return outputs["y"] if out is None else out


def _check(
    options: IntegerProductOptions, arrays: Mapping[str, Any], x: PackedActivations, weight: Level1Weight
) -> SpecCall:
    """Build the call; raise ArgumentError for operands that do not fit together."""
    N, K = shape_of(weight.q8)
    if x.K != K:
        raise ArgumentError(f"{NAME}: x", f"K must be {K} as the weight's", x.K)
    dtype = resolve_dtype(NAME, options, arrays["y"])
    require_scale(NAME, x.scale, dtype)
    operands = [
        CallArray("w", f"{NAME}: weight", weight.q8, "int8", (N, K)),
        CallArray("w_scale", f"{NAME}: weight's scale", weight.scale, "float32", (N,)),
        CallArray("x", f"{NAME}: x", x.x_q, "int8", (x.M, K)),
        CallArray("x_scale", f"{NAME}: x's scale", x.scale, "float32", (x.M,)),
        CallArray("y", f"{NAME}: out", arrays["y"], dtype, (x.M, N)),
    ]
    if arrays["bias"] is not None:
        operands.append(CallArray("bias", f"{NAME}: bias", arrays["bias"], "float32", (N,)))
    sizes = {"M": x.M, "N": N, "K": K}
    spec = choose_spec((W8A8, W8A8_SM80), sizes, options.backend)
    return SpecCall(NAME, (spec,), tuple(operands), sizes, dtype, replace(options, out_dtype=dtype))


_GEMM = Operation(NAME, _check, SpecCall.prepare, SpecCall.on_host)
