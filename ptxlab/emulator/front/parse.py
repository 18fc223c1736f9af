"""PTX text -> `Module`: what hand-written kernels and NVRTC's output use of the language."""

import re
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from ptxlab.arithmetic import ceil_div
from ptxlab.emulator.front import ir, refusals
from ptxlab.emulator.front.accumulator_copies import move_behind_waits
from ptxlab.emulator.front.ir import Entry, Instruction, Module, Operand, Register, Variable
from ptxlab.emulator.front.lane_annotation import parse_annotation
from ptxlab.emulator.front.tokens import OPERATORS, SUM, Cursor
from ptxlab.emulator.front.types import DTYPES, bits_of
from ptxlab.sources import names_same_file

SPACES = {".param", ".shared", ".local", ".global", ".const"}
_LINKAGE = {".visible", ".extern", ".weak", ".common"}
_SIZES = {"maxntid", "reqntid", "minnctapersm", "maxnctapersm", "maxnreg", "reqnctapercluster", "maxclusterrank"}
_FLAGS = {"explicitcluster", "blocksareclusters", "noreturn"}
_LONG_VECTOR = re.compile(r"\{\s*([^{},]+),(?:[^{},]+,){3,}\s*([^{},]+?)\s*\}")  # of more than four elements
MOST_REGISTERS = 1 << 18  # in one declaration
MOST_DECLARED = 1 << 19  # in a module, those of a function each time that it is called
MOST_BYTES = 1 << 28  # in all variables of a module, and in one
MOST_LOCAL = 512 << 10  # bytes of a thread's local memory, as on a GPU
MOST_CALLS = 10_000  # of functions, by one kernel: each is put in place
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:\s*,.*\binlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
_SPECIAL = re.compile(
    r"%(?:(?:n?tid|n?ctaid|cluster_n?ctaid|n?clusterid)\.[xyz]|cluster_n?ctarank|is_explicit_cluster|n?warpid|laneid|n?smid|gridid"
    r"|lanemask_(?:eq|lt|le|gt|ge)|clock(?:_hi|64)?|globaltimer(?:_lo|_hi)?"
    r"|(?:dynamic|total)_smem_size)"
)
Frames = tuple[tuple[int, int], ...]  # (number of a file, line in it), then where that was inlined, and so on out


@dataclass(slots=True)
class Scope:
    """Names of one `{ ... }`: registers (their type, until first used), variables and labels."""

    parent: "Scope | None"
    names: dict[str, str | Register | Variable] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, ir.Operands] = field(default_factory=dict)  # of .branchtargets: names of labels

    def chain(self) -> "Iterator[Scope]":
        """Yield this scope and those around it, innermost first."""
        scope: Scope | None = self
        while scope:
            yield scope
            scope = scope.parent


@dataclass(frozen=True, slots=True)
class Unresolved:
    """A name not declared so far: perhaps a label that follows."""

    name: str


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


class _Parser(Cursor):
    def __init__(self, text: str, path: str) -> None:
        super().__init__(text, path)
        self.result = Module(path, text)
        self.scope = Scope(None)
        self.entry = Entry("", 0)
        self.external = False  # whether what is being declared is defined elsewhere
        self.files: dict[int, str] = {}
        self.frames: Frames = ()  # by the last `.loc`
        self.inlined: dict[tuple[int, ...], Frames] = {}  # (file, line, column) -> the frames of its last `.loc`
        self.locations: list[tuple[Instruction, Frames]] = []
        self.inlining: list[str] = []
        self.calls = 0  # put in place in this kernel, those within functions each time
        self.bytes = 0  # of the module's variables
        self.declared = 0  # registers
        self.takes_parts = False  # whether the instruction takes parts of registers, as video instructions do
        self.functions: dict[str, int] = {}  # where each begins, as an index of a token; kernels may call what follows
        for following_token in [i for i, text in enumerate(self.texts, 1) if text == ".func"]:
            self.position = following_token
            self.function()
        self.position = 0

    # The module

    def module(self) -> Module:
        while self.kinds[self.position] != "end":
            if self.kinds[self.position] == "loc" or self.token == ".file":
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
                self.skip_to(";")
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
        line, self.frames = self.line_numbers[self.position], ()
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
        for instruction, scope in zip(entry.instructions, scopes, strict=True):
            instruction.operands = tuple(self.resolve_labels(o, scope, instruction) for o in instruction.operands)
        move_behind_waits(entry)
        self.lay_out_shared()
        self.result.entries[entry.name] = entry
        self.scope = self.scope.parent or self.scope

    def performance_directive(self, entry: Entry) -> None:
        name = self.word("a directive or the kernel's body").removeprefix(".")
        if name == "pragma":
            self.skip_to(";")
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
        param = self.variable("param", *self.type_and_alignment("param"))
        param.offset = ceil_div(self.entry.param_bytes, param.align) * param.align
        self.entry.params.append(param)
        self.declare(param.name, param)

    # Bodies

    def body(self, scopes: list[Scope]) -> None:
        """Read `{ ... }`: instructions go to the entry, and the scope of each to `scopes`."""
        self.expect("{")
        self.scope = Scope(self.scope)
        while not self.accept("}"):
            if self.kinds[self.position] == "end":
                self.fail("unexpected end of file")
            next_text = self.texts[self.position + 1]
            if self.token == "{":
                self.body(scopes)
            elif self.accept(";"):
                pass
            elif self.token == ".reg":
                self.take()
                self.registers()
            elif self.token in SPACES:
                self.variables(self.take()[1:])
            elif self.kinds[self.position] == "loc" or self.token == ".file":
                self.location()
            elif self.token == ".pragma":
                self.skip_to(";")
            elif self.kinds[self.position] == "word" and next_text == ":":
                label = self.word("a label")
                if label in self.scope.labels or label in self.scope.tables:
                    self.fail(f"{label} is declared twice", self.line_numbers[self.position - 1])
                self.take()
                if self.token in (".callprototype", ".calltargets"):
                    self.skip_to(";")  # of a call of an address, which is refused where it stands
                elif self.accept(".branchtargets"):
                    targets = self.comma_separated(lambda: Unresolved(self.word("a label")), ";")
                    self.scope.tables[label] = tuple(targets)
                else:
                    self.scope.labels[label] = len(self.entry.instructions)
            else:
                instruction = self.instruction()
                self.entry.instructions.append(instruction)
                scopes.append(self.scope)
                self.locations.append((instruction, self.frames))
                if instruction.head == "call":
                    self.inline(instruction, scopes)
        self.scope = self.scope.parent or self.scope

    def instruction(self) -> Instruction:
        guard = None
        if self.accept("@"):
            operand = self.operand()
            if not isinstance(operand, Register) or operand.type != "pred":
                self.fail("a guard has to be a predicate register")
            guard = operand
        line = self.line_numbers[self.position]
        opcode = self.word("an instruction")
        if opcode.startswith((".", "%")):
            self.fail(f"expected an instruction, found {opcode!r}")
        self.takes_parts = opcode.startswith("v") and not opcode.startswith("vote")
        operands = tuple(self.comma_separated(self.operand, ";"))
        text = re.sub(r"\s+", " ", self.lines[line - 1].split("//")[0]).strip().rstrip(";")
        text = _LONG_VECTOR.sub(r"{\1, ..., \2}", text)
        last_line = self.line_numbers[self.position - 1]
        instruction = Instruction(opcode, operands, guard, line, text, path=self.path)
        instruction.wraps = last_line in self.wrapping
        if last_line in self.annotations:
            try:
                instruction.lanes = parse_annotation(self.annotations[last_line], opcode)
            except ValueError as error:
                self.fail(str(error), last_line)
        return instruction

    # Declarations

    def location(self) -> None:
        """Read a `.loc` or `.file` directive.

        `.loc file line column[, function_name name, inlined_at file line column]` or `.file number "path" ...`
        """
        if self.accept(".file"):
            file = self.integer()
            self.files[file] = self.take().strip('"')
            self.skip_line()
            return
        match = _LOC.match(self.take())
        if not match:
            self.fail("expected .loc file line column", self.line_numbers[self.position - 1])
        try:
            file, line, column, *caller = (int(number or 0) for number in match.groups())
        except ValueError:  # Python reads some 4,000 digits at most
            self.fail(".loc names a line beyond any file", self.line_numbers[self.position - 1])
        self.frames = ((file, line),)
        if match[4]:
            self.frames += self.inlined.get(tuple(caller), ((caller[0], caller[1]),))
        self.inlined[file, line, column] = self.frames

    def move_to(self, source: str) -> None:
        """Give all instructions their `.loc` source lines; `source` is the path that messages name."""
        paths = {n: source if names_same_file(p, source) else p for n, p in self.files.items()}
        places: list[tuple[str, int]] = []
        is_cpp = not source.endswith(".py")
        for instruction, frames in self.locations:
            instruction.is_compiled = is_cpp and bisect(self.inline_marks, instruction.line) % 2 == 0
            # what has no place of its own, such as a constant that the compiler moved, is shown where the text stands
            places = [(paths[file], line) for file, line in frames if line and file in paths] or places
            if places:
                (instruction.path, instruction.line), *callers = places
                instruction.callers = tuple(callers)

    def variables(self, space: str) -> None:
        """Read variables of a state space, after its name: `.align 4 .b32 x, y[3] = {1, 2};`."""
        type_name, align, vector = self.type_and_alignment(space)
        while True:
            variable = self.variable(space, type_name, align, vector)
            if space in ("global", "const"):
                self.result.variables.append(variable)
                self.bytes += variable.size
                if self.bytes > MOST_BYTES:
                    self.fail(
                        f"{variable.name} makes {self.bytes} bytes of variables: at most {MOST_BYTES} are emulated"
                    )
            elif space in ("local", "param"):  # parameters of a call live in the caller's frame
                variable.space = "local"
                variable.offset = ceil_div(self.entry.local_bytes, variable.align) * variable.align
                self.entry.local_bytes = variable.offset + variable.size
                if self.entry.local_bytes > MOST_LOCAL:
                    self.fail(
                        f"{variable.name} makes {self.entry.local_bytes} bytes of local memory: {MOST_LOCAL} at most"
                    )
            self.declare(variable.name, variable)
            if self.accept(";"):
                return
            self.expect(",")

    def type_and_alignment(self, space: str) -> tuple[str, int, int]:
        """Read (type, alignment, elements of a vector) of `.align 8 .b8`, `.u64 .ptr .global .align 16`."""
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
        element = DTYPES[type_name].itemsize
        if space == "param" and type_name != "b8":  # `.ptr .align 16` speaks of what is pointed to
            align = element
        return type_name, align or element * vector, vector

    def variable(self, space: str, type_name: str, align: int, vector: int) -> Variable:
        """Read a variable's name, dimensions and initial values."""
        name, count, element = self.word("a name"), vector, DTYPES[type_name].itemsize
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
        """Read initial values: numbers, or addresses and perhaps numbers.

        The bytes of addresses are known once there is memory.
        """

        def read_values() -> Iterator[int | ir.Symbol | ir.Function]:
            if self.accept("{"):
                for _ in iter(lambda: self.accept("}"), True):
                    yield from read_values()
                    self.accept(",")
            elif self.kinds[self.position] == "word":
                yield self.pointer()
            else:
                is_negative = self.accept("-")
                number = self.number()
                yield -number.bits if is_negative else number.bits

        values = list(read_values())
        values = [
            initial_value & (1 << 8 * element) - 1 if isinstance(initial_value, int) else initial_value
            for initial_value in values
        ]
        numbers = [initial_value for initial_value in values if isinstance(initial_value, int)]
        variable.size = variable.size or len(values) * element
        if len(values) * element > variable.size:
            self.fail(f"{variable.name} has more initial values than elements")
        if len(numbers) == len(values):
            initial_value = b"".join(number.to_bytes(element, "little") for number in numbers)
            variable.initial = initial_value.ljust(variable.size, b"\0")
        elif element == 8:
            variable.pointers = {i * element: initial_value for i, initial_value in enumerate(values)}
        else:
            self.fail(f"{variable.name}: an address has 8 bytes, not {element}")

    def pointer(self) -> ir.Symbol | ir.Function:
        """Read `generic(variable)+4`, `variable`, or the name of a function."""
        is_generic = self.texts[self.position + 1] == "(" and self.accept("generic") and self.accept("(")
        name = self.word("a variable")
        if is_generic:
            self.expect(")")
        if name in self.functions:
            return ir.Function(name)
        variable = self.look_up(name)
        if not isinstance(variable, Variable) or variable.space not in ("global", "const"):
            self.fail(f"{name} is no variable of global memory that is declared above")
        return ir.Symbol(variable, self.offset())

    def registers(self) -> None:
        """Read the register declarations after `.reg`: `.b32 %r<10>, %a;`."""
        type_name = self.word("a type")[1:]
        if type_name not in DTYPES:
            refusal = f"registers of type .{type_name} are not emulated"
            self.fail(refusals.WIDE_REGISTERS if type_name == "b128" else refusal)
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
            self.declared += len(names)
            if self.declared > MOST_DECLARED:
                self.fail(f"{self.declared} registers so far: at most {MOST_DECLARED} are emulated")
            for name in names:
                self.declare(name, type_name)
            if self.accept(";"):
                return
            self.expect(",")

    def declare(self, name: str, meaning: str | Variable) -> None:
        """Enter a name into the innermost scope, where nothing else may have it."""
        if name in self.scope.names and not self.external:
            self.fail(f"{name} is declared twice")
        self.scope.names[name] = meaning

    def look_up(self, name: str) -> Register | Variable | None:
        """Look a name up in the innermost scope that declares it; None if no scope does."""
        for scope in self.scope.chain():
            definition = scope.names.get(name)
            if isinstance(definition, str):  # first use: registers that are only declared take no row
                width = bits_of(definition)
                definition = scope.names[name] = Register(name, definition, self.entry.registers[width])
                self.entry.registers[width] += 1
            if definition is not None:
                return definition
        return None

    # Operands

    def operand(self) -> Operand:
        if self.accept("["):
            return self.address()
        if self.accept("{"):
            return ir.Vector(tuple(self.comma_separated(self.operand, "}")))
        if self.accept("("):
            operands = self.comma_separated(self.operand, ")")
            first = operands[0] if len(operands) == 1 else None
            if isinstance(first, ir.Immediate) and self.token in OPERATORS:  # (1 + 2) * 3, and no argument of a call
                return self.constant(left=first.bits)
            return ir.Vector(tuple(operands))
        if self.accept("!"):
            register = self.operand()
            if not isinstance(register, Register):
                self.fail("! takes a predicate register")
            return replace(register, negated=not register.negated)
        if self.takes_parts and self.token == "-" and self.texts[self.position + 1].startswith("%"):
            self.take()
            register = self.operand()
            if not isinstance(register, Register):
                self.fail("- takes a register or a constant")
            return replace(register, selector=f"-{register.selector}")
        if self.kinds[self.position] == "number" or self.token in ("-", "~", "WARP_SZ"):
            return self.constant()
        first = self.resolve_name(self.word("an operand"))
        if self.accept("|"):
            return ir.Vector((first, self.operand()), pair=True)
        if isinstance(first, ir.Symbol) and self.token in ("+", "-"):
            return replace(first, offset=self.offset())
        return first

    def offset(self) -> int:
        """Read `+4-8`, perhaps nothing."""
        return self.constant(SUM, left=0).bits if self.token in ("+", "-") else 0

    def address(self) -> ir.Address:
        """Read an address after its `[`: `%rd+4]`, `variable+4]`, `%rd, {%x, %y}]`."""
        base = self.operand() if self.kinds[self.position] == "word" else ir.Immediate(self.integer())
        if isinstance(base, ir.Symbol):
            base, offset = replace(base, offset=0), base.offset
        elif isinstance(base, Register | ir.Special | ir.Immediate):
            offset = self.offset()
        elif isinstance(base, Unresolved):
            self.fail(f"{base.name} is not declared")
        else:
            self.fail("an address is [register+offset], [variable+offset] or [constant]")
        coordinates = ()
        if self.accept(","):
            vector = self.operand()
            coordinates = vector.elements if isinstance(vector, ir.Vector) else (vector,)
        self.expect("]")
        return ir.Address(base, offset, coordinates)

    def resolve_name(self, name: str) -> Operand:
        """Return the operand that a name stands for; `Unresolved` for a name that may be a later label."""
        if name == "_":
            return ir.Sink()
        definition = self.look_up(name)
        if definition is None and "." in name:  # `%r1.b3210`
            base, _, selector = name.rpartition(".")
            definition = self.look_up(base)
            if isinstance(definition, Register):
                if not self.takes_parts:
                    self.fail(f"{name}: only video instructions take a part of a register")
                return replace(definition, selector=selector)
        if definition is not None:
            return definition if isinstance(definition, Register) else ir.Symbol(definition)
        if _SPECIAL.fullmatch(name):
            return ir.Special(name)
        return Unresolved(name)  # type: ignore[return-value]

    # Functions

    def function(self) -> None:
        """Remember where a function is; its body is read at each call."""
        start = self.position
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

        A call of what has no body here stays: the driver may know it.
        """
        is_direct = not any(isinstance(o, Register) for o in call.operands)  # else the name is that of a prototype
        name = next((o.name for o in call.operands if isinstance(o, Unresolved) and is_direct), "")
        if name not in self.functions:
            functions = {Unresolved(name): ir.Function(name)} if name else {}
            call.operands = tuple(functions.get(o, o) if isinstance(o, Unresolved) else o for o in call.operands)
            call.text = f"{call.opcode} {name or 'of an address'}"
            return
        if name in self.inlining:
            self.fail(f"{name} calls itself: {refusals.RECURSION}", call.line)
        self.calls += 1
        if self.calls > MOST_CALLS:
            outermost_function = (*self.inlining, name)[0]
            self.fail(
                f"at most {MOST_CALLS} calls are emulated, each put in place; {outermost_function} makes more",
                call.line,
            )
        arguments = [o for vector in call.operands if isinstance(vector, ir.Vector) for o in vector.elements]
        instructions, return_position, caller = self.entry.instructions, self.position, self.scope
        if call.guard is None:
            instructions.pop()
            scopes.pop()
        first = len(instructions)
        self.position, self.scope = self.functions[name], Scope(list(caller.chain())[-1])
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
        end_label = ir.Label("the end of the call", len(instructions))
        for instruction in instructions[first:]:
            if instruction.head == "ret":
                instruction.opcode, instruction.operands = "bra", (end_label,)
        if call.guard is not None:  # lanes that do not call go around
            call.opcode, call.operands = "bra", (end_label,)
            call.guard = replace(call.guard, negated=not call.guard.negated)
        self.inlining.pop()
        self.position, self.scope = return_position, caller

    def formal(self) -> str:
        if self.accept(".reg"):
            self.type_and_alignment("reg")
            return self.word("a name")
        self.expect(".param")
        return self.variable("param", *self.type_and_alignment("param")).name

    def resolve_labels(self, operand: Operand, scope: Scope, instruction: Instruction) -> Operand:
        """Replace the names in an operand by the labels that they stand for."""
        if isinstance(operand, ir.Vector) and any(isinstance(o, Unresolved) for o in ir.flat(operand.elements)):
            elements = tuple(self.resolve_labels(o, scope, instruction) for o in operand.elements)
            return replace(operand, elements=elements)
        if not isinstance(operand, Unresolved) or instruction.head == "call":
            return operand
        for outer_scope in scope.chain():
            if operand.name in outer_scope.labels:
                return ir.Label(operand.name, outer_scope.labels[operand.name])
            if operand.name in outer_scope.tables:
                return self.resolve_labels(ir.Vector(outer_scope.tables[operand.name]), scope, instruction)
        if operand.name in self.functions:
            self.fail(f"the address of {operand.name}: {refusals.FUNCTION_POINTERS}", instruction.line)
        if reason := refusals.reason_for_special(operand.name):
            self.fail(f"{operand.name}: {reason}", instruction.line)
        self.fail(f"{operand.name} is not declared", instruction.line)

    def lay_out_shared(self) -> None:
        """Lay out the static shared variables that the kernel names, in order of appearance; then dynamic memory."""
        entry = self.entry
        named_variables = [
            o.variable for i in entry.instructions for o in ir.flat(i.operands) if isinstance(o, ir.Symbol)
        ]
        used_variables = {id(variable): variable for variable in named_variables if variable.space == "shared"}
        sized_variables = [v for v in used_variables.values() if v.size]
        dynamic = [v for v in used_variables.values() if not v.size]
        for variable in sized_variables:
            variable.offset = ceil_div(entry.shared_bytes, variable.align) * variable.align
            entry.shared_bytes = variable.offset + variable.size
        align = max([16, *(v.align for v in dynamic)])
        entry.dynamic_offset = ceil_div(entry.shared_bytes, align) * align
        for variable in dynamic:
            variable.offset = entry.dynamic_offset
        entry.shared = [*sized_variables, *dynamic]
