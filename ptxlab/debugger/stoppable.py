"""`StoppableCall`: one run of a call in a thread of its own, which stops where it is told to: at a moment.

A watcher wraps every instruction; in there the thread waits while nobody lets it go on. So the emulator's own scheduler
runs the kernel, and a launch that nobody debugs knows nothing of this. Two runs of the same call do the same, moment by
moment: that is how a debugger goes backwards.
"""

import threading
from collections.abc import Callable, Iterable
from contextvars import copy_context
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ptxlab import emulator
from ptxlab.emulator.core.lanes import Handler, Lanes, Successors, indices_of
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.core.watcher import Watcher
from ptxlab.emulator.core.wave import LaunchState
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.types import Array
from ptxlab.errors import EmulationError

# What of a machine refers to it, so that without more only the garbage collector would free its memory
_CYCLES = ("handlers", "watchers", "units", "livelock", "cluster_memory")
_NOBODY = np.zeros(0, np.intp)


@dataclass(frozen=True, eq=False)
class Moment:
    """A point of a run: before lanes run an instruction, or after one that reported findings or failed.

    `findings` are those since the moment before.
    `position` counts instructions dispatched before, whoever ran them. At the end there is no instruction.
    """

    position: int
    machine: Machine
    pc: int
    lanes: Lanes
    is_after: bool = False
    findings: tuple[emulator.Finding, ...] = ()
    error: EmulationError | None = None

    @property
    def key(self) -> tuple[int, bool]:
        """Sort key of the moments of a run."""
        return self.position + self.ended, self.is_after

    @property
    def ended(self) -> bool:
        """True if the moment is the end of the run."""
        return self.pc == len(self.machine.code)

    @property
    def instruction(self) -> Instruction:
        """The instruction that is about to run, or has just run."""
        return self.machine.code[self.pc]

    @property
    def place(self) -> tuple[object, ...]:
        """The instruction's path and line, with the calls that lead there."""
        return self.instruction.path, self.instruction.line, self.instruction.callers

    @cached_property
    def warps(self) -> Array:
        """Indices in the wave of the warps whose lanes run the instruction."""
        return np.unique(indices_of(self.lanes) // 32)


StopReason = Callable[[Moment], str]  # why to stop there; "" to go on


class _Abandoned(BaseException):
    """Unwinds a run that its session has abandoned; it is no error, so that no handler on the way takes it for one."""


class StoppableCall:
    """A call in progress; it launches kernels in the emulator, by any route."""

    def __init__(self, call: Callable[[], object], checks: Iterable[str] = ()) -> None:
        self.call, self.checks = call, frozenset(checks)
        self.position = 0
        self.moment: Moment | None = None  # where it has stopped
        self.reason = ""
        self.error: BaseException | None = None  # that the call has ended with
        self.interrupted = False
        self._stop_reason: StopReason = lambda moment: ""
        self._launch: LaunchState | None = None
        self._began = 0  # position at which the launch did
        self._finding_count = 0  # findings of the launch so far
        self._doomed: LaunchState | None = None  # the launch, if it will begin again
        self._again = (-1, False)  # moments before that were passed by then
        self._last: Machine | None = None  # the wave that runs, or has run last
        self._kept: dict[str, Any] = {}  # what it held at its end
        self._abandoned = False
        self._go, self._stopped = threading.Semaphore(0), threading.Event()
        self._thread = threading.Thread(target=copy_context().run, args=(self._call,), daemon=True)
        self._thread.start()

    def go(self, stop_reason: StopReason) -> None:
        """Run to the first moment with a stop reason, or to the end; a KeyboardInterrupt stops at the next moment."""
        self._stop_reason = stop_reason
        self._stopped.clear()
        self._go.release()
        while not self._stopped.is_set():
            try:
                self._stopped.wait()
            except KeyboardInterrupt:
                self.interrupted = True

    def abandon(self) -> None:
        """End the run where it is. Its last moment keeps registers and memory, no barriers and no pending effects."""
        self._abandoned = True
        self._go.release()
        self._thread.join()
        for name in _CYCLES if self._last is not None else ():
            vars(self._last).pop(name, None)

    # In the thread

    def _call(self) -> None:
        try:
            self._wait()
            with emulator.watch_launches(self._attach, self.checks):
                self.call()
        except _Abandoned:
            return
        except BaseException as error:  # the session raises it
            self.error = error
        self.reason, self.moment = "", None
        if self._last is not None:
            vars(self._last).update(self._kept)
            self._kept = {}
            pc_after_last, failed = len(self._last.code), self.error
            failed = failed if isinstance(failed, EmulationError) else None
            findings = self._take_new_findings(self._last)
            self.moment = Moment(self.position, self._last, pc_after_last, _NOBODY, True, findings, failed)
        self._stopped.set()

    def _wait(self) -> None:
        self._go.acquire()
        if self._abandoned:
            raise _Abandoned

    def _attach(self, machine: Machine) -> list[Watcher]:
        launch = machine.launch
        if launch is not self._launch:
            self._began = self.position = self._began if launch.tracked else self.position  # tracked: the same again
            self._launch, self._finding_count = launch, 0
        machine.targets = frozenset(range(len(machine.code)))  # so that no handler does the work of several mma
        self._last, self._kept = machine, {}
        return [_Stops(self, machine)]

    def reach(self, moment: Moment) -> None:
        """Stop at a moment if the session's stop reason holds.

        It does not stop if the launch will begin again, with loads tracked that have raced.
        """
        launch = moment.machine.launch
        if not launch.suspects <= launch.tracked:
            if launch is not self._doomed:
                self._doomed, self._again = launch, max(self._again, moment.key)
        elif moment.key >= self._again:
            self.reason = "interrupted" if self.interrupted else self._stop_reason(moment)
            if self.reason:
                self.moment, self.interrupted = moment, False
                self._stopped.set()
                self._wait()

    def dispatch(self, machine: Machine, pc: int, lanes: Lanes, handler: Handler) -> Successors:
        """Run an instruction, with the moments before and after it."""
        self.reach(Moment(self.position, machine, pc, lanes, False, self._take_new_findings(machine)))
        try:
            successors = handler(lanes)
        except EmulationError as error:
            self._stop_after(machine, pc, lanes, error)
            raise
        if len(machine.launch.findings.by_key) > self._finding_count:
            self._stop_after(machine, pc, lanes)
        self.position += 1
        return successors

    def _stop_after(self, machine: Machine, pc: int, lanes: Lanes, error: EmulationError | None = None) -> None:
        """Reach the moment after an instruction that has reported something, or failed."""
        self.reach(Moment(self.position, machine, pc, lanes, True, self._take_new_findings(machine), error))

    def _take_new_findings(self, machine: Machine) -> tuple[emulator.Finding, ...]:
        """Return the new findings.

        Copies that land report between two instructions, or behind the last.
        """
        findings = machine.launch.findings.by_key
        if len(findings) == self._finding_count:
            return ()
        new_findings = tuple(findings.values())[self._finding_count :]
        self._finding_count = len(findings)
        return new_findings

    def wave_ended(self, machine: Machine) -> None:
        """Save the machine's state, which the launch clears at the end of the wave."""
        self._kept = dict(vars(machine))


class _Stops(Watcher):
    """Watcher that has the run dispatch every instruction of a wave, together with its guard."""

    def __init__(self, run: StoppableCall, machine: Machine) -> None:
        self.run, self.machine = run, machine

    def wrap_handler(self, instruction: Instruction, handler: Handler) -> Handler:
        """Wrap the handler of an instruction without a guard."""
        return handler if instruction.guard is not None else self.wrap_guarded(instruction, handler)

    def wrap_guarded(self, instruction: Instruction, handler: Handler) -> Handler:
        """Wrap a handler that gets the lanes that the guard lets through."""
        run, machine = self.run, self.machine
        pc = machine.index[id(instruction)]
        return lambda lanes: run.dispatch(machine, pc, lanes, handler)

    def end(self) -> None:
        """End the wave."""
        self.run.wave_ended(self.machine)
