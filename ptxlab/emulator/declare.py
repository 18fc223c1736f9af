"""Declarations: names and their scopes, registers, variables with initial values."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from ptxlab.emulator import ir
from ptxlab.emulator.ir import Entry, Instruction, Module, Register, Variable
from ptxlab.emulator.tokens import Cursor, Token
from ptxlab.emulator.types import DTYPES, bits_of

SPACES = {".param", ".shared", ".local", ".global", ".const"}
MOST_REGISTERS = 1 << 18  # in one declaration
MOST_BYTES = 1 << 31  # in one variable


@dataclass(slots=True)
class Scope:
    """Names of one `{ ... }`: registers (their type, until first used), variables and labels."""

    parent: Scope | None
    names: dict[str, str | Register | Variable] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple] = field(default_factory=dict)  # of .branchtargets: names of labels

    def chain(self) -> Iterator[Scope]:
        """This scope and those around it, innermost first."""
        scope: Scope | None = self
        while scope:
            yield scope
            scope = scope.parent


class Declarations(Cursor):
    """Reads declarations into the module, the entry and the scope that are open."""

    def __init__(self, text: str, path: str) -> None:
        super().__init__(text, path)
        self.result = Module(path, text)
        self.scope = Scope(None)
        self.entry = Entry("", 0)
        self.files: dict[int, str] = {}
        self.here = (0, 0)  # number of a file, line in it, by the last `.loc`; no file has the number 0
        self.locations: list[tuple[Instruction, tuple[int, int]]] = []

    def location(self) -> None:
        """`.loc file line ...` or `.file number "path" ...`."""
        directive, file = self.take(), self.integer()
        if directive == ".loc":
            self.here = file, self.integer()
        else:
            self.files[file] = self.take().strip('"')
        self.skip_line()

    def move_to(self, source: str) -> None:
        """Give all instructions the place that they came from, by `.loc`; the source is called as it was named."""
        for instruction, (file, line) in self.locations:
            if line and file in self.files:
                path = self.files[file]
                instruction.path = source if path in (source, os.path.abspath(source)) else path
                instruction.line = line

    def variables(self, space: str, extern: bool = False) -> None:
        """Variables of a state space, after its name: `.align 4 .b32 x, y[3] = {1, 2};`."""
        while True:
            variable = self.declared(space)
            if space in ("global", "const"):
                self.result.variables.append(variable)
            elif space == "local":
                variable.offset = -(-self.entry.local_bytes // variable.align) * variable.align
                self.entry.local_bytes = variable.offset + variable.size
            elif space == "param":
                self.fail("functions and their parameters are not emulated")
            self.scope.names[variable.name] = variable
            if self.accept(";"):
                return
            # `.b32 x, y;`: the next name has the same type
            self.expect(",")
            self.at -= 1
            self.tokens[self.at] = Token("word", f".{variable.type}", self.tokens[self.at].line)

    def declared(self, space: str) -> Variable:
        """`.align 8 .b8 name[24] = {...}`, `.u64 .ptr .global .align 16 name`."""
        align, type_name, vector = 0, "", 1
        while self.token.startswith("."):
            word = self.take()[1:]
            if word == "align":
                align = self.integer()
            elif word in DTYPES:
                type_name = word
            elif word in ("v2", "v4"):
                vector = int(word[1])
            elif word == "attribute":
                self.comma_separated(self.take, ")") if self.accept("(") else None
            elif f".{word}" not in SPACES and word != "ptr":
                self.fail(f"unknown type or attribute .{word}")
        if not type_name:
            self.fail("the variable has no type")
        name, count = self.word("a name"), vector
        while self.accept("["):
            count *= 0 if self.token == "]" else self.integer()
            self.expect("]")
        element = ir.natural_size(type_name)
        if space == "param":  # `.ptr .align 16` speaks of what is pointed to
            align = align if type_name == "b8" else element
        if align < 0 or align & (align - 1):
            self.fail(f"alignment {align} is not a power of two")
        if not 0 <= element * count <= MOST_BYTES:
            self.fail(f"{name} has {element * count} bytes: at most {MOST_BYTES} are emulated")
        variable = Variable(name, space, type_name, align or element * vector, element * count)
        if self.accept("="):
            self.initialise(variable, element)
        return variable

    def initialise(self, variable: Variable, element: int) -> None:
        """Read the initial values of a variable, after `=`."""

        def values() -> Iterator[bytes]:
            if self.accept("{"):
                for _ in iter(lambda: self.accept("}"), True):
                    yield from values()
                    self.accept(",")
                return
            negative = self.accept("-")
            number = self.number()
            bits = -number.bits if negative else number.bits
            yield (bits & (1 << 8 * element) - 1).to_bytes(element, "little")

        initial = b"".join(values())
        variable.size = variable.size or len(initial)
        if len(initial) > variable.size:
            self.fail(f"{variable.name} has more initial values than elements")
        variable.initial = initial.ljust(variable.size, b"\0")

    def registers(self) -> None:
        """`.reg` has been read: `.b32 %r<10>, %a;`."""
        type_name = self.word("a type")[1:]
        if type_name not in DTYPES:
            self.fail(f"registers of type .{type_name} are not emulated")
        while True:
            name = self.word("a register")
            if self.accept("<"):
                count = self.integer()
                if not 0 <= count <= MOST_REGISTERS:
                    self.fail(f"{count} registers: at most {MOST_REGISTERS} are emulated")
                names = [f"{name}{i}" for i in range(count)]
                self.expect(">")
            else:
                names = [name]
            self.scope.names.update(dict.fromkeys(names, type_name))
            if self.accept(";"):
                return
            self.expect(",")

    def known(self, name: str) -> Register | Variable | None:
        """What a name has been declared as, in the innermost scope that has it."""
        for scope in self.scope.chain():
            known = scope.names.get(name)
            if isinstance(known, str):  # first use: registers that are only declared take no row
                width = bits_of(known)
                known = scope.names[name] = Register(name, known, self.entry.registers[width])
                self.entry.registers[width] += 1
            if known is not None:
                return known
        return None
