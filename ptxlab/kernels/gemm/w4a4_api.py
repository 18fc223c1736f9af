"""`gemm_w4a4`: Atom's W4A4 on any array library, in eager calls and in CUDA graphs."""

from typing import Any

from ptxlab.errors import ArgumentError
from ptxlab.kernels.gemm.common import FLOATS
from ptxlab.kernels.gemm.w4a4 import ATOM, SM90
from ptxlab.kernels.operation import CallArray, Operation, dtype_of
from ptxlab.kernels.spec_call import SpecCall
from ptxlab.layout import ATOM_ORDERS, AtomActivations, AtomWeight
from ptxlab.layout.atom_operands import activation_shapes
from ptxlab.spec.dtypes import name_of

NAME = "gemm_w4a4"
_SPECS = {"strips": SM90, "rows": ATOM}  # by the weight's layout
_NAMES = {  # the specs' of the activations' arrays
    "strips": {"x": "x", "scale": "x_scale"},
    "rows": {"x": "x4", "x8": "x8", "scale": "x_scale"},
}


def gemm_w4a4(
    x: AtomActivations,
    weight: AtomWeight,
    *,
    bias: Any = None,
    out: Any = None,
    out_dtype: Any = None,
    backend: str | None = None,
    programmatic: bool = False,
) -> Any:
    """Y = X Wᵀ, both in INT4 with a scale per row and group, outlier channels in INT8 (Atom §4).

    Sums of a group are exact; they are scaled and added in float32, one group after the other: the same bits on every
    GPU and in the emulator. The weight's layout decides the kernel: `strips` gemm_w4a4_sm90, `rows`
    gemm_w4a4_atom_sm80. On the GPU a call only enqueues, on the caller's stream; after the first call of a shape it
    allocates nothing but the result, if `out` does not provide that.

    Args:
        x: activations [M, K + outliers], M >= 0, in the channels' order of the weight: `bytes` for strips, `pairs` for
            rows. Arrays of NumPy, CuPy, PyTorch or JAX: the result is of the same kind.
        weight: [N, K + outliers], where the activations are, on the host or on the GPU (`ptxlab.to_device`).
        bias: f32 [N] or None.
        out: [M, N] to write into; it is what is returned.
        out_dtype: `float16`, `bfloat16` or `float32`, by name, or as a dtype of NumPy, PyTorch or JAX; by default that
            of `out`, else float16. NumPy and CuPy have no bfloat16: they get its bits, uint16.
        backend: `gpu` or `emulator`; by default the GPU where one will do. Host arrays are copied there and back.
        programmatic: the call may begin before the kernel before it on the stream has ended, for which it waits by
            itself before it reads activations or writes the output; weight and bias it reads at once. For weights in
            strips alone; of no effect on host arrays.

    Returns:
        Y [M, N].

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched.
        UnavailableError: the weight's kernel does not run here.
    """
    if not isinstance(weight, AtomWeight):
        raise ArgumentError(f"{NAME}: weight", "must be an AtomWeight (layout.pack_atom)", type(weight).__name__)
    if not isinstance(x, AtomActivations):
        rule = "must be AtomActivations (ptxlab.reorder_quantize)"
        raise ArgumentError(f"{NAME}: x", rule, type(x).__name__)
    names = _NAMES[weight.layout]
    given = {names[name]: array for name, array in x.arrays.items() if name in names}
    channels = weight.K, weight.outliers, weight.group

    def check() -> SpecCall:
        order = ATOM_ORDERS[weight.layout]
        if x.layout != order:
            raise ArgumentError(f"{NAME}: x", f"must be {order} for a weight in {weight.layout}", x.layout)
        if (x.K, x.outliers, x.group) != channels:
            said = ("K={}, outliers={}, group={}".format(*each) for each in (channels, (x.K, x.outliers, x.group)))
            raise ArgumentError(f"{NAME}: x", f"must have {next(said)} as the weight has", next(said))
        dtype = _output_dtype(out_dtype, out)
        spec, sizes = _SPECS[weight.layout], {"M": x.M, "N": weight.N, "K": x.K, "outliers": x.outliers, "g": x.group}
        if programmatic is True and not spec.after_wait:
            raise ArgumentError(f"{NAME}: programmatic", f"only for {SM90.name}, which waits", spec.name)
        operands = [
            CallArray(names[name], f"{NAME}: x.{name}", given[names[name]], *of)
            for name, of in activation_shapes(x.layout, x.M, *channels).items()
        ]
        operands += [CallArray(name, f"{NAME}: weight", array) for name, array in weight.buffers.items()]
        if bias is not None:
            operands.append(CallArray("bias", f"{NAME}: bias", bias, "float32", (weight.N,)))
        operands.append(CallArray("y", f"{NAME}: out", out, dtype, (x.M, weight.N)))
        return SpecCall(NAME, (spec,), tuple(operands), sizes, dtype, backend, programmatic)

    options = weight.layout, weight.N, *channels, x.layout, x.M, x.K, x.outliers, x.group, out_dtype
    arrays = {**given, "bias": bias, "y": out, **weight.buffers}
    made = _GEMM((*options, backend, programmatic), arrays, check)
    return made["y"] if out is None else out


def _output_dtype(out_dtype: Any, out: Any) -> str:
    """By name; raises ArgumentError for one that there is not."""
    dtype = name_of(out_dtype) if out_dtype is not None else "float16" if out is None else dtype_of(out)
    if dtype not in FLOATS:
        said = ("out_dtype", "") if out_dtype is not None else ("out", "dtype ")
        raise ArgumentError(f"{NAME}: {said[0]}", f"{said[1]}must be one of {', '.join(FLOATS)}", dtype)
    return dtype


_GEMM = Operation(NAME, SpecCall.prepare, SpecCall.on_host)
