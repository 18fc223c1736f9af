"""A memory instruction, decoded."""

from dataclasses import dataclass
from functools import cached_property

from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.opcode import UnknownOpcode
from ptxlab.emulator.front.types import DTYPES, Array, bits_of

SPACES = ("global", "shared", "shared::cta", "shared::cluster", "local", "const", "param", "param::entry")
ORDERS = ("weak", "volatile", "relaxed", "acquire", "release", "acq_rel", "mmio")
SCOPES = ("cta", "cluster", "gpu", "sys")
# They steer caches, not results.
HINTS = ("ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "unified", "noftz")
AccessSizes = int | Array  # of accesses: of all, or of each


@dataclass(frozen=True)
class MemoryAccess:
    """A memory instruction as the watchers see it; it accesses `size` bytes per lane."""

    instruction: Instruction
    kind: str  # "load", "store" or "atomic"
    space: str  # "generic" where the opcode names none
    order: str
    type: str
    count: int  # elements of a vector access
    operation: tuple[str, ...]  # modifiers that are left: the operation of an atomic

    @cached_property
    def size(self) -> int:
        """Bytes that each lane accesses."""
        return bits_of(self.type) // 8 * self.count


def decode(instruction: Instruction, kind: str) -> MemoryAccess:
    """Sort the modifiers of a memory opcode, which may stand in any order."""
    space, order, count, operation = "generic", "weak" if kind != "atomic" else "relaxed", 1, []
    modifiers = instruction.opcode.split(".")[1:]
    types = [word for word in modifiers if word in DTYPES]
    for word in modifiers:
        if word in SPACES:
            space = word if word == "shared::cluster" else word.split("::")[0]
        elif word in ORDERS:
            order = word
        elif word in ("v2", "v4", "v8"):
            count = int(word[1])
        elif word not in types and word not in SCOPES and word not in HINTS and not word.startswith(("L1::", "L2::")):
            operation.append(word)
    if len(types) != 1 or types == ["pred"] or (operation and kind != "atomic"):
        raise UnknownOpcode(instruction.opcode)
    return MemoryAccess(instruction, kind, space, order, types[0], count, tuple(operation))
