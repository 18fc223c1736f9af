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
        place = instruction.where
        raise MemoryFault(f"{place}: the string at {memory.describe(start, 1)}, is out of bounds")
    raw = memory.arena[start : min(region.end, start + _MOST_TEXT)].tobytes()
    return raw.split(b"\0")[0].decode("utf-8", "replace")


@binder("call")
def _call(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    """Bind a call of a function without a body in the module; those with one have been put in place (`front.parse`)."""
    name = next((operand.name for operand in instruction.operands if isinstance(operand, ir.Function)), "")
    if name not in _BUILDERS:
        raise UnknownOpcode(f"{instruction.opcode} {name}".strip())
    variables = [
        element.variable
        for vector in instruction.operands
        if isinstance(vector, ir.Vector)
        for element in vector.elements
        if isinstance(element, ir.Symbol)
    ]
    return _BUILDERS[name](machine, instruction, pc, variables)


def _reader(machine: Machine, instruction: Instruction, variable: ir.Variable) -> Callable[[Lanes], np.ndarray]:
    """Build a function lanes -> values of a call's parameter, which lies in local memory."""
    access = MemoryAccess(instruction, "load", "param", "weak", variable.type, 1, ())
    locate = locator(machine, access, ir.Address(ir.Symbol(variable)))
    view = machine.memory.arena.view(DTYPES[f"u{bits_of(variable.type)}"])
    return lambda lanes: view[locate(lanes) // access.size]


def _assert(machine: Machine, instruction: Instruction, pc: int, variables: list[ir.Variable]) -> Handler:
    if len(variables) != 5:
        raise ValueError("__assertfail takes message, file, line, function and size of a character")
    message, file, line, function, _ = (_reader(machine, instruction, variable) for variable in variables)

    def fail(lanes: Lanes) -> None:
        lane = indices_of(lanes)[:1]
        addresses = (int(read(lane)[0]) for read in (message, file, function))
        condition, path, function_name = (text_at(machine, instruction, address) for address in addresses)
        problem = f"the assertion `{condition}` of {path}:{int(line(lane)[0])} ({function_name}) does not hold"
        problem += describe_comparison(machine, pc, int(lane[0]))
        raise EmulationError(f"{machine.place(instruction, lanes)}: {problem}")

    return fail


def _print(machine: Machine, instruction: Instruction, pc: int, variables: list[ir.Variable]) -> Handler:
    if len(variables) != 3:
        raise ValueError("vprintf takes a format and the address of its arguments, and returns an integer")
    count_variable, text_variable, arguments_variable = variables
    read_form = _reader(machine, instruction, text_variable)
    read_arguments = _reader(machine, instruction, arguments_variable)
    store = MemoryAccess(instruction, "store", "param", "weak", "b32", 1, ())
    locate_result = locator(machine, store, ir.Address(ir.Symbol(count_variable)))

    def print_(lanes: Lanes) -> None:
        forms, places = read_form(lanes), read_arguments(lanes)
        counts = np.empty(count_of(lanes), np.uint32)
        for i, (address, place) in enumerate(zip(forms.tolist(), places.tolist(), strict=True)):
            text, counts[i] = _format_printf(machine, instruction, text_at(machine, instruction, address), place - BASE)
            machine.launch.print(text)
        machine.memory.view[4][locate_result(lanes) // 4] = counts

    return print_


def _format_printf(machine: Machine, instruction: Instruction, form: str, offset: int) -> tuple[str, int]:
    """Format arguments that lie at an arena offset, each aligned to its size; return the text and how many it took."""
    argument_count = 0

    def argument(kind: str) -> int | float:
        nonlocal offset, argument_count
        dtype = np.dtype(kind)
        offset, argument_count = ceil_div(offset, dtype.itemsize) * dtype.itemsize, argument_count + 1
        region = machine.memory.region_of(offset)
        if region is None or offset + dtype.itemsize > region.end:
            raise MemoryFault(f"{instruction.where}: printf: the arguments of {form!r} are out of bounds")
        raw: int | float = machine.memory.arena[offset : offset + dtype.itemsize].view(dtype)[0].item()
        offset += dtype.itemsize
        return raw

    def size(word: str | None) -> str:
        number = argument("i4") if word == "*" else int(word or 0)
        return str(max(min(int(number), _WIDEST), -_WIDEST)) if word else ""

    def field(match: re.Match[str]) -> str:
        kind = match["kind"]
        if kind == "%":
            return "%"
        width, precision = size(match["width"]), size(match["precision"])
        spec = f"%{match['flags']}{width}{f'.{precision}' if '.' in match[0] else ''}"
        if kind in "diouxX":
            is_long, is_signed = bool(_LONG.search(match[0])), kind in "di"
            number = argument(f"{'i' if is_signed else 'u'}{8 if is_long else 4}")
            return f"{spec}{'d' if kind == 'u' else kind}" % number
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
        return match[0]  # as it stands

    return _FIELD.sub(field, form), argument_count


@binder("trap", "brkpt")
def _trap(machine: Machine, instruction: Instruction, pc: int) -> Handler:
    def trap(lanes: Lanes) -> None:
        values = describe_comparison(machine, pc, int(indices_of(lanes)[0]))
        raise EmulationError(f"{machine.place(instruction, lanes)}: the kernel trapped{values}")

    return trap


def describe_comparison(machine: Machine, pc: int, lane: int) -> str:
    """Describe the comparison that probably led here: `; line 7, `setp.ge.s32 %p1, %r3, %r4`: %r3 = 64, %r4 = 60`.

    It is the last one before whose predicate guards the instruction or a branch above it; empty if there is none.
    """
    code = machine.code
    branches = (i for i in range(pc, -1, -1) if code[i].guard is not None and (i == pc or code[i].head == "bra"))
    guard = code[branch].guard if (branch := next(branches, -1)) >= 0 else None
    if guard is None:
        return ""
    writers = (i for i in range(branch - 1, -1, -1) if guard.name in {r.name for r in code[i].destinations})
    setter = code[writer] if (writer := next(writers, -1)) >= 0 else None
    if setter is None or setter.head != "setp":
        return ""
    t = setter.opcode.split(".")[-1]
    t = t if is_float(t) and t in DTYPES and t[:2] != "bf" and not t.endswith("x2") else t.replace("b", "u")
    registers = [r for r in setter.sources if r.type != "pred" and bits_of(r.type) == bits_of(t)]
    values = ", ".join(f"{r.name} = {machine.reader(r, t)(np.array([lane]))[0]}" for r in dict.fromkeys(registers))
    place = setter.seen_from(code[pc])
    return f"; {place}: {values}" if values else ""


_Builder = Callable[[Machine, Instruction, int, list[ir.Variable]], Handler]
_BUILDERS: dict[str, _Builder] = {"__assertfail": _assert, "vprintf": _print}
