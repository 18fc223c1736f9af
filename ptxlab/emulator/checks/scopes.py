"""How far strong operations reach: threads of the block (`.cta`), of the cluster, or all.

A release and an acquire, or two accesses, order nothing between threads that one of their scopes does not reach (PTX
ISA, "morally strong"). An mbarrier's operations that name no scope count as wide enough, as kernels everywhere have
them between the blocks of a cluster, though the ISA says `.cta`.
"""

from collections.abc import Iterator
from functools import cache
from math import prod

import numpy as np

from ptxlab.emulator.core.access import SCOPES
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.front.types import Array

CTA, CLUSTER, ALL = range(3)
_STRONG = ("ld.relaxed", "ld.acquire", "st.relaxed", "st.release", "atom.", "red.", "membar.",
           "fence.sc", "fence.acq_rel", "fence.acquire", "fence.release", "mbarrier.")  # fmt: skip
Released = tuple[int, int]  # how far it reaches, and from which block (-1: from none, as the copy engine does)
EVERYWHERE: Released = ALL, -1


@cache
def reach_of(opcode: str) -> int:
    """Return CTA, CLUSTER or ALL for the scope of an opcode; an mbarrier is in its cluster anyway."""
    scope = (
        next((word for word in opcode.split(".")[1:] if word in SCOPES), "gpu") if opcode.startswith(_STRONG) else ""
    )
    return {"cta": CTA, "cluster": ALL if opcode.startswith("mbarrier") else CLUSTER}.get(scope, ALL)


class Scopes:
    """The lanes that scopes reach, for the blocks and clusters of a wave."""

    def __init__(self, machine: Machine) -> None:
        self.block, self.cluster = machine.stride, machine.stride * prod(machine.launch.cluster)  # lanes
        self.reaches = np.array([reach_of(i.opcode) for i in machine.code])  # of each instruction, by its index
        narrow_kinds = {
            i.head == "mbarrier" for i, reach in zip(machine.code, self.reaches, strict=True) if reach == CTA
        }
        # who may meet a scope: all lanes; that of an mbarrier those of its cluster
        tracks_blocks = (False in narrow_kinds and machine.lanes > self.block) or (
            True in narrow_kinds and self.cluster > self.block
        )
        self.matter = (
            tracks_blocks
            or (CLUSTER in self.reaches and machine.lanes > self.cluster)
            # a barrier of the block reaches no other block, whose flags its threads may have read
            or (machine.lanes > self.block and machine.launch.entry.uses("bar.", "barrier."))
        )

    def by_block(self, reach: int, lanes: Array) -> Iterator[tuple[Released, Array]]:
        """Yield the lanes of each release: one per block, or one for all where scopes do not matter."""
        if not self.matter:
            yield EVERYWHERE, lanes
            return
        blocks = lanes // self.block
        for block in np.unique(blocks).tolist():
            yield (reach, block), lanes[blocks == block]

    def lanes_reached(self, released: Released, reach: int, lanes: Array) -> Array:
        """Return the lanes that are in scope of the release and whose own scope, `reach`, covers its block."""
        narrow, block = min(released[0], reach), released[1]
        if narrow == ALL or block < 0:
            return lanes
        size = self.block if narrow == CTA else self.cluster
        lanes_in_reach: Array = lanes[lanes // size == block * self.block // size]
        return lanes_in_reach

    def is_out_of_scope(self, lanes: Array, peers: Array, reaches: Array) -> Array:
        """Tell for each pair of lane and peer whether the peer lies outside the pair's scope."""
        other_block, other_cluster = (lanes // size != peers // size for size in (self.block, self.cluster))
        is_out_of_scope: Array = (other_block & (reaches == CTA)) | (other_cluster & (reaches == CLUSTER))
        return is_out_of_scope
