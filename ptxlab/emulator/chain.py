"""`chain`: launches on one stream, of which each may begin while those before it still run.

A `programmatic` launch (programmatic dependent launch) begins when all blocks of the kernel before it have allowed it,
which they may do at once. So all kernels back to the last ordinary launch may still run. A thread sees what they write
only behind its griddepcontrol.wait. In a chain such a launch therefore begins with the memory as it was before those
kernels (`begin="early"`), and the first wait brings what they have written. The check "race" holds every access to
their buffers against the waits (`checks.race_pdl`), whatever the spec says of its arguments.

A wait is for the one kernel before. If that kernel does not wait itself, nobody has waited for those before it: so a
programmatic kernel of which no thread waits is a finding too.

The check "proxy" looks at proxies: what a kernel wrote with ordinary stores, and fenced nowhere, must not be read by
the copy engine in a programmatic launch behind it, unless that fences behind its wait. (To which proxies the wait makes
things visible, the PTX ISA does not say; in FlashInfer #3361 the engine saw what was there before.)

The check "init" follows a buffer from launch to launch. Bytes that the kernel which outputs it has not written must not
be read by a later one, unless the buffer was `given`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import numpy as np

from ptxlab.emulator.core.findings import Finding
from ptxlab.emulator.core.memory import Region
from ptxlab.emulator.core.wave import LaunchState
from ptxlab.emulator.front.types import Array
from ptxlab.emulator.options import EmulatorOptions, checks_of
from ptxlab.errors import ArgumentError
from ptxlab.validate import is_one_of

BEGINS = ("early", "late")
Buffers = dict[int, tuple[Array, Region]]  # the arrays among a launch's arguments, by position, and where they lie


@dataclass
class Chain:
    """The launches of a chain so far.

    Attributes:
        options: checks that every launch has besides those of its call, and the mode and seed of all launches.
        begin: whether programmatic launches begin before those before them have written anything, or after.
        launches: names of the kernels.
        findings: of all of them.
    """

    options: EmulatorOptions
    begin: str
    launches: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    _running: list["_Bytes"] = field(default_factory=list)  # what kernels that may still run write, as it was before
    _unwritten: list["_Bytes"] = field(default_factory=list)  # which bytes nobody has written
    _given: list["_Bytes"] = field(default_factory=list)
    _unfenced: list["_Bytes"] = field(default_factory=list)  # who wrote which bytes without a proxy fence, from 1
    _writers: list[str] = field(default_factory=list)  # those, by their numbers

    def apply(self, options: EmulatorOptions) -> EmulatorOptions:
        """Return a launch's options with the chain's mode and seed, and with its checks added."""
        chain = self.options
        return replace(options, checks=options.checks | chain.checks, mode=chain.mode, seed=chain.seed)

    def enter(self, launch: LaunchState, buffers: Buffers, uninitialised: Iterable[int]) -> None:
        """Set up the memory of a launch that is about to begin."""
        if not launch.programmatic:
            self._running.clear()
            self._unfenced.clear()
        launch.writers = self._writers
        for position, (array, region) in buffers.items():
            address, contents = _address(array), launch.memory.arena[region.start : region.end]
            overlapping_parts = [part for part in self._running if part.overlaps(address, contents)]
            if overlapping_parts:
                launch.after_wait = [*launch.after_wait, region.start]
                launch.at_wait.append((region.start, contents.copy()))
            for part in overlapping_parts if self.begin == "early" else ():
                part.copy_to(address, contents)
            if launch.unwritten is not None and position not in uninitialised:
                for part in self._unwritten:
                    part.copy_to(address, launch.unwritten[region.start : region.end])
            if launch.unfenced is not None:
                for part in self._unfenced:
                    part.copy_to(address, launch.unfenced[region.start : region.end])

    def leave(self, launch: LaunchState, buffers: Buffers) -> None:
        """Record what a launch has written when it has ended, before its buffers are copied back."""
        self.launches.append(launch.entry.name)
        if launch.programmatic and not launch.has_waited:
            message = "no thread executes griddepcontrol.wait: the next kernel would not wait for those before this one"
            launch.findings.add(launch.entry.instructions[0], "race", ((0, 0, 0), (0, 0, 0)), message)
        self.findings += launch.findings.by_key.values()
        for array, region in buffers.values():
            if region.written:
                self._running.append(_Bytes(array, array.reshape(-1).view(np.uint8).copy()))
                if launch.unfenced is not None:
                    self._unfenced.append(_Bytes(array, launch.unfenced[region.start : region.end].copy()))
                if launch.unwritten is not None:
                    unwritten_bytes = launch.unwritten[region.start : region.end].copy()
                    for part in self._given:
                        part.copy_to(_address(array), unwritten_bytes)
                    self._unwritten.append(_Bytes(array, unwritten_bytes))


@dataclass(frozen=True, eq=False)
class _Bytes:
    """A value for each byte of an array: its contents, whether it was written, or by whom.

    Holds the array, so that no other array gets its address.
    """

    array: Array
    by_byte: Array

    def overlaps(self, address: int, target: Array) -> bool:
        """Tell whether `target`, at that address, overlaps this array."""
        start = _address(self.array)
        return start < address + len(target) and address < start + len(self.by_byte)

    def copy_to(self, address: int, target: Array) -> None:
        """Copy this array's values to `target`, which begins at `address`, where the two overlap."""
        start = _address(self.array)
        low, high = max(start, address), min(start + len(self.by_byte), address + len(target))
        if low < high:
            target[low - address : high - address] = self.by_byte[low - start : high - start]


def _address(array: Array) -> int:
    return int(array.ctypes.data)


_current: ContextVar[Chain | None] = ContextVar("chain", default=None)


def current() -> Chain | None:
    """Return the chain that launches of this thread belong to."""
    return _current.get()


@contextmanager
def chain(
    checks: str | Iterable[str],
    *,
    mode: str = "early",
    begin: str = "early",
    seed: int = 0,
    given: Iterable[Array] = (),
) -> Iterator[Chain]:
    """Run the emulator launches inside as one chain; its `mode` and `seed` override those of the calls.

    Args:
        checks, mode, seed: as in `EmulatorOptions`.
        begin: whether programmatic launches begin before those before them have written anything, or after.
        given: arrays that hold something before a kernel writes the rest, such as a cache.

    Raises ArgumentError for a value that breaks a rule, or inside of a chain.
    """
    if not is_one_of(begin, BEGINS):
        raise ArgumentError("begin", f"must be one of {', '.join(BEGINS)}", begin)
    if current() is not None:
        raise ArgumentError("chain", "must not begin inside of another", "one")
    options = EmulatorOptions(checks=checks_of("checks", checks), mode=mode, seed=seed)
    given_bytes = [_Bytes(array, np.zeros(array.nbytes, bool)) for array in given]
    new_chain = Chain(options, begin, _given=given_bytes)
    token = _current.set(new_chain)
    try:
        yield new_chain
    finally:
        _current.reset(token)
