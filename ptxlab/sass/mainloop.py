"""The main loop of a GEMM in machine code: which instructions it takes to dequantise and multiply, per weight."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ptxlab.sass import SassInstruction

_NIBBLES = "0xf0f0f0f"  # every unpacking of eight 4-bit weights masks twice with it
_WEIGHTS_PER_MASK = 4

Blocks = list[list[SassInstruction]]


@dataclass(frozen=True)
class MainLoop:
    """An iteration of the innermost loop that unpacks 4-bit weights, as one thread executes it.

    Attributes:
        weights: that the thread unpacks.
        opcodes: instructions that every iteration executes once, by opcode with modifiers.
        pipes: the same by pipe.
        beside: instructions in the loop that not every iteration executes, or not once: branches, loops within.
    """

    weights: int
    opcodes: dict[str, int]
    pipes: dict[str, int]
    beside: int

    @property
    def per_weight(self) -> float:
        """Instructions of one thread per weight, those of every iteration."""
        return sum(self.pipes.values()) / self.weights

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return asdict(self)


def main_loop(instructions: Sequence[SassInstruction]) -> MainLoop | None:
    """Find the main loop of one entry; None where no loop unpacks weights in every iteration."""
    blocks = basic_blocks(instructions)
    loops = [loop for loop in natural_loops(blocks) if any(map(_unpacks, _instructions(blocks, loop.body)))]
    if not loops:
        return None
    loop = min(loops, key=lambda loop: len(loop.body))
    instructions_once = _instructions(blocks, loop.always)
    weights = _WEIGHTS_PER_MASK * sum(map(_unpacks, instructions_once))
    if not weights:
        return None
    return MainLoop(
        weights=weights,
        opcodes=dict(Counter(i.name for i in instructions_once).most_common()),
        pipes=dict(Counter(i.pipe for i in instructions_once).most_common()),
        beside=len(_instructions(blocks, loop.body)) - len(instructions_once),
    )


def pipes_beside_mma(instructions: Sequence[SassInstruction]) -> dict[str, int]:
    """Count the instructions of one thread in the smallest loop that multiplies, by pipe, without the MMAs.

    The counts are empty if no loop multiplies.
    """
    blocks = basic_blocks(instructions)
    bodies = [_instructions(blocks, loop.body) for loop in natural_loops(blocks)]
    loop = min((body for body in bodies if any(i.pipe == "tensor" for i in body)), key=len, default=[])
    return dict(Counter(i.pipe for i in loop if i.pipe != "tensor").most_common())


def pipes_per_sum(instructions: Sequence[SassInstruction]) -> dict[str, float]:
    """Count the instructions that scale one INT32 sum in the main loop, by pipe; empty if none is converted there.

    Counted where least else happens: in the shortest block of a loop that converts integers to FP32.
    """
    blocks = basic_blocks(instructions)
    converting_blocks = [
        blocks[b] for loop in natural_loops(blocks) for b in loop.body if any(map(_converts, blocks[b]))
    ]
    block = min(converting_blocks, key=len, default=[])
    sums = sum(map(_converts, block))
    return {pipe: count / sums for pipe, count in Counter(i.pipe for i in block if i.pipe != "tensor").most_common()}


def _converts(instruction: SassInstruction) -> bool:
    return instruction.opcode in ("I2F", "I2FP")


def _unpacks(instruction: SassInstruction) -> bool:
    return instruction.opcode == "LOP3" and _NIBBLES in instruction.operands


def _instructions(blocks: Blocks, chosen: frozenset[int]) -> list[SassInstruction]:
    return [instruction for index in sorted(chosen) for instruction in blocks[index]]


def basic_blocks(instructions: Sequence[SassInstruction]) -> Blocks:
    """Cut where branches go and after every instruction that may not fall through."""
    starts = {target for i in instructions if (target := _branch_target(i)) is not None}
    blocks: Blocks = [[]]
    for instruction in instructions:
        if blocks[-1] and (instruction.address in starts or _ends_block(blocks[-1][-1])):
            blocks.append([])
        blocks[-1].append(instruction)
    return blocks


def _ends_block(instruction: SassInstruction) -> bool:
    return instruction.opcode in ("BRA", "EXIT", "RET")


def _branch_target(instruction: SassInstruction) -> int | None:
    return int(instruction.operands[-1], 16) if instruction.opcode == "BRA" else None


def _successors(blocks: Blocks) -> list[list[int]]:
    index_by_address = {block[0].address: index for index, block in enumerate(blocks)}
    successors = []
    for index, block in enumerate(blocks):
        last = block[-1]
        target = _branch_target(last)
        # BRA.DIV and its like branch on a condition that is no guard.
        always_leaves = _ends_block(last) and not last.guard and len(last.operands) < 2 and not last.modifiers
        next_blocks = [] if always_leaves or index + 1 == len(blocks) else [index + 1]
        successors.append(next_blocks + ([index_by_address[target]] if target in index_by_address else []))
    return successors


@dataclass(frozen=True)
class Loop:
    """A natural loop: its blocks, and those of them that every iteration executes exactly once."""

    body: frozenset[int]
    always: frozenset[int]


def natural_loops(blocks: Blocks) -> list[Loop]:
    """Find each loop header with the blocks that lead back to it, inner loops as part of it."""
    successors = _successors(blocks)
    dominators = _dominators(successors)
    latches: dict[int, list[int]] = {}
    for index, next_blocks in enumerate(successors):
        for header in next_blocks:
            if header in dominators[index]:
                latches.setdefault(header, []).append(index)
    bodies = {header: _loop_body(header, latch_blocks, successors) for header, latch_blocks in latches.items()}
    loops = []
    for header, body in bodies.items():
        inner_blocks = frozenset().union(*(b for h, b in bodies.items() if h != header and h in body and b < body))
        unconditional_blocks = body.intersection(*(dominators[latch] for latch in latches[header])) - inner_blocks
        loops.append(Loop(body, unconditional_blocks))
    return loops


def _dominators(successors: list[list[int]]) -> list[frozenset[int]]:
    """Compute for each block the blocks on every way from the entry to it.

    There are none for a block that is not reached.
    """
    all_blocks = frozenset(range(len(successors)))
    predecessors: list[list[int]] = [[] for _ in successors]
    for index, next_blocks in enumerate(successors):
        for successor in next_blocks:
            predecessors[successor].append(index)
    dominators = [frozenset({0}), *[all_blocks] * (len(successors) - 1)]
    has_changed = True
    while has_changed:
        has_changed = False
        for index in range(1, len(successors)):
            incoming_sets = [dominators[p] for p in predecessors[index]]
            new_dominators = (incoming_sets[0].intersection(*incoming_sets[1:]) if incoming_sets else frozenset()) | {
                index
            }
            has_changed |= new_dominators != dominators[index]
            dominators[index] = new_dominators
    return dominators


def _loop_body(header: int, latches: list[int], successors: list[list[int]]) -> frozenset[int]:
    body, pending_blocks = {header}, list(latches)
    while pending_blocks:
        index = pending_blocks.pop()
        if index not in body:
            body.add(index)
            pending_blocks += [p for p, next_blocks in enumerate(successors) if index in next_blocks]
    return frozenset(body)
