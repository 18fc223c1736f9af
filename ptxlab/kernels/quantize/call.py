"""What the calls of the family share: results to write into, operands, the way to the GPU and that on the host."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.kernels.operation import CallArray, Operation, Prepared, Results, check_how, dtype_of
from ptxlab.layout import PackedActivations
from ptxlab.layout.packed_activations import stored_shape, tile_of
from ptxlab.runtime import run_spec
from ptxlab.runtime.arguments import require_on_host
from ptxlab.runtime.plan import Plan
from ptxlab.sources import of_kernel
from ptxlab.spec import KernelSpec
from ptxlab.spec.dtypes import floats, storage

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


@dataclass(frozen=True, eq=False)
class QuantizeCall:
    """One call: arrays by argument of the kernel, and all that selects the kernel's variant."""

    name: str
    spec: KernelSpec
    given: Mapping[str, Any]
    shapes: Shapes
    layout: str
    sizes: dict[str, Any]
    dtype: str
    backend: str | None
    programmatic: bool
    check = False

    @property
    def key(self) -> tuple[Any, ...]:
        """All that selects the compiled kernel."""
        return (*self.sizes.values(), self.dtype, self.programmatic)

    @property
    def is_empty(self) -> bool:
        """Whether there are no tokens."""
        return bool(self.sizes["M"] == 0)

    @property
    def config(self) -> dict[str, int]:
        """The variant's constants."""
        floats = next(iter(self.spec.by_variant.values()))
        return {**self.spec.config_for(self.sizes), "IN": floats.index(self.dtype)}

    @property
    def floats(self) -> Iterator[CallArray]:
        """Arrays of floats: inputs, and what is updated in place."""
        for name, shape in self.shapes.items():
            yield CallArray(name, f"{self.name}: {name}", self.given[name], self.dtype, shape)

    @property
    def results(self) -> Iterator[CallArray]:
        """The arrays of `PackedActivations`."""
        M, K, rows = (self.sizes[name] for name in ("M", "K", "rows"))
        for name, dtype, shape in (
            ("x_q", "int8", stored_shape(self.layout, M, K, rows)),
            ("scale", "float32", (M,)),
            ("token_sum", "int32", (M,)),
        ):
            label, lacking = f"{self.name}: out", "must be given in a capture: the result of a call before it"
            if name in self.given:
                yield CallArray(name, f"{label}.{name}", self.given[name], dtype, shape)
            else:
                yield CallArray(name, label, None, dtype, shape, lacking)

    @property
    def operands(self) -> Iterator[CallArray]:
        """All arrays of the call."""
        yield from self.floats
        yield from self.results


class Quantizer:
    """One of the calls: checks arrays, launches its kernel, and hands the activations over."""

    def __init__(
        self, name: str, spec: KernelSpec, look: Callable[[dict[str, np.ndarray], Mapping[str, Any]], None]
    ) -> None:
        """`look` takes a call's floats by name and its sizes, and raises ArgumentError where a row would have no scale.
        It is called for host arrays alone: on a GPU nothing reads values."""
        self.name, self.spec, self.look = name, spec, look
        self._operation = Operation(name, _prepare, self._on_host)

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

    def _checked(self, given: Mapping[str, Any], fit: Callable[[], Fitted], how: How, like: Any) -> QuantizeCall:
        """The call; raises ArgumentError for what does not fit together. `like` is what describes `out`."""
        rows, span = tile_of(how.layout, how.rows)
        M, K, shapes, sizes = fit()
        check_how(self.name, how.backend, programmatic=how.programmatic)
        wanted, first = (M, K, how.layout, rows), next(iter(shapes))
        if like not in (None, wanted):
            said = ("M={}, K={}, layout={}, rows={}".format(*each) for each in (wanted, like))
            raise ArgumentError(f"{self.name}: out", f"must have {next(said)}", next(said))
        dtype, (dtypes,) = dtype_of(given[first]), self.spec.by_variant.values()
        if dtype not in dtypes:
            raise ArgumentError(f"{self.name}: {first}", f"dtype {' or '.join(dtypes)}", dtype)
        sizes = {"M": M, "K": K, "rows": rows, "span": span, **sizes}
        return QuantizeCall(
            self.name, self.spec, given, shapes, how.layout, sizes, dtype, how.backend, how.programmatic
        )

    def _on_host(self, call: QuantizeCall) -> Results:
        """NumPy, or PyTorch on the CPU: in the emulator, or copied to the GPU and back."""
        spec, sizes = call.spec, call.sizes
        written = [arg.name for arg in spec.outputs]
        numbers = {each.name: require_on_host(*each[1:5], written=each.name in written) for each in call.floats}
        spec.check_sizes(sizes)
        if not call.is_empty:
            self.look({name: floats(array) for name, array in numbers.items()}, sizes)
        arrays = {each.name: each.array for each in call.floats}
        for arg in spec.outputs:  # what is read and written, and left out, has no rows
            if arg.role == "inout" and arg.name not in arrays:
                arrays[arg.name] = np.empty(arg.resolve(sizes), storage(call.dtype))
        results = list(call.results)
        for each in results:
            if each.array is not None:
                arrays[each.name] = require_on_host(*each[1:5], written=True)
        if "x_q" in arrays:
            arrays["x_q"] = arrays["x_q"].reshape(spec.arg("x_q").resolve(sizes))  # contiguous, so the same memory
        out = {name: arrays.pop(name) for name in written if name in arrays}
        source = of_kernel(spec.name)[0]
        how: dict[str, Any] = {"backend": call.backend, "config": call.config, "programmatic": call.programmatic}
        made = run_spec(spec, source, arrays, sizes=sizes, out=out, **how).outputs
        return {each.name: made[each.name].reshape(each.shape) for each in results}


def _prepare(call: QuantizeCall) -> Prepared:
    spec = call.spec
    spec.check_sizes(call.sizes)
    if reason := gpu.why_not(spec.arch):
        raise UnavailableError(f'{call.name}: {reason}; pass backend="emulator" with NumPy arrays')
    config = call.config
    return Prepared(spec.name, lambda: (Plan(spec, config, call.sizes, programmatic=call.programmatic),))
