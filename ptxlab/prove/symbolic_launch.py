"""A symbolic launch of a kernel: its logical inputs, where its spec packs them, and what threads store.

Where each bit of a logical input lies in the arguments is read off the spec's own `pack`, so nothing is said twice.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import z3

from ptxlab.arithmetic import ceil_div
from ptxlab.emulator import pointers_of
from ptxlab.emulator.front.types import bits_of, is_float
from ptxlab.errors import ArgumentError
from ptxlab.mangled import distinct_names
from ptxlab.prove.bitvectors import Bits, concatenate_fields, constant, split_fields
from ptxlab.prove.execute import FALSE, TRUE, Buffer, Index, NotModelled, SymbolicRun, execute
from ptxlab.prove.expressions import Elements, arrays_at_i, formula, names_in, view_bytes
from ptxlab.runtime import Kernel
from ptxlab.sources import Source
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch
from ptxlab.toolchain.kernels import targets

MAX_THREADS = 256  # of a file's launch
Pack = Callable[[Arrays], Arrays]
_DOMAINS = {"u": ((0, 15),), "i": ((-8, 7),), "f": ()}  # of small integers that a packing may want
_LETTERS = {"u": "u", "i": "s", "f": "f"}


@dataclass(frozen=True)
class LogicalInput:
    """A logical input: its elements are symbols of so many bits."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    bits: int

    @property
    def count(self) -> int:
        """Elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def type(self) -> str:
        """Name of the elements' type in a view."""
        return f"{_LETTERS[self.dtype.kind]}{self.bits}"

    def symbol(self, index: int) -> Bits:
        """Return the symbol of an element."""
        return z3.BitVec(f"{self.name}[{index}]", self.bits)

    def element(self, index: int, bits: int) -> Bits:
        """Return the symbol of an element, which must have `bits` bits.

        Raises ValueError for another width: no other element lies beside it.
        """
        if bits != self.bits:
            raise ValueError(f"{self.name} has elements of {self.bits} bits, not {bits}")
        return self.symbol(index)

    def array(self, raw: np.ndarray) -> np.ndarray:
        """Convert elements by their bits (u64, flat) to the array that `pack` takes."""
        unsigned_dtype = np.dtype(f"u{self.dtype.itemsize}")
        bits = raw.astype(np.int64)
        if self.dtype.kind == "i":
            bits = (bits << 64 - self.bits) >> 64 - self.bits
        return (
            (bits & (1 << 8 * unsigned_dtype.itemsize) - 1).astype(unsigned_dtype).view(self.dtype).reshape(self.shape)
        )


@dataclass(frozen=True)
class Layout:
    """The layout in which a spec packs its logical inputs.

    It has for each bit of each argument the symbol's bit, and what that is xored with. `origin[name]` counts from 1
    over all bits of all logical inputs; 0 is a constant.
    """

    logical: tuple[LogicalInput, ...]
    origin: Mapping[str, np.ndarray]
    base: Mapping[str, np.ndarray]

    @cached_property
    def starts(self) -> list[int]:
        """The number of the first bit of each logical input."""
        return [int(n) for n in np.cumsum([1, *(a.count * a.bits for a in self.logical)])]

    def byte(self, name: str, offset: int) -> Bits:
        """Return a byte of an argument as a formula over the symbols."""
        return z3.simplify(concatenate_fields([self.bit(name, 8 * offset + i) for i in range(8)]))

    def bit(self, name: str, position: int) -> Bits:
        """Return a bit of an argument as a formula over the symbols."""
        number, base_bit = int(self.origin[name][position]), int(self.base[name][position])
        if not number:
            return constant(base_bit, 1)
        input_index = int(np.searchsorted(self.starts, number, side="right")) - 1
        index, bit_index = divmod(number - self.starts[input_index], self.logical[input_index].bits)
        bit = z3.Extract(bit_index, bit_index, self.logical[input_index].symbol(index))
        return ~bit if base_bit else bit

    def arrays(self, model: Mapping[str, int]) -> Arrays:
        """Build the logical inputs from the bits of their symbols."""
        raw = {a.name: np.zeros(a.count, np.uint64) for a in self.logical}
        for symbol, bits in model.items():
            name, _, index = symbol.rstrip("]").partition("[")
            if name in raw:
                raw[name][int(index)] = bits
        return {a.name: a.array(raw[a.name]) for a in self.logical}


@lru_cache(maxsize=32)
def layout_of(name: str, make: Callable[..., Arrays], pack: Pack, sizes: tuple[tuple[str, int], ...]) -> Layout:
    """Derive the layout from `pack`: number all input bits, and pack one binary digit of the numbers at a time."""
    example = make(np.random.default_rng(0), **dict(sizes))
    for input_name, x in example.items():
        if not isinstance(x, np.ndarray):
            raise NotModelled(f"{name}: its input {input_name} is {type(x).__name__}; arrays are followed")
    logical = tuple(_logical_input(pack, example, argument) for argument in example)
    counts = [a.count * a.bits for a in logical]
    numbers = np.split(np.arange(1, sum(counts) + 1), np.cumsum(counts)[:-1])

    def bits_after_pack(input_bits: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Run `pack` on the logical inputs that these bits, 0 or 1, make; return the bits of its arguments by name."""
        arrays = {}
        for a, bits in zip(logical, input_bits, strict=True):
            weights = np.uint64(1) << np.arange(a.bits, dtype=np.uint64)
            arrays[a.name] = a.array((bits.reshape(-1, a.bits).astype(np.uint64) * weights).sum(axis=1))
        return {n: np.unpackbits(np.ascontiguousarray(x).view(np.uint8).reshape(-1), bitorder="little")
                for n, x in pack(arrays).items()}  # fmt: skip

    base = bits_after_pack([np.zeros(len(n), np.uint8) for n in numbers])
    origin = {name: np.zeros(len(bits), np.int64) for name, bits in base.items()}
    for digit in range(sum(counts).bit_length()):
        for name, bits in bits_after_pack([(n >> digit & 1).astype(np.uint8) for n in numbers]).items():
            origin[name] |= (bits ^ base[name]).astype(np.int64) << digit
    random_bits = np.random.default_rng(1).integers(0, 2, 1 + sum(counts), np.uint8)
    random_bits[0] = 0
    for argument, bits in bits_after_pack([random_bits[n] for n in numbers]).items():
        is_bit_number = origin[argument] < len(random_bits)
        if not is_bit_number.all() or (bits != random_bits[origin[argument]] ^ base[argument]).any():
            raise NotModelled(f"{name}: {argument}: its pack does more than to move bits")
    return Layout(logical, origin, base)


def _logical_input(pack: Pack, example: Arrays, name: str) -> LogicalInput:
    """Return the logical input of that name, with the number of bits per element that `pack` accepts."""
    array = example[name]
    dtype_range = (0, 0) if array.dtype.kind == "f" else (np.iinfo(array.dtype).min, np.iinfo(array.dtype).max)
    for low, high in (dtype_range, *_DOMAINS[array.dtype.kind]):
        try:
            for number in (low, high):
                pack({**example, name: np.full_like(array, number)})
        except ArgumentError:
            continue
        bits = 8 * array.dtype.itemsize if (low, high) == dtype_range else (high - low).bit_length()
        return LogicalInput(name, array.shape, array.dtype, bits)
    raise NotModelled(f"{name}: its values are neither those of its dtype nor four bits")


@dataclass(frozen=True, eq=False)
class SymbolicLaunch:
    """A launch of one source of a kernel over symbols, with some threads followed.

    Attributes:
        label: the source.
        names: what claims may speak of: inputs, outputs as the launch leaves them, sizes; `before.out` is what lay in
            an output before.
        outputs: what was stored to, by name; claims are on every stored element of `target`, of so many `bits`.
        trace: what the run left.
        count: elements of the target; None where nothing tells.
        arrays: a counterexample, bits by name of a symbol -> arguments by name.
        command: runs it on these.
        expected: elements of the target that the threads have to store.
    """

    label: str
    names: dict[str, Any]
    outputs: Mapping[str, Buffer]
    target: str
    bits: int
    trace: SymbolicRun
    count: int | None
    arrays: Callable[[Mapping[str, int]], Arrays]
    command: str
    expected: Sequence[int] = ()

    @property
    def stored(self) -> list[int]:
        """Indices of the target's elements that were stored, or should have been."""
        bits = [range(8 * offset, 8 * offset + 8) for offset in self.outputs[self.target].written]
        return sorted({bit // self.bits for octet in bits for bit in octet} | set(self.expected))

    def stored_condition(self, i: int) -> Any:
        """Return the condition on which all bytes of element `i` of the target are stored."""
        octets = range(i * self.bits // 8, ((i + 1) * self.bits + 7) // 8)
        return z3.simplify(z3.And([self.outputs[self.target].written.get(offset, FALSE) for offset in octets]))

    @property
    def inputs(self) -> dict[str, Any]:
        """Names that assumptions may use: inputs and initial contents, no stored values."""
        initial_views = {name: replace(view, name=f"before.{name}") for name, view in self.names["before"].items()}
        return {name: x for name, x in {**self.names, **initial_views}.items() if name != "other"}

    def for_claim(self, claim: str) -> "SymbolicLaunch":
        """Return the launch for a claim, which names its target by an element `i` with its type (`out.s8[i]`)."""
        for name, type_name in arrays_at_i(claim):
            if name in self.outputs:
                try:
                    view = self.names[name].view_as(type_name) if type_name else self.names[name]
                except ValueError as error:
                    raise ArgumentError("claim", str(error), claim) from None
                return replace(self, target=name, bits=view.bits)
        rule = f"about element i of what the kernel stores ({', '.join(self.outputs)}), such as out.u8[i]"
        raise ArgumentError("claim", rule, claim)


def launch_spec(spec: KernelSpec, source: Source, *, alone: bool = False, entry: str = "") -> SymbolicLaunch:
    """Launch a spec's kernel over symbols at the largest of its examples; each thread stores as many elements.

    The threads: the first (`alone`: no other), one in the second block, the last that has work, and the first that has
    none. `entry` is another kernel's in the source, which takes the same arguments.
    """
    sizes = {k: int(v) for k, v in max(spec.example_sizes, key=spec.bytes_moved).items()}
    layout = layout_of(spec.name, spec.example, spec.pack, tuple(sizes.items()))
    output = spec.outputs[0]
    for arg in spec.args:
        if "|" in str(arg.dtype):
            raise NotModelled(f"{spec.name}: {arg.name} is {arg.dtype}; arguments of one dtype are followed")
    count, itemsize = int(np.prod(output.resolve(sizes))), np.dtype(str(output.dtype)).itemsize
    entry = entry or spec.name
    buffers, trace = _run(spec, source, entry, sizes, layout, [0])
    written_offsets = buffers[output.name].written
    elements_per_thread, faults = len(written_offsets) // itemsize, list[tuple[Any, str]]()
    if not elements_per_thread or sorted(written_offsets) != list(range(elements_per_thread * itemsize)):
        faults.append((TRUE, f"{source.label}: thread 0 does not store the first elements of {output.name}"))
        elements_per_thread = count
    working_threads, numbers = count // elements_per_thread, [0]
    if not alone:
        launch = spec.launch({**sizes, **spec.config_for(sizes)})
        width, last = launch.block[0], launch.block[0] * launch.grid[0] - 1
        numbers = sorted({0, min(width + 37, working_threads - 1), working_threads - 1, min(working_threads, last)})
        buffers, trace = _run(spec, source, entry, sizes, layout, numbers)
    trace.faults.extend(faults)
    names: dict[str, Any] = {**sizes}
    for arg in (*spec.inputs, *spec.outputs):
        byte = partial(layout.byte, arg.name) if arg.role == "in" else buffers[arg.name].read
        names[arg.name] = _elements(arg, sizes, byte)
    names |= {a.name: Elements(a.name, a.element, a.type, a.count) for a in layout.logical}
    names["before"] = {arg.name: _elements(arg, sizes, buffers[arg.name].initial_byte) for arg in spec.outputs}
    return SymbolicLaunch(
        label=source.label,
        names=names,
        outputs={arg.name: buffers[arg.name] for arg in spec.outputs},
        target=output.name,
        bits=8 * itemsize,
        trace=trace,
        count=count,
        arrays=lambda model: spec.pack(layout.arrays(model)),
        command=f"ptxlab run {source.label} --unchecked",
        expected=[
            i
            for n in numbers
            if n < working_threads and elements_per_thread < count
            for i in range(n * elements_per_thread, (n + 1) * elements_per_thread)
        ],
    )


def _run(
    spec: KernelSpec, source: Source, symbol: str, sizes: dict[str, int], layout: Layout, numbers: Sequence[int]
) -> tuple[dict[str, Buffer], SymbolicRun]:
    """Run some threads, by their number in the launch; return the buffers that they store to, and the trace."""
    config = spec.config_for(sizes)
    constants = {**sizes, **config}
    launch, entry = spec.launch(constants), Kernel.of(spec, source, config).module.entries[symbol]
    if len(entry.params) != len(spec.args):
        rule = f"as many parameters as {spec.name} has arguments ({', '.join(a.name for a in spec.args)})"
        raise ArgumentError(f"{source.label}: {symbol}", rule, len(entry.params))
    buffers = {
        a.name: Buffer(
            a.name, a.nbytes(constants), initial=partial(layout.byte, a.name) if a.name in layout.origin else None
        )
        for a in spec.args
        if a.shape
    }
    arguments = [buffers[a.name] if a.shape else _bits(spec.scalar(a, constants)) for a in spec.args]
    width = launch.block[0]
    threads = [((n // width, 0, 0), (n % width, 0, 0)) for n in numbers]
    return buffers, execute(entry, arguments, grid=launch.grid, block=launch.block, threads=threads)


def _elements(arg: Arg, sizes: Mapping[str, int], byte: Callable[[int], Bits]) -> Elements:
    """View an argument of a spec as elements, by its bytes."""
    kind = np.dtype(str(arg.dtype))
    type_name = f"{_LETTERS[kind.kind]}{8 * kind.itemsize}"
    return view_bytes(arg.name, byte, type=type_name, count=int(np.prod(arg.resolve(sizes))))


def launch_file(
    kernel: Kernel,
    *,
    geometry: Launch,
    assume: Sequence[str] = (),
    parameters: Sequence[str] = (),
    advance: Callable[[str], object] = lambda _: None,
) -> SymbolicLaunch:
    """Launch a kernel without a spec over symbols: all threads of a small launch, arguments byte by byte.

    `parameters` are other names for the kernel's own; `advance` is told the line of each instruction. ArgumentError for
    a launch of more than `MAX_THREADS`.
    """
    grid, block = geometry.grid, geometry.block
    if np.prod(grid) * np.prod(block) > MAX_THREADS:
        raise ArgumentError("launch", f"at most {MAX_THREADS} threads are followed", f"grid {grid}, block {block}")
    entry, names = kernel.module.entries[kernel.entry], parameters or kernel.parameters
    if len(names) != len(entry.params):
        raise ArgumentError(
            f"{kernel.source.label}: parameters", f"as many as in {', '.join(names)}", len(entry.params)
        )
    pointer_accesses = pointers_of(entry)
    arguments: dict[str, Bits | Buffer] = {}
    scalars: dict[str, Elements] = {}
    for name, parameter, declared_parameter in zip(names, entry.params, kernel.signature, strict=True):
        if parameter.size == 8 and (declared_parameter.is_pointer or parameter.name in pointer_accesses):
            arguments[name] = Buffer(name)
        else:
            bits = arguments[name] = z3.BitVec(name, 8 * parameter.size)
            kind = "s" if declared_parameter.number and declared_parameter.number.signed else "u"
            scalars[name] = view_bytes(name, split_fields(bits, 8).__getitem__, type=f"{kind}{bits.size()}", only=0)
    conditions = _input_conditions(assume, arguments, scalars)
    threads = [(b, t) for b in _indices(grid) for t in _indices(block)]
    trace = execute(
        entry, list(arguments.values()), grid=grid, block=block, threads=threads, assume=conditions, advance=advance
    )
    buffers = {name: argument for name, argument in arguments.items() if isinstance(argument, Buffer)}
    views = {name: _elements_of(buffer) for name, buffer in buffers.items()}
    outputs = {name: buffer for name, buffer in buffers.items() if buffer.written}
    if not outputs:
        raise ArgumentError(kernel.source.label, "a kernel that stores to one of its arguments", "none")

    def build_arguments(model: Mapping[str, int]) -> Arrays:
        """Build each argument by its label from a counterexample: a buffer as bytes, a scalar as a number."""
        arguments_by_label: Arrays = {}
        for (name, argument), parameter, label in zip(arguments.items(), entry.params, kernel.parameters, strict=True):
            if isinstance(argument, Buffer):
                size = ceil_div(1 + max(argument.content, default=0), 16) * 16
                content = [model.get(f"{name} byte {at}", 0) for at in range(size)]
                arguments_by_label[label] = np.array(content, np.uint8)
            else:
                arguments_by_label[label] = np.array(model.get(name, 0), f"u{parameter.size}")
        return arguments_by_label

    geometry_options = " ".join(f"--{n} {','.join(map(str, v))}" for n, v in (("grid", grid), ("block", block)))
    return SymbolicLaunch(
        label=kernel.source.label,
        names={**scalars, **views, "before": {name: _elements_of(buffers[name], initial=True) for name in outputs}},
        outputs=outputs,
        target=next(iter(outputs)),
        bits=8,
        trace=trace,
        count=None,
        arrays=build_arguments,
        command=f"ptxlab run {_target(kernel)} {geometry_options}",
    )


def _target(kernel: Kernel) -> str:
    """Return the kernel as a command-line argument, quoted for a shell: `'k.cu:add<float, 3>'`."""
    symbols = [*kernel.module.entries]
    return targets(kernel.source, distinct_names(symbols))[symbols.index(kernel.entry)]


def _input_conditions(
    assume: Sequence[str], arguments: Mapping[str, Bits | Buffer], scalars: Mapping[str, Elements]
) -> list[Any]:
    """Return the assumptions that name only scalars and elements such as `x.u32[3]`, as formulas.

    They tell which branches a kernel takes.
    """
    bytes_by_name = {
        name: view_bytes(name, argument.initial_byte)
        for name, argument in arguments.items()
        if isinstance(argument, Buffer)
    }
    names = {**bytes_by_name, **scalars}
    conditions = []
    for text in assume:
        if names_in(text) <= set(scalars) - {"i"}:
            conditions.append(formula(text, scalars, 0))
        elif names_in(text) <= set(names) - {"i"}:
            with suppress(ArgumentError):  # of elements without a type, which the kernel's accesses tell in the end
                conditions.append(formula(text, names, 0))
    return conditions


def _elements_of(buffer: Buffer, initial: bool = False) -> Elements:
    """View a buffer as elements of the type in which the kernel accesses it, if that is a single type."""
    kinds = {f"{'f' if is_float(t) and not t.endswith('x2') else 'u'}{bits_of(t)}" for t in buffer.types}
    type_name = kinds.pop() if len(kinds) == 1 else ""
    places = {8 * offset // int(type_name[1:] or 8) for offset in buffer.content}
    only_place = places.pop() if len(places) == 1 else None
    return view_bytes(buffer.name, buffer.initial_byte if initial else buffer.read, type=type_name, only=only_place)


def _indices(extent: Index) -> Iterator[Index]:
    x, y, z = extent
    return ((i, j, k) for k in range(z) for j in range(y) for i in range(x))


def _bits(number: np.generic) -> Bits:
    return constant(int.from_bytes(number.tobytes(), "little"), 8 * number.nbytes)
