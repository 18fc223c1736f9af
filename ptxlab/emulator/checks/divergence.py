"""The check "divergence": all threads of a warp execute an `.aligned` instruction together, or have left the kernel.

What counts is the program's control flow, not the order in which the scheduler takes a warp's lanes. Each lane of a
warp has to come to the same `.aligned` instructions in the same order, in the same turns of the loops around them;
lanes that come there one after the other are waited for. Who leaves the kernel early (`Flow.early_exits`) is not. To go
past an `.aligned` instruction, to what the others execute behind it, is not to leave early.

It is a check, and no error of every run, because it costs time, and because a GPU may well get along: its barriers
count whole warps. A warp is reported once. (PTX ISA, 9.7.13.1: in conditionally executed code, an aligned barrier only
where all threads of a warp evaluate the condition alike; who has exited is not waited for.)
"""

from dataclasses import dataclass

import numpy as np

from ptxlab.emulator.checks.check import Check
from ptxlab.emulator.core.lanes import Handler, Lanes, Successors, as_lanes, count_of, indices_of
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.core.warp import pack_bits
from ptxlab.emulator.front.control_flow import END, flow_of
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.types import Array


@dataclass
class Execution:
    """An `.aligned` instruction (or the end) to which some lanes of a warp have come, and others have yet to come."""

    pc: int
    iteration: int  # of the loops around it, since the last such instruction
    lanes: int  # one bit each


class Divergence(Check):
    """Check for warps whose lanes do not all execute the same `.aligned` instruction."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.flow = flow_of(machine.launch.entry)
        self.iterations = np.zeros(machine.lanes, np.int32)  # since the last .aligned instruction
        self.expected = machine.alive.copy()  # lanes that their warp has to wait for
        self.parked = np.zeros(machine.lanes, bool)  # ... and that will execute once more what they wait at
        self.open: dict[int, list[Execution]] = {}  # by warp, the oldest first

    def wrap_handler(self, instruction: Instruction, handler: Handler) -> Handler:
        """Wrap a handler to record the lanes at `.aligned` instructions and to follow branches."""
        pc = self.machine.index[id(instruction)]
        if instruction.guard is None and END not in self.flow.early_exits.get(pc, ()):
            handler = self.follow_branches(pc, handler)
        if pc in self.flow.aligned:

            def record_and_run(lanes: Lanes) -> Successors:
                self.record_execution(pc, lanes)
                return handler(lanes)

            return record_and_run
        if END in self.flow.early_exits.get(pc, ()):

            def leave_and_run(lanes: Lanes) -> Successors:
                self.leave(lanes)
                return handler(lanes)

            return leave_and_run
        return handler

    def wrap_guarded(self, instruction: Instruction, handler: Handler) -> Handler:
        """Wrap a guarded instruction to follow its lanes: some take a branch, others go on behind it."""
        return self.follow_branches(self.machine.index[id(instruction)], handler)

    def follow_branches(self, pc: int, handler: Handler) -> Handler:
        """Wrap the handler of a block's last instruction to count its lanes' loop iterations and note early exits."""
        loop_edges, early_exits = self.flow.loop_edges.get(pc, ()), self.flow.early_exits.get(pc, ())
        if not loop_edges and not early_exits:
            return handler

        def follow(lanes: Lanes) -> Successors:
            successors = handler(lanes)
            for target, target_lanes in [(pc + 1, lanes)] if successors is None else successors:
                if target in loop_edges:
                    self.iterations[target_lanes] += 1
                if target in early_exits:
                    self.leave(target_lanes)
            return successors

        return follow

    def exit(self, lanes: Lanes) -> None:
        """Record that ending lanes, unless they left early, reached the end; flag parked lanes, which look again."""
        for meeting in self.machine.meetings.values():
            for pc, meeting_lanes, _ in meeting:
                self.parked[meeting_lanes] = pc in self.flow.aligned
        remaining_lanes = indices_of(lanes)[self.expected[lanes]]
        if len(remaining_lanes):
            self.iterations[remaining_lanes] = 0
            self.record_execution(END, as_lanes(remaining_lanes))
            self.leave(as_lanes(remaining_lanes))

    def leave(self, lanes: Lanes) -> None:
        """Stop expecting these lanes at their warp's `.aligned` instructions."""
        self.expected[lanes] = False
        for warp in np.unique(indices_of(lanes) // 32).tolist() if self.open else ():
            self.forget_complete(warp)

    def forget_complete(self, warp: int) -> None:
        """Drop the warp's oldest executions that all expected lanes have reached."""
        executions, expected = self.open.get(warp, []), int(pack_bits(self.expected[warp * 32 : warp * 32 + 32])[0])
        while executions and not expected & ~executions[0].lanes:
            executions.pop(0)
        if not executions:
            self.open.pop(warp, None)

    def record_execution(self, pc: int, lanes: Lanes) -> None:
        """Record lanes that execute an `.aligned` instruction, or end; report divergence."""
        if self.parked.any():
            is_repeated = self.parked[lanes].copy()
            self.parked[lanes] = False
            if is_repeated.all():
                return
            lanes = as_lanes(indices_of(lanes)[~is_repeated])
        iterations = self.iterations[lanes].copy()
        self.iterations[lanes] = 0
        if not self.open and isinstance(lanes, slice) and lanes.start % 32 == 0 == lanes.stop % 32:
            rows = iterations.reshape(-1, 32)
            if (rows == rows[:, :1]).all():
                return
        is_present, lane_iteration = np.zeros(self.machine.lanes, bool), np.zeros(self.machine.lanes, np.int32)
        is_present[lanes], lane_iteration[lanes] = True, iterations
        is_present &= self.expected
        bits = pack_bits(is_present)
        last_iteration = np.where(is_present, lane_iteration, iterations.min()).reshape(-1, 32).max(axis=1)
        first_iteration = np.where(is_present, lane_iteration, iterations.max()).reshape(-1, 32).min(axis=1)
        is_incomplete = (bits != pack_bits(self.expected)) | (first_iteration != last_iteration)
        is_incomplete[list(self.open)] = True
        is_incomplete &= bits != 0
        for warp in np.flatnonzero(is_incomplete).tolist():
            in_warp = indices_of(lanes) // 32 == warp
            for iteration in np.unique(iterations[in_warp]).tolist():
                same_iteration = indices_of(lanes)[in_warp & (iterations == iteration)]
                awaited_lanes = same_iteration[self.expected[same_iteration]]
                self.enter_execution(
                    warp, Execution(pc, iteration, sum(1 << lane % 32 for lane in awaited_lanes.tolist()))
                )

    def enter_execution(self, warp: int, new: Execution) -> None:
        """Add a warp's lanes to its open executions, or open one; report lanes that one elsewhere still awaits."""
        executions = self.open.setdefault(warp, [])
        remaining_lanes = new.lanes
        for execution in executions:
            arriving_lanes = remaining_lanes & ~execution.lanes
            if arriving_lanes and (execution.pc, execution.iteration) != (new.pc, new.iteration):
                return self.report_divergence(warp, execution, Execution(new.pc, new.iteration, arriving_lanes))
            execution.lanes |= arriving_lanes
            remaining_lanes &= ~arriving_lanes
        if remaining_lanes:
            executions.append(Execution(new.pc, new.iteration, remaining_lanes))
        self.forget_complete(warp)

    def report_divergence(self, warp: int, deviating: Execution, reported: Execution) -> None:
        """Report lanes of `reported`, where others of the warp execute `deviating`; then leave the warp alone."""
        if reported.pc == END:
            deviating, reported = reported, deviating
        instruction = self.machine.code[reported.pc]
        _, thread = self.machine.place_of(self.lanes_of(warp, deviating)[0])
        if deviating.pc == END:
            deviation = "goes past it, to the end"
        elif deviating.pc == reported.pc:
            deviation = "executes it in another turn of the loop"
        else:
            deviation = f"executes {self.machine.code[deviating.pc].seen_from(instruction)}, instead"
        thread_text = ",".join(map(str, thread))
        rule = "by the rule of PTX all threads of a warp have to execute it together"
        message = f"{rule}, but thread ({thread_text}) {deviation};"
        lanes = self.lanes_of(warp, reported)
        self.report(instruction, "divergence", lanes, np.ones(count_of(lanes), bool), message)
        self.expected[warp * 32 : warp * 32 + 32] = False
        del self.open[warp]

    def lanes_of(self, warp: int, execution: Execution) -> Array:
        """Return the lanes of the wave that an execution stands for."""
        return np.array([warp * 32 + bit for bit in range(32) if execution.lanes >> bit & 1])
