"""Video instructions: SIMD on two halves or four bytes of a register, and their scalar forms with a part of a register.

`vop4.dtype.atype.btype{.sat|.add} d{.mask}, a{.asel}, b{.bsel}, c`: each selector picks bytes out of the eight of a
and b; lanes that the mask leaves out come from c, and `.add` sums the lanes in the mask onto c instead. What an opcode
says (`SimdForm`, `ScalarForm`) is apart from what is computed, of which the prover has its own.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ptxlab.emulator.front.opcode import Opcode, UnknownOpcode
from ptxlab.emulator.front.types import Array, limits
from ptxlab.emulator.ops.alu import AluOperation, operation
from ptxlab.emulator.ops.integer import COMPARISONS

_SIMD = ("vadd", "vsub", "vavrg", "vabsdiff", "vmin", "vmax", "vset")
SIMD_NAMES = tuple(f"{name}{lanes}" for name in _SIMD for lanes in (2, 4))
SCALAR_NAMES = ("vadd", "vsub", "vabsdiff", "vmin", "vmax", "vset", "vshl", "vshr")
_ORDER = ("eq", "ne", "lt", "le", "gt", "ge")


@dataclass(frozen=True)
class SimdForm:
    """Contents of a SIMD instruction: its function (of vset the comparison), and which parts meet in which lane."""

    function: str
    signed: bool  # the result
    sources_signed: tuple[bool, bool]
    count: int  # lanes
    saturate: bool
    accumulate: bool
    picks: tuple[list[int], list[int]]  # of a and b: for each lane the part of both registers
    is_computed: list[bool]  # lanes that are computed; the others are c's

    @classmethod
    def of(cls, op: Opcode) -> "SimdForm":
        """Take the modifiers and selectors; `UnknownOpcode` for a selector that does not exist."""
        count, types = int(op.name[-1]), _function_and_types(op)
        saturate, accumulate = op.flag("sat"), op.flag("add")
        letter, parts = "h" if count == 2 else "b", "76543210"[8 - 2 * count :]

        def picks(selector: str, default: str) -> list[int]:
            digits = selector or letter + default
            if not re.fullmatch(f"{letter}[{parts}]{{{count}}}", digits):
                raise UnknownOpcode(f"selector .{selector}")
            return [int(digit) for digit in reversed(digits[1:])]

        mask, a, b, c = op.selectors
        if c:
            raise UnknownOpcode(f"selector .{c}")
        picked_lanes = picks(a, parts[count:]), picks(b, parts[:count])
        if not re.fullmatch(f"{letter}[{parts[count:]}]+", mask or letter + "0"):
            raise UnknownOpcode(f"mask .{mask}")
        return cls(
            *types, count, saturate, accumulate, picked_lanes, [not mask or str(i) in mask[1:] for i in range(count)]
        )


@dataclass(frozen=True)
class ScalarForm:
    """Contents of a scalar instruction: its function (of vset the comparison); parts of registers as (bits, number)."""

    function: str
    signed: bool  # the result
    sources_signed: tuple[bool, bool]
    saturate: bool
    wrap: bool  # a shift's count, modulo 32
    second: str  # of the result and c: add, min, max or ""
    target: tuple[int, int] | None  # the part of c that the result replaces
    parts: tuple[tuple[int, int], ...]  # of a and b

    @classmethod
    def of(cls, op: Opcode) -> "ScalarForm":
        """Take the modifiers and selectors."""
        types, saturate = _function_and_types(op), op.flag("sat")
        wraps = op.name in ("vshl", "vshr") and op.choice("clamp", "wrap") == "wrap"
        second_operation = op.choice("add", "min", "max", default="")
        d, a, b, c = op.selectors
        if c:
            raise UnknownOpcode(f"selector .{c}")
        return cls(*types, saturate, wraps, second_operation, _part(d) if d else None, (_part(a), _part(b)))


def _part(selector: str) -> tuple[int, int]:
    """Return bits and number of the part of a register that a selector names."""
    if not re.fullmatch("|b[0-3]|h[01]", selector):
        raise UnknownOpcode(f"selector .{selector}")
    return {"b": 8, "h": 16}.get(selector[:1], 32), int(selector[1:] or 0)


def _select(x: Array, part: tuple[int, int], signed: bool) -> Array:
    """Extract the part of a register, extended by its sign or by zeros."""
    bits, number = part
    columns = np.ascontiguousarray(x).view(f"{'i' if signed else 'u'}{bits // 8}").reshape(len(x), -1)
    return columns[:, number].astype(np.int64)


def _function_and_types(op: Opcode) -> tuple[str, bool, tuple[bool, bool]]:
    """Take the function, and whether the result is signed, and a and b."""
    name = op.name.rstrip("24")
    function = op.choice(*_ORDER) if name == "vset" else name
    is_signed_result = name != "vset" and op.type("u32", "s32") == "s32"
    return function, is_signed_result, (op.type("u32", "s32") == "s32", op.type("u32", "s32") == "s32")


def _average(a: Array, b: Array) -> Array:
    total = a + b
    return total + (total >= 0) >> 1  # halves are rounded away from zero


def _flags(compare: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda a, b: compare(a, b).astype(np.int64)


_FUNCTIONS: dict[str, Callable[[Array, Array], Array]] = {
    "vadd": np.add,
    "vsub": np.subtract,
    "vavrg": _average,
    "vabsdiff": lambda a, b: np.abs(a - b),
    "vmin": np.minimum,
    "vmax": np.maximum,
    **{name: _flags(COMPARISONS[name]) for name in _ORDER},
}


def _clamp(x: Array, signed: bool, bits: int) -> Array:
    return x.clip(-(1 << bits - 1), (1 << bits - 1) - 1) if signed else x.clip(0, (1 << bits) - 1)


@operation(*SIMD_NAMES, floating=False)
def _simd(op: Opcode) -> AluOperation:
    form = SimdForm.of(op)
    function, size = _FUNCTIONS[form.function], 4 // form.count

    def simd(a: Array, b: Array, c: Array) -> Array:
        pool = np.stack(np.broadcast_arrays(a, b), axis=1)
        x, y = (
            pool.view(f"{'i' if signed else 'u'}{size}")[:, picks].astype(np.int64)
            for signed, picks in zip(form.sources_signed, form.picks, strict=True)
        )
        lanes = function(x, y)
        lanes = _clamp(lanes, form.signed, 8 * size) if form.saturate else lanes
        if form.accumulate:
            total: Array = (lanes[:, form.is_computed].sum(axis=1) + c).astype(np.uint32)
            return total
        merged = np.where(form.is_computed, lanes.astype(f"u{size}"), c[:, None].view(f"u{size}"))
        return np.ascontiguousarray(merged).view(np.uint32)[:, 0]

    return AluOperation(("b32",), ("b32", "b32", "b32"), simd)


@operation(*SCALAR_NAMES, floating=False)
def _scalar(op: Opcode) -> AluOperation:
    form = ScalarForm.of(op)

    def function(a: Array, b: Array) -> Array:
        if form.function in ("vshl", "vshr"):
            count = b & 31 if form.wrap else np.minimum(b, 32)
            return a << count if form.function == "vshl" else a >> count
        return _FUNCTIONS[form.function](a, b)

    def scalar(a: Array, b: Array, c: Array | None = None) -> Array:
        outcome = function(*(_select(*source) for source in zip((a, b), form.parts, form.sources_signed, strict=True)))
        size, position = form.target or (32, 0)
        if form.saturate and form.signed:
            outcome = _clamp(outcome, True, size)
        elif form.saturate:  # as GPUs have it: an unsigned word has no upper bound, its parts have no lower one
            outcome = np.maximum(outcome, 0) if size == 32 else np.minimum(outcome & 0xFFFFFFFF, (1 << size) - 1)
        if form.target:  # merged into c
            assert c is not None
            first, mask = size * position, (1 << size) - 1
            return ((c.astype(np.int64) & ~(mask << first)) | (outcome & mask) << first).astype(np.uint32)
        if form.second:
            assert c is not None
            addend = c.view(np.int32).astype(np.int64) if form.signed else c.astype(np.int64)
            if form.function in ("vadd", "vsub"):  # the others pass their result on with all its bits
                outcome = outcome.astype(np.int32 if form.signed else np.uint32).astype(np.int64)
            outcome = {"add": np.add, "min": np.minimum, "max": np.maximum}[form.second](outcome, addend)
        return outcome.astype(np.uint32)

    has_third_operand = bool(form.target or form.second)
    return AluOperation(("b32",), ("b32", "b32", "b32") if has_third_operand else ("b32", "b32"), scalar)


@operation("vmad", floating=False)
def _multiply_add(op: Opcode) -> AluOperation:
    op.type("u32", "s32")  # the result's 32 bits are the same
    signs = [op.type("u32", "s32") == "s32" for _ in "ab"]
    plus_one, saturate, scale = op.flag("po"), op.flag("sat"), op.choice("shr7", "shr15", default="")
    target, *selectors = op.selectors
    negates_a, negates_b, negates_c = (selector.startswith("-") for selector in selectors)
    part_a, part_b, part_c = (_part(selector.removeprefix("-")) for selector in selectors)
    negates_product = negates_a != negates_b
    if target or part_c != (32, 0) or negates_product + negates_c + plus_one > 1 or (plus_one and negates_a):
        raise UnknownOpcode(op.text)
    c_signed = any(signs) or negates_product
    signed = c_signed or negates_c

    def multiply_add(a: Array, b: Array, c: Array) -> Array:
        # as Python's integers: a product of 64 bits, and its sign
        x, y, z = (
            _select(*source).astype(object)
            for source in ((a, part_a, signs[0]), (b, part_b, signs[1]), (c, part_c, c_signed))
        )
        total = (-x if negates_product else x) * y + (-z if negates_c else z) + plus_one
        total = total >> int(scale[3:] or 0)
        if saturate:
            total = total.clip(*limits("s32" if signed else "u32"))
        low: Array = (total & 0xFFFFFFFF).astype(np.uint32)
        return low

    return AluOperation(("b32",), ("b32", "b32", "b32"), multiply_add)
