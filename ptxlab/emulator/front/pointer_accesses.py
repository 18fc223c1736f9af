"""Accesses of a PTX kernel through each pointer parameter: kind and width of the elements.

A pointer is followed from `ld.param` through moves and integer arithmetic, whatever way the code branches. Where one is
stored, handed on, or mixed with another, nothing is claimed about either.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ptxlab.emulator.front.ir import (
    Address,
    Entry,
    Immediate,
    Instruction,
    Register,
    Special,
    Symbol,
    Variable,
    cache_on_subject,
    registers,
)
from ptxlab.emulator.front.types import DTYPES

_FLOATS = {"f16": 2, "f16x2": 2, "bf16": 2, "bf16x2": 2, "f32": 4, "f64": 8}  # bytes of a number
# What makes an address of an address.
_ARITHMETIC = frozenset(
    {"mov", "cvta", "cvt", "add", "sub", "mul", "mad", "shl", "shr", "and", "or", "xor", "not", "selp", "min", "max"}
)
_MOVES = frozenset({"mov", "cvta", "cvt", "selp"})  # of these, what goes in comes out
# What looks at an address and keeps nothing of it.
_HARMLESS = frozenset({"setp", "isspacep", "prefetch", "prefetchu", "applypriority", "discard", "createpolicy"})
_OF_THREADS = ("ld", "st.", "stmatrix", "atom", "red.", "mbarrier.", "cp.async.")
_ACCESSES = frozenset({"ld", "ldu", "st", "atom", "red"})


@dataclass(frozen=True)
class PointerAccess:
    """Elements that a kernel moves through a pointer: floats, or integers (also bits that it only copies)."""

    is_float: bool
    nbytes: int  # of a number: 2 of f16x2
    is_vector: bool = False  # of .v2, .v4: numbers side by side

    def __str__(self) -> str:
        return f"{'f' if self.is_float else 'u'}{8 * self.nbytes}"


def accesses_of(entry: Entry) -> dict[str, frozenset[PointerAccess]]:
    """Find the accesses through each parameter, by its name; a parameter with an unknown access is left out."""
    pointers = _pointers(entry)
    unknown_names: set[str] = set()
    accesses_by_name: dict[str, set[PointerAccess]] = defaultdict(set)
    meanings = _Meanings(entry.instructions)
    for instruction in entry.instructions:
        head = instruction.head
        # An address is an operand in brackets; whatever else holds a pointer lets go of it.
        data_registers = [r for o in instruction.operands if not isinstance(o, Address) for r in registers((o,))]
        if head not in _ARITHMETIC | _HARMLESS:
            unknown_names.update(*(pointers[r] for r in data_registers if r not in instruction.destinations))
        pointer_names = _origins(instruction, pointers)
        access = meanings.access(instruction) if head in _ACCESSES else None
        if access is None or len(pointer_names) > 1:
            unknown_names |= pointer_names
        else:
            for name in pointer_names:
                accesses_by_name[name].add(access)
    return {name: frozenset(accesses) for name, accesses in accesses_by_name.items() if name not in unknown_names}


def pointers_of(entry: Entry) -> set[str]:
    """Find the parameters that are certainly pointers: some access has its address from that one alone."""
    pointers = _pointers(entry)
    origins = (_origins(instruction, pointers) for instruction in entry.instructions)
    return {name for origin in origins if len(origin) == 1 for name in origin}


def _origins(instruction: Instruction, pointers: dict[Register, set[str]]) -> set[str]:
    """Return the parameters that the address of an access comes from."""
    addresses = tuple(o for o in instruction.operands if isinstance(o, Address) and instruction.head not in _HARMLESS)
    return set().union(*(pointers[register] for register in registers(addresses)))


def _pointers(entry: Entry) -> dict[Register, set[str]]:
    """Find the parameters that the value of each register may come from."""
    pointers: dict[Register, set[str]] = defaultdict(set)
    for instruction in entry.instructions:
        if instruction.head == "ld" and ".param" in instruction.opcode:
            for address in instruction.operands[1:]:
                base = address.base if isinstance(address, Address) else None
                if isinstance(base, Symbol) and base.variable.size == 8:
                    for register in instruction.destinations:
                        pointers[register].add(base.variable.name)
        elif instruction.head in _ARITHMETIC:
            for operand in instruction.operands[1:]:  # `mov.u64 %p, parameter` of its address
                if isinstance(operand, Symbol) and operand.variable in entry.params:
                    pointers[instruction.destinations[0]] |= {operand.variable.name, "an address in the parameters"}
    _follow_arithmetic(entry, pointers)
    return pointers


def _follow_arithmetic(entry: Entry, origins: dict[Register, set[str]]) -> None:
    """Propagate origins through moves and integer arithmetic, in place, until nothing changes."""
    arithmetic_instructions = [instruction for instruction in entry.instructions if instruction.head in _ARITHMETIC]
    steps = [
        (register, instruction.sources)
        for instruction in arithmetic_instructions
        for register in instruction.destinations
    ]
    has_changed = True
    while has_changed:
        has_changed = False
        for register, sources in steps:
            origin = set().union(*(origins[source] for source in sources))
            if not origin <= origins[register]:
                origins[register] |= origin
                has_changed = True


def _unknown_addresses(entry: Entry, origins: dict[Register, set[str]]) -> set[Register]:
    """Find the registers that may hold an address that was loaded, exchanged or returned.

    A number that is added to the address of an array is an index, wherever it comes from.
    """
    unknown_registers = {
        register for i in entry.instructions if i.head not in _ARITHMETIC for register in i.destinations
    }
    arithmetic_instructions = [instruction for instruction in entry.instructions if instruction.head in _ARITHMETIC]
    has_changed = True
    while has_changed:
        has_changed = False
        for instruction in arithmetic_instructions:
            sources = instruction.sources
            if instruction.head not in _MOVES:
                sources = [source for source in sources if origins[source]] or sources
            if not unknown_registers.isdisjoint(sources) and not unknown_registers.issuperset(instruction.destinations):
                unknown_registers.update(instruction.destinations)
                has_changed = True
    return unknown_registers


@cache_on_subject
def shared_arrays_of(entry: Entry) -> dict[int, Variable]:
    """Find the array in shared memory that each instruction's first address comes from, by the instruction's index.

    Only where it comes from no other array, and not of dynamic shared memory, which has no size.
    """
    arrays = {variable.name: variable for variable in entry.shared}
    origins: dict[Register, set[str]] = defaultdict(set)
    for instruction in entry.instructions:
        if instruction.head in _ARITHMETIC:
            names = {o.variable.name for o in instruction.operands[1:] if isinstance(o, Symbol)} & arrays.keys()
            for register in instruction.destinations:
                origins[register] |= names
    _follow_arithmetic(entry, origins)
    unknown_registers = _unknown_addresses(entry, origins)
    arrays_by_index: dict[int, Variable] = {}
    for index, instruction in enumerate(entry.instructions):
        if not instruction.opcode.startswith(_OF_THREADS) or "bulk" in instruction.opcode:
            continue  # of a copy engine's two addresses in shared memory one is its mbarrier's
        base = next((operand.base for operand in instruction.operands if isinstance(operand, Address)), None)
        names = {base.variable.name} & arrays.keys() if isinstance(base, Symbol) else set()
        names = origins[base] if isinstance(base, Register) and base not in unknown_registers else names
        if len(names) == 1 and (array := arrays[next(iter(names))]).size:
            arrays_by_index[index] = array
    return arrays_by_index


class _Meanings:
    """Meanings of registers' bits: floats of what types, or integers, by the instructions that compute with them."""

    def __init__(self, instructions: Iterable[Instruction]) -> None:
        self.types: dict[Register, set[str]] = defaultdict(set)
        self.written: Counter[Register] = Counter()  # by how many instructions
        for instruction in instructions:
            self.written.update(instruction.destinations)
            head, *modifiers = instruction.opcode.split(".")
            types = [m for m in modifiers if (m in DTYPES and m[0] != "b") or m in _FLOATS]
            if head in _ACCESSES or head in ("mov", "selp") or not types:
                continue
            first, last = types[0], types[-1]
            for register in instruction.destinations:
                self.types[register].add(first)
            for register in instruction.sources:
                self.types[register].add(last if head in ("cvt", "set", "slct") else first)

    def access(self, instruction: Instruction) -> PointerAccess | None:
        """Return the element kind and width of a load, store or atomic; None where its bits may be anything."""
        _, *modifiers = instruction.opcode.split(".")
        types = [m for m in modifiers if m in DTYPES]
        if not types or ".param" in instruction.opcode:
            return None
        is_vector = "v2" in modifiers or "v4" in modifiers or "v8" in modifiers
        if types[-1] in _FLOATS:
            return PointerAccess(True, _FLOATS[types[-1]], is_vector)
        moved_registers = [r for o in instruction.operands if not isinstance(o, Address | Immediate | Special)
                 for r in registers((o,))]  # fmt: skip
        types_in_use = {register.type for register in moved_registers}
        if not types_in_use <= set(_FLOATS):
            if any(self.written[register] > 1 for register in moved_registers):  # may hold something else each time
                return None
            types_in_use = {t for register in moved_registers for t in self.types[register]}
        floats = {_FLOATS[t] for t in types_in_use if t in _FLOATS}
        if floats:
            is_one_kind = len(floats) == 1 and types_in_use <= set(_FLOATS)
            return PointerAccess(True, floats.pop(), is_vector) if is_one_kind else None
        return PointerAccess(False, DTYPES[types[-1]].itemsize, is_vector)
