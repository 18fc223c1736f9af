"""`gemm_w4a4` and `gemm_w4ax`: 4-bit activations on any array library, in eager calls and in CUDA graphs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

from ptxlab.errors import ArgumentError
from ptxlab.io.dynamo import break_graph
from ptxlab.lowbit.kernels.gemm import w4ax
from ptxlab.lowbit.kernels.gemm.options import ProductOptions, resolve_dtype
from ptxlab.lowbit.kernels.gemm.w4a4 import ATOM, SM90
from ptxlab.lowbit.kernels.operation import CallArray, Operation
from ptxlab.lowbit.kernels.options import document_options
from ptxlab.lowbit.kernels.spec_call import SpecCall
from ptxlab.lowbit.layout import ATOM_ORDERS, BLOCK_ORDERS, AtomActivations, AtomWeight, BlockActivations, BlockWeight
from ptxlab.lowbit.layout.atom_operands import activation_shapes
from ptxlab.lowbit.layout.comet_operands import block_activation_shapes
from ptxlab.lowbit.layout.packings import Shapes
from ptxlab.spec import KernelSpec

FOUR_BIT_KERNELS: Mapping[str, Mapping[str, KernelSpec]] = {  # by scheme of the input, then by layout of the weight
    "atom": {"strips": SM90, "rows": ATOM},
    "fmpq": {"strips": w4ax.SM90, "rows": w4ax.NAIVE},
}


@break_graph
@document_options(ProductOptions)
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
    """Compute Y = X Wᵀ, both in INT4 with a scale per row and group, outlier channels in INT8 (Atom §4).

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
        {options}

    Returns:
        Y [M, N].

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched.
        UnavailableError: the weight's kernel does not run here.
    """
    return _ATOM(ProductOptions.of(backend, programmatic, out_dtype), x, weight, bias, out)


@break_graph
@document_options(ProductOptions)
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
    """Compute Y = X Wᵀ, activations in blocks of 128 channels, INT4 or INT8, weights in INT4 (COMET §4).

    Rows of both have a scale per block. Sums of a block are exact; they are scaled and added in float32, one block
    after the other: the same bits on every GPU and in the emulator. The weight's layout decides the kernel: `strips`
    gemm_w4ax_sm90, `rows` gemm_w4ax_naive_sm80. A call enqueues and allocates what one of `gemm_w4a4` does.

    Args:
        x: activations [M, K4 + K8], M >= 0, in the channels' order of the weight: `joined` for strips, `pairs` for
            rows. Arrays of NumPy, CuPy, PyTorch or JAX: the result is of the same kind.
        weight: [N, K4 + K8], where the activations are, on the host or on the GPU (`ptxlab.to_device`).
        bias, out: as in `gemm_w4a4`.
        {options}

    Returns:
        Y [M, N].

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched.
        UnavailableError: the weight's kernel does not run here.
    """
    return _COMET(ProductOptions.of(backend, programmatic, out_dtype), x, weight, bias, out)


@dataclass(frozen=True)
class _Product:
    """Public call of a W4A4 or W4Ax product.

    Attributes:
        name: of the call.
        weight, activations: the packed operands' classes, and what an error says makes them.
        specs, names, orders: by the weight's layout: the kernel, its names of the activations' arrays, their order.
        channels: sizes on which the operands must agree: the operands' name -> the spec's name.
        values: an operand -> these sizes.
        shapes: order, M, these sizes -> dtypes and shapes of the activations' arrays.
    """

    name: str
    weight: tuple[type, str]
    activations: tuple[type, str]
    specs: Mapping[str, KernelSpec]
    names: Mapping[str, Mapping[str, str]]
    orders: Mapping[str, str]
    channels: Mapping[str, str]
    values: Callable[[Any], tuple[int, ...]]
    shapes: Callable[..., Shapes]

    @cached_property
    def operation(self) -> Operation[SpecCall]:
        """Operation that checks, prepares and launches the calls."""
        return Operation(self.name, self._check, SpecCall.prepare, SpecCall.on_host)

    def __call__(self, options: ProductOptions, x: Any, weight: Any, bias: Any, out: Any) -> Any:
        """Check, launch, return the result."""
        for label, operand, (kind, source) in (("weight", weight, self.weight), ("x", x, self.activations)):
            if not isinstance(operand, kind):
                raise ArgumentError(f"{self.name}: {label}", f"must be {source}", type(operand).__name__)
        names = self.names[weight.layout]
        arrays = {}
        for part, array in x.arrays.items():
            if part in names:
                arrays[names[part]] = array
        arrays |= {"bias": bias, "y": out, **weight.buffers}
        outputs = self.operation(options, (weight.description, x.description), arrays, x, weight)
        return outputs["y"] if out is None else out

    def _check(self, options: ProductOptions, arrays: Mapping[str, Any], x: Any, weight: Any) -> SpecCall:
        """Build the call; raise ArgumentError for operands that do not fit together."""
        name, order, spec = self.name, self.orders[weight.layout], self.specs[weight.layout]
        if x.layout != order:
            raise ArgumentError(f"{name}: x", f"must be {order} for a weight in {weight.layout}", x.layout)
        channels = self.values(weight)
        if self.values(x) != channels:
            rule, got = (
                ", ".join(f"{field}={size}" for field, size in zip(self.channels, sizes, strict=True))
                for sizes in (channels, self.values(x))
            )
            raise ArgumentError(f"{name}: x", f"must have {rule} as the weight has", got)
        options = replace(options, out_dtype=resolve_dtype(name, options, arrays["y"]))
        if options.programmatic and not spec.after_wait:
            rule = f"only for {self.specs['strips'].name}, which waits"
            raise ArgumentError(f"{name}: programmatic", rule, spec.name)
        names = self.names[weight.layout]
        operands = [
            CallArray(names[part], f"{name}: x.{part}", arrays[names[part]], dtype, shape)
            for part, (dtype, shape) in self.shapes(x.layout, x.M, *channels).items()
        ]
        operands += [CallArray(part, f"{name}: weight", array) for part, array in weight.buffers.items()]
        if arrays["bias"] is not None:
            operands.append(CallArray("bias", f"{name}: bias", arrays["bias"], "float32", (weight.N,)))
        operands.append(CallArray("y", f"{name}: out", arrays["y"], options.out_dtype, (x.M, weight.N)))
        sizes = {"M": x.M, "N": weight.N, **dict(zip(self.channels.values(), channels, strict=True))}
        return SpecCall(name, (spec,), tuple(operands), sizes, options.out_dtype, options)


_ATOM = _Product(
    name="gemm_w4a4",
    weight=(AtomWeight, "an AtomWeight (layout.pack_atom)"),
    activations=(AtomActivations, "AtomActivations (ptxlab.reorder_quantize)"),
    specs=FOUR_BIT_KERNELS["atom"],
    names={"strips": {"x": "x", "scale": "x_scale"}, "rows": {"x": "x4", "x8": "x8", "scale": "x_scale"}},
    orders=ATOM_ORDERS,
    channels={"K": "K", "outliers": "outliers", "group": "g"},
    values=attrgetter("K", "outliers", "group"),
    shapes=activation_shapes,
)
_COMET = _Product(
    name="gemm_w4ax",
    weight=(BlockWeight, "a BlockWeight (layout.pack_block_weight)"),
    activations=(BlockActivations, "BlockActivations (layout.pack_block_activations)"),
    specs=FOUR_BIT_KERNELS["fmpq"],
    names=_ATOM.names,
    orders=BLOCK_ORDERS,
    channels={"K4": "K4", "K8": "K8"},
    values=attrgetter("K4", "K8"),
    shapes=block_activation_shapes,
)
