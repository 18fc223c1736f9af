"""Video instructions: SIMD on two halves or four bytes of a register, and their scalar forms with a part of a register.

`vop4.dtype.atype.btype{.sat|.add} d{.mask}, a{.asel}, b{.bsel}, c`: each selector picks bytes out of the eight of a
and b; lanes that the mask leaves out come from c, and `.add` sums the lanes in the mask onto c instead.
"""

import re
from collections.abc import Callable

import numpy as np

from ptxlab.emulator.front.opcode import Opcode, UnknownOpcode
from ptxlab.emulator.front.types import Array
from ptxlab.emulator.ops.alu import AluOperation, operation
from ptxlab.emulator.ops.integer import COMPARISONS


def _average(a: Array, b: Array) -> Array:
    total = a + b
    return total + (total >= 0) >> 1  # halves are rounded away from zero


_FUNCTIONS: dict[str, Callable[[Array, Array], Array]] = {
    "vadd": np.add,
    "vsub": np.subtract,
    "vavrg": _average,
    "vabsdiff": lambda a, b: np.abs(a - b),
    "vmin": np.minimum,
    "vmax": np.maximum,
}
_ORDER = ("eq", "ne", "lt", "le", "gt", "ge")


def _selection(selector: str, letter: str, default: str, choices: str) -> list[int]:
    """The digits of `b3210`, lowest lane first."""
    digits = selector or letter + default
    if not re.fullmatch(f"{letter}[{choices}]{{{len(default)}}}", digits):
        raise UnknownOpcode(f"selector .{selector}")
    return [int(d) for d in reversed(digits[1:])]


def _clamp(x: Array, signed: bool, bits: int) -> Array:
    return x.clip(-(1 << bits - 1), (1 << bits - 1) - 1) if signed else x.clip(0, (1 << bits) - 1)


@operation(*(f"{name}{n}" for name in (*_FUNCTIONS, "vset") for n in (2, 4)), floating=False)
def _simd(op: Opcode) -> AluOperation:
    count = int(op.name[-1])
    bits, letter = 32 // count, "h" if count == 2 else "b"
    function: Callable[[Array, Array], Array]
    if op.name[:-1] == "vset":
        compare = COMPARISONS[op.choice(*_ORDER)]
        function, signed = lambda a, b: compare(a, b).astype(np.int64), False
    else:
        function, signed = _FUNCTIONS[op.name[:-1]], op.type("u32", "s32") == "s32"
    types = op.type("u32", "s32"), op.type("u32", "s32")
    saturate, accumulate = op.flag("sat"), op.flag("add")
    mask, asel, bsel = op.selectors
    lanes = "76543210"
    a_picks = _selection(asel, letter, lanes[8 - count :], lanes[8 - 2 * count :])
    b_picks = _selection(bsel, letter, lanes[8 - 2 * count : 8 - count], lanes[8 - 2 * count :])
    if not re.fullmatch(f"{letter}[{lanes[8 - count :]}]+", mask or letter + "0"):
        raise UnknownOpcode(f"mask .{mask}")
    kept = [not mask or str(i) in mask[1:] for i in range(count)]

    def simd(a: Array, b: Array, c: Array) -> Array:
        pool = np.stack(np.broadcast_arrays(a, b), axis=1)
        x, y = (
            pool.view(f"{'i' if t == 's32' else 'u'}{bits // 8}")[:, picks].astype(np.int64)
            for t, picks in zip(types, (a_picks, b_picks), strict=True)
        )
        result = function(x, y)
        result = _clamp(result, signed, bits) if saturate else result
        if accumulate:
            total: Array = (result[:, kept].sum(axis=1) + c).astype(np.uint32)
            return total
        merged = np.where(kept, result.astype(f"u{bits // 8}"), c[:, None].view(f"u{bits // 8}"))
        return np.ascontiguousarray(merged).view(np.uint32)[:, 0]

    return AluOperation(("b32",), ("b32", "b32", "b32"), simd)


@operation(*_FUNCTIONS, "vset", "vshl", "vshr", floating=False)
def _scalar(op: Opcode) -> AluOperation:
    if op.name == "vavrg":
        raise UnknownOpcode(op.text)
    comparison = op.choice(*_ORDER) if op.name == "vset" else ""
    signed = comparison == "" and op.type("u32", "s32") == "s32"
    types = op.type("u32", "s32"), op.type("u32", "s32")
    saturate = op.flag("sat")
    wrap = op.choice("clamp", "wrap") == "wrap" if op.name in ("vshl", "vshr") else False
    second = op.choice("add", "min", "max", default="")
    target, *parts = op.selectors

    def select(x: Array, part: str, signed: bool) -> Array:
        """The part of a register that a selector names, extended."""
        size = {"b": 1, "h": 2}.get(part[:1], 4)
        columns = np.ascontiguousarray(x).view(f"{'i' if signed else 'u'}{size}").reshape(len(x), -1)
        return columns[:, int(part[1:] or 0)].astype(np.int64)

    def function(a: Array, b: Array) -> Array:
        if comparison:
            return COMPARISONS[comparison](a, b).astype(np.int64)
        if op.name in ("vshl", "vshr"):
            count = b & 31 if wrap else np.minimum(b, 32)
            return a << count if op.name == "vshl" else a >> count
        return _FUNCTIONS[op.name](a, b)

    def scalar(a: Array, b: Array, c: Array | None = None) -> Array:
        x, y = (select(v, p, t == "s32") for v, p, t in zip((a, b), parts, types, strict=True))
        result = function(x, y)
        size = {"b": 8, "h": 16}.get(target[:1], 32)
        if saturate and signed:
            result = _clamp(result, True, size)
        elif saturate:  # as GPUs have it: an unsigned word has no upper bound, its parts have no lower one
            result = np.maximum(result, 0) if size == 32 else np.minimum(result & 0xFFFFFFFF, (1 << size) - 1)
        if target:  # merged into c
            assert c is not None
            position, mask = size * int(target[1:]), (1 << size) - 1
            return ((c.astype(np.int64) & ~(mask << position)) | (result & mask) << position).astype(np.uint32)
        if second:
            assert c is not None
            other = c.view(np.int32).astype(np.int64) if signed else c.astype(np.int64)
            if op.name in ("vadd", "vsub"):  # the others pass their result on with all its bits
                result = result.astype(np.int32 if signed else np.uint32).astype(np.int64)
            result = {"add": np.add, "min": np.minimum, "max": np.maximum}[second](result, other)
        return result.astype(np.uint32)

    three = bool(target or second)
    return AluOperation(("b32",), ("b32", "b32", "b32") if three else ("b32", "b32"), scalar)
