"""The calls that quantise as Atom and COMET do: from the floats of any array library to what `gemm_w4a4` and
`gemm_w4ax` take."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import F32
from ptxlab.io.dynamo import break_graph
from ptxlab.lowbit.kernels.operation import CallArray, Operation, dtype_of
from ptxlab.lowbit.kernels.options import document_options
from ptxlab.lowbit.kernels.quantize.api import (
    fit_gated,
    fit_normed,
    fit_plain,
    gated_numbers,
    normed_arrays,
    normed_numbers,
)
from ptxlab.lowbit.kernels.quantize.atom import (
    BY_PAIRS,
    COMET,
    ORDERS,
    REORDER,
    REORDER_BLOCK,
    RMSNORM_REORDER,
    RMSNORM_REORDER_BLOCK,
    RULES,
    SILU_MUL_REORDER,
    SILU_MUL_REORDER_BLOCK,
    check_place,
    ordered_rows,
)
from ptxlab.lowbit.kernels.quantize.call import Fitted, matrix_of
from ptxlab.lowbit.kernels.quantize.options import GateReorderOptions, NormReorderOptions, ReorderOptions
from ptxlab.lowbit.kernels.spec_call import SpecCall, choose_spec
from ptxlab.lowbit.layout import BLOCK_ORDERS, AtomActivations, BlockActivations
from ptxlab.lowbit.layout.atom_operands import activation_shapes
from ptxlab.lowbit.layout.comet_operands import block_activation_shapes
from ptxlab.lowbit.layout.packings import Shapes
from ptxlab.lowbit.quant.atom import ACTIVATION_CLIP, ATOM_PAPER, AtomRules
from ptxlab.lowbit.quant.fmpq import BLOCK
from ptxlab.lowbit.quant.inputs import extremes
from ptxlab.spec import KernelSpec
from ptxlab.spec.dtypes import floats
from ptxlab.validate import is_integer, is_one_of

_NAMES = {"x": "x_q", "x8": "x8", "scale": "x_scale"}  # the specs' of the activations' arrays
Numbers = Callable[[dict[str, np.ndarray], Mapping[str, Any]], F32]


_ATOM_DEFAULTS = {name: getattr(ReorderOptions(), name) for name in ("outliers", "group", "clip", "rules")}


class _Quantizer:
    """Public call that quantises and reorders: checks arrays, launches its kernel, and returns the activations."""

    def __init__(
        self,
        specs: tuple[KernelSpec, ...],
        fit: Callable[[str, Mapping[str, Any], Any], Fitted],
        numbers: Numbers,
        *,
        parts: int = 1,
        disjoint: tuple[str, ...] = (),
    ) -> None:
        """Store the parts in which the calls differ.

        `numbers` takes a call's floats by name, its sizes and dtype, and returns the floats to quantise, or raises
        ArgumentError. It serves host arrays alone, as on a GPU nothing reads values. `specs`, `fit`, `parts` and
        `disjoint` are those of `call.Quantizer`.
        """
        self.name, self.specs, self.fit, self.numbers, self.parts = specs[0].name, specs, fit, numbers, parts
        names = {array_name: array_name for array_name in disjoint}
        self._operation = Operation(self.name, self._check, SpecCall.prepare, SpecCall.on_host, disjoint=names)

    def __call__(self, options: ReorderOptions, arrays: Mapping[str, Any], place: Any, out: Any) -> Any:
        """Return the activations: `out`, or new ones of the first array's kind.

        `arrays` are floats by argument of the kernel.
        """
        arrays, kind = {**arrays, "place": place}, AtomActivations if options.int8 is None else BlockActivations
        if out is None:
            outputs = self._operation(options, (), arrays, None)
            M, channels = matrix_of(arrays, self.parts)
            parts = {name: outputs[spec] for name, spec in _NAMES.items() if spec in outputs}
            return kind(M=M, **activation_fields(self.name, channels, options), **parts)
        if not isinstance(out, kind):
            raise ArgumentError(f"{self.name}: out", f"must be {kind.__name__}", type(out).__name__)
        arrays |= {_NAMES[name]: array for name, array in out.arrays.items()}
        self._operation(options, out.description, arrays, out)
        return out

    def _check(self, options: ReorderOptions, arrays: Mapping[str, Any], out: Any) -> SpecCall:
        """Build the call; raise ArgumentError for operands that do not fit together."""
        M, channels, shapes, sizes = self.fit(self.name, arrays, options)
        fields = {"M": M, **activation_fields(self.name, channels, options)}
        options = replace(options, layout=fields["layout"])
        if out is not None and (out_sizes := {field: getattr(out, field) for field in fields}) != fields:
            expected, sizes_text = (
                ", ".join(f"{field}={sizes[field]}" for field in fields) for sizes in (fields, out_sizes)
            )
            raise ArgumentError(f"{self.name}: out", f"must have {expected}", sizes_text)
        dtype, first = dtype_of(arrays[next(iter(shapes))]), next(iter(shapes))
        if dtype not in (dtypes := self.specs[0].by_variant["IN"]):
            raise ArgumentError(f"{self.name}: {first}", f"dtype {' or '.join(dtypes)}", dtype)
        row_fields: dict[str, Any]
        if options.int8 is None:
            output_shapes = activation_shapes(**fields)
            code, clip = RULES.index(options.rules), float(options.clip)
            row_fields = {"outliers": options.outliers, "g": options.group, "code": code, "clip": clip}
        else:
            output_shapes = block_activation_shapes(**fields)
            row_fields = {"outliers": fields["K8"], "g": BLOCK, "code": COMET, "clip": 1.0}
        pairs = BY_PAIRS.index(fields["layout"])
        sizes = {"M": M, "K": channels - row_fields["outliers"], "pairs": pairs, **row_fields, **sizes}
        operands = [
            CallArray(array_name, f"{self.name}: {array_name}", arrays[array_name], dtype, shape)
            for array_name, shape in shapes.items()
        ]
        operands.append(CallArray("place", f"{self.name}: place", arrays["place"], "int16", (channels,)))
        operands += self._results(arrays, output_shapes)

        def check_values(host_arrays: dict[str, np.ndarray]) -> None:
            check_place(self.name, host_arrays)
            y = self.numbers(
                {array_name: floats(host_arrays[array_name]) for array_name in shapes}, {**sizes, "dtype": dtype}
            )
            ordered_rows(y, host_arrays["place"], **row_fields)  # or what is wrong with it

        spec = choose_spec(self.specs, sizes, options.backend)
        return SpecCall(self.name, (spec,), tuple(operands), sizes, dtype, options, check_values)

    def _results(self, arrays: Mapping[str, Any], shapes: Shapes) -> Iterator[CallArray]:
        """Yield the arrays of the activations."""
        label, rule = f"{self.name}: out", "must be given in a capture: the result of a call before it"
        for name, (dtype, shape) in shapes.items():
            array = arrays.get(_NAMES[name])
            yield CallArray(_NAMES[name], label if array is None else f"{label}.{name}", array, dtype, shape, rule)


def activation_fields(name: str, channels: int, options: ReorderOptions) -> dict[str, Any]:
    """Return the activations' fields but M; raise ArgumentError for options that are unknown or do not fit."""
    if options.int8 is not None:
        return _block_fields(name, channels, options)
    layout = "bytes" if options.layout is None else options.layout
    if not is_one_of(layout, ORDERS):
        raise ArgumentError(f"{name}: layout", f"must be one of {', '.join(ORDERS)}", layout)
    K = channels - options.outliers
    if K < 1:
        raise ArgumentError(f"{name}: outliers", f"must leave INT4 channels of {channels}", options.outliers)
    activation_shapes(layout, 0, K, options.outliers, options.group)  # or what is wrong with K and the group
    return {"K": K, "outliers": options.outliers, "group": options.group, "layout": layout}


def _block_fields(name: str, channels: int, options: ReorderOptions) -> dict[str, Any]:
    """Return the fields of COMET's activations, whose rules leave no choice."""
    for option, default in _ATOM_DEFAULTS.items():
        argument = getattr(options, option)
        if type(argument) is not type(default) or argument != default:
            raise ArgumentError(f"{name}: {option}", "must be left out with int8: it is Atom's", argument)
    layout = "joined" if options.layout is None else options.layout
    if not is_one_of(layout, BLOCK_ORDERS.values()):
        raise ArgumentError(f"{name}: layout", f"must be one of {', '.join(BLOCK_ORDERS.values())} with int8", layout)
    if not channels or channels % BLOCK:
        raise ArgumentError(f"{name}: channels", f"must be a positive multiple of {BLOCK}", channels)
    if not is_integer(options.int8) or not 0 <= options.int8 <= channels // BLOCK:
        raise ArgumentError(f"{name}: int8", f"must be 0..{channels // BLOCK} blocks", options.int8)
    K8 = options.int8 * BLOCK
    return {"K4": channels - K8, "K8": K8, "layout": layout}


@break_graph
@document_options(ReorderOptions)
def reorder_quantize(
    x: Any,
    place: Any,
    *,
    outliers: int = 128,
    group: int = 128,
    layout: str | None = None,
    clip: float = ACTIVATION_CLIP,
    rules: AtomRules = ATOM_PAPER,
    int8: int | None = None,
    out: AtomActivations | BlockActivations | None = None,
    backend: str | None = None,
    programmatic: bool = False,
) -> Any:
    """Move channels to their places, then quantise to INT4 with a scale per group, and outliers to INT8.

    The results have the bits of `quantize_atom_activations`.

    With `int8` they are in COMET's blocks of 128, and the bits those of `quantize_blocks`: `BlockActivations`, for
    `gemm_w4ax`. Else `AtomActivations`, for `gemm_w4a4`.

    On the GPU a call only enqueues, on the caller's stream, and nothing looks at values: a group with a NaN or an
    infinity, or whose scale is beyond FP16, gets a scale that is not finite; where `place` is no permutation, some
    results are undefined. On the host all that is refused.

    Args:
        x: [M, C], of float16, bfloat16 (also as its bits, uint16) or float32; NumPy, CuPy, PyTorch or JAX: the results
            are of the same kind. C up to 32768 in whole blocks of 128.
        place: s16 [C], where each channel goes, the last `outliers` places being those of the outliers
            (`quant.channel_places` of `quant.outlier_order`). No kernel that may still run writes it: it is read ahead
            of the wait.
        out: activations of the same sizes and layout to write into; needed while a CUDA graph is captured.
        {options}

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched.
        UnavailableError: no GPU backend here, or one below sm_80, or rows that only clusters of sm_90 hold.
    """
    options = ReorderOptions.of(backend, programmatic, outliers, group, layout, clip, rules, int8)
    return _REORDER(options, {"x": x}, place, out)


@break_graph
@document_options(NormReorderOptions)
def rmsnorm_reorder_quantize(
    x: Any,
    gamma: Any,
    place: Any,
    *,
    residual: Any = None,
    eps: float = 1e-5,
    normed: Any = None,
    outliers: int = 128,
    group: int = 128,
    layout: str | None = None,
    clip: float = ACTIVATION_CLIP,
    rules: AtomRules = ATOM_PAPER,
    int8: int | None = None,
    out: AtomActivations | BlockActivations | None = None,
    backend: str | None = None,
    programmatic: bool = False,
) -> Any:
    """Add a residual, apply RMSNorm and quantise as `reorder_quantize`, in one launch.

    y is that of `rmsnorm_quantize`, not rounded before it is quantised.

    Args:
        x, gamma, residual, normed: as `rmsnorm_quantize` takes them, in the channels' own order.
        place, out: as `reorder_quantize` takes them.
        {options}

    Raises what `rmsnorm_quantize` and `reorder_quantize` raise.
    """
    options = NormReorderOptions.of(backend, programmatic, outliers, group, layout, clip, rules, int8, eps)
    return _RMSNORM(options, normed_arrays(x, gamma, residual, normed), place, out)


@break_graph
@document_options(GateReorderOptions)
def silu_mul_reorder_quantize(
    gate_up: Any,
    place: Any,
    *,
    activation: str = "silu",
    outliers: int = 128,
    group: int = 128,
    layout: str | None = None,
    clip: float = ACTIVATION_CLIP,
    rules: AtomRules = ATOM_PAPER,
    int8: int | None = None,
    out: AtomActivations | BlockActivations | None = None,
    backend: str | None = None,
    programmatic: bool = False,
) -> Any:
    """Apply the gate of an FFN and quantise as `reorder_quantize`, in one launch.

    h is that of `silu_mul_quantize`, not rounded before it is quantised.

    Args:
        gate_up: as `silu_mul_quantize` takes it; `place` is for the channels of h.
        place, out: as `reorder_quantize` takes them.
        {options}

    Raises what `silu_mul_quantize` and `reorder_quantize` raise.
    """
    options = GateReorderOptions.of(backend, programmatic, outliers, group, layout, clip, rules, int8, activation)
    return _SILU_MUL(options, {"gate_up": gate_up}, place, out)


def _plain_numbers(numbers: dict[str, np.ndarray], sizes: Mapping[str, Any]) -> F32:
    """Return x f32 as it is; raise ArgumentError if it is not finite."""
    extremes("x", numbers["x"])
    return numbers["x"]


_REORDER = _Quantizer((REORDER, REORDER_BLOCK), fit_plain, _plain_numbers)
_RMSNORM = _Quantizer(
    (RMSNORM_REORDER, RMSNORM_REORDER_BLOCK), fit_normed, normed_numbers, disjoint=("x", "residual", "normed")
)
_SILU_MUL = _Quantizer((SILU_MUL_REORDER, SILU_MUL_REORDER_BLOCK), fit_gated, gated_numbers, parts=2)
