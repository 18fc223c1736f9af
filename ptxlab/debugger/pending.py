"""What goes on beside the lanes of a wave: copies, products, barriers; and where its warps are."""

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
    """List everything that is pending for a block of the wave, or the one line that nothing is."""
    found = [*_effects(machine, block), *_mbarriers(machine, block), *_barriers(machine, block)]
    return [*found, *_waiting(machine, block)] or ["nothing is pending"]


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
    """Name a place in memory as `full + 8`, or in more words where no variable lies."""
    text = machine.memory.byte(place)
    named = re.search(r"\((\w+ \+ \d+)\)$", text)
    return named[1] if named else text


def _effects(machine: Machine, block: int) -> Iterator[str]:
    """Describe copies and products that no thread has waited for."""
    queue = machine.units.get(EffectQueue)
    if not isinstance(queue, EffectQueue):
        return
    for whole in queue.queue:
        effect, _ = whole.split(whole.lanes // machine.stride == block)
        if effect is not None:
            who, state = _whose(machine, effect), _state(machine, queue, effect)
            yield f"{_what(effect)}, {line_of(effect.instruction)}, by {who}: {state}"


def _what(effect: Effect) -> str:
    if isinstance(effect, WgmmaProducts):
        return f"wgmma m64n{effect.decoded.n}"
    if effect.arrives:
        return "arrival of cp.async"
    kind = "cp.async" if effect.kind == "cp.async" else "bulk copy"
    return f"{kind} of {int(effect.writes[2].sum())} bytes"


def _whose(machine: Machine, effect: Effect) -> str:
    lanes = np.unique(effect.lanes)
    if effect.kind == "wgmma":
        first = place_of(machine, int(lanes[0]))
        return f"the warp of {first}" + (f" and {len(lanes) - 1} more" if len(lanes) > 1 else "")
    return place_of(machine, int(lanes[0])) + (f" and {len(lanes) - 1} more" if len(lanes) > 1 else "")


def _state(machine: Machine, queue: EffectQueue, effect: Effect) -> str:
    state = "done, but nobody has waited for it" if effect.landed else "under way"
    grouped = effect.group < UNGROUPED
    if grouped.any():
        group, lane = int(effect.group[grouped][0]), int(effect.lanes[grouped][0])
        open_ = int(queue.committed[effect.kind][lane]) <= group
        state += f"; group {group}, " + ("not committed" if open_ else "committed")
    for place in np.unique(effect.barrier[effect.barrier >= 0]).tolist():
        state += f"; tells the mbarrier at {name_of(machine, place)}"
    return state


def _mbarriers(machine: Machine, block: int) -> Iterator[str]:
    unit, start = machine.units.get(MBarriers), int(machine.launch.shared_windows[block])
    for each in unit.by_place.values() if isinstance(unit, MBarriers) else ():
        if not start <= each.place < start + machine.launch.window_bytes:
            continue
        arrived = each.count - each.missing
        line = f"mbarrier {name_of(machine, each.place)}: phase {each.phase} (parity {each.phase & 1}), "
        line += f"{arrived} of {each.count} arrivals"
        if each.bytes:
            line += f", {each.bytes} bytes to come" if each.bytes > 0 else f", {-each.bytes} bytes came unexpected"
        waiting = sum(count_of(parked.lanes) for parked, _ in each.waiting)
        yield line + (f", {waiting} threads wait" if waiting else "")


def _barriers(machine: Machine, block: int) -> Iterator[str]:
    unit = machine.units.get(BlockBarriers)
    for each in unit.by_key.values() if isinstance(unit, BlockBarriers) else ():
        if each.block != block:
            continue
        wanted = each.expected or int(machine.alive.reshape(-1, machine.stride)[each.block].sum())
        line = f"barrier {each.number}: {int(each.present.sum())} of {wanted} threads"
        yield f"{line}, since {line_of(each.first)}"


def parked(machine: Machine) -> list[Parked]:
    """Return the lanes that wait for something."""
    found = [Parked(pc, lanes, "the rest of its warp") for m in machine.meetings.values() for pc, lanes, _ in m]
    return found + [each for unit in machine.units.values() for each in unit.waiters()]


def _waiting(machine: Machine, block: int) -> Iterator[str]:
    for each in parked(machine):
        lanes = indices_of(each.lanes)
        lanes = lanes[lanes // machine.stride == block]
        if not len(lanes):
            continue
        who = place_of(machine, int(lanes[0])) + (f" and {len(lanes) - 1} more" if len(lanes) > 1 else "")
        yield f"{line_of(machine.code[each.pc])}: {who}: waits for {each.why}"


def whereabouts(machine: Machine, pc: int, here: Lanes, block: int) -> list[str]:
    """List the places of a block's warps: a line for each place that lanes are at."""
    places: dict[tuple[int, str], list[int]] = {}

    def enter(some: Lanes, text: str) -> None:
        for lane in indices_of(some)[indices_of(some) // machine.stride == block].tolist():
            places.setdefault((lane % machine.stride // 32, text), []).append(lane)

    def at(index: int) -> str:
        end = index >= len(machine.code)
        return "the end" if end else f"{line_of(machine.code[index])}  `{text_of(machine.code[index])}`"

    if pc < len(machine.code):
        enter(here, f"runs   {at(pc)}")
    for index, lanes in sorted(machine.ready.items()):
        enter(lanes, f"ready  {at(index)}")
    for index, lanes in machine.held_stores:
        enter(lanes, f"later  {at(index)}")
    for each in parked(machine):
        enter(each.lanes, f"waits  {at(each.pc)}  for {each.why}")
    ended = np.flatnonzero(~machine.alive & (machine.thread < machine.launch.threads))
    if len(ended):
        enter(as_lanes(ended), "ended")
    warps: dict[tuple[str, str], list[int]] = {}
    for (warp, text), numbers in sorted(places.items()):
        warps.setdefault((ranges([number % 32 for number in numbers]), text), []).append(warp)
    return [f"warp {ranges(those):<6} lanes {lanes:<6} {text}" for (lanes, text), those in warps.items()]


def ranges(numbers: list[int]) -> str:
    """Format numbers as ranges: `0-15,20`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
