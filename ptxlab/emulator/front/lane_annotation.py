"""Packed lanes: the `@lanes` annotation, and the check that no lane of a packed operation disturbs another.

An instruction that does arithmetic on several small integers packed into one register says so in a trailing comment:

    mad.lo.u32 %d0, %q0, %s, %a;   // @lanes d:u8x4 a:u8x4 b:u32 c:u8x4

Grammar: `@lanes` and then one `operand:type` per register operand, separated by spaces. `d` is the destination, `a`,
`b` and `c` the sources in order. A type is `u` or `s`, a width of 1 to 64 bits, and `xN` for N lanes, lane 0 in the
lowest bits; the lanes of one operand fill the operand's whole width. A type without `xN` is one number that goes to
every lane. In a `.cu` the comment rides in the text of an inline `asm`, where it reaches the PTX unchanged.

With the check on, each lane is computed again in wide integers, from the sources as declared. Two things are findings:

`carry`   the lane of the stored result is not the wide result modulo 2^width: a carry, borrow or shifted bit came over
          from a neighbour. SIMD opcodes (`vadd4` ...) wrap lane by lane, so they cannot carry.
`range`   the wide result does not fit the type declared for `d` (or a source without `xN` does not fit its own type).

Bitwise operations (`and`, `or`, `xor`, `not`, `lop3`, `prmt`, `mov`, ...) keep bits in their lanes and may reinterpret
them: `xor d, a, 0x80808080` with `d:s8x4 a:u8x4` subtracts 128. Nothing is recomputed for them; the annotation
documents.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ptxlab.emulator.front.types import DTYPES, Array, is_float

_TYPE = re.compile(r"([dabc]):([us])(\d+)(?:x(\d+))?")


@dataclass(frozen=True, slots=True)
class LaneType:
    """An integer of `bits` bits, `count` times in a register; `count` 0 stands for one number for every lane."""

    signed: bool
    bits: int
    count: int

    def __str__(self) -> str:
        return f"{'s' if self.signed else 'u'}{self.bits}" + (f"x{self.count}" if self.count else "")

    @property
    def limits(self) -> tuple[int, int]:
        """Smallest and largest value."""
        return (-(1 << self.bits - 1), (1 << self.bits - 1) - 1) if self.signed else (0, (1 << self.bits) - 1)

    def decode(self, raw: Array) -> Array:
        """Decode registers (unsigned, shape [n]) to lane values (int64 [lanes, n]; one row for a plain number)."""
        if not self.count:
            return raw.view(f"i{raw.itemsize}").astype(np.int64)[None] if self.signed else raw.astype(np.int64)[None]
        shifts = np.arange(self.count, dtype=np.uint64)[:, None] * np.uint64(self.bits)
        values = (raw.astype(np.uint64) >> shifts) & np.uint64((1 << self.bits) - 1)
        return wrap(values.view(np.int64), self)


LaneTypes = dict[str, LaneType]


def wrap(values: Array, to: LaneType) -> Array:
    """Reduce integers modulo 2^bits to the range of the type."""
    spare_bits = np.int64(64 - to.bits)
    shifted_values = values << spare_bits
    return (
        shifted_values >> spare_bits
        if to.signed
        else (shifted_values.view(np.uint64) >> spare_bits.view(np.uint64)).view(np.int64)
    )


def parse_annotation(text: str, opcode: str) -> LaneTypes:
    """Read `d:u8x4 a:u8x4 ...` as operand letter -> type; ValueError says what is wrong with it."""
    types: LaneTypes = {}
    for word in text.split():
        match = _TYPE.fullmatch(word)
        if not match:
            raise ValueError(f"@lanes: {word!r} is not operand:type such as d:u8x4")
        letter, sign, bits, count = match[1], match[2], int(match[3]), int(match[4] or 0)
        if letter in types:
            raise ValueError(f"@lanes: operand {letter} is given twice")
        if not 1 <= bits <= 64 or (match[4] and count < 2):
            raise ValueError(f"@lanes: {word!r} needs 1 to 64 bits and 2 or more lanes")
        types[letter] = LaneType(sign == "s", bits, count)
    if "d" not in types or not types["d"].count:
        raise ValueError("@lanes: d has to be given, with its number of lanes (d:u8x4)")
    for letter, lane in types.items():
        if lane.count not in (0, types["d"].count):
            raise ValueError(f"@lanes: {letter}:{lane} and d:{types['d']} differ in their number of lanes")
    operation = operation_of(opcode)
    if operation is None:
        raise ValueError(f"@lanes: not defined for {opcode}")
    width = re.search(r"\.[usb](8|16|32|64)$", opcode)
    for letter, lane in types.items():
        if width and lane.count and lane.count * lane.bits != int(width[1]):
            raise ValueError(f"@lanes: {letter}:{lane} does not fill the {width[1]} bits of {opcode}")
    needed_letters = operation.letters if operation.compute else ()
    missing_letters = [letter for letter in needed_letters if letter not in types]
    if missing_letters:
        raise ValueError(f"@lanes: {opcode} needs a type for operand {', '.join(missing_letters)}")
    if set(types) - {"d", *operation.letters}:
        raise ValueError(f"@lanes: {opcode} has no operand {', '.join(sorted(set(types) - {'d', *operation.letters}))}")
    return types


@dataclass(frozen=True, slots=True)
class LaneOperation:
    """Effect of an opcode on packed lanes: `compute` on wide values (None: bitwise, unchecked), and how to print it."""

    letters: tuple[str, ...]
    compute: Callable[..., Array] | None
    format: str = ""
    simd: bool = False


_BITWISE = LaneOperation(("a", "b", "c"), None)
_OPERATIONS = {
    "add": LaneOperation(("a", "b"), np.add, "{a} + {b}"),
    "sub": LaneOperation(("a", "b"), np.subtract, "{a} - {b}"),
    "mul.lo": LaneOperation(("a", "b"), np.multiply, "{a} * {b}"),
    "mad.lo": LaneOperation(("a", "b", "c"), lambda a, b, c: a * b + c, "{a} * {b} + {c}"),
    "neg": LaneOperation(("a",), np.negative, "-{a}"),
    "shl": LaneOperation(("a", "b"), lambda a, b: np.where(b < 56, a << np.clip(b, 0, 55), 0), "{a} << {b}"),
    "shr": LaneOperation(("a", "b"), lambda a, b: a >> np.clip(b, 0, 63), "{a} >> {b}"),
    "vadd": LaneOperation(("a", "b"), np.add, "{a} + {b}", simd=True),
    "vsub": LaneOperation(("a", "b"), np.subtract, "{a} - {b}", simd=True),
    "vmin": LaneOperation(("a", "b"), np.minimum, "min({a}, {b})", simd=True),
    "vmax": LaneOperation(("a", "b"), np.maximum, "max({a}, {b})", simd=True),
    "vabsdiff": LaneOperation(("a", "b"), lambda a, b: abs(a - b), "|{a} - {b}|", simd=True),
    "vavrg": LaneOperation(("a", "b"), lambda a, b: (a + b + 1) >> 1, "({a} + {b} + 1) >> 1", simd=True),
    **dict.fromkeys(("and", "or", "xor", "not", "lop3", "prmt", "mov", "selp", "cvt", "bfi"), _BITWISE),
}


def operation_of(opcode: str) -> LaneOperation | None:
    """Return the lane operation of an opcode, or None if the annotation has no meaning there."""
    name, *modifiers = opcode.split(".")
    if re.fullmatch(r"v[a-z]+[24]", name):
        return _OPERATIONS.get(name[:-1])
    if name in ("mul", "mad"):
        return _OPERATIONS.get(f"{name}.{modifiers[0]}") if modifiers else None
    if "cc" in modifiers or any(is_float(m) for m in modifiers if m in DTYPES):
        return None
    return _OPERATIONS.get(name)
