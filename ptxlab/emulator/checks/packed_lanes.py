"""The check "lanes": recomputes annotated instructions lane by lane, in wide integers; see `lane_annotation`."""

import numpy as np

from ptxlab.emulator.checks.check import Check
from ptxlab.emulator.core.findings import LaneFault, PackedOperand
from ptxlab.emulator.core.lanes import Handler, Lanes, Successors, indices_of
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.lane_annotation import LaneOperation, LaneType, LaneTypes, operation_of, wrap
from ptxlab.emulator.front.types import Array


class PackedLanes(Check):
    """Recomputes annotated instructions lane by lane; see `lane_annotation`."""

    def wrap_handler(self, instruction: Instruction, handler: Handler) -> Handler:
        """Wrap an annotated handler to compare what it stores with its lanes computed in wide integers."""
        types = instruction.lanes
        if types is None:
            return handler
        machine, width = self.machine, 32
        for part in instruction.opcode.split("."):
            if part[1:].isdigit() and part[0] in "usb":
                width = int(part[1:])
        target, *sources = instruction.operands
        read_stored = machine.reader(target, f"u{width}")
        letters = [letter for letter in "abc" if letter in types]
        findings = machine.launch.findings
        readers = {letter: machine.reader(sources["abc".index(letter)], f"u{width}") for letter in letters}

        def run_and_compare(lanes: Lanes) -> Successors:
            source_values = {letter: read(lanes).copy() for letter, read in readers.items()}
            successors = handler(lanes)
            for fault in lane_faults(
                instruction.opcode, types, np.ascontiguousarray(read_stored(lanes)), source_values
            ):
                place = machine.place_of(int(indices_of(lanes)[fault.index]))
                findings.add(instruction, fault.kind, place, fault.problem, fault.times, fault)
            return successors

        return run_and_compare


def lane_faults(opcode: str, types: LaneTypes, stored: Array, sources: dict[str, Array]) -> list[LaneFault]:
    """Recompute an annotated instruction lane by lane.

    `stored` and `sources[letter]` are unsigned arrays of shape [n], the destination after and the sources before the
    instruction. Returns one `LaneFault` per rule and lane, for the first position that broke it.
    """
    operation = operation_of(opcode)
    if operation is None or operation.compute is None:
        return []
    target = types["d"]
    values = {letter: types[letter].decode(sources[letter]) for letter in operation.letters}
    exact_values = np.broadcast_to(operation.compute(*values.values()), (target.count, len(stored)))
    stored_values = target.decode(stored)
    faults: list[LaneFault] = []

    def operand_values(lane: int, index: int) -> dict[str, int]:
        return {
            letter: int(operand_lanes[lane if len(operand_lanes) > 1 else 0, index])
            for letter, operand_lanes in values.items()
        }

    def sum_up(lane: int, index: int) -> str:
        return f"{operation.format.format(**operand_values(lane, index))} = {exact_values[lane, index]}"

    def report(kind: str, lane: int, wrong: Array, problem: str) -> None:
        index = int(np.argmax(wrong))
        operands = operand_values(lane, index) | {"d": int(stored_values[lane, index])}
        words = {letter: sources[letter] for letter in operation.letters} | {"d": stored}
        registers = tuple(PackedOperand(letter, types[letter], int(w[index])) for letter, w in words.items())
        lane_values = tuple(int(lane_value) for lane_value in exact_values[:, index])
        faults.append(
            LaneFault(kind, lane, index, int(np.count_nonzero(wrong)), operands, problem, registers, lane_values)
        )

    for lane in range(target.count):
        is_disturbed = stored_values[lane] != wrap(exact_values[lane], target)
        if is_disturbed.any() and not operation.simd:
            index = int(np.argmax(is_disturbed))
            culprit_lane, reason = _blame(operation, target, exact_values[:, index], lane)
            cause_text = reason if operation.format == "{a} >> {b}" else f"{sum_up(culprit_lane, index)} {reason}"
            report("carry", lane, is_disturbed, f"lane {lane} is disturbed by lane {culprit_lane} ({cause_text})")
        is_out_of_range = outside(exact_values[lane], target)
        if is_out_of_range.any() and ".sat" not in opcode:
            problem = f"lane {lane} is {sum_up(lane, int(np.argmax(is_out_of_range)))}, which does not fit {target}"
            report("range", lane, is_out_of_range, problem)
    for letter, operand_lanes in values.items():
        is_out_of_range = outside(operand_lanes[0], types[letter])
        if not types[letter].count and is_out_of_range.any():
            number = int(operand_lanes[0, int(np.argmax(is_out_of_range))])
            report("range", 0, is_out_of_range, f"operand {letter} is {number}, which does not fit {types[letter]}")
    return faults


def outside(values: Array, lane_type: LaneType) -> Array:
    """Tell which values do not fit the type."""
    low, high = lane_type.limits
    return (values < low) | (values > high)


def _blame(operation: LaneOperation, target: LaneType, exact: Array, lane: int) -> tuple[int, str]:
    """Find the lane that overflowed into `lane`, and why: the nearest one below that does not fit its bits.

    For a right shift it is the lane above.
    """
    if operation.format == "{a} >> {b}":
        return lane + 1, "its bits are shifted down"
    top = (1 << target.bits) - 1
    for lower_lane in range(lane - 1, -1, -1):
        if not 0 <= exact[lower_lane] <= top:
            return lower_lane, f"> {top}" if exact[lower_lane] > top else "< 0"
    # a sum that fits overflows its field all the same if a negative term went in as its two's complement
    return max(lane - 1, 0), "with a negative term"
