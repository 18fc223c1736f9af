"""PTX text -> `Module`: what hand-written kernels and NVRTC's output use of the language."""

import re
from collections.abc import Iterator
from dataclasses import replace

from ptxlab.emulator.front import ir
from ptxlab.emulator.front.declare import SPACES, Scope
from ptxlab.emulator.front.ir import Entry, Instruction, Module, Operand, Register, Variable
from ptxlab.emulator.front.lane_annotation import parse_annotation
from ptxlab.emulator.front.operands import Operands, Unresolved

_LINKAGE = {".visible", ".extern", ".weak", ".common"}
_SIZES = {"maxntid", "reqntid", "minnctapersm", "maxnctapersm", "maxnreg", "reqnctapercluster", "maxclusterrank"}
_LONG_VECTOR = re.compile(r"\{\s*([^{},]+),(?:[^{},]+,){3,}\s*([^{},]+?)\s*\}")  # of more than four elements
MOST_CALLS = 10_000  # of functions, by one kernel: each is put in place
_FLAGS = {"explicitcluster", "blocksareclusters", "noreturn"}


def parse(text: str, path: str = "<ptx>", cuda: str = "") -> Module:
    """Parse a PTX module.

    `path` is what messages call the source. Of PTX that a compiler made with line information, `cuda` names the CUDA
    source: what happens while it runs is then reported at the lines of that source and its headers. Raises
    `SourceError` with the line of the first thing that is not PTX, or that this emulator cannot take.
    """
    parser = _Parser(text, path)
    try:
        module = parser.module()
    except RecursionError:
        parser.fail(f"nested too deeply: {f'calls, in {parser.inlining[0]}' if parser.inlining else 'braces'}")
    if cuda:
        parser.move_to(cuda)
    return module


class _Parser(Operands):
    def __init__(self, text: str, path: str) -> None:
        super().__init__(text, path)
        self.inlining: list[str] = []
        self.calls = 0  # put in place in this kernel, those within functions each time
        self.functions: dict[str, int] = {}  # where each begins, as an index of a token; kernels may call what follows
        for after in [i for i, text in enumerate(self.texts, 1) if text == ".func"]:
            self.at = after
            self.function()
        self.at = 0

    # The module

    def module(self) -> Module:
        while self.kinds[self.at] != "end":
            if self.kinds[self.at] == "loc" or self.token == ".file":
                self.location()
                continue
            directive = self.word("a directive")
            if directive in _LINKAGE:
                self.external |= directive == ".extern"
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
                self.function()
            elif directive in SPACES:
                self.variables(directive[1:])
            else:
                self.fail(f"unexpected {directive!r} at module level")
            self.external = False
        if not self.result.version:
            self.fail("not a PTX module: .version is missing", 1)
        return self.result

    def kernel(self) -> None:
        line, self.here = self.line_numbers[self.at], ()
        entry = self.entry = Entry(self.word("the kernel's name"), line)
        self.calls = 0
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
        param = self.variable("param", *self.kind("param"))
        param.offset = -(-self.entry.param_bytes // param.align) * param.align
        self.entry.params.append(param)
        self.declare(param.name, param)

    # Bodies

    def body(self, scopes: list[Scope]) -> None:
        """`{ ... }`: instructions go to the entry, and the scope of each to `scopes`."""
        self.expect("{")
        self.scope = Scope(self.scope)
        while not self.accept("}"):
            if self.kinds[self.at] == "end":
                self.fail("unexpected end of file")
            following = self.texts[self.at + 1]
            if self.token == "{":
                self.body(scopes)
            elif self.accept(";"):
                pass
            elif self.token == ".reg":
                self.take()
                self.registers()
            elif self.token in SPACES:
                self.variables(self.take()[1:])
            elif self.kinds[self.at] == "loc" or self.token == ".file":
                self.location()
            elif self.token == ".pragma":
                self.skip_statement()
            elif self.kinds[self.at] == "word" and following == ":":
                label = self.word("a label")
                if label in self.scope.labels or label in self.scope.tables:
                    self.fail(f"{label} is declared twice", self.line_numbers[self.at - 1])
                self.take()
                if self.accept(".branchtargets"):
                    targets = self.comma_separated(lambda: Unresolved(self.word("a label")), ";")
                    self.scope.tables[label] = tuple(targets)
                else:
                    self.scope.labels[label] = len(self.entry.instructions)
            else:
                instruction = self.instruction()
                self.entry.instructions.append(instruction)
                scopes.append(self.scope)
                self.locations.append((instruction, self.here))
                if instruction.opcode.split(".")[0] == "call":
                    self.inline(instruction, scopes)
        self.scope = self.scope.parent or self.scope

    def instruction(self) -> Instruction:
        guard = None
        if self.accept("@"):
            operand = self.operand()
            if not isinstance(operand, Register) or operand.type != "pred":
                self.fail("a guard has to be a predicate register")
            guard = operand
        line = self.line_numbers[self.at]
        opcode = self.word("an instruction")
        if opcode.startswith((".", "%")):
            self.fail(f"expected an instruction, found {opcode!r}")
        operands = tuple(self.comma_separated(self.operand, ";"))
        text = re.sub(r"\s+", " ", self.lines[line - 1].split("//")[0]).strip().rstrip(";")
        text = _LONG_VECTOR.sub(r"{\1, ..., \2}", text)
        last = self.line_numbers[self.at - 1]
        instruction = Instruction(opcode, operands, guard, line, text, path=self.path)
        if last in self.annotations:
            try:
                instruction.lanes = parse_annotation(self.annotations[last], opcode)
            except ValueError as error:
                self.fail(str(error), last)
        return instruction

    # Functions

    def function(self) -> None:
        """Remember where a function is; its body is read at each call."""
        start = self.at
        if self.accept("("):
            self.skip_to(")")
        name = self.word("the function's name")
        while self.token not in ("{", ";"):
            self.take()
        if not self.accept(";"):
            self.functions[name] = start
            self.skip_braces()

    def inline(self, call: Instruction, scopes: list[Scope]) -> None:
        """Put a function's body in place of the call that has just been read; names of parameters stand for arguments.

        A call of what has no body here stays, and is an unknown instruction.
        """
        name = next((o.name for o in call.operands if isinstance(o, Unresolved)), "")
        if name not in self.functions:
            return
        if name in self.inlining:
            self.fail(f"{name} calls itself, which is not emulated", call.line)
        self.calls += 1
        if self.calls > MOST_CALLS:
            outermost = (*self.inlining, name)[0]
            self.fail(f"at most {MOST_CALLS} calls are emulated, each put in place; {outermost} makes more", call.line)
        arguments = [o for vector in call.operands if isinstance(vector, ir.Vector) for o in vector.items]
        instructions, after, caller = self.entry.instructions, self.at, self.scope
        if call.guard is None:
            instructions.pop()
            scopes.pop()
        first = len(instructions)
        self.at, self.scope = self.functions[name], Scope(list(caller.chain())[-1])
        self.inlining.append(name)
        formals = self.comma_separated(self.formal, ")") if self.accept("(") else []
        self.take()
        formals += self.comma_separated(self.formal, ")") if self.accept("(") else []
        if len(formals) != len(arguments):
            self.fail(f"{name} takes {len(formals)} results and parameters, not {len(arguments)}", call.line)
        for formal, argument in zip(formals, arguments, strict=True):
            self.scope.names[formal] = argument.variable if isinstance(argument, ir.Symbol) else argument
        while self.token != "{":
            self.take()
        self.body(scopes)
        end = ir.Label("the end of the call", len(instructions))
        for instruction in instructions[first:]:
            if instruction.opcode.split(".")[0] == "ret":
                instruction.opcode, instruction.operands = "bra", (end,)
        if call.guard is not None:  # lanes that do not call go around
            call.opcode, call.operands = "bra", (end,)
            call.guard = replace(call.guard, negated=not call.guard.negated)
        self.inlining.pop()
        self.at, self.scope = after, caller

    def formal(self) -> str:
        """Name of a function's parameter."""
        if self.accept(".reg"):
            self.kind("reg")
            return self.word("a name")
        self.expect(".param")
        return self.variable("param", *self.kind("param")).name

    def resolve_labels(self, scopes: list[Scope]) -> None:
        for instruction, scope in zip(self.entry.instructions, scopes, strict=True):
            if any(isinstance(o, Unresolved) for o in _flat(instruction.operands)):
                instruction.operands = tuple(self.labelled(o, scope, instruction) for o in instruction.operands)

    def labelled(self, operand: Operand, scope: Scope, instruction: Instruction) -> Operand:
        """The operand with labels in place of names."""
        if isinstance(operand, ir.Vector) and any(isinstance(o, Unresolved) for o in _flat(operand.items)):
            return replace(operand, items=tuple(self.labelled(o, scope, instruction) for o in operand.items))
        if not isinstance(operand, Unresolved) or instruction.opcode.split(".")[0] == "call":
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
        entry.shared = [*fixed, *dynamic]


def _flat(operands: ir.Operands) -> Iterator[Operand]:
    for operand in operands:
        yield operand
        if isinstance(operand, ir.Vector):
            yield from _flat(operand.items)


def _variables(operands: ir.Operands) -> Iterator[Variable]:
    for operand in _flat(operands):
        target = operand.base if isinstance(operand, ir.Address) else operand
        if isinstance(target, ir.Symbol):
            yield target.variable
