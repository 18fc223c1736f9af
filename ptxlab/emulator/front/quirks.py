"""The check "quirks": lines of a kernel that ptxas or a GPU treats otherwise than the PTX manual says.

It looks at the text of a kernel alone, and its notes are no findings: the emulator follows the manual, and the numbers
decide whether a GPU's result differs. `ptxlab.hardware.quirks` has the forms.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ptxlab.emulator.front.ir import (
    Entry,
    Immediate,
    Instruction,
    Register,
    Vector,
    cache_on_subject,
    called_from,
    labels,
    registers,
)
from ptxlab.hardware import quirks
from ptxlab.mangled import demangle_message

Makers = Mapping[tuple[int, int], Instruction]  # width and index of a register that one instruction alone writes
_ENDS = ("wgmma.fence", "wgmma.wait_group")  # up to here ptxas takes one wgmma for another


@dataclass(frozen=True)
class Note:
    """A line that has the form of a quirk."""

    quirk: str
    path: str
    line: int
    text: str
    message: str
    callers: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}{called_from(self.path, self.callers)}"
        return f"note: {place}: `{self.text}`: {self.message} (quirk {self.quirk}, guide/hardware_quirks.md)"


@cache_on_subject
def notes_of(entry: Entry) -> tuple[Note, ...]:
    """List a kernel's lines with forms of quirks, in their order."""
    candidates = [(quirk, form) for quirk in quirks.load().values() for form in quirk.forms]
    forms_by_opcode = {opcode: [(quirk, form) for quirk, form in candidates if form.pattern.fullmatch(opcode)]
                 for opcode in entry.opcodes}  # fmt: skip
    makers = _makers(entry) if any(forms_by_opcode.values()) else {}
    repetitions = _repetitions(entry) if entry.uses("wgmma.mma_async") else set()
    forms = {form for named_forms in forms_by_opcode.values() for _, form in named_forms}
    variants = {form: _variants(entry, form, form.differs, makers) for form in forms if form.differs is not None}
    notes: dict[tuple[object, ...], Note] = {}
    for i, instruction in enumerate(entry.instructions):
        for quirk, form in forms_by_opcode[instruction.opcode]:
            if (
                _has(form, instruction, makers)
                and (not form.again or i in repetitions)
                and (form.differs is None or i in variants[form])
            ):
                message = quirk.effect[0].lower() + quirk.effect[1:].rstrip(".")
                text = demangle_message(instruction.text)
                note = Note(quirk.name, instruction.path, instruction.line, text, message, instruction.callers)
                notes.setdefault((note.quirk, note.path, note.line, note.callers), note)
    return tuple(notes.values())


def _makers(entry: Entry) -> Makers:
    """Map each register that a single instruction writes to that instruction."""
    written_registers = [(r.place, instruction) for instruction in entry.instructions for r in instruction.destinations]
    times = Counter(key for key, _ in written_registers)
    return {key: instruction for key, instruction in written_registers if times[key] == 1}


def _repetitions(entry: Entry) -> set[int]:
    """Find each wgmma that ptxas merges with an equal earlier one in the same code without branches."""
    candidates: list[Instruction] = []
    repetitions = set()
    for i, instruction in enumerate(entry.instructions):
        if i in entry.targets or labels(instruction.operands) or instruction.opcode.startswith(_ENDS):
            candidates = []
        if instruction.opcode.startswith("wgmma.mma_async"):
            if any(
                _without_place(instruction) == _without_place(earlier_instruction) for earlier_instruction in candidates
            ):
                repetitions.add(i)
            candidates.append(instruction)
        written_places = {register.place for register in instruction.destinations}
        candidates = [
            earlier_instruction
            for earlier_instruction in candidates
            if not written_places & {register.place for register in earlier_instruction.sources}
        ]
    return repetitions


def _variants(entry: Entry, form: quirks.Form, differs: int, makers: Makers) -> set[int]:
    """Find each instruction of a form that differs from an earlier one in its result and source `differs` alone.

    Registers that both read have to be written once, as the text does not tell which of several values they hold.
    """
    earlier_sources: dict[tuple[object, ...], set[object]] = {}
    variants = set()
    for i, instruction in enumerate(entry.instructions):
        if not form.pattern.fullmatch(instruction.opcode):
            continue
        shared_operands = instruction.operands[1:differs] + instruction.operands[differs + 1 :]
        if any(register.place not in makers for register in registers(shared_operands)):
            continue
        source = instruction.operands[differs]
        sources = earlier_sources.setdefault((instruction.opcode, shared_operands), set())
        if sources - {source}:
            variants.add(i)
        sources.add(source)
    return variants


def _has(form: quirks.Form, instruction: Instruction, makers: Makers) -> bool:
    """Tell whether an instruction, with the makers of its sources, has the form, but for `again` and `differs`."""
    operands = instruction.operands
    constants = [_constant(operand, makers) for operand in operands]
    parts = [operand.selector.removeprefix("-") if isinstance(operand, Register) else "" for operand in operands]
    places = [register.place for register in registers(operands[1:])]
    reads_twice = len({*places}) < len(places)
    if not form.fits(instruction.opcode, instruction.guard is not None, parts, constants, reads_twice):
        return False
    if not form.made_by:
        return True
    sources = instruction.sources if form.source is None else registers(operands[form.source : form.source + 1])
    if form.word is not None:
        sources = [word for source in sources for word in _words(source, makers)[form.word : form.word + 1]]
    origins = [makers[source.place] for source in sources if source.place in makers]
    shared_places = (
        {register.place for register in registers(operands[form.shared : form.shared + 1])}
        if form.shared is not None
        else None
    )
    return any(
        form.maker.fullmatch(maker.opcode)
        and (shared_places is None or shared_places & {source.place for source in maker.sources})
        for maker in origins
    )


def _words(pair: Register, makers: Makers) -> list[Register]:
    """List the registers that one `mov` packs into a pair, the low word first."""
    maker = makers.get(pair.place)
    packed_operand = maker.operands[1] if maker and maker.head == "mov" else None
    return registers(packed_operand.elements) if isinstance(packed_operand, Vector) else []


def _without_place(instruction: Instruction) -> tuple[object, ...]:
    return instruction.opcode, instruction.operands, instruction.guard


def _constant(operand: object, makers: Makers) -> int | None:
    """Return the number that an operand holds, itself or by a lone unguarded `mov`; None if neither tells."""
    if isinstance(operand, Register) and (maker := makers.get(operand.place)) and maker.head == "mov":
        operand = maker.operands[1] if maker.guard is None else operand
    return operand.bits if isinstance(operand, Immediate) else None
