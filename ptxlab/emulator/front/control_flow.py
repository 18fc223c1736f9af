"""The control flow of a kernel, as far as it can part the lanes of a warp at an `.aligned` instruction.

Basic blocks are numbered in the order of the code, and go by the index of their first instruction outside. `END` stands
behind all of them.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Entry, Instruction, remembered

END = -1
_LEAVES = ("ret", "exit")
_JUMPS = ("bra", "brx", "trap", *_LEAVES)


def is_aligned(instruction: Instruction) -> bool:
    """Tell whether all threads of a warp have to execute it together. `bar` stands for `barrier.aligned`."""
    words = instruction.opcode.split(".")
    return "aligned" in words or (words[0] == "bar" and "warp" not in words)


@dataclass(frozen=True)
class Flow:
    """Facts about a kernel's control flow that are worth following; all by instruction indices.

    aligned: the first `.aligned` instruction of each block (what follows in the block is executed by the same lanes),
        and all that have a guard.
    turning: last of a block -> heads of loops with an `.aligned` instruction to which it goes back. A compiler may put
        the way back ahead of the head, so the last need not be a branch.
    leaving: branch -> targets by which lanes leave early: they come to no `.aligned` instruction any more, while others
        may, nor to anything, but the end, that is executed whichever way the branch takes.
    """

    aligned: frozenset[int]
    turning: dict[int, frozenset[int]]
    leaving: dict[int, frozenset[int]]


class ControlFlowGraph:
    """Blocks and the edges between them."""

    def __init__(self, code: list[Instruction]) -> None:
        labels = [[label.index for label in ir.labels(instruction.operands)] for instruction in code]
        begins = {0, *(at for targets in labels for at in targets if at < len(code))}
        begins |= {i + 1 for i in range(len(code) - 1) if code[i].head in _JUMPS}
        self.first = sorted(begins)
        self.last = [at - 1 for at in self.first[1:]] + [len(code) - 1]
        number = {at: i for i, at in enumerate(self.first)} | {len(code): END}
        self.after: list[set[int]] = []
        for last in self.last:
            kind, guarded = code[last].head, code[last].guard is not None
            ways = [number[at] for at in labels[last]] + [END] * (kind in _LEAVES)
            self.after.append({*ways, *([number[last + 1]] if guarded or kind not in _JUMPS else [])})
        self.before: dict[int, set[int]] = {i: set() for i in [*range(len(self.first)), END]}
        for block, successors in enumerate(self.after):
            for successor in successors:
                self.before[successor].add(block)

    def reached(self, starts: Iterable[int], without: Collection[int] = (), backwards: bool = False) -> set[int]:
        """Find the blocks on the ways from these, themselves among them, that do not lead through the others."""
        todo = [start for start in starts if start not in without]
        found = set(todo)
        while todo:
            block = todo.pop()
            for other in self.before[block] if backwards else self.after[block] if block != END else ():
                if other not in found and other not in without:
                    found.add(other)
                    todo.append(other)
        return found


@remembered
def flow_of(entry: Entry) -> Flow:
    """Look at a kernel's code."""
    code = entry.instructions
    graph = ControlFlowGraph(code)
    blocks = range(len(graph.first))
    aligned: set[int] = set()
    with_aligned: set[int] = set()
    for block in blocks:
        inside = [i for i in range(graph.first[block], graph.last[block] + 1) if is_aligned(code[i])]
        aligned.update(i for i in inside if code[i].guard is not None or i == inside[0])
        if inside:
            with_aligned.add(block)
    alive = graph.reached(with_aligned, backwards=True)  # from here lanes may come to an .aligned instruction
    turning: dict[int, frozenset[int]] = {}
    leaving: dict[int, frozenset[int]] = {}
    for block in alive:
        branch = graph.last[block]
        back = {h for h in graph.after[block] & alive if with_aligned & loop(graph, block, h)}
        if back:
            turning[branch] = frozenset(graph.first[h] for h in back)
        away = {v for v in graph.after[block] - alive if leaves(graph, code, block, v)}
        if away and graph.after[block] & alive:
            leaving[branch] = frozenset(END if v == END else graph.first[v] for v in away)
    return Flow(frozenset(aligned), turning, leaving)


def loop(graph: ControlFlowGraph, block: int, start: int) -> set[int]:
    """Find the blocks of the natural loop that an edge from `block` to `start` closes.

    The set is empty if `start` is not a block that all ways to `block` lead through.
    """
    if start > block and not graph.before[start] - {block}:  # most edges
        return set()
    body = graph.reached([block], without=[start], backwards=True)
    return set() if 0 in body else body | {start}


def leaves(graph: ControlFlowGraph, code: list[Instruction], block: int, way: int) -> bool:
    """Tell whether nothing on this way out is common to all ways from the block to the end; a mere `ret` may be."""
    for common in graph.reached([way]) - {END}:
        does = code[graph.first[common] : graph.last[common] + 1]
        is_bare = all(i.head in (*_LEAVES, "bra") and i.guard is None for i in does)
        if not is_bare and END not in graph.reached([block], without=[common]):
            return False
    return True
