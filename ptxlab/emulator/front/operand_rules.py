"""What may stand as an operand, as ptxas has it: registers and constants of a kind that agrees, constants in range.

Widths are compared where operands are resolved (`wave`).
"""

from collections.abc import Iterable
from functools import cache

from ptxlab.emulator.front import ir
from ptxlab.emulator.front.ir import Instruction, Operand, Register
from ptxlab.emulator.front.types import is_float

_FIELDS = {"bfe": (2, 3), "bfi": (3, 4)}  # operands that say where a field lies, and how long it is
_WIDE_SPECIALS = ("%clock64", "%globaltimer", "%gridid")  # the only ones of 64 bits


@cache
def agrees(register: str, taken: str) -> bool:
    """Tell whether a register of one type may stand where an instruction takes another, their widths apart.

    This follows ptxas. Untyped bits agree with everything, integers with integers; a float with itself. A pair is 32
    untyped bits, except to a single float. Predicates are told by their width.
    """
    if "pred" in (register, taken):
        return True
    if register.endswith("x2"):
        return taken.endswith("x2") or not is_float(taken)
    kinds = {register.rstrip("0123456789"), taken.rstrip("0123456789")}
    return register == taken or "b" in kinds or kinds <= {"u", "s"}


def require_kinds(operands: Iterable[Operand], types: Iterable[str]) -> None:
    """Raise ValueError for a register or constant of another kind than the instruction takes.

    For example, a float is refused where it takes an integer.
    """
    for operand, taken in zip(operands, types, strict=False):
        if isinstance(operand, Register) and not agrees(operand.type, taken):
            raise ValueError(f"{operand.name} is .{operand.type}, the instruction takes .{taken}")
        if isinstance(operand, ir.Immediate) and taken != "pred":
            kind = "float" if operand.float_bits else "integer"
            # a literal of 32 or 64 bits is rounded to a float of the other width; bits have to be as many
            fits = taken in ("f32", "f64") or (taken[0] == "b" and taken[1].isdigit())
            if not (fits if operand.float_bits else not is_float(taken)):
                raise ValueError(f"a constant {kind} for .{taken}")


def check_operands(instruction: Instruction) -> None:
    """Raise ValueError for constants out of range, and for what has to be a constant and is not.

    A special register is refused, too, except by cvt.
    """
    name, operands = instruction.head, instruction.operands
    if name == "lop3" and not isinstance(operands[4], ir.Immediate):
        raise ValueError("the table of lop3 is a constant")
    for operand in (operands[position] for position in _FIELDS.get(name, ())):
        if isinstance(operand, ir.Immediate) and not 0 <= operand.bits <= 255:
            raise ValueError(f"{operand.bits} is not within 0..255")
    if name != "cvt":
        refuse_specials(operands)


def refuse_specials(operands: Iterable[Operand]) -> None:
    """Raise ValueError if there is a special register among the operands."""
    if any(isinstance(operand, ir.Special) for operand in operands):
        raise ValueError("special registers are read by mov and cvt")


def check_special(special: ir.Special, bits: int) -> None:
    """Raise ValueError if a mov of so many bits cannot read it."""
    own = 64 if special.name in _WIDE_SPECIALS else 32
    if bits > own or (bits < own == 64 and special.name != "%gridid"):
        raise ValueError(f"{special.name} has {own} bits, the instruction takes {bits}")
