"""Copies of a wgmma's accumulators that stand before the wait for the wgmma: moved behind it, as ptxas does.

A compiler may put a `mov` of an accumulator, also one that packs or unpacks halves, between `wgmma.commit_group` and
`wgmma.wait_group`. ptxas makes no instruction of it: it renames registers, and what the copy holds is read behind the
wait. So such a copy is moved behind the wait, if everything from it to there leaves its registers alone but copies of
the same kind. Any other access to the copy finds what the accumulator held before, and leaves the copy where it is.
"""

from dataclasses import dataclass

from ptxlab.emulator.front.ir import Entry, Instruction, Register, registers

_ENDS = ("bra", "brx", "call", "ret", "exit", "trap")  # of a row of instructions
Place = tuple[int, int]


@dataclass
class Copy:
    """A `mov` of accumulators that a running wgmma may still write."""

    index: int  # of the instruction
    sources: set[Place]
    targets: set[Place]
    wait: int | None = None  # index of the instruction behind which they are complete


def move_behind_waits(entry: Entry) -> None:
    """Move copies of accumulators behind the wait for their wgmma."""
    if not entry.uses("wgmma.mma_async"):
        return
    code, copies_by_wait = entry.instructions, dict[int, list[int]]()
    for copy in _movable(code, entry.targets):
        assert copy.wait is not None
        copies_by_wait.setdefault(copy.wait, []).append(copy.index)
    moved_indices = {index for indices in copies_by_wait.values() for index in indices}
    order = [
        i for index in range(len(code)) if index not in moved_indices for i in (index, *copies_by_wait.get(index, ()))
    ]
    entry.instructions[:] = [code[index] for index in order]


def _movable(code: list[Instruction], targets: frozenset[int]) -> list[Copy]:
    """List the copies that can be moved, in the order of the code."""
    movable_copies: list[Copy] = []
    open_copies: list[Copy] = []
    commits: dict[Place, int] = {}  # of accumulators under way, and copies of these: commits since their wgmma
    for index, instruction in enumerate(code):
        if index in targets:
            open_copies, commits = [], {}
        read_places, written_places = (
            _places(registers_) for registers_ in (instruction.sources, instruction.destinations)
        )
        if instruction.head == "mov" and instruction.guard is None and read_places & commits.keys():
            open_copies = [copy for copy in open_copies if not written_places & (copy.sources | copy.targets)]
            open_copies.append(Copy(index, read_places, written_places))
            commits.update(dict.fromkeys(written_places, min(commits[place] for place in read_places & commits.keys())))
        elif instruction.opcode.startswith("wgmma.commit_group"):
            commits = {place: count + 1 for place, count in commits.items()}
        elif instruction.opcode.startswith("wgmma.wait_group"):
            newest_count = getattr(instruction.operands[0], "bits", 0) if instruction.operands else 0
            commits = {place: count for place, count in commits.items() if count <= newest_count}
            for copy in [copy for copy in open_copies if not copy.sources & commits.keys()]:
                copy.wait = index
                movable_copies.append(copy)
                open_copies.remove(copy)
        else:
            touched_places = read_places | written_places
            guard = _places([instruction.guard]) if instruction.guard else set()
            open_copies = [
                copy
                for copy in open_copies
                if not (touched_places | guard) & copy.targets and not written_places & copy.sources
            ]
            commits = {place: count for place, count in commits.items() if place not in written_places}
            if instruction.opcode.startswith("wgmma.mma_async"):
                commits.update(dict.fromkeys(_places(registers(instruction.operands[:1])), 0))
            if instruction.head in _ENDS:
                open_copies, commits = [], {}
    return sorted(movable_copies, key=lambda copy: copy.index)


def _places(registers_: list[Register]) -> set[Place]:
    """Return the places of registers: width and row."""
    return {register.place for register in registers_}
