"""Integers over bitvectors that never wrap: each knows its limits, and has as many bits as these need."""

from collections.abc import Callable
from typing import Any, Union

import z3

Operand = Union["Integer", int]
MAX_BITS = 256  # of an intermediate result


class Integer:
    """A mathematical integer within `low`..`high`, as a signed z3 bitvector `bits` wide enough for both."""

    def __init__(self, bits: Any, low: int, high: int) -> None:
        self.low, self.high = low, high
        width = max((n if n >= 0 else ~n).bit_length() for n in (low, high)) + 1
        if width > MAX_BITS:
            raise ValueError(f"an integer of {width} bits: at most {MAX_BITS} are proved about")
        spare_bits = width - bits.size()
        self.bits = (
            z3.SignExt(spare_bits, bits)
            if spare_bits > 0
            else z3.Extract(width - 1, 0, bits)
            if spare_bits < 0
            else bits
        )

    @classmethod
    def of(cls, number: Operand) -> "Integer":
        """Convert a Python number to an Integer; an Integer is returned as it is."""
        if isinstance(number, Integer):
            return number
        return cls(z3.BitVecVal(number, number.bit_length() + 1), number, number)

    @classmethod
    def from_unsigned(cls, bits: Any) -> "Integer":
        """Make the Integer of a bitvector's unsigned value."""
        return cls(z3.ZeroExt(1, bits), 0, (1 << bits.size()) - 1)

    @classmethod
    def from_signed(cls, bits: Any) -> "Integer":
        """Make the Integer of a bitvector's value in two's complement."""
        half = 1 << bits.size() - 1
        return cls(bits, -half, half - 1)

    @classmethod
    def within(cls, name: str, low: int, high: int) -> tuple["Integer", list[Any]]:
        """Make a new unknown of that name; return it and the formulas that keep it within its limits."""
        width = Integer.of(low).bits.size(), Integer.of(high).bits.size()
        symbol = z3.BitVec(name, max(width))
        integer = cls(symbol, low, high)
        return integer, [symbol >= low, symbol <= high]

    def extend_to(self, width: int) -> Any:
        """Return the bitvector at a width, extended by its sign."""
        spare_bits = width - self.bits.size()
        return z3.SignExt(spare_bits, self.bits) if spare_bits > 0 else self.bits

    def modulo(self, width: int) -> Any:
        """Return the lowest `width` bits."""
        return z3.Extract(width - 1, 0, self.extend_to(max(width, self.bits.size())))

    # Arithmetic. The limits of a result are those of the operands' extremes.

    def __add__(self, other: Operand) -> "Integer":
        return self._combine(other, lambda a, b: a + b)

    def __sub__(self, other: Operand) -> "Integer":
        return self._combine(other, lambda a, b: a - b)

    def __mul__(self, other: Operand) -> "Integer":
        return self._combine(other, lambda a, b: a * b)

    def __radd__(self, other: int) -> "Integer":
        return Integer.of(other) + self

    def __rsub__(self, other: int) -> "Integer":
        return Integer.of(other) - self

    def __rmul__(self, other: int) -> "Integer":
        return Integer.of(other) * self

    def __neg__(self) -> "Integer":
        return Integer.of(0) - self

    def __abs__(self) -> "Integer":
        return self.where(self >= 0, -self)

    def __floordiv__(self, other: Operand) -> "Integer":
        divisor = _require_divisor(other)
        low, high = self.low // divisor, self.high // divisor
        if divisor & divisor - 1 == 0:
            return Integer(self.bits >> (divisor.bit_length() - 1), low, high)
        width = max(self.bits.size(), divisor.bit_length() + 1) + 1
        a, b = self.extend_to(width), z3.BitVecVal(divisor, width)
        return Integer(z3.If(a < 0, -((-a + b - 1) / b), a / b), low, high)

    def __mod__(self, other: Operand) -> "Integer":
        divisor = _require_divisor(other)
        if self.low >= 0 and self.high < divisor:
            return self
        if divisor & divisor - 1 == 0:
            return Integer(z3.ZeroExt(1, self.modulo(max(divisor.bit_length() - 1, 1)) & divisor - 1), 0, divisor - 1)
        remainder = self - (self // divisor) * divisor
        return Integer(remainder.bits, 0, divisor - 1)

    def __lshift__(self, other: Operand) -> "Integer":
        return self * (1 << _require_shift_count(other))

    def __rshift__(self, other: Operand) -> "Integer":
        return self // (1 << _require_shift_count(other))

    def __and__(self, other: Operand) -> "Integer":
        return self._bitwise(other, lambda a, b: a & b)

    def __or__(self, other: Operand) -> "Integer":
        return self._bitwise(other, lambda a, b: a | b)

    def __xor__(self, other: Operand) -> "Integer":
        return self._bitwise(other, lambda a, b: a ^ b)

    def __rand__(self, other: int) -> "Integer":
        return self & other

    def __ror__(self, other: int) -> "Integer":
        return self | other

    def __rxor__(self, other: int) -> "Integer":
        return self ^ other

    def __invert__(self) -> "Integer":
        return -1 - self

    # Comparisons: z3 Bools

    def __lt__(self, other: Operand) -> Any:
        return self._compare(other, lambda a, b: a < b)

    def __le__(self, other: Operand) -> Any:
        return self._compare(other, lambda a, b: a <= b)

    def __gt__(self, other: Operand) -> Any:
        return self._compare(other, lambda a, b: a > b)

    def __ge__(self, other: Operand) -> Any:
        return self._compare(other, lambda a, b: a >= b)

    def __eq__(self, other: object) -> Any:
        return self._compare(other, lambda a, b: a == b)

    def __ne__(self, other: object) -> Any:
        return self._compare(other, lambda a, b: a != b)

    __hash__ = None  # type: ignore[assignment]

    def where(self, condition: Any, otherwise: Operand) -> "Integer":
        """Select this where the condition (z3 Bool) holds, and `otherwise` elsewhere."""
        alternative = Integer.of(otherwise)
        a, b = self._same_width(alternative)
        return Integer(z3.If(condition, a, b), min(self.low, alternative.low), max(self.high, alternative.high))

    def _same_width(self, right: "Integer") -> tuple[Any, Any]:
        width = max(self.bits.size(), right.bits.size())
        return self.extend_to(width), right.extend_to(width)

    def _combine(self, operand: Operand, compute: Callable[[Any, Any], Any]) -> "Integer":
        """Compute a sum, difference or product of bitvectors, and its limits by `compute` on the operands' limits."""
        right = Integer.of(operand)
        extremes = [compute(a, b) for a in (self.low, self.high) for b in (right.low, right.high)]
        low, high = min(extremes), max(extremes)
        width = max(Integer.of(low).bits.size(), Integer.of(high).bits.size(), self.bits.size(), right.bits.size())
        return Integer(compute(self.extend_to(width), right.extend_to(width)), low, high)

    def _bitwise(self, operand: Operand, compute: Callable[[Any, Any], Any]) -> "Integer":
        right = Integer.of(operand)
        a, b = self._same_width(right)
        if self.low >= 0 and right.low >= 0:
            return Integer(compute(a, b), 0, (1 << a.size() - 1) - 1)
        return Integer.from_signed(compute(a, b))

    def _compare(self, operand: Any, compute: Callable[[Any, Any], Any]) -> Any:
        if not isinstance(operand, Integer | int):
            return NotImplemented
        return compute(*self._same_width(Integer.of(operand)))


def _require_shift_count(operand: Operand) -> int:
    number = operand if isinstance(operand, int) else operand.low if operand.low == operand.high else None
    if number is None or number < 0:
        raise ValueError("a shift takes a constant count")
    return number


def _require_divisor(operand: Operand) -> int:
    number = operand if isinstance(operand, int) else operand.low if operand.low == operand.high else 0
    if number <= 0:
        raise ValueError("a divisor has to be a positive constant")
    return number
