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
def agrees(register: str, expected: str) -> bool:
    """Tell whether a register's type fits an operand's expected type; widths are not compared.

    This follows ptxas. Untyped bits agree with everything, integers with integers; a float with itself. A pair is 32
    untyped bits, except to a single float. Predicates are told by their width.
    """
    if "pred" in (register, expected):
        return True
    if register.endswith("x2"):
        return expected.endswith("x2") or not is_float(expected)
    kinds = {register.rstrip("0123456789"), expected.rstrip("0123456789")}
    return register == expected or "b" in kinds or kinds <= {"u", "s"}


def require_kinds(operands: Iterable[Operand], types: Iterable[str]) -> None:
    """Raise ValueError for a register or constant of another kind than the instruction takes.

    For example, a float is refused where it takes an integer.
    """
    for operand, expected_type in zip(operands, types, strict=False):
        if isinstance(operand, Register) and not agrees(operand.type, expected_type):
            raise ValueError(f"{operand.name} is .{operand.type}, the instruction takes .{expected_type}")
        if isinstance(operand, ir.Immediate) and expected_type != "pred":
            kind = "float" if operand.float_bits else "integer"
            # a literal of 32 or 64 bits is rounded to a float of the other width; bits have to be as many
            is_right_kind = expected_type in ("f32", "f64") or (expected_type[0] == "b" and expected_type[1].isdigit())
            if not (is_right_kind if operand.float_bits else not is_float(expected_type)):
                raise ValueError(f"a constant {kind} for .{expected_type}")


def check_operands(instruction: Instruction) -> None:
    """Raise ValueError for constants out of range, and for operands that have to be constants and are not.

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
    width = 64 if special.name in _WIDE_SPECIALS else 32
    if bits > width or (bits < width == 64 and special.name != "%gridid"):
        raise ValueError(f"{special.name} has {width} bits, the instruction takes {bits}")
