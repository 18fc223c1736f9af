"""Declarations: names and their scopes, registers, variables with initial values."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Entry, Instruction, Module, Register, Variable
from ptxlab.emulator.front.tokens import Cursor
from ptxlab.emulator.front.types import DTYPES, bits_of
from ptxlab.sources import names_same_file

SPACES = {".param", ".shared", ".local", ".global", ".const"}
Frames = tuple[tuple[int, int], ...]  # (number of a file, line in it), then where that was inlined, and so on out
MOST_REGISTERS = 1 << 18  # in one declaration
MOST_BYTES = 1 << 31  # in one variable
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:\s*,.*\binlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")


@dataclass(slots=True)
class Scope:
    """Names of one `{ ... }`: registers (their type, until first used), variables and labels."""

    parent: "Scope | None"
    names: dict[str, str | Register | Variable] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, ir.Operands] = field(default_factory=dict)  # of .branchtargets: names of labels

    def chain(self) -> "Iterator[Scope]":
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
        self.external = False  # whether what is being declared is defined elsewhere
        self.files: dict[int, str] = {}
        self.here: Frames = ()  # by the last `.loc`
        self.inlined: dict[tuple[int, ...], Frames] = {}  # (file, line, column) -> the frames of its last `.loc`
        self.locations: list[tuple[Instruction, Frames]] = []

    def location(self) -> None:
        """`.loc file line column[, function_name name, inlined_at file line column]` or `.file number "path" ...`."""
        if self.accept(".file"):
            file = self.integer()
            self.files[file] = self.take().strip('"')
            self.skip_line()
            return
        found = _LOC.match(self.take())
        if not found:
            self.fail("expected .loc file line column", self.line_numbers[self.at - 1])
        try:
            file, line, column, *caller = (int(number or 0) for number in found.groups())
        except ValueError:  # Python reads some 4,000 digits at most
            self.fail(".loc names a line beyond any file", self.line_numbers[self.at - 1])
        self.here = ((file, line),)
        if found[4]:
            self.here += self.inlined.get(tuple(caller), ((caller[0], caller[1]),))
        self.inlined[file, line, column] = self.here

    def move_to(self, source: str) -> None:
        """Give all instructions the place that they came from, by `.loc`; the source is called as it was named."""
        paths = {n: source if names_same_file(p, source) else p for n, p in self.files.items()}
        places: list[tuple[str, int]] = []
        for instruction, frames in self.locations:
            # what has no place of its own, such as a constant that the compiler moved, is shown where the text stands
            places = [(paths[file], line) for file, line in frames if line and file in paths] or places
            if places:
                (instruction.path, instruction.line), *callers = places
                instruction.callers = tuple(callers)

    def variables(self, space: str) -> None:
        """Variables of a state space, after its name: `.align 4 .b32 x, y[3] = {1, 2};`."""
        kind = self.kind(space)
        while True:
            variable = self.variable(space, *kind)
            if space in ("global", "const"):
                self.result.variables.append(variable)
            elif space in ("local", "param"):  # parameters of a call live in the caller's frame
                variable.space = "local"
                variable.offset = -(-self.entry.local_bytes // variable.align) * variable.align
                self.entry.local_bytes = variable.offset + variable.size
            self.declare(variable.name, variable)
            if self.accept(";"):
                return
            self.expect(",")

    def kind(self, space: str) -> tuple[str, int, int]:
        """(type, alignment, elements of a vector) of `.align 8 .b8`, `.u64 .ptr .global .align 16`."""
        align, type_name, vector = 0, "", 1
        while self.token.startswith("."):
            word = self.take()[1:]
            if word == "align":
                align = self.integer()
                if align <= 0 or align & (align - 1):
                    self.fail(f"alignment {align} is not a power of two")
            elif word in DTYPES:
                type_name = word
            elif word in ("v2", "v4"):
                vector = int(word[1])
            elif word == "attribute":
                self.expect("(")
                self.comma_separated(self.take, ")")
            elif f".{word}" not in SPACES and word != "ptr":
                self.fail(f"unknown type or attribute .{word}")
        if not type_name:
            self.fail("the variable has no type")
        element = ir.natural_size(type_name)
        if space == "param" and type_name != "b8":  # `.ptr .align 16` speaks of what is pointed to
            align = element
        return type_name, align or element * vector, vector

    def variable(self, space: str, type_name: str, align: int, vector: int) -> Variable:
        """A variable's name, dimensions and initial values."""
        name, count, element = self.word("a name"), vector, ir.natural_size(type_name)
        while self.accept("["):
            count *= 0 if self.token == "]" else self.integer()
            self.expect("]")
        if not 0 <= element * count <= MOST_BYTES:
            self.fail(f"{name} has {element * count} bytes: at most {MOST_BYTES} are emulated")
        variable = Variable(name, space, type_name, align, element * count)
        if self.accept("="):
            self.initialise(variable, element)
        if not variable.size and not self.external and space != "param":
            self.fail(f"{name} has no size")
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
            for name in names:
                self.declare(name, type_name)
            if self.accept(";"):
                return
            self.expect(",")

    def declare(self, name: str, what: str | Variable) -> None:
        """Enter a name into the innermost scope, where nothing else may have it."""
        if name in self.scope.names and not self.external:
            self.fail(f"{name} is declared twice")
        self.scope.names[name] = what

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
