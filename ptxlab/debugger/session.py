"""`Session`: a launch in the emulator under a debugger's commands, forwards and backwards."""

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from ptxlab.debugger.stoppable import Moment, StoppableCall, StopReason
from ptxlab.emulator.core.lanes import indices_of
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.types import Array
from ptxlab.emulator.options import KINDS, checks_of
from ptxlab.errors import PtxlabError
from ptxlab.runtime import Kernel

FLOAT = KINDS["float"]
_KINDS = ("finding", *dict.fromkeys(kind for kinds in KINDS.values() for kind in kinds))
_NO_LANES = np.zeros(0, np.intp)
UNITS = ("line", "call", "instruction")


class DebuggerError(PtxlabError):
    """Error of a debugger command that cannot be carried out."""


@dataclass(frozen=True)
class Breakpoint:
    """Instructions at which to stop, or kinds of findings after which to stop.

    `condition` returns the lanes of a moment for which it stops; without one these are all.
    """

    text: str  # as it was asked for, or a line with its file
    entry: str = ""  # the kernel that the instructions are of
    code: frozenset[int] = frozenset()
    kinds: frozenset[str] = frozenset()
    condition: Callable[[Moment], Array] | None = None

    def lanes(self, moment: Moment) -> Array:
        """Return the lanes of a moment for which the breakpoint stops."""
        if moment.is_after or not (moment.pc in self.code and moment.machine.launch.entry.name == self.entry):
            return _NO_LANES
        return indices_of(moment.lanes) if self.condition is None else self.condition(moment)


@dataclass(frozen=True)
class Stop:
    """Moment at which a session is stopped, and the reason."""

    moment: Moment
    reason: str

    @property
    def ended(self) -> bool:
        """True if the launch has ended."""
        return self.moment.ended


class Session:
    """A call that launches a kernel in the emulator, stopped before its first instruction.

    `call` is made again whenever the session goes backwards, so it must find its arrays as they were: give it copies.
    `kernel` is what it launches; `checks` are added to those that it asks for. One thread is looked at, `focus`.

    Raises what `call` raises before the kernel begins.
    """

    def __init__(self, call: Callable[[], object], kernel: Kernel, checks: Iterable[str] = ()) -> None:
        self.call, self.kernel, self.asked = call, kernel, frozenset(checks)
        self.checks = self.asked
        self.breakpoints: dict[int, Breakpoint] = {}
        self.focus = (0, 0)  # block and thread, by their number in grid and block
        self.found = False  # whether a check has reported something, or the launch has failed, wherever it is now
        self._texts: dict[str, list[str]] = {}
        self._number = 0
        self._run = StoppableCall(call, self.checks)
        self.now = self._run_until(lambda moment: "begin")
        self._watch(self.now.moment)

    @classmethod
    def of(cls, kernel: Kernel, *args: Any, checks: str | Iterable[str] = "all", **launch: Any) -> Self:
        """Make a session of a kernel of `ptxlab.load`, launched as `kernel(*args, **launch)` would be.

        The arguments stay as they are.
        """
        chosen = checks_of("checks", checks)

        def call() -> object:
            return kernel(*copy.deepcopy(args), checks=chosen, **{**launch, "backend": "emulator"})

        return cls(call, kernel, chosen)

    def close(self) -> None:
        """End the launch where it is; nothing can be done with the session any more."""
        self._run.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Where the session is

    @property
    def lane(self) -> int | None:
        """Lane of the focused thread in the wave; None if its block is in another wave."""
        machine = self.now.moment.machine
        (block, thread), grid = self.focus, machine.launch.grid
        blocks = np.flatnonzero((machine.blocks == np.unravel_index(block, grid, order="F")).all(axis=1))
        return int(blocks[0]) * machine.stride + thread if len(blocks) else None

    def look_at(self, block: int, thread: int) -> None:
        """Focus another thread, by its block's index in the grid and its own in the block."""
        launch = self.now.moment.machine.launch
        for name, number, count in (("block", block, int(np.prod(launch.grid))), ("thread", thread, launch.threads)):
            if not 0 <= number < count:
                raise DebuggerError(f"{name}: 0 to {count - 1} (got {number})")
        self.focus = block, thread

    def _watch(self, moment: Moment) -> None:
        """Focus the thread of the moment's finding; without one a lane of it, unless the focused warp runs it."""
        if moment.ended:
            return
        if moment.findings:
            launch, first = moment.machine.launch, moment.findings[0]
            block = int(np.ravel_multi_index(first.block, launch.grid, order="F"))
            self.focus = block, int(np.ravel_multi_index(first.thread, launch.block, order="F"))
        elif self.lane is None or self.lane // 32 not in moment.warps:
            self._look_at_lane(moment, int(indices_of(moment.lanes)[0]))
        self._watch_condition(moment)

    # Breakpoints

    def stop_at(self, place: str, condition: Callable[[Moment], Array] | None = None) -> int:
        """Set a breakpoint and return its number.

        It is a line (`12`, `scale.cu:12`), an instruction (`#17`, or an opcode's beginning), or a finding of any kind
        (`finding`) or of one (`race`, `nan` ...). `condition` returns the lanes of a moment for which it stops; of
        findings there is none.
        """
        breakpoint_ = self._parse_breakpoint(place.strip())
        if condition is not None and breakpoint_.kinds:
            raise DebuggerError(f"break: `if` goes with a line or an instruction (got {breakpoint_.text})")
        breakpoint_ = replace(breakpoint_, condition=condition)
        if breakpoint_.kinds & {*FLOAT} and "float" not in self.checks:
            self.checks |= {"float"}
            self._replay(self.now.moment.key)
        self._number += 1
        self.breakpoints[self._number] = breakpoint_
        return self._number

    def forget(self, number: int) -> None:
        """Remove a breakpoint."""
        if number not in self.breakpoints:
            raise DebuggerError(f"delete: no breakpoint {number}; there are {[*self.breakpoints] or 'none'}")
        del self.breakpoints[number]

    def _parse_breakpoint(self, place: str) -> Breakpoint:
        code, entry = self.code, self.now.moment.machine.launch.entry.name
        if place in _KINDS:
            skipped_checks = set[str]() if "float" in self.asked else {*FLOAT}
            kinds = {place} if place != "finding" else {*_KINDS} - skipped_checks
            return Breakpoint(place, kinds=frozenset(kinds))
        if index := re.fullmatch(r"#(\d+)", place):
            if int(index[1]) >= len(code):
                raise DebuggerError(f"break: #{index[1]} is no instruction; they are #0 to #{len(code) - 1}")
            return Breakpoint(place, entry, frozenset({int(index[1])}))
        if line := re.fullmatch(r"(?:(.*):)?(\d+)", place):
            return self._at_line(line[1], int(line[2]))
        prefix = f"{place.rstrip('.')}."
        chosen = {pc for pc, instruction in enumerate(code) if place and f"{instruction.opcode}.".startswith(prefix)}
        if not chosen:
            rule = f"a line, #INSTRUCTION, an opcode of the kernel, or {', '.join(_KINDS)}"
            raise DebuggerError(f"break: {rule} (got {place!r})")
        return Breakpoint(place, entry, frozenset(chosen))

    def _at_line(self, file: str | None, line: int) -> Breakpoint:
        """Make a breakpoint where instructions of a line begin, at each place that the compiler has put them."""
        code = self.code
        paths = dict.fromkeys(instruction.path for instruction in code)
        path = self.kernel.source.path  # unless `file` names another source
        if file:
            path = next((p for p in paths if p == file or Path(p).name == Path(file).name), "")
            if not path:
                file_names = ", ".join(Path(p).name for p in paths)
                raise DebuggerError(f"break: no instruction is from {file}; there is {file_names}")
        name, count = Path(path).name, len(self.text(path))
        lines = sorted({instruction.line for instruction in code if instruction.path == path})
        if count and not 1 <= line <= count:
            raise DebuggerError(f"break: {name} has {count} lines (got {line})")
        if line not in lines:
            next_line_note = next((f"; the next with one is {n}" for n in lines if n > line), "")
            raise DebuggerError(f"break: line {line} of {name} has no instruction{next_line_note}")
        places = [(instruction.path, instruction.line, instruction.callers) for instruction in code]
        starts = {pc for pc, place in enumerate(places)
                  if place[:2] == (path, line) and (pc == 0 or places[pc - 1] != place)}  # fmt: skip
        return Breakpoint(f"{name}:{line}", self.now.moment.machine.launch.entry.name, frozenset(starts))

    def _name_stop(self, moment: Moment) -> str:
        """Name the error or breakpoint that stops at a moment; return an empty text if there is none."""
        if moment.error is not None:
            return "error"
        kinds = {finding.kind for finding in moment.findings}
        for number, breakpoint_ in self.breakpoints.items():
            if breakpoint_.kinds & kinds or len(breakpoint_.lanes(moment)):
                return f"breakpoint {number}, {breakpoint_.text}"
        return ""

    def _or_breakpoint(self, steps: StopReason) -> StopReason:
        """Return a stop reason that holds at a breakpoint and where a step ends.

        The step is asked every time, because it follows the places.
        """

        def stop_reason(moment: Moment) -> str:
            step_reason = steps(moment)
            return self._name_stop(moment) or step_reason

        return stop_reason

    # Forwards

    def go_on(self) -> Stop:
        """Run to the next breakpoint, error or end."""
        return self._forward("continue", self._name_stop)

    def step(self, unit: str = "line", *, everyone: bool = False) -> Stop:
        """Run until the focused warp (`everyone`: any warp) reaches another `line` or `instruction`.

        A `call` is a line that is not in a function called from here. The other warps run as the scheduler has it.
        """
        self._refuse_ended("step")
        if not everyone and self.lane is not None:
            machine, first = self.now.moment.machine, self.lane // 32 * 32
            if not machine.alive[first : first + 32].any():
                raise DebuggerError(f"step: warp {self.focus[1] // 32} of block {self.focus[0]} has ended; step all?")
        steps = self._steps(unit, everyone, self.now.moment)
        return self._forward("step", self._or_breakpoint(steps))

    def _forward(self, command: str, stop_reason: StopReason) -> Stop:
        self._refuse_ended(command)
        start = self.now.moment.key
        self.now = self._run_until(lambda moment: stop_reason(moment) if moment.key > start else "")
        if self.now.reason != "step":
            self._watch(self.now.moment)
        return self.now

    def _watch_condition(self, moment: Moment) -> None:
        """Focus the first thread for which a breakpoint's condition holds."""
        for breakpoint_ in self.breakpoints.values():
            if breakpoint_.condition is not None and len(lanes := breakpoint_.lanes(moment)):
                self._look_at_lane(moment, int(lanes[0]))
                return

    def _look_at_lane(self, moment: Moment, lane: int) -> None:
        block_in_wave, thread = divmod(lane, moment.machine.stride)
        index = tuple(moment.machine.blocks[block_in_wave])
        self.focus = int(np.ravel_multi_index(index, moment.machine.launch.grid, order="F")), thread

    def _refuse_ended(self, command: str) -> None:
        if self.now.ended:
            raise DebuggerError(f"{command}: the launch has ended; back, rewind and restart go on from here")

    def _steps(self, unit: str, everyone: bool, since: Moment | None) -> StopReason:
        """Return the condition that ends a step of the focused warp, or of any warp.

        `since` is where the step has begun.
        """
        if unit not in UNITS:
            raise DebuggerError(f"step: by {', '.join(UNITS)} (got {unit!r})")
        (block, thread), depth = self.focus, None
        place: object = None
        if since is not None and not since.ended:
            is_own_place = everyone or (self.lane is not None and self.lane // 32 in since.warps)
            place, depth = since.place if is_own_place else None, len(since.instruction.callers)

        def stop_reason(moment: Moment) -> str:
            nonlocal place
            if moment.is_after or not (everyone or self._is_of(moment, block, thread)):
                return ""
            previous_place, place = place, moment.place
            if unit == "call" and depth is not None and len(moment.instruction.callers) > depth:
                place = previous_place
                return ""
            return "step" if unit == "instruction" or place != previous_place else ""

        return stop_reason

    @staticmethod
    def _is_of(moment: Moment, block: int, thread: int) -> bool:
        """Check whether lanes of that thread's warp run the instruction."""
        machine = moment.machine
        index = np.unravel_index(block, machine.launch.grid, order="F")
        blocks = np.flatnonzero((machine.blocks == index).all(axis=1))
        return bool(len(blocks)) and (int(blocks[0]) * machine.stride + thread) // 32 in moment.warps

    # Backwards

    def back(self, unit: str = "line", *, everyone: bool = False) -> Stop:
        """Go back to the last moment before here where such a step ends, or to a breakpoint in between."""
        steps = self._steps(unit, everyone, None)
        return self._backward("back", self._or_breakpoint(steps))

    def rewind(self) -> Stop:
        """Go back to the last breakpoint before here, or to the beginning."""
        return self._backward("rewind", self._name_stop)

    def restart(self) -> Stop:
        """Go back to the beginning."""
        return self._replay((0, False), "begin")

    def _backward(self, command: str, stop_reason: StopReason) -> Stop:
        start = self.now.moment.key
        if start == (0, False):
            raise DebuggerError(f"{command}: this is the beginning of the launch")
        target, reason = (0, False), "begin"

        def note_last_stop(moment: Moment) -> str:
            nonlocal target, reason
            if moment.key >= start:
                return "here"
            if why := stop_reason(moment):
                target, reason = moment.key, why
            return ""

        self._renew()
        self._run_until(note_last_stop)
        self._replay(target, reason)
        if reason != "step":
            self._watch(self.now.moment)
        return self.now

    def _replay(self, target: tuple[int, bool], reason: str = "") -> Stop:
        """Run again from the beginning up to the moment whose key is `target`."""
        reason = reason or self.now.reason
        self._renew()
        self.now = self._run_until(lambda moment: reason if moment.key >= target else "")
        return self.now

    def _renew(self) -> None:
        self._run.abandon()
        self._run = StoppableCall(self.call, self.checks)

    def _run_until(self, stop_reason: StopReason) -> Stop:
        run = self._run
        run.go(stop_reason)
        moment = run.moment
        if run.error is not None and (moment is None or moment.error is None):
            raise run.error
        if moment is None:
            raise DebuggerError("debug: the call has launched nothing in the emulator")
        self.found |= bool(moment.machine.launch.findings.by_key) or moment.error is not None
        return Stop(moment, run.reason or "end")

    # Sources

    @property
    def code(self) -> list[Instruction]:
        """Instructions of the kernel that runs."""
        return self.now.moment.machine.code

    def text(self, path: str) -> list[str]:
        """Return the lines of a source; none if it cannot be read."""
        if path not in self._texts:
            source, text = self.kernel.source, ""
            if path == source.path:
                text = source.text
            elif Path(path).is_file():
                text = Path(path).read_text(errors="replace")
            self._texts[path] = text.splitlines()
        return self._texts[path]
