"""Quirks: what ptxas and GPUs make of some PTX otherwise than the manual says. `quirks.toml` has them."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".toml")
PTXAS = ("12.9", "13.0", "13.2")  # versions whose machine code was looked at


@dataclass(frozen=True)
class Form:
    """Instructions that a quirk concerns. Operands count from 0, the first result.

    Attributes:
        opcode: of the instruction, a regular expression.
        guarded: it has a guard.
        part: of the register that it writes (`h1`), a regular expression.
        whole: an operand that is all of its register, not a part.
        constant: an operand that is a constant from `at_least` to `at_most`.
        variable: an operand that is none.
        made_by: opcode of the one instruction that made operand `source`, or any source.
        word: the operand is a pair that `mov` packs, and this word of it (1: the high one) is what counts.
        shared: an operand that this one reads too.
        twice: it reads one register as two operands.
        again: an equal wgmma stands ahead of it, with no fence, wait, branch or change of its operands in between.
        differs: the one source in which it differs from an instruction ahead of it.
    """

    opcode: str
    guarded: bool = False
    part: str = ""
    whole: int | None = None
    constant: int | None = None
    at_least: int = 0
    at_most: int = 1 << 64
    variable: int | None = None
    made_by: str = ""
    source: int | None = None
    word: int | None = None
    shared: int | None = None
    twice: bool = False
    again: bool = False
    differs: int | None = None

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Opcodes of the instruction."""
        return re.compile(self.opcode)

    @cached_property
    def maker(self) -> re.Pattern[str]:
        """Opcodes of the instruction that made an operand."""
        return re.compile(self.made_by)

    def fits(
        self, opcode: str, guarded: bool, parts: list[str], constants: list[int | None], reads_twice: bool
    ) -> bool:
        """Tell whether an instruction has what is seen in itself alone: parts and constants of its operands."""
        if not self.pattern.fullmatch(opcode) or (self.guarded and not guarded) or (self.twice and not reads_twice):
            return False
        if self.part and not re.fullmatch(self.part, parts[0]):
            return False
        if self.whole is not None and parts[self.whole]:
            return False
        if self.variable is not None and constants[self.variable : self.variable + 1] != [None]:
            return False
        number = constants[self.constant : self.constant + 1] if self.constant is not None else [self.at_least]
        return all(x is not None and self.at_least <= x <= self.at_most for x in number)


@dataclass(frozen=True)
class Quirk:
    """A class of departures from the manual.

    Attributes:
        name: of its table.
        effect: what happens, in a sentence.
        who: "optimiser" if the driver's optimisation level 0 is right, "ptxas" if it is the same, "hardware".
        manual: what the manual says, or "silent".
        program: lines of PTX in which it is seen; thread t reads 8 words from [%in] on, and stores as many to [%out].
        inputs: words by thread, as hexadecimal text; the threads behind them repeat them.
        emulator, gpu, level0: words that the first threads store: in the emulator, on an H200, there at level 0.
        threads: of a block.
        cluster: how many blocks there are, a cluster.
        forms: the instructions; none where only operands tell, which no text of a kernel shows.
        ptxas: versions that make it.
        remark: of what a version makes otherwise.
        rule: of the fuzzer's generator, by which it leaves the form out; without one it leaves out `forms`.
    """

    name: str
    effect: str
    who: str
    manual: str
    program: str
    inputs: list[list[str]]
    emulator: list[list[str]]
    gpu: list[list[str]]
    level0: list[list[str]]
    threads: int = 32
    cluster: int = 1
    forms: tuple[Form, ...] = ()
    ptxas: tuple[str, ...] = PTXAS
    remark: str = ""
    rule: str = ""


@cache
def load() -> dict[str, Quirk]:
    """Read all quirks, by name."""
    tables: dict[str, dict[str, Any]] = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {name: _quirk(name, table) for name, table in tables.items()}


def _quirk(name: str, table: dict[str, Any]) -> Quirk:
    forms = tuple(Form(**form) for form in table.pop("forms", ()))
    return Quirk(name=name, forms=forms, ptxas=tuple(table.pop("ptxas", PTXAS)), **table)
