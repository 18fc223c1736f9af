"""Finds out that lanes spin for ever.

When the same lanes stand at the same instructions twice, and in between every lane that could run had its turn, while
no register, byte of memory or barrier is other than before, then it will be so again and again. From time to time the
scheduler's states are compared for a while: first a few registers, then a digest of everything.
"""

from collections.abc import Callable
from hashlib import blake2b

from ptxlab.emulator.core.lanes import Lanes, indices_of
from ptxlab.emulator.core.wave import Wave

FIRST = 1 << 14  # steps before the first look; the next ones after ever more
WHILE = 1 << 14  # steps that a look takes


class LivelockDetector:
    """Detects that a wave repeats a state: the scheduler asks `has_repeated` from step `due` of the launch on."""

    def __init__(self, wave: Wave, ready: dict[int, Lanes], state: Callable[[], object], turns: int) -> None:
        """Watch the scheduler's `ready` and `state`.

        `turns`: steps within which every lane that can run has had its turn.
        """
        self.wave, self.ready, self.state, self.turns = wave, ready, state, turns
        self.began = wave.launch.steps
        self.due = self.began + FIRST
        self.sample: tuple[int, dict[int, list[bytes]]] | None = None
        self.whole: tuple[int, bytes] | None = None  # when, and the digest

    def has_repeated(self, last: int) -> bool:
        """Tell whether the wave is in a state in which it has been before; `last` is where the scheduler has been."""
        steps = self.wave.launch.steps
        if self.sample is None:
            self.sample = last, {pc: self.registers(pc) for pc in self.ready}
        elif steps > self.due + WHILE:
            self.due, self.sample, self.whole = self.began + 2 * (steps - self.began), None, None
        elif (self.whole is None or steps - self.whole[0] >= self.turns) and self.is_like_sample(last):
            previous_digest, self.whole = self.whole, (steps, self.digest())
            if previous_digest is not None and previous_digest[1] == self.whole[1]:
                self.due = steps  # to go on looking, if the machine finds a way out
                return True
        return False

    def is_like_sample(self, last: int) -> bool:
        """Tell whether the cheap part of the wave's state equals that of the sample.

        It does if lanes stand at the same instructions and the first lane at each has the same registers.
        """
        assert self.sample is not None
        sample_last, sample_registers = self.sample
        are_places_equal = last == sample_last and self.ready.keys() == sample_registers.keys()
        return are_places_equal and all(self.registers(pc) == registers for pc, registers in sample_registers.items())

    def registers(self, pc: int) -> list[bytes]:
        """Return the registers of the first lane at an instruction, as bytes of each file."""
        lane = indices_of(self.ready[pc])[0]
        return [file[:, lane].tobytes() for file in self.wave.files.values()]

    def digest(self) -> bytes:
        """Compute a digest of all registers, memory, places of lanes and barriers."""
        digest = blake2b(self.wave.memory.arena.data)
        for file in self.wave.files.values():
            digest.update(file.data)
        for pc, lanes in sorted(self.ready.items(), key=lambda entry: entry[0]):
            digest.update(repr(pc).encode() + indices_of(lanes).tobytes())
        digest.update(repr(self.state()).encode())
        return digest.digest()
