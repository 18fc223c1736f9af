"""The control flow of a kernel, as far as it can part the lanes of a warp at an `.aligned` instruction.

Basic blocks are numbered in the order of the code, and go by the index of their first instruction outside. `END` stands
behind all of them.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Entry, Instruction, cache_on_subject

END = -1
_LEAVES = ("ret", "exit")
_JUMPS = ("bra", "brx", "trap", *_LEAVES)


def is_aligned(instruction: Instruction) -> bool:
    """Tell whether all threads of a warp have to execute it together. `bar` stands for `barrier.aligned`."""
    words = instruction.opcode.split(".")
    return "aligned" in words or (words[0] == "bar" and "warp" not in words)


@dataclass(frozen=True)
class Flow:
    """Facts about a kernel's control flow that the check "divergence" follows, by instruction index.

    aligned: the first `.aligned` instruction of each block (what follows in the block is executed by the same lanes),
        and all that have a guard.
    loop_edges: last of a block -> heads of loops with an `.aligned` instruction to which it goes back. A compiler may
        put the way back ahead of the head, so the last need not be a branch.
    early_exits: branch -> targets by which lanes leave early: they come to no `.aligned` instruction any more, while
        others may, nor to anything, but the end, that is executed whichever way the branch takes.
    """

    aligned: frozenset[int]
    loop_edges: dict[int, frozenset[int]]
    early_exits: dict[int, frozenset[int]]


class ControlFlowGraph:
    """Blocks and the edges between them."""

    def __init__(self, code: list[Instruction]) -> None:
        labels = [[label.index for label in ir.labels(instruction.operands)] for instruction in code]
        block_starts = {0, *(start for targets in labels for start in targets if start < len(code))}
        block_starts |= {i + 1 for i in range(len(code) - 1) if code[i].head in _JUMPS}
        self.first = sorted(block_starts)
        self.last = [start - 1 for start in self.first[1:]] + [len(code) - 1]
        number = {start: i for i, start in enumerate(self.first)} | {len(code): END}
        self.successors: list[set[int]] = []
        for last_index in self.last:
            kind, is_guarded = code[last_index].head, code[last_index].guard is not None
            targets_of_block = [number[start] for start in labels[last_index]] + [END] * (kind in _LEAVES)
            self.successors.append(
                {*targets_of_block, *([number[last_index + 1]] if is_guarded or kind not in _JUMPS else [])}
            )
        self.predecessors: dict[int, set[int]] = {i: set() for i in [*range(len(self.first)), END]}
        for block, successors in enumerate(self.successors):
            for successor in successors:
                self.predecessors[successor].add(block)

    def find_reachable(self, starts: Iterable[int], without: Collection[int] = (), backwards: bool = False) -> set[int]:
        """Find the blocks reachable from `starts`, these included, on paths that avoid `without`."""
        to_visit = [start for start in starts if start not in without]
        reachable_blocks = set(to_visit)
        while to_visit:
            block = to_visit.pop()
            for neighbour_block in (
                self.predecessors[block] if backwards else self.successors[block] if block != END else ()
            ):
                if neighbour_block not in reachable_blocks and neighbour_block not in without:
                    reachable_blocks.add(neighbour_block)
                    to_visit.append(neighbour_block)
        return reachable_blocks


@cache_on_subject
def flow_of(entry: Entry) -> Flow:
    """Analyse the control flow of a kernel."""
    code = entry.instructions
    graph = ControlFlowGraph(code)
    blocks = range(len(graph.first))
    aligned: set[int] = set()
    with_aligned: set[int] = set()
    for block in blocks:
        aligned_indices = [i for i in range(graph.first[block], graph.last[block] + 1) if is_aligned(code[i])]
        aligned.update(i for i in aligned_indices if code[i].guard is not None or i == aligned_indices[0])
        if aligned_indices:
            with_aligned.add(block)
    # From here lanes may come to an .aligned instruction.
    blocks_with_barrier_ahead = graph.find_reachable(with_aligned, backwards=True)
    loop_edges: dict[int, frozenset[int]] = {}
    early_exits: dict[int, frozenset[int]] = {}
    for block in blocks_with_barrier_ahead:
        branch = graph.last[block]
        loop_heads = {
            h for h in graph.successors[block] & blocks_with_barrier_ahead if with_aligned & loop(graph, block, h)
        }
        if loop_heads:
            loop_edges[branch] = frozenset(graph.first[h] for h in loop_heads)
        exit_blocks = {v for v in graph.successors[block] - blocks_with_barrier_ahead if leaves(graph, code, block, v)}
        if exit_blocks and graph.successors[block] & blocks_with_barrier_ahead:
            early_exits[branch] = frozenset(END if v == END else graph.first[v] for v in exit_blocks)
    return Flow(frozenset(aligned), loop_edges, early_exits)


def loop(graph: ControlFlowGraph, block: int, start: int) -> set[int]:
    """Find the blocks of the natural loop that an edge from `block` to `start` closes.

    The set is empty if `start` is not a block that all ways to `block` lead through.
    """
    if start > block and not graph.predecessors[start] - {block}:  # most edges
        return set()
    body = graph.find_reachable([block], without=[start], backwards=True)
    return set() if 0 in body else body | {start}


def leaves(graph: ControlFlowGraph, code: list[Instruction], block: int, start: int) -> bool:
    """Tell whether `block` can reach the end around each block reachable from `start`, bare `ret` and `bra` apart."""
    for common in graph.find_reachable([start]) - {END}:
        instructions = code[graph.first[common] : graph.last[common] + 1]
        is_bare = all(i.head in (*_LEAVES, "bra") and i.guard is None for i in instructions)
        if not is_bare and END not in graph.find_reachable([block], without=[common]):
            return False
    return True
