"""What the calls of the family share: options, operands, results to write into."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.lowbit.kernels.operation import CallArray, Operation, dtype_of
from ptxlab.lowbit.kernels.quantize.options import QuantizeOptions
from ptxlab.lowbit.kernels.spec_call import SpecCall, choose_spec
from ptxlab.lowbit.layout import PackedActivations
from ptxlab.lowbit.layout.packed_activations import stored_shape, tile_of
from ptxlab.spec import KernelSpec
from ptxlab.spec.dtypes import floats
from ptxlab.validate import shape_of

Shapes = Mapping[str, tuple[int, ...]]


class Fitted(NamedTuple):
    """Arrays that fit together: M, K of the results, the shape of every array of floats, and sizes of that kernel."""

    M: int
    K: int
    shapes: Shapes
    sizes: Mapping[str, Any] = {}


def matrix_shape(name: str, label: str, array: Any) -> tuple[int, int]:
    """Return the shape of a matrix [M, K]; raise ArgumentError for anything else."""
    shape = shape_of(array)
    if len(shape) != 2:
        raise ArgumentError(f"{name}: {label}", "must be a matrix [M, K]", f"shape {shape}")
    return shape[0], shape[1]


def matrix_of(arrays: Mapping[str, Any], parts: int) -> tuple[int, int]:
    """Return M and K of the results, where the first array is known to be a matrix [M, parts·K]."""
    M, width = shape_of(next(iter(arrays.values())))
    return M, width // parts


class Quantizer:
    """Public call that quantises: checks arrays, launches its kernel, and returns the activations."""

    def __init__(
        self,
        name: str,
        specs: tuple[KernelSpec, ...],
        fit: Callable[[str, Mapping[str, Any], Any], Fitted],
        check_values: Callable[[dict[str, np.ndarray], Mapping[str, Any]], None],
        *,
        parts: int = 1,
        disjoint: tuple[str, ...] = (),
    ) -> None:
        """Store the parts in which the calls differ.

        Args:
            name: of the call.
            specs: the kernel's forms, the fastest first; the first that runs here is taken.
            fit: makes of the call's name, its arrays of floats and its options their sizes, or raises ArgumentError.
            check_values: raises ArgumentError, given a call's floats by name, its sizes and dtype, if a row would have
                no scale: for host arrays alone, as on a GPU nothing reads values.
            parts: the first array has so many times the columns of the results.
            disjoint: no two of these arrays may share memory.
        """
        self.name, self.specs, self.fit, self.check_values, self.parts = name, specs, fit, check_values, parts
        names = {array_name: array_name for array_name in disjoint}
        self._operation = Operation(name, self._check, SpecCall.prepare, SpecCall.on_host, disjoint=names)

    def __call__(
        self, options: QuantizeOptions, arrays: Mapping[str, Any], out: PackedActivations | None
    ) -> PackedActivations:
        """Return the activations: `out`, or new ones of the first array's kind.

        `arrays` are floats by argument of the kernel.
        """
        if out is None:
            outputs = self._operation(options, (), arrays, None)
            (M, K), (rows, _) = matrix_of(arrays, self.parts), tile_of(options.layout, options.rows)
            return PackedActivations(layout=options.layout, M=M, K=K, rows=rows, **outputs)
        if not isinstance(out, PackedActivations):
            raise ArgumentError(f"{self.name}: out", "must be PackedActivations", type(out).__name__)
        arrays = {**arrays, "x_q": out.x_q, "scale": out.scale, "token_sum": out.token_sum}
        self._operation(options, out.description, arrays, out)
        return out

    def _check(self, options: QuantizeOptions, arrays: Mapping[str, Any], out: PackedActivations | None) -> SpecCall:
        """Build the call; raise ArgumentError for operands that do not fit together."""
        rows, span = tile_of(options.layout, options.rows)
        M, K, shapes, sizes = self.fit(self.name, arrays, options)
        first_name = next(iter(shapes))
        if out is not None and (out.M, out.K, out.layout, out.rows) != (M, K, options.layout, rows):
            rule = f"must have M={M}, K={K}, layout={options.layout}, rows={rows}"
            out_text = f"M={out.M}, K={out.K}, layout={out.layout}, rows={out.rows}"
            raise ArgumentError(f"{self.name}: out", rule, out_text)
        dtype, (dtypes,) = dtype_of(arrays[first_name]), self.specs[0].by_variant.values()
        if dtype not in dtypes:
            raise ArgumentError(f"{self.name}: {first_name}", f"dtype {' or '.join(dtypes)}", dtype)
        sizes = {"M": M, "K": K, "rows": rows, "span": span, **sizes}
        operands = [
            CallArray(array_name, f"{self.name}: {array_name}", arrays[array_name], dtype, shape)
            for array_name, shape in shapes.items()
        ]
        operands += self._results(arrays, stored_shape(options.layout, M, K, rows), M)

        def check_values(numbers: dict[str, np.ndarray]) -> None:
            self.check_values(
                {array_name: floats(numbers[array_name]) for array_name in shapes}, {**sizes, "dtype": dtype}
            )

        spec = choose_spec(self.specs, sizes, options.backend)
        return SpecCall(self.name, (spec,), tuple(operands), sizes, dtype, replace(options, rows=rows), check_values)

    def _results(self, arrays: Mapping[str, Any], shape: tuple[int, ...], M: int) -> Iterator[CallArray]:
        """Yield the arrays of `PackedActivations`."""
        label, rule = f"{self.name}: out", "must be given in a capture: the result of a call before it"
        for name, dtype, size in (("x_q", "int8", shape), ("scale", "float32", (M,)), ("token_sum", "int32", (M,))):
            array = arrays.get(name)
            yield CallArray(name, label if array is None else f"{label}.{name}", array, dtype, size, rule)
