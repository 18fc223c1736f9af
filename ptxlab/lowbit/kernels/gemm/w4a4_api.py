"""`gemm_w4a4` and `gemm_w4ax`: 4-bit activations on any array library, in eager calls and in CUDA graphs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from ptxlab.errors import ArgumentError
from ptxlab.lowbit.kernels.gemm import w4ax
from ptxlab.lowbit.kernels.gemm.common import FLOATS
from ptxlab.lowbit.kernels.gemm.w4a4 import ATOM, SM90
from ptxlab.lowbit.kernels.operation import CallArray, Operation, dtype_of
from ptxlab.lowbit.kernels.spec_call import SpecCall
from ptxlab.lowbit.layout import ATOM_ORDERS, BLOCK_ORDERS, AtomActivations, AtomWeight, BlockActivations, BlockWeight
from ptxlab.lowbit.layout.atom_operands import activation_shapes
from ptxlab.lowbit.layout.comet_operands import block_activation_shapes
from ptxlab.lowbit.layout.packings import Shapes
from ptxlab.spec import KernelSpec
from ptxlab.spec.dtypes import name_of


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
    return _called(_ATOM, x, weight, bias, out, out_dtype, backend, programmatic)


def gemm_w4ax(
    x: BlockActivations,
    weight: BlockWeight,
    *,
    bias: Any = None,
    out: Any = None,
    out_dtype: Any = None,
    backend: str | None = None,
    programmatic: bool = False,
) -> Any:
    """Y = X Wᵀ, activations in blocks of 128 channels, INT4 or INT8, weights in INT4 (COMET §4).

    Rows of both have a scale per block. Sums of a block are exact; they are scaled and added in float32, one block
    after the other: the same bits on every GPU and in the emulator. The weight's layout decides the kernel: `strips`
    gemm_w4ax_sm90, `rows` gemm_w4ax_naive_sm80. What a call enqueues and allocates is as of `gemm_w4a4`.

    Args:
        x: activations [M, K4 + K8], M >= 0, in the channels' order of the weight: `joined` for strips, `pairs` for
            rows. Arrays of NumPy, CuPy, PyTorch or JAX: the result is of the same kind.
        weight: [N, K4 + K8], where the activations are, on the host or on the GPU (`ptxlab.to_device`).
        bias, out, out_dtype, backend, programmatic: as of `gemm_w4a4`.

    Returns:
        Y [M, N].

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched.
        UnavailableError: the weight's kernel does not run here.
    """
    return _called(_COMET, x, weight, bias, out, out_dtype, backend, programmatic)


@dataclass(frozen=True)
class _Call:
    """What the calls differ in.

    Attributes:
        operation: it, by the call's name.
        weight, activations: the packed operands' classes, and what an error says makes them.
        specs, names, orders: by the weight's layout: the kernel, its names of the activations' arrays, their order.
        channels: the sizes that both operands have.
        values: these of an operand.
        shapes: order, M, those sizes -> the activations' arrays.
    """

    operation: Operation[SpecCall]
    weight: tuple[type, str]
    activations: tuple[type, str]
    specs: Mapping[str, KernelSpec]
    names: Mapping[str, Mapping[str, str]]
    orders: Mapping[str, str]
    channels: Mapping[str, str]
    values: Callable[[Any], tuple[int, ...]]
    shapes: Callable[..., Shapes]


def _called(
    call: _Call, x: Any, weight: Any, bias: Any, out: Any, out_dtype: Any, backend: str | None, programmatic: bool
) -> Any:
    """Check, launch, return the result."""
    name = call.operation.name
    for label, operand, (kind, made) in (("weight", weight, call.weight), ("x", x, call.activations)):
        if not isinstance(operand, kind):
            raise ArgumentError(f"{name}: {label}", f"must be {made}", type(operand).__name__)
    names, channels, of_x = call.names[weight.layout], call.values(weight), call.values(x)
    given = {names[part]: array for part, array in x.arrays.items() if part in names}

    def check() -> SpecCall:
        order, spec = call.orders[weight.layout], call.specs[weight.layout]
        if x.layout != order:
            raise ArgumentError(f"{name}: x", f"must be {order} for a weight in {weight.layout}", x.layout)
        if of_x != channels:
            rule, got = (
                ", ".join(f"{field}={size}" for field, size in zip(call.channels, sizes, strict=True))
                for sizes in (channels, of_x)
            )
            raise ArgumentError(f"{name}: x", f"must have {rule} as the weight has", got)
        dtype = _output_dtype(name, out_dtype, out)
        if programmatic is True and not spec.after_wait:
            rule = f"only for {call.specs['strips'].name}, which waits"
            raise ArgumentError(f"{name}: programmatic", rule, spec.name)
        operands = [
            CallArray(names[part], f"{name}: x.{part}", given[names[part]], *of)
            for part, of in call.shapes(x.layout, x.M, *channels).items()
        ]
        operands += [CallArray(part, f"{name}: weight", array) for part, array in weight.buffers.items()]
        if bias is not None:
            operands.append(CallArray("bias", f"{name}: bias", bias, "float32", (weight.N,)))
        operands.append(CallArray("y", f"{name}: out", out, dtype, (x.M, weight.N)))
        sizes = {"M": x.M, "N": weight.N, **dict(zip(call.channels.values(), channels, strict=True))}
        return SpecCall(name, (spec,), tuple(operands), sizes, dtype, backend, programmatic)

    options = weight.layout, weight.N, *channels, x.layout, x.M, *of_x, out_dtype
    arrays = {**given, "bias": bias, "y": out, **weight.buffers}
    results = call.operation((*options, backend, programmatic), arrays, check)
    return results["y"] if out is None else out


def _output_dtype(name: str, out_dtype: Any, out: Any) -> str:
    """By name; raises ArgumentError for one that there is not."""
    dtype = name_of(out_dtype) if out_dtype is not None else "float16" if out is None else dtype_of(out)
    if dtype not in FLOATS:
        said = ("out_dtype", "") if out_dtype is not None else ("out", "dtype ")
        raise ArgumentError(f"{name}: {said[0]}", f"{said[1]}must be one of {', '.join(FLOATS)}", dtype)
    return dtype


_ATOM = _Call(
    operation=Operation("gemm_w4a4", SpecCall.prepare, SpecCall.on_host),
    weight=(AtomWeight, "an AtomWeight (layout.pack_atom)"),
    activations=(AtomActivations, "AtomActivations (ptxlab.reorder_quantize)"),
    specs={"strips": SM90, "rows": ATOM},
    names={"strips": {"x": "x", "scale": "x_scale"}, "rows": {"x": "x4", "x8": "x8", "scale": "x_scale"}},
    orders=ATOM_ORDERS,
    channels={"K": "K", "outliers": "outliers", "group": "g"},  # with the specs' names
    values=attrgetter("K", "outliers", "group"),
    shapes=activation_shapes,
)
_COMET = _Call(
    operation=Operation("gemm_w4ax", SpecCall.prepare, SpecCall.on_host),
    weight=(BlockWeight, "a BlockWeight (layout.pack_block_weight)"),
    activations=(BlockActivations, "BlockActivations (layout.pack_block_activations)"),
    specs={"strips": w4ax.SM90, "rows": w4ax.NAIVE},
    names=_ATOM.names,
    orders=BLOCK_ORDERS,
    channels={"K4": "K4", "K8": "K8"},
    values=attrgetter("K4", "K8"),
    shapes=block_activation_shapes,
)
