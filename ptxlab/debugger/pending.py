"""Pending work of a wave: copies, wgmma, barriers; and the places of its warps."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ptxlab.debugger.state import place_of
from ptxlab.emulator.async_.wgmma import WgmmaProducts
from ptxlab.emulator.core.effect import Effect
from ptxlab.emulator.core.effect_queue import UNGROUPED, EffectQueue
from ptxlab.emulator.core.lanes import Lanes, as_lanes, count_of, indices_of
from ptxlab.emulator.core.machine import Machine, Parked
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.sync.barrier import BlockBarriers
from ptxlab.emulator.sync.mbarrier import MBarriers


def lines(machine: Machine, block: int) -> list[str]:
    """List a block's pending effects, mbarriers, barriers and waiting threads; one line if nothing is pending."""
    pending_lines = [*_effects(machine, block), *_mbarriers(machine, block), *_barriers(machine, block)]
    return [*pending_lines, *_waiting(machine, block)] or ["nothing is pending"]


def line_of(instruction: Instruction) -> str:
    """Format an instruction's place as `scale.cu:12`."""
    return f"{Path(instruction.path).name}:{instruction.line}"


def text_of(instruction: Instruction) -> str:
    """Return an instruction's text.

    It is only the opcode if the instruction shares its line of inline assembly with others.
    """
    guard = f"@{'!' if instruction.guard.negated else ''}{instruction.guard.name} " if instruction.guard else ""
    return f"{guard}{instruction.opcode} .." if ";" in instruction.text else instruction.text


def name_of(machine: Machine, place: int) -> str:
    """Name a place in memory by its variable (`full + 8`), or in words where no variable lies."""
    text = machine.memory.name_byte(place)
    match = re.search(r"\((\w+ \+ \d+)\)$", text)
    return match[1] if match else text


def _effects(machine: Machine, block: int) -> Iterator[str]:
    """Describe copies and products that no thread has waited for."""
    queue = machine.units.get(EffectQueue)
    if not isinstance(queue, EffectQueue):
        return
    for queued in queue.queue:
        effect, _ = queued.split(queued.lanes // machine.stride == block)
        if effect is not None:
            owner, state = _effect_owner(machine, effect), _state(machine, queue, effect)
            yield f"{_effect_name(effect)}, {line_of(effect.instruction)}, by {owner}: {state}"


def _effect_name(effect: Effect) -> str:
    if isinstance(effect, WgmmaProducts):
        return f"wgmma m64n{effect.decoded.n}"
    if effect.arrives:
        return "arrival of cp.async"
    kind = "cp.async" if effect.kind == "cp.async" else "bulk copy"
    return f"{kind} of {int(effect.writes[2].sum())} bytes"


def _effect_owner(machine: Machine, effect: Effect) -> str:
    lanes = np.unique(effect.lanes)
    if effect.kind == "wgmma":
        first = place_of(machine, int(lanes[0]))
        return f"the warp of {first}" + (f" and {len(lanes) - 1} more" if len(lanes) > 1 else "")
    return place_of(machine, int(lanes[0])) + (f" and {len(lanes) - 1} more" if len(lanes) > 1 else "")


def _state(machine: Machine, queue: EffectQueue, effect: Effect) -> str:
    state = "done, but nobody has waited for it" if effect.landed else "under way"
    is_in_group = effect.group < UNGROUPED
    if is_in_group.any():
        group, lane = int(effect.group[is_in_group][0]), int(effect.lanes[is_in_group][0])
        is_group_open = int(queue.committed[effect.kind][lane]) <= group
        state += f"; group {group}, " + ("not committed" if is_group_open else "committed")
    for place in np.unique(effect.barrier[effect.barrier >= 0]).tolist():
        state += f"; tells the mbarrier at {name_of(machine, place)}"
    return state


def _mbarriers(machine: Machine, block: int) -> Iterator[str]:
    unit, start = machine.units.get(MBarriers), int(machine.launch.shared_windows[block])
    for mbarrier in unit.by_place.values() if isinstance(unit, MBarriers) else ():
        if not start <= mbarrier.place < start + machine.launch.window_bytes:
            continue
        arrived_count = mbarrier.count - mbarrier.missing
        line = f"mbarrier {name_of(machine, mbarrier.place)}: phase {mbarrier.phase} (parity {mbarrier.phase & 1}), "
        line += f"{arrived_count} of {mbarrier.count} arrivals"
        if mbarrier.bytes:
            missing_bytes = mbarrier.bytes
            line += (
                f", {missing_bytes} bytes to come" if missing_bytes > 0 else f", {-missing_bytes} bytes came unexpected"
            )
        waiting_count = sum(count_of(waiting_group.lanes) for waiting_group, _ in mbarrier.waiting)
        yield line + (f", {waiting_count} threads wait" if waiting_count else "")


def _barriers(machine: Machine, block: int) -> Iterator[str]:
    unit = machine.units.get(BlockBarriers)
    for barrier in unit.by_key.values() if isinstance(unit, BlockBarriers) else ():
        if barrier.block != block:
            continue
        expected_count = barrier.expected or int(machine.alive.reshape(-1, machine.stride)[barrier.block].sum())
        line = f"barrier {barrier.number}: {int(barrier.present.sum())} of {expected_count} threads"
        yield f"{line}, since {line_of(barrier.first)}"


def waiting_lanes(machine: Machine) -> list[Parked]:
    """Return the groups of lanes that wait for something, each with the reason."""
    waiting_groups = [
        Parked(pc, lanes, "the rest of its warp") for m in machine.meetings.values() for pc, lanes, _ in m
    ]
    return waiting_groups + [waiter for unit in machine.units.values() for waiter in unit.waiters()]


def _waiting(machine: Machine, block: int) -> Iterator[str]:
    for waiter in waiting_lanes(machine):
        lanes = indices_of(waiter.lanes)
        lanes = lanes[lanes // machine.stride == block]
        if not len(lanes):
            continue
        threads = place_of(machine, int(lanes[0])) + (f" and {len(lanes) - 1} more" if len(lanes) > 1 else "")
        yield f"{line_of(machine.code[waiter.pc])}: {threads}: waits for {waiter.why}"


def whereabouts(machine: Machine, pc: int, running: Lanes, block: int) -> list[str]:
    """List the places of a block's warps: a line for each place that lanes are at."""
    places: dict[tuple[int, str], list[int]] = {}

    def add_place(lanes: Lanes, text: str) -> None:
        for lane in indices_of(lanes)[indices_of(lanes) // machine.stride == block].tolist():
            places.setdefault((lane % machine.stride // 32, text), []).append(lane)

    def place_text(index: int) -> str:
        is_past_end = index >= len(machine.code)
        return "the end" if is_past_end else f"{line_of(machine.code[index])}  `{text_of(machine.code[index])}`"

    if pc < len(machine.code):
        add_place(running, f"runs   {place_text(pc)}")
    for index, lanes in sorted(machine.ready.items()):
        add_place(lanes, f"ready  {place_text(index)}")
    for index, lanes in machine.held_stores:
        add_place(lanes, f"later  {place_text(index)}")
    for waiter in waiting_lanes(machine):
        add_place(waiter.lanes, f"waits  {place_text(waiter.pc)}  for {waiter.why}")
    ended_lanes = np.flatnonzero(~machine.alive & (machine.thread < machine.launch.threads))
    if len(ended_lanes):
        add_place(as_lanes(ended_lanes), "ended")
    warps: dict[tuple[str, str], list[int]] = {}
    for (warp, text), numbers in sorted(places.items()):
        warps.setdefault((ranges([number % 32 for number in numbers]), text), []).append(warp)
    return [f"warp {ranges(warp_numbers):<6} lanes {lanes:<6} {text}" for (lanes, text), warp_numbers in warps.items()]


def ranges(numbers: list[int]) -> str:
    """Format numbers as ranges: `0-15,20`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
