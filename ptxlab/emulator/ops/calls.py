"""Calls of what the driver provides: `printf` prints, `assert` fails; and `trap`."""

import re
from collections.abc import Callable

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.emulator.core.access import MemoryAccess
from ptxlab.emulator.core.addressing import locator
from ptxlab.emulator.core.lanes import Handler, Lanes, count_of, indices_of
from ptxlab.emulator.core.machine import Machine, binder
from ptxlab.emulator.core.memory import BASE
from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Instruction
from ptxlab.emulator.front.opcode import UnknownOpcode
from ptxlab.emulator.front.types import DTYPES, bits_of, is_float
from ptxlab.errors import EmulationError, MemoryFault

_FIELD = re.compile(r"%(?P<flags>[-+ #0]*)(?P<width>\*|\d+)?(?:\.(?P<precision>\*|\d+)?)?(?:hh|ll|[hljzt])?(?P<kind>.)")
_LONG = re.compile(r"(?:ll|[ljzt])[diouxX]$")
_MOST_TEXT = 4096  # bytes of a string that is printed
_WIDEST = 1024  # of one number


def text_at(machine: Machine, instruction: Instruction, address: int) -> str:
    """Read the C string at a generic address."""
    memory, start = machine.memory, address - BASE
    region = memory.region_of(start) if 0 <= start < memory.size else None
    if region is None or start >= region.end:
        where = instruction.where
        raise MemoryFault(f"{where}: the string at {memory.describe(start, 1)}, is out of bounds")
    raw = memory.arena[start : min(region.end, start + _MOST_TEXT)].tobytes()
    return raw.split(b"\0")[0].decode("utf-8", "replace")


@binder("call")
def _call(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    """Bind a call of a function without a body in the module; those with one have been put in place (`front.parse`)."""
    name = next((each.name for each in instruction.operands if isinstance(each, ir.Function)), "")
    if name not in _KNOWN:
        raise UnknownOpcode(f"{instruction.opcode} {name}".strip())
    variables = [
        item.variable
        for vector in instruction.operands
        if isinstance(vector, ir.Vector)
        for item in vector.items
        if isinstance(item, ir.Symbol)
    ]
    return _KNOWN[name](machine, instruction, pc, variables)


def _reader(machine: Machine, instruction: Instruction, variable: ir.Variable) -> Callable[[Lanes], np.ndarray]:
    """Build a function lanes -> values of a call's parameter, which lies in local memory."""
    access = MemoryAccess(instruction, "load", "param", "weak", variable.type, 1, ())
    locate = locator(machine, access, ir.Address(ir.Symbol(variable)))
    view = machine.memory.arena.view(DTYPES[f"u{bits_of(variable.type)}"])
    return lambda lanes: view[locate(lanes) // access.size]


def _assert(machine: Machine, instruction: Instruction, pc: int, variables: list[ir.Variable]) -> Handler:
    if len(variables) != 5:
        raise ValueError("__assertfail takes message, file, line, function and size of a character")
    message, file, line, function, _ = (_reader(machine, instruction, each) for each in variables)

    def fail(lanes: Lanes) -> None:
        lane = indices_of(lanes)[:1]
        condition, path, where = (text_at(machine, instruction, int(r(lane)[0])) for r in (message, file, function))
        said = f"the assertion `{condition}` of {path}:{int(line(lane)[0])} ({where}) does not hold"
        raise EmulationError(f"{machine.place(instruction, lanes)}: {said}{compared(machine, pc, int(lane[0]))}")

    return fail


def _print(machine: Machine, instruction: Instruction, pc: int, variables: list[ir.Variable]) -> Handler:
    if len(variables) != 3:
        raise ValueError("vprintf takes a format and the address of its arguments, and returns an integer")
    result, form, arguments = variables
    read_form, read_arguments = _reader(machine, instruction, form), _reader(machine, instruction, arguments)
    store = MemoryAccess(instruction, "store", "param", "weak", "b32", 1, ())
    locate_result = locator(machine, store, ir.Address(ir.Symbol(result)))

    def print_(lanes: Lanes) -> None:
        forms, places = read_form(lanes), read_arguments(lanes)
        counts = np.empty(count_of(lanes), np.uint32)
        for i, (address, place) in enumerate(zip(forms.tolist(), places.tolist(), strict=True)):
            text, counts[i] = _printed(machine, instruction, text_at(machine, instruction, address), place - BASE)
            machine.launch.print(text)
        machine.memory.view[4][locate_result(lanes) // 4] = counts

    return print_


def _printed(machine: Machine, instruction: Instruction, form: str, at: int) -> tuple[str, int]:
    """Format arguments that lie at an arena offset, each aligned to its size; return the text and how many it took."""
    taken = 0

    def argument(kind: str) -> int | float:
        nonlocal at, taken
        dtype = np.dtype(kind)
        at, taken = ceil_div(at, dtype.itemsize) * dtype.itemsize, taken + 1
        region = machine.memory.region_of(at)
        if region is None or at + dtype.itemsize > region.end:
            raise MemoryFault(f"{instruction.where}: printf: the arguments of {form!r} are out of bounds")
        raw: int | float = machine.memory.arena[at : at + dtype.itemsize].view(dtype)[0].item()
        at += dtype.itemsize
        return raw

    def size(word: str | None) -> str:
        number = argument("i4") if word == "*" else int(word or 0)
        return str(max(min(int(number), _WIDEST), -_WIDEST)) if word else ""

    def field(found: re.Match[str]) -> str:
        kind = found["kind"]
        if kind == "%":
            return "%"
        width, precision = size(found["width"]), size(found["precision"])
        spec = f"%{found['flags']}{width}{f'.{precision}' if '.' in found[0] else ''}"
        if kind in "diouxX":
            is_long, is_signed = bool(_LONG.search(found[0])), kind in "di"
            value = argument(f"{'i' if is_signed else 'u'}{8 if is_long else 4}")
            return f"{spec}{'d' if kind == 'u' else kind}" % value
        if kind in "fFeEgG":
            return f"{spec}{kind}" % argument("f8")
        if kind in "aA":
            return float(argument("f8")).hex()
        if kind == "c":
            return f"{spec}s" % chr(int(argument("i4")) & 255)
        if kind == "p":
            return f"{int(argument('u8')):#x}"
        if kind == "s":
            return f"{spec}s" % text_at(machine, instruction, int(argument("u8")))
        return found[0]  # as it stands

    return _FIELD.sub(field, form), taken


@binder("trap", "brkpt")
def _trap(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    def trap(lanes: Lanes) -> None:
        values = compared(machine, pc, int(indices_of(lanes)[0]))
        raise EmulationError(f"{machine.place(instruction, lanes)}: the kernel trapped{values}")

    return trap


def compared(machine: Machine, pc: int, lane: int) -> str:
    """Name the comparison that has led here, as it seems: `; line 7, `setp.ge.s32 %p1, %r3, %r4`: %r3 = 64, %r4 = 60`.

    It is the last one before whose predicate guards the instruction or a branch above it; empty if there is none.
    """
    code = machine.code
    branches = (i for i in range(pc, -1, -1) if code[i].guard is not None and (i == pc or code[i].head == "bra"))
    guard = code[at].guard if (at := next(branches, -1)) >= 0 else None
    if guard is None:
        return ""
    writers = (i for i in range(at - 1, -1, -1) if guard.name in {r.name for r in code[i].destinations})
    setter = code[found] if (found := next(writers, -1)) >= 0 else None
    if setter is None or setter.head != "setp":
        return ""
    t = setter.opcode.split(".")[-1]
    t = t if is_float(t) and t in DTYPES and t[:2] != "bf" and not t.endswith("x2") else t.replace("b", "u")
    registers = [r for r in setter.sources if r.type != "pred" and bits_of(r.type) == bits_of(t)]
    values = ", ".join(f"{r.name} = {machine.reader(r, t)(np.array([lane]))[0]}" for r in dict.fromkeys(registers))
    place = setter.seen_from(code[pc])
    return f"; {place}: {values}" if values else ""


_Builder = Callable[[Machine, Instruction, int, list[ir.Variable]], Handler]
_KNOWN: dict[str, _Builder] = {"__assertfail": _assert, "vprintf": _print}
