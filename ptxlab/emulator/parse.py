"""PTX text -> `Module`: what hand-written kernels and NVRTC's output use of the language."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ptxlab.emulator import ir
from ptxlab.emulator.declare import SPACES, Declarations, Scope
from ptxlab.emulator.ir import Entry, Instruction, Module, Operand, Register, Variable
from ptxlab.emulator.packed import parse_annotation

_LINKAGE = {".visible", ".extern", ".weak", ".common"}
_SIZES = {"maxntid", "reqntid", "minnctapersm", "maxnctapersm", "maxnreg", "reqnctapercluster", "maxclusterrank"}
_FLAGS = {"explicitcluster", "blocksareclusters", "noreturn"}
_SPECIAL = re.compile(
    r"%(?:(?:n?tid|n?ctaid|cluster_n?ctaid|n?clusterid)\.[xyz]|cluster_n?ctarank|is_explicit_cluster|n?warpid|laneid|n?smid|gridid"
    r"|lanemask_(?:eq|lt|le|gt|ge)|clock(?:_hi|64)?|globaltimer(?:_lo|_hi)?"
    r"|(?:dynamic|total|aggr)_smem_size|reserved_smem_offset_begin)"
)


@dataclass(frozen=True, slots=True)
class _Unresolved:
    """A name that may be a label further down."""

    name: str


def parse(text: str, path: str = "<ptx>", cuda: str = "") -> Module:
    """Parse a PTX module.

    `path` is what messages call the source. Of PTX that a compiler made with line information, `cuda` names the CUDA
    source: what happens while it runs is then reported at the lines of that source and its headers. Raises
    `SourceError` with the line of the first thing that is not PTX, or that this emulator cannot take (functions with
    bodies, initialisers that hold addresses).
    """
    parser = _Parser(text, path)
    module = parser.module()
    if cuda:
        parser.move_to(cuda)
    return module


class _Parser(Declarations):
    # The module

    def module(self) -> Module:
        extern = False
        while self.tokens[self.at].kind != "end":
            if self.token in (".file", ".loc"):
                self.location()
                continue
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
            elif directive == ".section":
                self.skip_braces()
            elif directive in (".pragma", ".alias"):
                self.skip_statement()
            elif directive == ".entry":
                self.kernel()
            elif directive == ".func":
                self.function(extern)
            elif directive in SPACES:
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
        line, self.here = self.tokens[self.at].line, (0, 0)
        entry = self.entry = Entry(self.word("the kernel's name"), line)
        if entry.name in self.result.entries:
            self.fail(f"kernel {entry.name} is defined twice", line)
        self.scope = Scope(self.scope)
        if self.accept("("):
            self.comma_separated(self.parameter, ")")
        while self.token != "{":
            self.performance_directive(entry)
        scopes: list[Scope] = []
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

    # Bodies

    def body(self, scopes: list[Scope]) -> None:
        """`{ ... }`: instructions go to the entry, and the scope of each to `scopes`."""
        self.expect("{")
        self.scope = Scope(self.scope)
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
            elif self.token in SPACES:
                self.variables(self.take()[1:])
            elif self.token in (".loc", ".file"):
                self.location()
            elif self.token == ".pragma":
                self.skip_statement()
            elif self.tokens[self.at].kind == "word" and following == ":":
                label = self.take()
                self.take()
                if self.accept(".branchtargets"):
                    targets = self.comma_separated(lambda: _Unresolved(self.word("a label")), ";")
                    self.scope.tables[label] = tuple(targets)
                else:
                    self.scope.labels[label] = len(self.entry.instructions)
            else:
                self.entry.instructions.append(self.instruction())
                scopes.append(self.scope)
                self.locations.append((self.entry.instructions[-1], self.here))
        self.scope = self.scope.parent or self.scope

    def instruction(self) -> Instruction:
        guard = None
        if self.accept("@"):
            operand = self.operand()
            if not isinstance(operand, Register) or operand.type != "pred":
                self.fail("a guard has to be a predicate register")
            guard = operand
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
        known = self.known(name)
        if known is None and "." in name:  # `%r1.b3210`
            base, _, selector = name.rpartition(".")
            known = self.known(base)
            if isinstance(known, Register):
                return replace(known, selector=selector)
        if known is not None:
            return known if isinstance(known, Register) else ir.Symbol(known)
        if _SPECIAL.fullmatch(name):
            return ir.Special(name)
        return _Unresolved(name)  # type: ignore[return-value]

    def resolve_labels(self, scopes: list[Scope]) -> None:
        for instruction, scope in zip(self.entry.instructions, scopes, strict=True):
            if any(isinstance(o, _Unresolved) for o in _flat(instruction.operands)):
                instruction.operands = tuple(self.labelled(o, scope, instruction) for o in instruction.operands)

    def labelled(self, operand: Operand, scope: Scope, instruction: Instruction) -> Operand:
        """The operand with labels in place of names."""
        if isinstance(operand, ir.Vector) and any(isinstance(o, _Unresolved) for o in _flat(operand.items)):
            return replace(operand, items=tuple(self.labelled(o, scope, instruction) for o in operand.items))
        if not isinstance(operand, _Unresolved) or instruction.opcode.split(".")[0] == "call":
            return operand
        for outer in scope.chain():
            if operand.name in outer.labels:
                return ir.Label(operand.name, outer.labels[operand.name])
            if operand.name in outer.tables:
                return self.labelled(ir.Vector(outer.tables[operand.name]), scope, instruction)
        self.fail(f"{operand.name} is not declared", instruction.line)

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
