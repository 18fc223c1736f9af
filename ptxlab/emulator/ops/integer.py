"""Integer arithmetic, comparison and selection."""

from collections.abc import Callable

import numpy as np

from ptxlab.emulator.front.opcode import Opcode, UnknownOpcode
from ptxlab.emulator.front.types import DTYPES, Array, bits_of, is_float, is_signed, limits
from ptxlab.emulator.ops.alu import AluOperation, operation
from ptxlab.emulator.ops.rounding import flush, pack, round_to

INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")
BITS = ("b16", "b32", "b64")
WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


# Add, subtract, multiply


@operation("add", "sub", "addc", "subc", floating=False)
def _add(op: Opcode) -> AluOperation:
    carry_in, carry_out, saturate = op.name.endswith("c"), op.flag("cc"), op.flag("sat")
    subtract = op.name.startswith("sub")
    t = op.type(*INTEGERS, "u16x2", "s16x2")
    if t.endswith("x2"):
        return AluOperation((t,), (t, t), lambda a, b: _by_halves(np.subtract if subtract else np.add, a, b))
    if saturate:
        low, high = limits(t)
        add_or_subtract = np.subtract if subtract else np.add
        return AluOperation((t,), (t, t), lambda a, b: add_or_subtract(a, b, dtype=np.int64).clip(low, high))
    if not carry_in and not carry_out:
        return AluOperation((t,), (t, t), np.subtract if subtract else np.add)

    def with_carry(a: Array, b: Array, carry: Array | None = None) -> tuple[Array, Array] | Array:
        # a - b is a + ~b + 1, and the flag that goes in and out of a subtraction is the borrow
        total, carry_out_bit = (a - b, a < b) if subtract else (a + b, a + b < a)
        if carry is not None:
            sum_with_carry = total - carry if subtract else total + carry
            carry_out_bit = carry_out_bit | (sum_with_carry > total if subtract else sum_with_carry < total)
            total = sum_with_carry
        return (total, carry_out_bit) if carry_out else total

    unsigned_type = t.replace("s", "u")
    input_types, output_types = (unsigned_type, unsigned_type), (unsigned_type,)
    return AluOperation(
        (*output_types, "cc") if carry_out else output_types,
        (*input_types, "cc") if carry_in else input_types,
        with_carry,
    )


def _by_halves(function: np.ufunc, a: Array, b: Array) -> Array:
    low = function(a, b) & np.uint32(0xFFFF)
    high = function(a & np.uint32(0xFFFF0000), b & np.uint32(0xFFFF0000))
    halves: Array = low | high & np.uint32(0xFFFF0000)
    return halves


def multiply_high(a: Array, b: Array) -> Array:
    """Compute the upper half of the double-width product of two integer arrays of one dtype."""
    bits = a.dtype.itemsize * 8
    if bits < 64:
        wide_dtype = f"{a.dtype.kind}{bits // 4}"
        upper: Array = (a.astype(wide_dtype) * b.astype(wide_dtype) >> bits).astype(a.dtype)
        return upper
    x, y, half, mask = a.view(np.uint64), b.view(np.uint64), np.uint64(32), np.uint64(0xFFFFFFFF)
    low, mid = (x & mask) * (y & mask), (x >> half) * (y & mask)
    mid2, high = (x & mask) * (y >> half), (x >> half) * (y >> half)
    carry = ((low >> half) + (mid & mask) + (mid2 & mask)) >> half
    high = high + (mid >> half) + (mid2 >> half) + carry
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, y, 0).astype(np.uint64) - np.where(b < 0, x, 0).astype(np.uint64)
    upper = high.view(a.dtype)
    return upper


def _product(op: Opcode) -> tuple[str, str, Callable[[Array, Array], Array]]:
    """Return (source type, result type, function) of mul, mul24 and their multiply-adds."""
    part = op.choice("lo", "hi", "wide", default="lo" if "24" in op.name else None)
    if "24" in op.name:
        t = op.type("u32", "s32")
        shift = np.array([8], DTYPES[t])

        def product24(a: Array, b: Array) -> Array:
            # the low 24 bits of each operand, extended; .hi is bits 47..16 of the product
            wide_dtype = "i8" if is_signed(t) else "u8"
            full_product = (a << shift >> shift).astype(wide_dtype) * (b << shift >> shift).astype(wide_dtype)
            part_of_product: Array = (full_product >> (16 if part == "hi" else 0)).astype(DTYPES[t])
            return part_of_product

        return t, t, product24
    t = op.type(*INTEGERS)
    if part == "wide":
        if t not in WIDER:
            raise UnknownOpcode(op.text)
        wide_dtype = DTYPES[WIDER[t]]
        return t, WIDER[t], lambda a, b: np.multiply(a, b, dtype=wide_dtype)
    return t, t, np.multiply if part == "lo" else multiply_high


@operation("mul", "mul24", floating=False)
def _mul(op: Opcode) -> AluOperation:
    t, result_type, product = _product(op)
    return AluOperation((result_type,), (t, t), product)


@operation("mad", "mad24", "madc", floating=False)
def _mad(op: Opcode) -> AluOperation:
    carry_in, carry_out, saturate = op.name == "madc", op.flag("cc"), op.flag("sat")
    t, result_type, product = _product(op)
    low, high = limits(result_type)

    def mad(a: Array, b: Array, c: Array, carry: Array | None = None) -> Array | tuple[Array, Array]:
        p = product(a, b)
        if saturate:
            return np.add(p, c, dtype=np.int64).clip(low, high)
        total: Array = p + c
        if carry is None and not carry_out:
            return total
        unsigned_dtype = DTYPES[result_type.replace("s", "u")]
        p, total = np.broadcast_arrays(p.view(unsigned_dtype), total.view(unsigned_dtype))
        carry_out_bit = total < p
        if carry is not None:
            sum_with_carry = total + carry
            carry_out_bit, total = carry_out_bit | (sum_with_carry < total), sum_with_carry
        return (total, carry_out_bit) if carry_out else total

    sources = (t, t, result_type, "cc") if carry_in else (t, t, result_type)
    return AluOperation((result_type, "cc") if carry_out else (result_type,), sources, mad)


@operation("sad", floating=False)
def _sad(op: Opcode) -> AluOperation:
    t = op.type(*INTEGERS)
    unsigned_type = t.replace("s", "u")
    dtype = DTYPES[unsigned_type]
    return AluOperation(
        (unsigned_type,), (t, t, unsigned_type), lambda a, b, c: c + (np.maximum(a, b) - np.minimum(a, b)).view(dtype)
    )


@operation("dp4a", "dp2a", floating=False)
def _dot(op: Opcode) -> AluOperation:
    word_half = op.choice("lo", "hi") if op.name == "dp2a" else ""
    a_type, b_type = op.type("u32", "s32"), op.type("u32", "s32")
    result_type = "s32" if "s32" in (a_type, b_type) else "u32"

    def fields(x: Array, bits: int, signed: bool) -> Array:
        return np.ascontiguousarray(x).view(f"{'i' if signed else 'u'}{bits // 8}").reshape(len(x), -1).astype(np.int64)

    def dot(a: Array, b: Array, c: Array) -> Array:
        left, right = fields(a, 16 if word_half else 8, a_type == "s32"), fields(b, 8, b_type == "s32")
        right = {"": right, "lo": right[:, :2], "hi": right[:, 2:]}[word_half]
        total: Array = ((left * right).sum(axis=1) + c).astype(DTYPES[result_type])
        return total

    return AluOperation((result_type,), (a_type, b_type, result_type), dot)


# Divide, compare, extremes


@operation("div", "rem", floating=False)
def _div(op: Opcode) -> AluOperation:
    t = op.type(*INTEGERS)
    is_remainder, unsigned_dtype = op.name == "rem", DTYPES[t.replace("s", "u")]

    def divide(a: Array, b: Array) -> Array:
        # truncation towards zero, on magnitudes; NVIDIA GPUs give all ones, or the dividend, for a divisor of zero
        x, y = (np.abs(a).view(unsigned_dtype), np.abs(b).view(unsigned_dtype)) if is_signed(t) else (a, b)
        safe_divisor = np.where(y == 0, unsigned_dtype.type(1), y)
        quotient = x % safe_divisor if is_remainder else x // safe_divisor
        if is_signed(t):
            is_negative = (a < 0) if is_remainder else (a < 0) != (b < 0)
            quotient = np.where(is_negative, np.negative(quotient), quotient)
        return np.where(y == 0, a.view(unsigned_dtype) if is_remainder else ~unsigned_dtype.type(0), quotient)

    return AluOperation((t.replace("s", "u"),), (t, t), divide)


@operation("min", "max", floating=False)
def _extreme(op: Opcode) -> AluOperation:
    function = np.minimum if op.name == "min" else np.maximum
    relu = op.flag("relu")
    t = op.type(*INTEGERS, "u16x2", "s16x2")

    def extreme(a: Array, b: Array) -> Array:
        if t.endswith("x2"):
            half_dtype = "i2" if t == "s16x2" else "u2"
            a, b = (x.view(half_dtype).reshape(-1, 2) for x in np.broadcast_arrays(a, b))
        chosen = function(a, b)
        chosen = np.maximum(chosen, 0) if relu else chosen
        return pack(chosen, t) if t.endswith("x2") else chosen

    return AluOperation((t,), (t, t), extreme)


@operation("abs", "neg", floating=False)
def _negate(op: Opcode) -> AluOperation:
    t = op.type("s16", "s32", "s64")
    return AluOperation((t,), (t,), np.abs if op.name == "abs" else np.negative)


COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


_COMBINE: dict[str, np.ufunc] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def compare_operation(op: Opcode, result_type: str, t: str, compare: Callable[[Array, Array], Array]) -> AluOperation:
    """Build setp and set: compare, combine with a predicate where the opcode says so, store one or two results.

    Comparisons of packed pairs are [lanes, 2]; `result_type` is the type that set stores.
    """
    name = op.choice(*_COMBINE, default="")
    sources = (t, t, "pred") if name else (t, t)

    def combine(true: Array, c: Array | None) -> Array:
        if c is None:
            return true
        combined_bits: Array = _COMBINE[name](true, c if true.ndim == 1 else c[:, None])
        return combined_bits

    def setp(a: Array, b: Array, c: Array | None = None) -> tuple[Array, Array]:
        is_true = compare(a, b)
        p, q = is_true.T if is_true.ndim == 2 else (is_true, ~is_true)
        return combine(p, c), combine(q, c)

    def set_(a: Array, b: Array, c: Array | None = None) -> Array:
        is_true = combine(compare(a, b), c)
        if is_float(result_type):
            return round_to(is_true.astype(np.float64), 0.0, result_type)
        if is_true.ndim == 2:
            return pack(np.where(is_true, 0xFFFF, 0).astype(np.uint16), result_type)
        return np.where(is_true, -1, 0).astype(DTYPES[result_type])

    if op.name == "setp":  # `p|q`; a single destination takes the first
        return AluOperation(("pred", "pred"), sources, setp)
    return AluOperation((result_type,), sources, set_)


def set_results(t: str) -> tuple[str, ...]:
    """List the types that set stores of a comparison of a type."""
    if t.endswith("x2"):
        return t, "u32", "s32"
    if t in ("f16", "bf16"):
        return "u16", "s16", "u32", "s32", "bf16", *["f16"] * (t == "f16")
    return "u32", "s32", "f32", "f16", "bf16"


@operation("setp", "set", floating=False)
def _compare(op: Opcode) -> AluOperation:
    compare = COMPARISONS[op.choice(*COMPARISONS)]
    t = op.modifiers.pop()
    if t not in (*INTEGERS, *BITS):
        raise UnknownOpcode(op.text)
    return compare_operation(op, op.type(*set_results(t)) if op.name == "set" else "", t, compare)


@operation("selp")
def _select(op: Opcode) -> AluOperation:
    t = op.type()
    bits = f"b{bits_of(t)}" if t[0] != "f" else t
    return AluOperation((bits,), (bits, bits, "pred"), lambda a, b, p: np.where(p, a, b))


@operation("slct")
def _select_by_sign(op: Opcode) -> AluOperation:
    ftz, t, test = op.flag("ftz"), op.type(), op.type("s32", "f32")
    if ftz and test == "s32":
        raise UnknownOpcode(op.text)
    return AluOperation((t,), (t, t, test), lambda a, b, c: np.where((flush(c, test) if ftz else c) >= 0, a, b))
