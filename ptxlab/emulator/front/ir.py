"""What a parsed PTX module consists of."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, wraps
from math import prod
from typing import Any, TypeVar

from ptxlab.emulator.front.lane_annotation import LaneTypes
from ptxlab.emulator.front.types import bits_of

Subject = TypeVar("Subject")
Answer = TypeVar("Answer")
Operands = tuple[Any, ...]  # each an `Operand`; what an instruction takes of which kind, it asks when it is bound


@dataclass(frozen=True, slots=True)
class Register:
    """A declared register: row `index` in the file of its type's width."""

    name: str
    type: str
    index: int
    negated: bool = False  # `!%p` as a predicate source
    selector: str = ""  # `b0`, `h1`, `b3210`: the part that a video instruction takes or writes; `-h1` is negated

    @property
    def place(self) -> tuple[int, int]:
        """Width of its file, in bits, and its row there."""
        return bits_of(self.type), self.index


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as `%tid.x`."""

    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """A constant. `bits` are those of an integer, or of a float literal of `float_bits` bits."""

    bits: int
    float_bits: int = 0


@dataclass(slots=True)
class Variable:
    """A `.param`, `.shared`, `.local`, `.global` or `.const` variable; `offset` (bytes) is within its window."""

    name: str
    space: str
    type: str
    align: int
    size: int  # bytes; 0 for an extern array, which begins where dynamic shared memory does
    initial: bytes | None = None
    offset: int = 0
    pointers: dict[int, "int | Symbol | Function"] = field(default_factory=dict)  # by byte, instead of `initial`


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable, plus `offset` bytes."""

    variable: Variable
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Label:
    """A place in the code: the index of the instruction that runs next."""

    name: str
    index: int


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b}`, or `p|q` where `pair`; the elements are operands."""

    elements: Operands
    pair: bool = False


@dataclass(frozen=True, slots=True)
class Function:
    """A called function without a body in the module: the driver provides it, or nobody does."""

    name: str


@dataclass(frozen=True, slots=True)
class Sink:
    """`_`: a destination whose value is dropped."""


@dataclass(frozen=True, slots=True)
class Address:
    """`[base+offset]`; `coordinates` are those of a tensor access, `[base, {x, y}]`."""

    base: Register | Special | Symbol | Immediate
    offset: int = 0
    coordinates: Operands = ()


Operand = Register | Special | Immediate | Symbol | Label | Vector | Function | Sink | Address


@dataclass
class Instruction:
    """A PTX instruction: `opcode` in full ("mad.lo.u32"), its operands in source order, and where it stands.

    What it reads and writes is asked for by every launch, but not before the parser is done with it.
    """

    opcode: str
    operands: Operands
    guard: Register | None
    line: int
    text: str  # the source line without indentation, comment and semicolon
    lanes: LaneTypes | None = None
    path: str = "<ptx>"
    wraps: bool = False  # its line of PTX says `@wraps` (check "narrow")
    is_compiled: bool = False  # the compiler of CUDA C++ has made it: it is no line of PTX, in a file or inline
    callers: tuple[tuple[str, int], ...] = ()  # if it came from an inlined function: where that was called, and so on

    @property
    def head(self) -> str:
        """`bra` of `bra.uni`."""
        return self.opcode.split(".")[0]

    @cached_property
    def destinations(self) -> list[Register]:
        """Registers that the instruction writes."""
        reads_only = self.head in _NO_DESTINATION or (self.head in ("bar", "barrier") and ".red" not in self.opcode)
        if reads_only or isinstance((*self.operands, None)[0], Address):  # st, stmatrix, cp.async, mbarrier.init ...
            return []
        return registers(self.operands[:1])

    @cached_property
    def sources(self) -> list[Register]:
        """Registers that the instruction reads: those of its addresses too, but not the guard."""
        return registers(self.operands[1:] if self.destinations else self.operands)

    @property
    def where(self) -> str:
        """`path:line: `text``, as every message begins."""
        return f"{self.path}:{self.line}{called_from(self.path, self.callers)}: `{self.text}`"

    def seen_from(self, subject: "Instruction") -> str:
        """Name this instruction for a message about another one: `line 5, `text``."""
        return f"{line_of(self.path, self.line, subject.path)}{called_from(subject.path, self.callers)}, `{self.text}`"


@dataclass
class Entry:
    """A kernel: parameters in launch order, instructions, and how many registers of each width (bits) it uses."""

    name: str
    line: int
    params: list[Variable] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    registers: dict[int, int] = field(default_factory=lambda: dict.fromkeys((1, 8, 16, 32, 64), 0))
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)  # "maxntid" -> (256, 1, 1) ...
    shared: list[Variable] = field(default_factory=list)  # in the order of their offsets
    shared_bytes: int = 0  # static shared memory; dynamic shared memory follows at `dynamic_offset`
    dynamic_offset: int = 0
    local_bytes: int = 0

    @property
    def param_bytes(self) -> int:
        """Size of the parameter block."""
        return max((p.offset + p.size for p in self.params), default=0)

    @cached_property
    def opcodes(self) -> frozenset[str]:
        """The set of all opcodes; cached, so only to be read once parsing is complete."""
        return frozenset(instruction.opcode for instruction in self.instructions)

    @cached_property
    def targets(self) -> frozenset[int]:
        """Indices of the instructions that a branch may go to."""
        return frozenset(label.index for instruction in self.instructions for label in labels(instruction.operands))

    def uses(self, *beginnings: str) -> bool:
        """Tell whether an opcode of the kernel begins with one of the strings."""
        return any(opcode.startswith(beginnings) for opcode in self.opcodes)

    @property
    def is_asynchronous(self) -> bool:
        """True if the kernel has asynchronous instructions: copies, wgmma, st.async and the like."""
        return self.uses("cp.async", "wgmma", "st.async", "red.async")

    @property
    def uses_async_proxy(self) -> bool:
        """True if the kernel has work of the async proxy (copy engine, wgmma); cp.async is not."""
        return self.uses("cp.async.bulk", "wgmma", "st.async", "red.async")

    @property
    def max_threads(self) -> int | None:
        """Largest block that the kernel declares to support (`.maxntid`, `.reqntid`), or None."""
        sizes = self.directives.get("reqntid") or self.directives.get("maxntid")
        return None if sizes is None else prod(sizes)


@dataclass
class Module:
    """A parsed `.ptx`: its kernels by name, and the variables that live as long as the module."""

    path: str
    text: str
    version: str = ""
    target: str = ""
    entries: dict[str, Entry] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)  # .global and .const


_NO_DESTINATION = frozenset({"bra", "brx", "ret", "exit", "trap", "nanosleep", "setmaxnreg"})


def cache_on_subject(function: Callable[[Subject], Answer]) -> Callable[[Subject], Answer]:
    """Decorate a function of an instruction or kernel to cache its result on that object.

    It may be asked once the parser is done with its subject, which nobody changes from then on.
    """
    name = f"{function.__module__}.{function.__name__}"

    @wraps(function)
    def ask(subject: Subject) -> Answer:
        answers: dict[str, Any] = subject.__dict__
        if name not in answers:
            answers[name] = function(subject)
        answer: Answer = answers[name]
        return answer

    return ask


def line_of(path: str, line: int, current_path: str) -> str:
    """Name a line for a message about a line of the file `current_path`; the path is left out if it is the same."""
    return f"line {line}" + ("" if path == current_path else f" of {path}")


def called_from(current_path: str, callers: tuple[tuple[str, int], ...]) -> str:
    """Write the callers as ` (called from line 7)`; empty for what is not in an inlined function."""
    return f" (called from {', '.join(line_of(*caller, current_path) for caller in callers)})" if callers else ""


def flat(operands: Operands) -> Iterator[Operand]:
    """Yield all operands, those within vectors and addresses too."""
    for operand in operands:
        yield operand
        if isinstance(operand, Vector):
            yield from flat(operand.elements)
        elif isinstance(operand, Address):
            yield from flat((operand.base, *operand.coordinates))


def registers(operands: Operands) -> list[Register]:
    """List all registers among operands."""
    return [operand for operand in flat(operands) if isinstance(operand, Register)]


def labels(operands: Operands) -> list[Label]:
    """List all labels among operands, those of a list of targets too."""
    return [operand for operand in flat(operands) if isinstance(operand, Label)]
