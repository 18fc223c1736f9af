"""A kernel's launch over symbols: what its logical inputs are, where its spec packs them, and what threads store.

Where each bit of a logical input lies in the arguments is read off the spec's own `pack`, so nothing is said twice.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import z3

from ptxlab.emulator.front.types import bits_of, is_float
from ptxlab.errors import ArgumentError
from ptxlab.prove.bitvectors import Bits, joined, value
from ptxlab.prove.execute import FALSE, TRUE, Buffer, Index, NotModelled, SymbolicRun, execute
from ptxlab.prove.expressions import Elements, formula, indexed_by_i, names_in, of_bytes
from ptxlab.prove.integers import Integer
from ptxlab.runtime import Kernel
from ptxlab.sources import Source
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch

MOST_THREADS = 256  # of a file's launch
Pack = Callable[[Arrays], Arrays]
_DOMAINS = {"u": ((0, 15),), "i": ((-8, 7),), "f": ()}  # of small integers that a packing may want
_LETTERS = {"u": "u", "i": "s", "f": "f"}


@dataclass(frozen=True)
class Logical:
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
        """What a view calls it."""
        return f"{ {'u': 'u', 'i': 's', 'f': 'f'}[self.dtype.kind] }{self.bits}"

    def symbol(self, index: int, bits: int = 0) -> Bits:
        """The element, whatever width is asked for: it has one type."""
        return z3.BitVec(f"{self.name}[{index}]", self.bits)

    def array(self, raw: np.ndarray) -> np.ndarray:
        """Elements by their bits (u64, flat) as the array that `pack` takes."""
        unsigned = np.dtype(f"u{self.dtype.itemsize}")
        bits = raw.astype(np.int64)
        if self.dtype.kind == "i":
            bits = (bits << 64 - self.bits) >> 64 - self.bits
        return (bits & (1 << 8 * unsigned.itemsize) - 1).astype(unsigned).view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class Layout:
    """Where a spec packs its logical inputs: for each bit of each argument, the symbol's bit and what it is xored with.

    `origin[name]` counts from 1 over all bits of all logical inputs; 0 is a constant.
    """

    logical: tuple[Logical, ...]
    origin: Mapping[str, np.ndarray]
    base: Mapping[str, np.ndarray]

    @cached_property
    def starts(self) -> list[int]:
        """The number of the first bit of each logical input."""
        return [int(n) for n in np.cumsum([1, *(a.count * a.bits for a in self.logical)])]

    def byte(self, name: str, at: int) -> Bits:
        """A byte of an argument, over the symbols."""
        return z3.simplify(joined([self.bit(name, 8 * at + i) for i in range(8)]))

    def bit(self, name: str, at: int) -> Bits:
        """A bit of an argument."""
        number, flipped = int(self.origin[name][at]), int(self.base[name][at])
        if not number:
            return value(flipped, 1)
        which = int(np.searchsorted(self.starts, number, side="right")) - 1
        index, place = divmod(number - self.starts[which], self.logical[which].bits)
        bit = z3.Extract(place, place, self.logical[which].symbol(index))
        return ~bit if flipped else bit


@lru_cache(maxsize=32)
def layout_of(name: str, make: Callable[..., Arrays], pack: Pack, sizes: tuple[tuple[str, int], ...]) -> Layout:
    """Read the layout off `pack`: each bit of each input has a number, whose binary digits are packed one by one."""
    example = make(np.random.default_rng(0), **dict(sizes))
    logical = tuple(_logical(pack, example, argument) for argument in example)
    counts = [a.count * a.bits for a in logical]
    numbers = np.split(np.arange(1, sum(counts) + 1), np.cumsum(counts)[:-1])

    def packed(chosen: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """The arguments' bits for bits of the logical inputs."""
        arrays = {}
        for a, bits in zip(logical, chosen, strict=True):
            weights = np.uint64(1) << np.arange(a.bits, dtype=np.uint64)
            arrays[a.name] = a.array((bits.reshape(-1, a.bits).astype(np.uint64) * weights).sum(axis=1))
        return {n: np.unpackbits(np.ascontiguousarray(x).view(np.uint8).reshape(-1), bitorder="little")
                for n, x in pack(arrays).items()}  # fmt: skip

    base = packed([np.zeros(len(n), np.uint8) for n in numbers])
    origin = {name: np.zeros(len(bits), np.int64) for name, bits in base.items()}
    for digit in range(sum(counts).bit_length()):
        for name, bits in packed([(n >> digit & 1).astype(np.uint8) for n in numbers]).items():
            origin[name] |= (bits ^ base[name]).astype(np.int64) << digit
    anything = np.random.default_rng(1).integers(0, 2, 1 + sum(counts), np.uint8)
    anything[0] = 0
    for argument, bits in packed([anything[n] for n in numbers]).items():
        known = origin[argument] < len(anything)
        if not known.all() or (bits != anything[origin[argument]] ^ base[argument]).any():
            raise NotModelled(f"{name}: {argument}: its pack does more than to move bits")
    return Layout(logical, origin, base)


def _logical(pack: Pack, example: Arrays, name: str) -> Logical:
    """The input, and the bits that `pack` takes of it."""
    array = example[name]
    own = (0, 0) if array.dtype.kind == "f" else (np.iinfo(array.dtype).min, np.iinfo(array.dtype).max)
    for low, high in (own, *_DOMAINS[array.dtype.kind]):
        try:
            for number in (low, high):
                pack({**example, name: np.full_like(array, number)})
        except ArgumentError:
            continue
        bits = 8 * array.dtype.itemsize if (low, high) == own else (high - low).bit_length()
        return Logical(name, array.shape, array.dtype, bits)
    raise NotModelled(f"{name}: its values are neither those of its dtype nor four bits")


@dataclass(eq=False)
class SymbolicLaunch:
    """One source of a kernel, launched over symbols, with some threads followed.

    Attributes:
        label: the source.
        names: what claims may speak of: inputs, outputs, sizes.
        outputs: the names of what was stored to; claims are on every stored element of the first.
        target: its buffer, and `bits` of an element.
        trace: what the run left.
        count: elements of the first output; None where nothing tells.
        arrays: a counterexample, bits by name of a symbol -> arguments by name.
        command: runs it on these.
        expected: elements of the first output that the threads have to store.
    """

    label: str
    names: dict[str, Any]
    outputs: tuple[str, ...]
    target: Buffer
    bits: int
    trace: SymbolicRun
    count: int | None
    arrays: Callable[[Mapping[str, int]], Arrays]
    command: str
    expected: Sequence[int] = ()

    @property
    def stored(self) -> list[int]:
        """The elements of the first output that were stored to, or should have been."""
        return sorted({8 * at // self.bits for at in self.target.written} | set(self.expected))

    def written(self, i: int) -> Any:
        """The condition on which all bytes of element `i` of the first output are stored."""
        octets = range(i * self.bits // 8, ((i + 1) * self.bits + 7) // 8)
        return z3.simplify(z3.And([self.target.written.get(at, FALSE) for at in octets]))


def of_spec(spec: KernelSpec, source: Source, *, alone: bool = False) -> SymbolicLaunch:
    """A spec's kernel at the largest of its examples, of whose outputs each thread stores as many elements.

    The threads: the first (`alone`: no other), one in the second block, the last that has work, and the first that has
    none.
    """
    sizes = {k: int(v) for k, v in max(spec.example_sizes, key=spec.bytes_moved).items()}
    config = spec.config_for(sizes)
    entry = Kernel.of(spec, source, config).module.entries[spec.name]
    launch = spec.launch({**sizes, **config})
    layout = layout_of(spec.name, spec.example, spec.pack, tuple(sizes.items()))
    output, width = spec.outputs[0], launch.block[0]
    count, itemsize = int(np.prod(output.resolve(sizes))), np.dtype(str(output.dtype)).itemsize

    def run(numbers: Sequence[int]) -> tuple[dict[str, Buffer], SymbolicRun]:
        buffers = {}
        for arg in spec.args:
            if arg.shape:
                first = partial(layout.byte, arg.name) if arg.name in layout.origin else None
                buffers[arg.name] = Buffer(arg.name, arg.nbytes({**sizes, **config}), first=first)
        arguments = [buffers[a.name] if a.shape else _bits(spec.scalar(a, {**sizes, **config})) for a in spec.args]
        threads = [((n // width, 0, 0), (n % width, 0, 0)) for n in numbers]
        return buffers, execute(entry, arguments, grid=launch.grid, block=launch.block, threads=threads)

    buffers, trace = run([0])
    faults: list[tuple[Any, str]] = []
    each = len(buffers[output.name].written) // itemsize
    if not each or sorted(buffers[output.name].written) != list(range(each * itemsize)):
        faults.append((TRUE, f"{source.label}: thread 0 does not store the first elements of {output.name}"))
        each = count
    working = count // each
    numbers = sorted({0, min(width + 37, working - 1), working - 1, min(working, width * launch.grid[0] - 1)})
    if alone:
        numbers = numbers[:1]
    else:
        buffers, trace = run(numbers)
    trace.faults.extend(faults)

    def view_of(arg: Arg) -> Elements:
        kind = np.dtype(str(arg.dtype))
        given = partial(layout.byte, arg.name) if arg.role == "in" else buffers[arg.name].read
        type_name = f"{_LETTERS[kind.kind]}{8 * kind.itemsize}"
        return of_bytes(arg.name, given, type=type_name, count=int(np.prod(arg.resolve(sizes))))

    def arrays(model: Mapping[str, int]) -> Arrays:
        raw = {a.name: np.zeros(a.count, np.uint64) for a in layout.logical}
        for symbol, bits in model.items():
            name, _, index = symbol.rstrip("]").partition("[")
            if name in raw:
                raw[name][int(index)] = bits
        return spec.pack({a.name: a.array(raw[a.name]) for a in layout.logical})

    logical = {a.name: Elements(a.name, a.symbol, a.type, a.count) for a in layout.logical}
    names = {**sizes, **{arg.name: view_of(arg) for arg in (*spec.inputs, *spec.outputs)}, **logical}
    expected = [i for n in numbers if n < working and each < count for i in range(n * each, (n + 1) * each)]
    outputs, target = tuple(a.name for a in spec.outputs), buffers[output.name]
    command = f"ptxlab run {source.label} --unchecked"
    return SymbolicLaunch(
        source.label, names, outputs, target, 8 * itemsize, trace, count, arrays, command, expected
    )  # fmt: skip


def of_file(
    kernel: Kernel,
    claim: str,
    *,
    where: Launch,
    assume: Sequence[str] = (),
    parameters: Sequence[str] = (),
) -> SymbolicLaunch:
    """A kernel without a spec, all threads of a small launch: its arguments are symbols, byte by byte.

    `claim` tells which output it is on, and as which elements (`out.s8[i]`); `parameters` are other names for the
    kernel's own. ArgumentError for a launch of more than `MOST_THREADS`, or a claim on nothing that is stored.
    """
    grid, block = where.grid, where.block
    if np.prod(grid) * np.prod(block) > MOST_THREADS:
        raise ArgumentError("launch", f"at most {MOST_THREADS} threads are followed", f"grid {grid}, block {block}")
    entry = kernel.module.entries[kernel.entry]
    own = parameters or kernel.parameters
    if len(own) != len(entry.params):
        raise ArgumentError(f"{kernel.source.label}: parameters", f"as many as in {', '.join(own)}", len(entry.params))
    arguments: list[Bits | Buffer] = [
        Buffer(name) if p.size == 8 and p.type[0] in "ub" else z3.BitVec(name, 8 * p.size)
        for name, p in zip(own, entry.params, strict=True)
    ]  # fmt: skip
    scalars = {n: Integer.unsigned(a) for n, a in zip(own, arguments, strict=True) if not isinstance(a, Buffer)}
    # conditions on scalars alone tell which ways the kernel can go
    known = [formula(text, scalars, 0) for text in assume if names_in(text) <= set(scalars)]
    threads = [(b, t) for b in _indices(grid) for t in _indices(block)]
    trace = execute(entry, arguments, grid=grid, block=block, threads=threads, assume=known)
    names: dict[str, Any] = dict(scalars)
    names |= {a.name: _typed(a) for a in arguments if isinstance(a, Buffer)}
    stored = {a.name: a for a in arguments if isinstance(a, Buffer) and a.written}
    target, bits = "", 8
    for name, type_name in indexed_by_i(claim) if claim else ():
        if name in stored:
            target, bits = name, int((type_name or names[name].type or "u8")[1:])
            break
    else:
        target = next(iter(stored), "") if not claim else ""
    if not target:
        rule = f"about element i of what the kernel stores ({', '.join(stored) or 'nothing'}), such as out.u8[i]"
        raise ArgumentError("claim", rule, claim)

    def arrays(model: Mapping[str, int]) -> Arrays:
        found: Arrays = {}
        for argument, parameter in zip(arguments, entry.params, strict=True):
            if isinstance(argument, Buffer):
                size = -(-(1 + max(argument.content, default=0)) // 16) * 16
                octets = [model.get(f"{argument.name} byte {at}", 0) for at in range(size)]
                found[parameter_names[argument.name]] = np.array(octets, np.uint8)
            else:
                number = model.get(str(argument), 0)
                found[parameter_names[str(argument)]] = np.array(number, f"u{parameter.size}")
        return found

    parameter_names = dict(zip(own, kernel.parameters, strict=True))
    geometry = " ".join(f"--{n} {','.join(map(str, v))}" for n, v in (("grid", grid), ("block", block)))
    command = f"ptxlab run {kernel.source.path}:{kernel.entry} {geometry}"
    outputs = (target, *(name for name in stored if name != target))
    return SymbolicLaunch(kernel.source.label, names, outputs, stored[target], bits, trace, None, arrays, command)


def _typed(buffer: Buffer) -> Elements:
    """A pointer's elements, of the type by which the kernel accesses them, if it is one."""
    kinds = {f"{'f' if is_float(t) and not t.endswith('x2') else 'u'}{bits_of(t)}" for t in buffer.types}
    type_name = kinds.pop() if len(kinds) == 1 else ""
    places = {8 * at // int(type_name[1:] or 8) for at in buffer.content}
    return of_bytes(buffer.name, buffer.read, type=type_name, only=places.pop() if len(places) == 1 else None)


def _indices(extent: Index) -> Iterator[Index]:
    x, y, z = extent
    return ((i, j, k) for k in range(z) for j in range(y) for i in range(x))


def _bits(number: np.generic) -> Bits:
    return value(int.from_bytes(number.tobytes(), "little"), 8 * number.nbytes)
