"""PTX text -> `Module`: what hand-written kernels and NVRTC's output use of the language."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NoReturn

from ptxlab.emulator import ir
from ptxlab.emulator.ir import Entry, Instruction, Module, Operand, Register, Variable
from ptxlab.emulator.packed import parse_annotation
from ptxlab.emulator.types import DTYPES, bits_of
from ptxlab.errors import SourceError

_TOKEN = re.compile(
    r"""(?P<newline>\n) | (?P<space>[^\S\n]+) | (?P<comment>//[^\n]*) | (?P<block>/\*.*?\*/) | (?P<string>"[^"\n]*")
      | (?P<number>0[fF][0-9a-fA-F]{8}\b | 0[dD][0-9a-fA-F]{16}\b | 0[xX][0-9a-fA-F]+U? | 0[bB][01]+U?
                 | \d+\.\d*(?:[eE][+-]?\d+)? | \d+U?)
      | (?P<word>[.%$A-Za-z_][\w.$]*(?:::[\w.$]+)*)
      | (?P<mark>[;,{}()\[\]:@!|+\-=<>]) | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_SPACES = {".param", ".shared", ".local", ".global", ".const"}
_LINKAGE = {".visible", ".extern", ".weak", ".common"}
_SIZES = {"maxntid", "reqntid", "minnctapersm", "maxnctapersm", "maxnreg", "reqnctapercluster", "maxclusterrank"}
_FLAGS = {"explicitcluster", "blocksareclusters", "noreturn"}
_SPECIAL = re.compile(
    r"%(?:(?:n?tid|n?ctaid|cluster_n?ctaid|n?clusterid)\.[xyz]|cluster_n?ctarank|is_explicit_cluster|n?warpid|laneid|n?smid|gridid"
    r"|lanemask_(?:eq|lt|le|gt|ge)|clock(?:_hi|64)?|globaltimer(?:_lo|_hi)?"
    r"|(?:dynamic|total|aggr)_smem_size|reserved_smem_offset_begin)"
)


@dataclass(slots=True)
class _Token:
    kind: str
    text: str
    line: int


@dataclass(slots=True)
class _Scope:
    """Names of one `{ ... }`: registers (their type, until first used), variables and labels."""

    parent: _Scope | None
    names: dict[str, str | Register | Variable] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)

    def chain(self) -> Iterator[_Scope]:
        scope: _Scope | None = self
        while scope:
            yield scope
            scope = scope.parent


@dataclass(frozen=True, slots=True)
class _Unresolved:
    """A name that may be a label further down."""

    name: str


def parse(text: str, path: str = "<ptx>") -> Module:
    """Parse a PTX module.

    `path` is what messages call the source. Raises `SourceError` with the line of the first thing that is not PTX,
    or that this emulator cannot take (functions with bodies, initialisers that hold addresses).
    """
    return _Parser(text, path).module()


class _Parser:
    def __init__(self, text: str, path: str) -> None:
        self.result = Module(path, text)
        self.path = path
        self.lines = text.split("\n")
        self.annotations: dict[int, str] = {}
        self.tokens = list(self.tokenise(text))
        self.at = 0
        self.scope = _Scope(None)
        self.entry = Entry("", 0)

    # Tokens

    def tokenise(self, text: str) -> Iterator[_Token]:
        line = 1
        for match in _TOKEN.finditer(text):
            kind, token = match.lastgroup or "", match[0]
            if kind == "comment" and "@lanes" in token:
                self.annotations[line] = token.partition("@lanes")[2]
            elif kind == "other":
                self.fail(f"unexpected character {token!r}", line)
            elif kind in ("word", "number", "mark", "string"):
                yield _Token(kind, token, line)
            line += token.count("\n") if kind in ("newline", "block") else 0
        yield _Token("end", "end of file", line)

    def fail(self, problem: str, line: int | None = None) -> NoReturn:
        line = line or self.tokens[min(self.at, len(self.tokens) - 1)].line
        raise SourceError(self.path, line, problem, self.lines[line - 1].strip() if line <= len(self.lines) else "")

    @property
    def token(self) -> str:
        return self.tokens[self.at].text

    def take(self) -> str:
        token = self.tokens[self.at]
        if token.kind == "end":
            self.fail("unexpected end of file")
        self.at += 1
        return token.text

    def accept(self, text: str) -> bool:
        if self.tokens[self.at].text != text:
            return False
        self.at += 1
        return True

    def expect(self, text: str) -> None:
        if not self.accept(text):
            self.fail(f"expected {text!r} before {self.token!r}")

    def word(self, what: str) -> str:
        if self.tokens[self.at].kind != "word":
            self.fail(f"expected {what}, found {self.token!r}")
        return self.take()

    def integer(self) -> int:
        sign = -1 if self.accept("-") else 1
        number = self.number()
        if number.float_bits:
            self.fail("expected an integer")
        return sign * number.bits

    def number(self) -> ir.Immediate:
        if self.tokens[self.at].kind != "number":
            self.fail(f"expected a number, found {self.token!r}")
        text = self.take()
        prefix, digits = text[:2].lower(), text.removesuffix("U")
        if prefix in ("0f", "0d"):
            return ir.Immediate(int(text[2:], 16), 32 if prefix == "0f" else 64)
        if "." in text:
            return ir.Immediate(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
        base = 16 if prefix == "0x" else 2 if prefix == "0b" else 8 if digits[0] == "0" and len(digits) > 1 else 10
        return ir.Immediate(int(digits, base))

    def comma_separated(self, item: Callable, end: str) -> list:
        items: list = []
        while not self.accept(end):
            if items:
                self.expect(",")
            items.append(item())
        return items

    def skip_line(self) -> None:
        line = self.tokens[self.at - 1].line
        while self.tokens[self.at].line == line and self.tokens[self.at].kind != "end":
            self.at += 1

    def skip_braces(self) -> None:
        depth = 0
        while True:
            text = self.take()
            depth += (text == "{") - (text == "}")
            if depth == 0 and text == "}":
                return

    def skip_statement(self) -> None:
        while self.take() != ";":
            pass

    # The module

    def module(self) -> Module:
        extern = False
        while self.tokens[self.at].kind != "end":
            directive = self.word("a directive")
            if directive in _LINKAGE:
                extern |= directive == ".extern"
                continue
            if directive == ".version":
                self.result.version = self.take()
            elif directive == ".target":
                self.result.target = self.word("a target")
                self.skip_line()
            elif directive == ".address_size":
                if self.integer() != 64:
                    self.fail("only 64-bit addresses are emulated")
            elif directive in (".file", ".loc"):
                self.skip_line()
            elif directive == ".section":
                self.skip_braces()
            elif directive in (".pragma", ".alias"):
                self.skip_statement()
            elif directive == ".entry":
                self.kernel()
            elif directive == ".func":
                self.function(extern)
            elif directive in _SPACES:
                self.variables(directive[1:], extern)
            else:
                self.fail(f"unexpected {directive!r} at module level")
            extern = False
        if not self.result.version:
            self.fail("not a PTX module: .version is missing", 1)
        return self.result

    def function(self, extern: bool) -> None:
        """Skip a function: calling it is an unknown instruction."""
        while self.token not in ("{", ";"):
            self.take()
        if not self.accept(";"):
            self.skip_braces()

    def kernel(self) -> None:
        line = self.tokens[self.at].line
        entry = self.entry = Entry(self.word("the kernel's name"), line)
        if entry.name in self.result.entries:
            self.fail(f"kernel {entry.name} is defined twice", line)
        self.scope = _Scope(self.scope)
        if self.accept("("):
            self.comma_separated(self.parameter, ")")
        while self.token != "{":
            self.performance_directive(entry)
        scopes: list[_Scope] = []
        self.body(scopes)
        self.resolve_labels(scopes)
        self.lay_out_shared()
        self.result.entries[entry.name] = entry
        self.scope = self.scope.parent or self.scope

    def performance_directive(self, entry: Entry) -> None:
        name = self.word("a directive or the kernel's body").removeprefix(".")
        if name == "pragma":
            self.skip_statement()
        elif name in _SIZES:
            sizes = [self.integer()]
            while self.accept(","):
                sizes.append(self.integer())
            entry.directives[name] = tuple(sizes)
        elif name in _FLAGS:
            entry.directives[name] = ()
        else:
            self.fail(f"unexpected .{name} before the kernel's body")

    def parameter(self) -> None:
        if self.word(".param") != ".param":
            self.fail("expected .param")
        param = self.declared("param")
        param.offset = -(-self.entry.param_bytes // param.align) * param.align
        self.entry.params.append(param)
        self.scope.names[param.name] = param

    # Declarations

    def variables(self, space: str, extern: bool = False) -> None:
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
            self.tokens[self.at] = _Token("word", f".{variable.type}", self.tokens[self.at].line)

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
            elif f".{word}" not in _SPACES and word != "ptr":
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
        variable = Variable(name, space, type_name, align or element * vector, element * count)
        if self.accept("="):
            self.initialise(variable, element)
        return variable

    def initialise(self, variable: Variable, element: int) -> None:
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
        type_name = self.word("a type")[1:]
        if type_name not in DTYPES:
            self.fail(f"registers of type .{type_name} are not emulated")
        while True:
            name = self.word("a register")
            if self.accept("<"):
                names = [f"{name}{i}" for i in range(self.integer())]
                self.expect(">")
            else:
                names = [name]
            self.scope.names.update(dict.fromkeys(names, type_name))
            if self.accept(";"):
                return
            self.expect(",")

    # Bodies

    def body(self, scopes: list[_Scope]) -> None:
        """`{ ... }`: instructions go to the entry, and the scope of each to `scopes`."""
        self.expect("{")
        self.scope = _Scope(self.scope)
        while not self.accept("}"):
            if self.tokens[self.at].kind == "end":
                self.fail("unexpected end of file")
            following = self.tokens[self.at + 1].text
            if self.token == "{":
                self.body(scopes)
            elif self.accept(";"):
                pass
            elif self.token == ".reg":
                self.take()
                self.registers()
            elif self.token in _SPACES:
                self.variables(self.take()[1:])
            elif self.token in (".loc", ".file"):
                self.take()
                self.skip_line()
            elif self.token == ".pragma":
                self.skip_statement()
            elif self.tokens[self.at].kind == "word" and following == ":":
                self.scope.labels[self.take()] = len(self.entry.instructions)
                self.take()
            else:
                self.entry.instructions.append(self.instruction())
                scopes.append(self.scope)
        self.scope = self.scope.parent or self.scope

    def instruction(self) -> Instruction:
        guard = None
        if self.accept("@"):
            guard = self.operand()
            if not isinstance(guard, Register) or guard.type != "pred":
                self.fail("a guard has to be a predicate register")
        line = self.tokens[self.at].line
        opcode = self.word("an instruction")
        if opcode.startswith((".", "%")):
            self.fail(f"expected an instruction, found {opcode!r}")
        operands = tuple(self.comma_separated(self.operand, ";"))
        text = re.sub(r"\s+", " ", self.lines[line - 1].split("//")[0]).strip().rstrip(";")
        last = self.tokens[self.at - 1].line
        instruction = Instruction(opcode, operands, guard, line, text, path=self.path)
        if last in self.annotations:
            try:
                instruction.lanes = parse_annotation(self.annotations[last], opcode)
            except ValueError as error:
                self.fail(str(error), last)
        return instruction

    def operand(self) -> Operand:
        if self.accept("["):
            return self.address()
        if self.accept("{"):
            return ir.Vector(tuple(self.comma_separated(self.operand, "}")))
        if self.accept("("):
            return ir.Vector(tuple(self.comma_separated(self.operand, ")")))
        if self.accept("!"):
            register = self.operand()
            if not isinstance(register, Register):
                self.fail("! takes a predicate register")
            return replace(register, negated=not register.negated)
        if self.tokens[self.at].kind == "number" or self.token == "-":
            negative = self.accept("-")
            number = self.number()
            if negative and number.float_bits:
                return replace(number, bits=number.bits ^ 1 << number.float_bits - 1)
            return replace(number, bits=-number.bits) if negative else number
        first = self.named(self.word("an operand"))
        if self.accept("|"):
            return ir.Vector((first, self.operand()), pair=True)
        if isinstance(first, ir.Symbol) and self.token in ("+", "-"):
            return replace(first, offset=self.offset())
        return first

    def offset(self) -> int:
        total = 0
        while self.token in ("+", "-"):
            sign = -1 if self.take() == "-" else 1
            total += sign * self.integer()
        return total

    def address(self) -> ir.Address:
        base = self.operand() if self.tokens[self.at].kind == "word" else ir.Immediate(self.integer())
        if isinstance(base, ir.Symbol):
            base, offset = replace(base, offset=0), base.offset
        elif isinstance(base, Register | ir.Special | ir.Immediate):
            offset = self.offset()
        elif isinstance(base, _Unresolved):
            self.fail(f"{base.name} is not declared")
        else:
            self.fail("an address is [register+offset], [variable+offset] or [constant]")
        coordinates = ()
        if self.accept(","):
            vector = self.operand()
            coordinates = vector.items if isinstance(vector, ir.Vector) else (vector,)
        self.expect("]")
        return ir.Address(base, offset, coordinates)

    def named(self, name: str) -> Operand:
        """What a name stands for; one that is not known yet may be a label."""
        if name == "_":
            return ir.Sink()
        if name == "WARP_SZ":
            return ir.Immediate(32)
        for candidate, selector in ((name, ""), name.rpartition(".")[::2]):
            for scope in self.scope.chain():
                known = scope.names.get(candidate)
                if isinstance(known, str):  # first use: registers that are only declared take no row
                    width = bits_of(known)
                    known = scope.names[candidate] = Register(candidate, known, self.entry.registers[width])
                    self.entry.registers[width] += 1
                if isinstance(known, Register):
                    return replace(known, selector=selector) if selector else known
                if known is not None:
                    return ir.Symbol(known)
        if _SPECIAL.fullmatch(name):
            return ir.Special(name)
        return _Unresolved(name)  # type: ignore[return-value]

    def resolve_labels(self, scopes: list[_Scope]) -> None:
        for instruction, scope in zip(self.entry.instructions, scopes, strict=True):
            if any(isinstance(o, _Unresolved) for o in _flat(instruction.operands)):
                instruction.operands = tuple(self.labelled(o, scope, instruction) for o in instruction.operands)

    def labelled(self, operand: Operand, scope: _Scope, instruction: Instruction) -> Operand:
        if isinstance(operand, _Unresolved) and instruction.opcode.split(".")[0] not in ("call", "brx"):
            for outer in scope.chain():
                if operand.name in outer.labels:
                    return ir.Label(operand.name, outer.labels[operand.name])
            self.fail(f"{operand.name} is not declared", instruction.line)
        if isinstance(operand, ir.Vector) and any(isinstance(o, _Unresolved) for o in _flat(operand.items)):
            return replace(operand, items=tuple(self.labelled(o, scope, instruction) for o in operand.items))
        return operand

    def lay_out_shared(self) -> None:
        """Static shared variables that the kernel names, in order of appearance, then dynamic shared memory."""
        entry = self.entry
        used = {id(v): v for i in entry.instructions for v in _variables(i.operands) if v.space == "shared"}
        fixed = [v for v in used.values() if v.size]
        dynamic = [v for v in used.values() if not v.size]
        for variable in fixed:
            variable.offset = -(-entry.shared_bytes // variable.align) * variable.align
            entry.shared_bytes = variable.offset + variable.size
        align = max([16, *(v.align for v in dynamic)])
        entry.dynamic_offset = -(-entry.shared_bytes // align) * align
        for variable in dynamic:
            variable.offset = entry.dynamic_offset


def _flat(operands: tuple) -> Iterator:
    for operand in operands:
        yield operand
        if isinstance(operand, ir.Vector):
            yield from _flat(operand.items)


def _variables(operands: tuple) -> Iterator[Variable]:
    for operand in _flat(operands):
        target = operand.base if isinstance(operand, ir.Address) else operand
        if isinstance(target, ir.Symbol):
            yield target.variable
