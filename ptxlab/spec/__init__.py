"""`KernelSpec`: the one record per kernel, from which running, verifying, measuring and reporting are derived.

A spec's sizes are symbols (`R`, `K`, `g`): they are read off the shapes of the arguments or given by name, and every
rule, shape, scalar and count is an expression over them, evaluated here and quoted in error messages.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ptxlab import sources
from ptxlab.errors import ArgumentError
from ptxlab.hardware.tensor_map import TensorMap
from ptxlab.spec.claims import KernelClaim as KernelClaim
from ptxlab.spec.dtypes import ByVariant, DType, dtype_in, storage
from ptxlab.spec.expressions import evaluate as evaluate
from ptxlab.spec.expressions import names_in, nibbles, per_weight, solve
from ptxlab.spec.tolerance import Allowed

NULL = np.uint64(0)  # what a kernel is given for an optional array that is left out
Role = Literal["in", "out", "inout", "scratch", "tma", "scalar"]
Sizes = Mapping[str, Any]  # integers, but for scalar arguments that are floats
Arrays = dict[str, Any]


def sizes_rows(names: str, *rows: tuple[Any, ...]) -> tuple[dict[str, Any], ...]:
    """Build the sizes of a spec's examples: a number of each row per name."""
    return tuple(dict(zip(names.split(), row, strict=True)) for row in rows)


@dataclass(frozen=True)
class Arg:
    """An argument of a kernel.

    Attributes:
        name: also the keyword in `ptxlab.run(kernel, name=array)`.
        dtype: name of the element type, or which constant of the variant decides it.
        shape: one expression per axis over the sizes; empty for a scalar.
        role: `in`, `out`, `inout`, `scratch`, `tma` or `scalar`.
        value: for a scalar, the expression that gives its value.
        optional: an input that may be left out: the kernel is given a null pointer.
        absent: the constant of the variant, if there is one, that is 1 where it is left out, else 0.
        box, swizzle: for `tma`, an input taken as a `TensorMap`: its box, over sizes and the variant's constants.
    """

    name: str
    dtype: DType
    shape: tuple[str, ...] = ()
    role: Role = "in"
    value: str = ""
    optional: bool = False
    absent: str = ""
    box: tuple[str, str] = ("", "")
    swizzle: int = 0

    def resolve(self, sizes: Sizes) -> tuple[int, ...]:
        """Compute the shape in numbers."""
        return tuple(int(evaluate(axis, sizes)) for axis in self.shape)

    def nbytes(self, sizes: Sizes) -> int:
        """Compute the bytes of the array at these sizes.

        They include the constants of the variant where one decides the dtype.
        """
        return math.prod(self.resolve(sizes)) * storage(dtype_in(self.dtype, sizes)).itemsize


MAX_BLOCKS = (2**31 - 1, 65535, 65535)  # of a grid in x, y, z, on every GPU


@dataclass(frozen=True)
class Launch:
    """Geometry of one launch: grid and block in blocks and threads, dynamic shared memory in bytes.

    Raises ArgumentError for a grid beyond `MAX_BLOCKS`.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int = 0
    cluster: tuple[int, int, int] = (1, 1, 1)
    programmatic: bool = False  # may begin before the kernel before it on the stream has ended, for which it waits

    def __post_init__(self) -> None:
        if any(blocks > limit for blocks, limit in zip(self.grid, MAX_BLOCKS, strict=True)):
            raise ArgumentError("grid", f"at most {MAX_BLOCKS} blocks", self.grid)


@dataclass(frozen=True)
class WrongByDesign:
    """A mistake that a kernel shows: the truth it misses, and the model of where it misses it.

    Attributes:
        truth: logical inputs -> the results a correct kernel would give.
        misses: logical inputs -> boolean array, true exactly where the kernel's result differs from the truth.
        why: one line for people.
        overflows: whether lanes overflow, which the emulator's checks find. No check can know a wrong order.
    """

    truth: Callable[..., np.ndarray]
    misses: Callable[..., np.ndarray]
    why: str
    overflows: bool = True


@dataclass(frozen=True)
class KernelSpec:
    """Everything the project knows of one kernel; nothing here can be derived from anything else here.

    Attributes:
        name: file stem, entry symbol, test id, bench row and record key.
        summary: one line: what it shows, with the paper's section.
        args: arguments in launch order.
        launch: sizes, and the constants of the variant that runs -> geometry.
        example: `(rng, **sizes) -> logical inputs`, valid by the rules.
        pack: logical inputs -> arrays by argument name (inputs only).
        reference: logical inputs -> expected output, or a tuple of them: the oracle. A constant
            that decides a dtype is an argument of it too.
        rules: expressions over the sizes that must hold.
        value_rules: expressions over sizes and input arrays that must hold everywhere; `nibbles(q)` unpacks words,
            `per_weight(s)` repeats a group's value over its weights.
        operations: expression over the sizes: arithmetic operations (a multiply-add counts two), 0 for data movement.
        configs: `-D` constants of the compiled variants, the first is the default.
        choose: sizes -> the variant to run; by default the first.
        arch: lowest architecture, or with `exact` the only one.
        exact_arch: true for architecture-specific code (`sm_90a`).
        tolerance: allowed relative error of floating outputs; 0 means bit-exact.
        bound: instead of a tolerance: `reference`'s arguments -> the absolute error of each output: array or `Allowed`.
        tolerance_reason: why the tolerance, or the bound, is what it is.
        wrong: set for kernels that are wrong by design.
        example_sizes: sizes at which `verify` and the tests draw examples.
        agree: (the kernel's name, input arrays) -> raises `ArgumentError` where one of them belies another.
        after_wait: inputs that the kernel before may still be writing: this one waits for it (griddepcontrol.wait)
            before it reads them or writes anything. Empty: it does not wait.
        batch: the size that counts a batch's rows, tokens or sequences, of which each has results of its own: the first
            axis of some arguments. Results must not depend on it (`verify.check_rows`). Empty: they may.
        batch_sizes: sizes at which `check_rows` has its batch; by default some of the examples' with more rows.
        one_row: (input arrays, row) -> those that are others, besides being cut to the row, where it is alone.
        invariant: the spec of the variant whose results do not depend on the batch, where this one's do.
        form: of a kernel with several contracts which one it is; empty: the one that a bare name means.
        claims: what it does for all inputs, to be proved (`ptxlab.prove`).
    """

    name: str
    summary: str
    args: tuple[Arg, ...]
    launch: Callable[[Sizes], Launch]
    example: Callable[..., Arrays]
    pack: Callable[[Arrays], Arrays]
    reference: Callable[..., Any]
    rules: tuple[str, ...] = ()
    value_rules: tuple[str, ...] = ()
    operations: str = "0"
    configs: tuple[Mapping[str, int], ...] = ({},)
    choose: Callable[[Sizes], Mapping[str, int]] | None = None
    arch: str = "sm_75"
    exact_arch: bool = False
    tolerance: float = 0.0
    bound: Callable[..., Any] | None = None
    tolerance_reason: str = "integer results are compared for equality"
    wrong: WrongByDesign | None = None
    example_sizes: tuple[Mapping[str, int], ...] = field(default=())
    agree: Callable[[str, Arrays], None] | None = None
    after_wait: tuple[str, ...] = ()
    batch: str = "M"
    batch_sizes: Mapping[str, Any] | None = None
    one_row: Callable[[Arrays, int], Arrays] | None = None
    invariant: "KernelSpec | None" = None
    form: str = ""
    claims: tuple[KernelClaim, ...] = ()

    @property
    def label(self) -> str:
        """Name that selects the kernel: `NAME`, or `NAME:FORM`."""
        return self.name + self.suffix

    @property
    def suffix(self) -> str:
        """`:FORM` behind the name of the kernel or of a source."""
        return f":{self.form}" if self.form else ""

    def config_for(self, sizes: Sizes) -> dict[str, int]:
        """Return the `-D` constants of the variant that runs at these sizes."""
        return dict(self.choose(sizes) if self.choose else self.configs[0])

    @cached_property
    def by_variant(self) -> dict[str, tuple[str, ...]]:
        """The constants that decide dtypes, unless sizes do; with the dtypes that their values 0, 1 ... stand for."""
        dtypes = [arg.dtype for arg in self.args if isinstance(arg.dtype, ByVariant)]
        return {dtype.constant: dtype.dtypes for dtype in dtypes if not dtype.by_sizes}

    def expected(self, logical: Arrays, config: Mapping[str, int] | None = None) -> Arrays:
        """Compute the reference's outputs, by name, in the variant `config` (by default the reference's)."""
        return self._by_output(self.reference, logical, config)

    def allowed(self, logical: Arrays, config: Mapping[str, int] | None = None) -> dict[str, Allowed]:
        """Compute the error that every output may have, by name; of a spec with a `bound`."""
        bounds = self._by_output(self.bound, logical, config) if self.bound else {}
        return {name: bound if isinstance(bound, Allowed) else Allowed(bound) for name, bound in bounds.items()}

    def _by_output(self, function: Callable[..., Any], logical: Arrays, config: Mapping[str, int] | None) -> Arrays:
        constants = {name: config[name] for name in self.by_variant if config and name in config}
        outputs = function(**logical, **constants)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return {arg.name: output for arg, output in zip(self.outputs, outputs, strict=True)}

    @property
    def family(self) -> str:
        """The folder of its sources: `dequant`, `load`, `gemm` ..."""
        return sources.family_of(self.name)

    @cached_property
    def inputs(self) -> tuple[Arg, ...]:
        """Arguments that the caller provides."""
        return tuple(a for a in self.args if a.role in ("in", "inout", "tma"))

    @cached_property
    def outputs(self) -> tuple[Arg, ...]:
        """Arguments that the kernel writes for the caller."""
        return tuple(a for a in self.args if a.role in ("out", "inout"))

    @cached_property
    def symbols(self) -> frozenset[str]:
        """The sizes that shapes, scalars and rules are expressions over."""
        argument_expressions = [expression for a in self.args for expression in a.shape or (a.value or a.name,)]
        return frozenset(set().union(*map(names_in, [*argument_expressions, *self.rules])))

    def arg(self, name: str) -> Arg:
        """Return the argument of that name."""
        if matches := [arg for arg in self.args if arg.name == name]:
            return matches[0]
        raise ArgumentError("argument", f"{self.name} takes {', '.join(a.name for a in self.args)}", name)

    def sizes_of(self, shapes: Mapping[str, tuple[int, ...]], known_sizes: Sizes | None = None) -> dict[str, int]:
        """Read the sizes off the arrays' shapes and check every shape and rule.

        Args:
            shapes: shape by argument name, for any of the array arguments.
            known_sizes: sizes that the shapes do not determine, or that shall be checked against them.
        """
        sizes = dict(known_sizes or {})
        if unknown_symbols := sorted(set(sizes) - self.symbols):
            raise ArgumentError(f"{self.name}: sizes", ", ".join(sorted(self.symbols)), unknown_symbols[0])
        for name, shape in shapes.items():
            arg = self.arg(name)
            if len(shape) != len(arg.shape):
                axes = f"{len(arg.shape)} axes [{', '.join(arg.shape)}]"
                raise ArgumentError(f"{self.name}: {name}", axes, f"{shape}")
        for arg in self.args:  # launch order, whatever order the caller named them in
            for axis, length in zip(arg.shape, shapes.get(arg.name, ()), strict=False):
                solve(axis, length, sizes)
        for name, shape in shapes.items():
            arg = self.arg(name)
            if tuple(self._evaluate(axis, sizes) for axis in arg.shape) != tuple(shape):
                sizes_text = ", ".join(f"{k}={v}" for k, v in sizes.items())
                raise ArgumentError(
                    f"{self.name}: {name}", f"shape [{', '.join(arg.shape)}] with {sizes_text}", f"{shape}"
                )
        self.check_sizes(sizes)
        return sizes

    def check_sizes(self, sizes: Sizes) -> None:
        """Raise `ArgumentError` for the first rule that the sizes break."""
        for rule in self.rules:
            if not self._evaluate(rule, sizes):
                used_sizes = [f"{n}={v}" for n, v in sizes.items() if re.search(rf"\b{n}\b", rule)]
                raise ArgumentError(self.name, rule, ", ".join(used_sizes))

    def _evaluate(self, expression: str, sizes: Sizes) -> Any:
        try:
            return evaluate(expression, sizes)
        except NameError as error:
            raise ArgumentError(f"{self.name}: sizes", f"{error.name} must be given", dict(sizes)) from None
        except (ArithmeticError, ValueError):  # a division by 0
            raise ArgumentError(f"{self.name}: sizes", f"{expression} must be a number", dict(sizes)) from None

    def check_values(self, arrays: Mapping[str, np.ndarray], sizes: Sizes) -> None:
        """Raise `ArgumentError` for the first value rule that an element of the (NumPy) inputs breaks."""
        if self.agree:
            self.agree(self.name, dict(arrays))
        for rule in self.value_rules:
            names = {**sizes, **arrays, "nibbles": nibbles, "per_weight": lambda a: per_weight(a, sizes["g"])}
            is_satisfied = np.asarray(evaluate(rule, names))
            if is_satisfied.all():
                continue
            place = tuple(int(i) for i in np.argwhere(~is_satisfied)[0])
            places = {n: _place(place, arrays[n], is_satisfied) for n in arrays if re.search(rf"\b{n}\b", rule)}
            values = [f"{n}[{', '.join(map(str, p))}] = {arrays[n][p]}" for n, p in places.items()]
            raise ArgumentError(f"{self.name}: {', '.join(places)}", rule, ", ".join(values))

    def scalar(self, arg: Arg, sizes: Sizes) -> np.generic:
        """Compute the value of a scalar argument at these sizes."""
        dtype, number = np.dtype(str(arg.dtype)), self._evaluate(arg.value or arg.name, sizes)
        try:
            scalar: np.generic = dtype.type(number if dtype.kind == "f" else int(number))
        except OverflowError:
            raise ArgumentError(f"{self.name}: {arg.name}", f"must fit {dtype}", number) from None
        return scalar

    def arguments(self, arrays: Mapping[str, Any], sizes: Sizes) -> list[Any]:
        """Return the arguments in launch order: arrays, tensor maps over arrays, scalars; null for an input left out.

        `sizes` has the constants of the variant too.
        """
        return [self._argument(arg, arrays, sizes) for arg in self.args]

    def _argument(self, arg: Arg, arrays: Mapping[str, Any], sizes: Sizes) -> Any:
        if arg.role == "tma":
            return self.tensor_map(arg, arrays[arg.name], sizes)
        return arrays.get(arg.name, NULL) if arg.shape else self.scalar(arg, sizes)

    def tensor_map(self, arg: Arg, array: Any, sizes: Sizes) -> TensorMap:
        """Make the tensor map of a `tma` argument: of the matrix, or of the boxes one after the other.

        `sizes` are those of `arguments`.
        """
        rows, columns = (int(self._evaluate(side, sizes)) for side in arg.box)
        array = array if len(arg.shape) == 2 else array.reshape(-1, columns)
        try:
            return TensorMap(array, (rows, columns), arg.swizzle)
        except ArgumentError as error:
            raise ArgumentError(f"{self.name}: {arg.name}: {error.argument}", error.rule, error.value) from None

    def rows_of(self, sizes: Sizes) -> tuple[str, ...]:
        """List the array arguments whose first axis counts a batch's rows at these sizes.

        Raises ArgumentError for an argument in which the batch's size is anywhere else.
        """
        row_arguments = []
        for arg in self.args:
            if not any(self.batch in names_in(axis) for axis in arg.shape):
                continue
            if self.batch in set().union(*map(names_in, arg.shape[1:])) or arg.resolve(sizes)[0] != sizes[self.batch]:
                raise ArgumentError(
                    arg.name, f"its first axis alone must count {self.batch} rows", f"[{', '.join(arg.shape)}]"
                )
            row_arguments.append(arg.name)
        return tuple(row_arguments)

    def bytes_moved(self, sizes: Sizes) -> int:
        """Compute the compulsory traffic: inputs read once, outputs written once.

        `sizes` may hold constants of a variant.
        """
        sizes = {**self.config_for(sizes), **sizes}
        moved_arguments = [a for a in self.args if a.shape and a.role != "scratch"]
        return sum(a.nbytes(sizes) * (2 if a.role == "inout" else 1) for a in moved_arguments)


def _place(place: tuple[int, ...], array: np.ndarray, holds: np.ndarray) -> tuple[int, ...]:
    """Find the element of `array` that decided `holds[place]`.

    The last axis may be packed or grouped.
    """
    return (*place[:-1], place[-1] * array.shape[-1] // holds.shape[-1])
