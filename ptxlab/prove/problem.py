"""A kernel's launch over symbols: what its logical inputs are, where its spec packs them, and what threads store.

Where each bit of a logical input lies in the arguments is read off the spec's own `pack`, so nothing is said twice.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import z3

from ptxlab.errors import ArgumentError
from ptxlab.prove.execute import Buffer, Index, NotModelled, Trace, execute
from ptxlab.prove.expressions import View, of_bytes
from ptxlab.prove.semantics import Bits, joined, value
from ptxlab.runtime import Kernel
from ptxlab.sources import Source
from ptxlab.spec import Arg, Arrays, KernelSpec

Pack = Callable[[Arrays], Arrays]
_DOMAINS = {"u": ((0, 15),), "i": ((-8, 7),), "f": ()}  # of small integers that a packing may want


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

    def symbol(self, index: int) -> Bits:
        """The element."""
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
        if (bits != anything[origin[argument]] ^ base[argument]).any():
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
class Problem:
    """One source of a kernel, launched over symbols, with some threads followed.

    Attributes:
        label: the source.
        inputs: what claims say of the inputs, by name.
        outputs: what claims say of the outputs, and the buffers behind them.
        trace: what the run left.
        count: elements of the first output; None where nothing tells.
        arrays: a counterexample, bits by element -> arguments by name.
        command: runs it on these.
        expected: elements of the first output that the threads have to store.
    """

    label: str
    inputs: dict[str, Any]
    outputs: dict[str, tuple[View, Buffer]]
    trace: Trace
    count: int | None
    arrays: Callable[[Mapping[str, int]], dict[str, np.ndarray]]
    command: str
    expected: Sequence[int] = ()

    @property
    def bits(self) -> int:
        """Of an element of the first output."""
        return int(next(iter(self.outputs.values()))[0].type[1:])

    @property
    def stored(self) -> list[int]:
        """The elements of the first output that were stored to, or should have been."""
        _, buffer = next(iter(self.outputs.values()))
        size = self.bits // 8
        return sorted({at // size for at in buffer.written} | set(self.expected))

    def written(self, i: int) -> Any:
        """The condition on which all bytes of element `i` of the first output are stored."""
        _, buffer = next(iter(self.outputs.values()))
        size = self.bits // 8
        return z3.simplify(
            z3.And([buffer.written.get(at, z3.BoolVal(False)) for at in range(i * size, (i + 1) * size)])
        )


def of_spec(spec: KernelSpec, source: Source) -> Problem:
    """A spec's kernel at the largest of its examples: threads of the first and second block, the last that works, and
    the first that has no work.
    """
    sizes = {k: int(v) for k, v in max(spec.example_sizes, key=spec.bytes_moved).items()}
    config = spec.config_for(sizes)
    module = Kernel.of(spec, source, config).module
    launch = spec.launch({**sizes, **config})
    layout = layout_of(spec.name, spec.example, spec.pack, tuple(sizes.items()))

    def run(threads: Sequence[tuple[Index, Index]]) -> tuple[dict[str, Buffer], Trace]:
        buffers = {}
        for arg in spec.args:
            if arg.shape:
                given = arg.name in layout.origin
                first = (lambda at, name=arg.name: layout.byte(name, at)) if given else None
                buffers[arg.name] = Buffer(arg.name, arg.nbytes({**sizes, **config}), first=first)
        arguments = [buffers[a.name] if a.shape else _scalar(spec.scalar(a, {**sizes, **config})) for a in spec.args]
        trace = execute(module.entries[spec.name], arguments, grid=launch.grid, block=launch.block, threads=threads)
        return buffers, trace

    output = spec.outputs[0]
    dtype = np.dtype(str(output.dtype))
    count = int(np.prod(output.resolve(sizes)))
    alone, _ = run([((0, 0, 0), (0, 0, 0))])
    each = len(alone[output.name].written) // dtype.itemsize  # elements per thread
    if not each or sorted(alone[output.name].written) != list(range(each * dtype.itemsize)):
        raise NotModelled(f"{source.label}: thread 0 does not store the first elements of {output.name}")
    width, working = launch.block[0], count // each
    numbers = sorted({0, min(width + 37, working - 1), working - 1, min(working, width * launch.grid[0] - 1)})

    def view_of(arg: Arg, buffer: Buffer) -> View:
        kind = np.dtype(str(arg.dtype))
        letter = {"u": "u", "i": "s", "f": "f"}[kind.kind]
        content = (lambda at: layout.byte(arg.name, at)) if arg.role == "in" else buffer.read
        return of_bytes(arg.name, content, type=f"{letter}{8 * kind.itemsize}", count=int(np.prod(arg.resolve(sizes))))

    buffers, trace = run([((n // width, 0, 0), (n % width, 0, 0)) for n in numbers])
    views = {a.name: View(a.name, lambda i, bits, a=a: a.symbol(i), a.type, a.count) for a in layout.logical}
    outputs = {a.name: (view_of(a, buffers[a.name]), buffers[a.name]) for a in spec.outputs}
    inputs = {**sizes, **{a.name: view_of(a, buffers[a.name]) for a in spec.inputs}, **views}
    expected = [i for n in numbers if n < working for i in range(n * each, (n + 1) * each)]

    def arrays(model: Mapping[str, int]) -> dict[str, np.ndarray]:
        raw = {a.name: np.zeros(a.count, np.uint64) for a in layout.logical}
        for key, bits in model.items():
            name, _, index = key.rstrip("]").partition("[")
            if name in raw:
                raw[name][int(index)] = bits
        return spec.pack({a.name: a.array(raw[a.name]) for a in layout.logical})

    command = f"ptxlab run {source.label} --unchecked"
    return Problem(source.label, inputs, outputs, trace, count, arrays, command, expected)


def _scalar(number: np.generic) -> Bits:
    return value(int.from_bytes(number.tobytes(), "little"), 8 * number.nbytes)
