"""`gemm_w8a8`: 8-bit weights and activations on any array library, in eager calls and in CUDA graphs."""

from typing import Any

from ptxlab.errors import ArgumentError
from ptxlab.lowbit.kernels.gemm.api import output_dtype
from ptxlab.lowbit.kernels.gemm.w8a8 import W8A8
from ptxlab.lowbit.kernels.operation import CallArray, Operation
from ptxlab.lowbit.kernels.spec_call import SpecCall
from ptxlab.lowbit.layout import PackedActivations
from ptxlab.lowbit.quant import Level1Weight
from ptxlab.validate import shape_of

NAME = "gemm_w8a8"


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
    """Y = X Wᵀ of INT8 activations and weights: exact integers, scaled once. A row's bits depend on that row alone.

    On the GPU a call only enqueues, on the caller's stream; after the first call of a shape it allocates nothing but
    the result, if `out` does not provide that.

    Args:
        x: activations [M, K], M >= 0, row-major. Arrays of NumPy, CuPy, PyTorch or JAX: the result is of the same kind.
        weight: s8 [N, K] with a scale per row, where the activations are, on the host or on the GPU.
        bias: f32 [N] or None.
        out: [M, N] to write into; it is what is returned.
        out_dtype: `float16`, `bfloat16`, `float32`, or `int32` for the accumulators; by default that of `out`, else
            float16. NumPy and CuPy have no bfloat16: they get its bits, uint16.
        backend: `gpu` or `emulator`; by default the GPU where one will do. Host arrays are copied there and back.
        programmatic: the call may begin before the kernel before it on the stream has ended, for which it waits by
            itself before it reads activations or writes the output; weight and bias it reads at once. Of no effect on
            host arrays.

    Returns:
        Y [M, N].

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched.
        UnavailableError: the kernel does not run here.
    """
    if not isinstance(weight, Level1Weight):
        raise ArgumentError(f"{NAME}: weight", "must be a Level1Weight (quant.quantize_level1)", type(weight).__name__)
    if not isinstance(x, PackedActivations) or x.layout != "row_major":
        got = x.layout if isinstance(x, PackedActivations) else type(x).__name__
        raise ArgumentError(f"{NAME}: x", "must be row-major PackedActivations (ptxlab.quantize_activations)", got)
    arrays = {"x": x.x_q, "x_scale": x.scale, "w": weight.q8, "w_scale": weight.scale, "bias": bias, "y": out}

    def check() -> SpecCall:
        N, K = shape_of(weight.q8)
        if x.K != K:
            raise ArgumentError(f"{NAME}: x", f"K must be {K} as the weight's", x.K)
        dtype = output_dtype(NAME, out_dtype, out, x.scale)
        operands = [
            CallArray("w", f"{NAME}: weight", weight.q8, "int8", (N, K)),
            CallArray("w_scale", f"{NAME}: weight's scale", weight.scale, "float32", (N,)),
            CallArray("x", f"{NAME}: x", x.x_q, "int8", (x.M, K)),
            CallArray("x_scale", f"{NAME}: x's scale", x.scale, "float32", (x.M,)),
            CallArray("y", f"{NAME}: out", out, dtype, (x.M, N)),
        ]
        if bias is not None:
            operands.append(CallArray("bias", f"{NAME}: bias", bias, "float32", (N,)))
        return SpecCall(NAME, (W8A8,), tuple(operands), {"M": x.M, "N": N, "K": K}, dtype, backend, programmatic)

    made = _GEMM((x.M, x.K, out_dtype, backend, programmatic), arrays, check)
    return made["y"] if out is None else out


_GEMM = Operation(NAME, SpecCall.prepare, SpecCall.on_host)
