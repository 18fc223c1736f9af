"""What the calls of the family share: options, operands, results to write into."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.lowbit.kernels.operation import CallArray, Operation, dtype_of
from ptxlab.lowbit.kernels.spec_call import SpecCall
from ptxlab.lowbit.layout import PackedActivations
from ptxlab.lowbit.layout.packed_activations import stored_shape, tile_of
from ptxlab.spec import KernelSpec
from ptxlab.spec.dtypes import floats
from ptxlab.validate import shape_of

Shapes = Mapping[str, tuple[int, ...]]


class How(NamedTuple):
    """The options that all calls have."""

    layout: str
    rows: int | None
    out: PackedActivations | None
    backend: str | None
    programmatic: bool


class Fitted(NamedTuple):
    """Arrays that fit together: M, K of the results, the shape of every array of floats, and sizes of that kernel."""

    M: int
    K: int
    shapes: Shapes
    sizes: Mapping[str, Any] = {}


def matrix_shape(name: str, label: str, array: Any) -> tuple[int, int]:
    """The shape of a matrix [M, K]; ArgumentError for anything else."""
    shape = shape_of(array)
    if len(shape) != 2:
        raise ArgumentError(f"{name}: {label}", "must be a matrix [M, K]", f"shape {shape}")
    return shape[0], shape[1]


class Quantizer:
    """One of the calls: checks arrays, launches its kernel, and hands the activations over."""

    def __init__(
        self,
        name: str,
        spec: KernelSpec,
        look: Callable[[dict[str, np.ndarray], Mapping[str, Any]], None],
        apart: tuple[str, ...] = (),
    ) -> None:
        """`look` takes a call's floats by name, its sizes and dtype, and raises ArgumentError where a row would have no
        scale: for host arrays alone, as on a GPU nothing reads values. No two arrays of `apart` may share memory."""
        self.name, self.spec, self.look = name, spec, look
        self._operation = Operation(name, SpecCall.prepare, SpecCall.on_host, apart={each: each for each in apart})

    def __call__(
        self, arrays: Mapping[str, Any], fit: Callable[[], Fitted], how: How, *options: Any
    ) -> PackedActivations:
        """The activations: `how.out`, or new ones of the first array's kind.

        Args:
            arrays: the arrays of floats that are given, by argument of the kernel.
            fit: returns their sizes; ArgumentError if they do not fit together.
            how: the options of all calls.
            options: further values that `fit` depends on, part of the key of remembered calls.
        """
        given, out, like = dict(arrays), how.out, None
        if isinstance(out, PackedActivations):
            given |= {"x_q": out.x_q, "scale": out.scale, "token_sum": out.token_sum}
            like = out.M, out.K, out.layout, out.rows
        elif out is not None:
            raise ArgumentError(f"{self.name}: out", "must be PackedActivations", type(out).__name__)
        how = how._replace(out=None)
        made = self._operation((*how, like, *options), given, lambda: self._checked(given, fit, how, like))
        if out is not None:
            return out
        (M, K, *_), (rows, _) = fit(), tile_of(how.layout, how.rows)
        return PackedActivations(layout=how.layout, M=M, K=K, rows=rows, **made)

    def _checked(self, given: Mapping[str, Any], fit: Callable[[], Fitted], how: How, like: Any) -> SpecCall:
        """The call; raises ArgumentError for what does not fit together. `like` is what describes `out`."""
        rows, span = tile_of(how.layout, how.rows)
        M, K, shapes, sizes = fit()
        wanted, first = (M, K, how.layout, rows), next(iter(shapes))
        if like not in (None, wanted):
            said = ("M={}, K={}, layout={}, rows={}".format(*each) for each in (wanted, like))
            raise ArgumentError(f"{self.name}: out", f"must have {next(said)}", next(said))
        dtype, (dtypes,) = dtype_of(given[first]), self.spec.by_variant.values()
        if dtype not in dtypes:
            raise ArgumentError(f"{self.name}: {first}", f"dtype {' or '.join(dtypes)}", dtype)
        sizes = {"M": M, "K": K, "rows": rows, "span": span, **sizes}
        operands = [
            CallArray(each, f"{self.name}: {each}", given[each], dtype, shape) for each, shape in shapes.items()
        ]
        operands += self._results(given, stored_shape(how.layout, M, K, rows), M)

        def look(numbers: dict[str, np.ndarray]) -> None:
            self.look({each: floats(numbers[each]) for each in shapes}, {**sizes, "dtype": dtype})

        return SpecCall(self.name, (self.spec,), tuple(operands), sizes, dtype, how.backend, how.programmatic, look)

    def _results(self, given: Mapping[str, Any], shape: tuple[int, ...], M: int) -> Iterator[CallArray]:
        """The arrays of `PackedActivations`."""
        label, lacking = f"{self.name}: out", "must be given in a capture: the result of a call before it"
        for name, dtype, size in (("x_q", "int8", shape), ("scale", "float32", (M,)), ("token_sum", "int32", (M,))):
            array = given.get(name)
            yield CallArray(name, label if array is None else f"{label}.{name}", array, dtype, size, lacking)
