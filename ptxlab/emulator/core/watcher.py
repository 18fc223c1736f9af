"""The hooks of observers: a machine calls them at every access and every synchronisation.

`wrap_handler` may wrap an instruction when it is bound. A launch without checks has no watchers.
"""

from ptxlab.emulator.core.access import MemoryAccess
from ptxlab.emulator.core.effect import Effect
from ptxlab.emulator.core.lanes import Handler, Lanes
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.types import Array


class Watcher:
    """Base of observers of a machine: every hook does nothing until a subclass overrides it."""

    def wrap_handler(self, instruction: Instruction, handler: Handler) -> Handler:
        """Wrap a handler when the instruction is bound."""
        return handler

    def wrap_guarded(self, instruction: Instruction, handler: Handler) -> Handler:
        """Wrap a handler together with its guard."""
        return handler

    def load(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Handle lanes that are about to read at arena offsets."""

    def store(self, access: MemoryAccess, lanes: Lanes, offsets: Array, values: Array) -> None:
        """Handle lanes that are about to write at arena offsets."""

    def atomic(self, access: MemoryAccess, lanes: Lanes, offsets: Array) -> None:
        """Handle lanes that are about to read, change and write at arena offsets."""

    def fence(self, instruction: Instruction, lanes: Lanes) -> None:
        """Handle a memory fence of lanes."""

    def converge(self, lanes: Lanes) -> None:
        """Handle lanes that have met at bar.warp.sync."""

    def arrive(self, instruction: Instruction, barrier: tuple[int, int], lanes: Lanes) -> None:
        """Handle lanes that have come to a barrier, (block of the wave, number)."""

    def depart(self, barrier: tuple[int, int], lanes: Lanes | None) -> None:
        """Handle a barrier that is complete; these lanes waited there."""

    def exchange(self, instruction: Instruction, lanes: Lanes, sources: Array, members: Array) -> None:
        """Handle lanes that take values of lanes `sources` of their warps, out of those in the masks `members`."""

    def issue(self, effect: Effect) -> None:
        """Handle an effect that lanes ask for, which goes on while they do."""

    def effect_complete(self, effect: Effect) -> None:
        """Handle an effect that has been done; mbarriers hear of it next."""

    def effect_wait(self, effect: Effect, only_read: bool) -> None:
        """Handle lanes that have waited for their effect, or for its operands to have been read."""

    def effect_seen(self, effect: Effect) -> None:
        """Handle an effect that somebody has waited for at its mbarrier."""

    def register_fence(self, lanes: Lanes) -> None:
        """Handle a wgmma.fence of lanes."""

    def proxy_fence(self, lanes: Lanes, spaces: tuple[str, ...]) -> None:
        """Handle a proxy fence: the copy engine now sees what the lanes have written in these spaces."""

    def release_mbarriers(self, lanes: Lanes) -> None:
        """Handle a fence that releases the initialisation of mbarriers by these lanes."""

    def begin(self, instruction: Instruction, lanes: Lanes, places: Array) -> None:
        """Handle the initialisation of mbarriers at arena offsets."""

    def phase_arrive(self, instruction: Instruction, place: int, lanes: Lanes) -> None:
        """Handle the arrival of lanes at an mbarrier."""

    def phase_complete(self, place: int) -> None:
        """Handle the completion of a phase of an mbarrier."""

    def phase_seen(self, instruction: Instruction, place: int, lanes: Lanes) -> None:
        """Handle lanes that have seen that the last phase of an mbarrier is complete."""

    def phase_wait(self, instruction: Instruction, place: int, lanes: Lanes) -> None:
        """Handle lanes that have waited for a phase of an mbarrier or of a cluster's barrier."""

    def wait_for_predecessors(self, lanes: Lanes) -> None:
        """Handle lanes that have waited for the kernel before."""

    def exit(self, lanes: Lanes) -> None:
        """Handle lanes that have left the kernel."""

    def end(self) -> None:
        """Handle the end of all lanes."""
