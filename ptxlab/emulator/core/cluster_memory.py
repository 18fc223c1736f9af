"""The blocks of a cluster, and the shared memory that they let each other see.

In the window `.shared::cluster` a block's own addresses are those of `.shared::cta`; the same byte of the block of rank
r is (r + 1) << 24 further on, as `mapa` says. (Hardware's addresses are absolute: one that is handed to another block
without `mapa` still means the block it came from. Here it means the block that uses it.) A generic address points into
the arena, so those of peers need no mapping.
"""

import numpy as np

from ptxlab.emulator.core.lanes import Lanes
from ptxlab.emulator.core.memory import BASE, SHARED_START
from ptxlab.emulator.core.wave import Wave
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.types import Array
from ptxlab.errors import EmulationError, MemoryFault

_RANK = 24  # bits of an address below the rank, plus one, of the block that it points to
_WITHIN = (1 << _RANK) - 1


class ClusterMemory:
    """The clusters of a wave: the blocks of each, and where their shared windows are."""

    def __init__(self, wave: Wave) -> None:
        x, y, z = wave.launch.cluster
        self.wave, self.size = wave, x * y * z
        self.block = np.arange(wave.lanes) // wave.stride  # of each lane, by its place in the wave
        self.windows = wave.launch.shared_windows[: len(wave.blocks)]
        self.first_window = int(self.windows[0]) if len(self.windows) else 0

    def first_block(self, lanes: Lanes) -> Array:
        """Return the first block of each lane's cluster."""
        block: Array = self.block[lanes]
        first_blocks: Array = block - block % self.size
        return first_blocks

    def block_at(self, offsets: Array) -> Array:
        """Return the blocks whose shared windows hold these arena offsets; -1 for an offset outside all windows."""
        blocks = np.searchsorted(self.windows, offsets, "right") - 1
        is_inside = (blocks >= 0) & (offsets < self.windows[blocks] + self.wave.launch.window_bytes)
        return np.where(is_inside, blocks, -1)

    # Addresses

    def is_far(self, addresses: Array) -> bool:
        """Tell whether any address lies in the cluster window, where the high bits name a block's rank."""
        return len(addresses) > 0 and int(addresses.max()) > _WITHIN

    def explain_address(self, address: int) -> str:
        """Explain an address that `mapa` made but is used as one in the block's own window; "" for others."""
        rank = (address >> _RANK) - 1
        if not 0 <= rank < self.size:
            return ""
        byte = (address & _WITHIN) - SHARED_START
        return f": it is the address of byte {byte} in block {rank} of the cluster, which takes .shared::cluster"

    def resolve(self, instruction: Instruction, lanes: Lanes, addresses: Array) -> tuple[Array, Array]:
        """Resolve addresses in the cluster window to (block, address in that block's own window)."""
        ranks = addresses >> _RANK
        self.check_ranks(instruction, lanes, ranks - 1)
        blocks = np.where(ranks == 0, self.block[lanes], self.first_block(lanes) + ranks - 1)
        self.check_visible(instruction, lanes, blocks)
        return blocks, addresses & _WITHIN

    def map_addresses(self, instruction: Instruction, lanes: Lanes, addresses: Array, ranks: Array) -> Array:
        """Return the addresses of the same bytes in the blocks with these ranks."""
        self.check_ranks(instruction, lanes, ranks)
        return (ranks + 1) << _RANK | addresses & _WITHIN

    def to_generic(self, instruction: Instruction, lanes: Lanes, addresses: Array) -> Array:
        """Convert addresses in the window of the cluster to generic ones."""
        blocks, window_offsets = self.resolve(instruction, lanes, addresses)
        return self.windows[blocks] + window_offsets - SHARED_START + BASE

    def from_generic(self, lanes: Lanes, addresses: Array) -> Array:
        """Convert generic addresses of shared memory to addresses in the window of the cluster."""
        blocks = self.block_at(addresses - BASE)
        window_offsets = addresses - BASE - self.windows[blocks] + SHARED_START
        is_remote = blocks != self.block[lanes]
        ranked_addresses: Array = np.where(is_remote, (blocks % self.size + 1) << _RANK, 0) + window_offsets
        return ranked_addresses

    def shifts(self, instruction: Instruction, indices: Array, masks: Array) -> tuple[Array, Array]:
        """Find the distance from each lane's own window to that of each block in its mask.

        Returns, for each lane and each such block, (position of the lane, distance).
        """
        ranks = np.arange(16)
        positions, target_ranks = np.nonzero(masks[:, None] >> ranks.astype(np.uint16) & np.uint16(1))
        lanes = indices[positions]
        self.check_ranks(instruction, lanes, target_ranks)
        blocks = self.first_block(lanes) + target_ranks
        self.check_visible(instruction, lanes, blocks)
        return positions, self.windows[blocks] - self.windows[self.block[lanes]]

    # Rules

    def check_ranks(self, instruction: Instruction, lanes: Lanes, ranks: Array) -> None:
        """Refuse ranks beyond the cluster."""
        is_wrong = ranks >= self.size
        if is_wrong.any():
            first, place = self.wave.first_fault(instruction, lanes, is_wrong)
            raise EmulationError(f"{place}: block {int(ranks[first])} of a cluster of {self.size}")

    def check_visible(self, instruction: Instruction, lanes: Lanes, blocks: Array) -> None:
        """Refuse blocks that are of another cluster, or have ended."""
        own_blocks: Array = np.broadcast_to(self.block[lanes], blocks.shape)
        if (own_blocks == blocks).all():
            return
        is_other_cluster: Array = np.not_equal(blocks // self.size, own_blocks // self.size)
        is_block_alive: Array = np.any(self.wave.alive.reshape(-1, self.wave.stride), axis=1)
        is_wrong = np.logical_or(is_other_cluster, ~is_block_alive[blocks])
        if is_wrong.any():
            first, place = self.wave.first_fault(instruction, lanes, is_wrong)
            block = "({},{},{})".format(*self.wave.blocks[blocks[first]])
            reason = "is of another cluster" if is_other_cluster[first] else "has ended"
            raise MemoryFault(f"{place}: shared memory of block {block}, which {reason}")

    def check_generic(self, instruction: Instruction, lanes: Lanes, offsets: Array) -> None:
        """Refuse arena offsets in shared memory that the lanes cannot see."""
        blocks = self.block_at(offsets)
        self.check_visible(instruction, lanes, np.where(blocks < 0, self.block[lanes], blocks))
