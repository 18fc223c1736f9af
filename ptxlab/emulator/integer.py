"""Integer arithmetic, bit fields, logic, comparison, selection and moves."""

from __future__ import annotations

from functools import cache

import numpy as np

from ptxlab.emulator.alu import Form, Opcode, UnknownOpcode, operation
from ptxlab.emulator.types import DTYPES, Array, bits_of, is_signed, limits

INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")
BITS = ("b16", "b32", "b64")
WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}


# Add, subtract, multiply


@operation("add", "sub", "addc", "subc", floating=False)
def _add(op: Opcode) -> Form:
    carry_in, carry_out, saturate = op.name.endswith("c"), op.flag("cc"), op.flag("sat")
    subtract = op.name.startswith("sub")
    t = op.type(*INTEGERS, "u16x2", "s16x2")
    if t.endswith("x2"):
        return Form((t,), (t, t), lambda a, b: _by_halves(np.subtract if subtract else np.add, a, b))
    if saturate:
        low, high = limits(t)
        wide = np.subtract if subtract else np.add
        return Form((t,), (t, t), lambda a, b: wide(a, b, dtype=np.int64).clip(low, high))
    if not carry_in and not carry_out:
        return Form((t,), (t, t), np.subtract if subtract else np.add)

    def with_carry(a: Array, b: Array, carry: Array | None = None) -> tuple[Array, Array] | Array:
        # a - b is a + ~b + 1, and the flag that goes in and out of a subtraction is the borrow
        result, extra = (a - b, a < b) if subtract else (a + b, a + b < a)
        if carry is not None:
            more = result - carry if subtract else result + carry
            extra = extra | (more > result if subtract else more < result)
            result = more
        return (result, extra) if carry_out else result

    unsigned = t.replace("s", "u")
    ins, outs = (unsigned, unsigned), (unsigned,)
    return Form((*outs, "cc") if carry_out else outs, (*ins, "cc") if carry_in else ins, with_carry)


def _by_halves(function: np.ufunc, a: Array, b: Array) -> Array:
    low = function(a, b) & np.uint32(0xFFFF)
    high = function(a & np.uint32(0xFFFF0000), b & np.uint32(0xFFFF0000))
    return low | high & np.uint32(0xFFFF0000)


def multiply_high(a: Array, b: Array) -> Array:
    """Upper half of the double-width product of two integer arrays of one dtype."""
    bits = a.dtype.itemsize * 8
    if bits < 64:
        wide = f"{a.dtype.kind}{bits // 4}"
        return (a.astype(wide) * b.astype(wide) >> bits).astype(a.dtype)
    x, y, half, mask = a.view(np.uint64), b.view(np.uint64), np.uint64(32), np.uint64(0xFFFFFFFF)
    low, mid = (x & mask) * (y & mask), (x >> half) * (y & mask)
    mid2, high = (x & mask) * (y >> half), (x >> half) * (y >> half)
    carry = ((low >> half) + (mid & mask) + (mid2 & mask)) >> half
    high = high + (mid >> half) + (mid2 >> half) + carry
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, y, 0).astype(np.uint64) - np.where(b < 0, x, 0).astype(np.uint64)
    return high.view(a.dtype)


def _product(op: Opcode) -> tuple[str, str, object]:
    """(source type, result type, function) of mul, mul24 and their multiply-adds."""
    part = op.choice("lo", "hi", "wide", default="lo" if "24" in op.name else None)
    if "24" in op.name:
        t = op.type("u32", "s32")
        shift = np.array([8], DTYPES[t])

        def product24(a: Array, b: Array) -> Array:
            # the low 24 bits of each operand, extended; .hi is bits 47..16 of the product
            wide = "i8" if is_signed(t) else "u8"
            full = (a << shift >> shift).astype(wide) * (b << shift >> shift).astype(wide)
            return (full >> (16 if part == "hi" else 0)).astype(DTYPES[t])

        return t, t, product24
    t = op.type(*INTEGERS)
    if part == "wide":
        if t not in WIDER:
            raise UnknownOpcode(op.text)
        wide = DTYPES[WIDER[t]]
        return t, WIDER[t], lambda a, b: np.multiply(a, b, dtype=wide)
    return t, t, np.multiply if part == "lo" else multiply_high


@operation("mul", "mul24", floating=False)
def _mul(op: Opcode) -> Form:
    t, result, product = _product(op)
    return Form((result,), (t, t), product)  # type: ignore[arg-type]


@operation("mad", "mad24", "madc", floating=False)
def _mad(op: Opcode) -> Form:
    carry_in, carry_out, saturate = op.name == "madc", op.flag("cc"), op.flag("sat")
    t, result, product = _product(op)
    low, high = limits(result)

    def mad(a: Array, b: Array, c: Array, carry: Array | None = None) -> Array | tuple[Array, Array]:
        p = product(a, b)  # type: ignore[operator]
        if saturate:
            return np.add(p, c, dtype=np.int64).clip(low, high)
        total = p + c
        if carry is None and not carry_out:
            return total
        unsigned = DTYPES[result.replace("s", "u")]
        p, total = np.broadcast_arrays(p.view(unsigned), total.view(unsigned))
        extra = total < p
        if carry is not None:
            more = total + carry
            extra, total = extra | (more < total), more
        return (total, extra) if carry_out else total

    sources = (t, t, result, "cc") if carry_in else (t, t, result)
    return Form((result, "cc") if carry_out else (result,), sources, mad)


@operation("sad", floating=False)
def _sad(op: Opcode) -> Form:
    t = op.type(*INTEGERS)
    unsigned = t.replace("s", "u")
    dtype = DTYPES[unsigned]
    return Form((unsigned,), (t, t, unsigned), lambda a, b, c: c + (np.maximum(a, b) - np.minimum(a, b)).view(dtype))


@operation("dp4a", "dp2a", floating=False)
def _dot(op: Opcode) -> Form:
    half = op.choice("lo", "hi") if op.name == "dp2a" else ""
    ta, tb = op.type("u32", "s32"), op.type("u32", "s32")
    result = "s32" if "s32" in (ta, tb) else "u32"

    def fields(x: Array, bits: int, signed: bool) -> Array:
        return np.ascontiguousarray(x).view(f"{'i' if signed else 'u'}{bits // 8}").reshape(len(x), -1).astype(np.int64)

    def dot(a: Array, b: Array, c: Array) -> Array:
        left, right = fields(a, 16 if half else 8, ta == "s32"), fields(b, 8, tb == "s32")
        right = {"": right, "lo": right[:, :2], "hi": right[:, 2:]}[half]
        return ((left * right).sum(axis=1) + c).astype(DTYPES[result])

    return Form((result,), (ta, tb, result), dot)


# Divide, compare, extremes


@operation("div", "rem", floating=False)
def _div(op: Opcode) -> Form:
    t = op.type(*INTEGERS)
    remainder, unsigned = op.name == "rem", DTYPES[t.replace("s", "u")]

    def divide(a: Array, b: Array) -> Array:
        # truncation towards zero, on magnitudes; NVIDIA GPUs give all ones, or the dividend, for a divisor of zero
        x, y = (np.abs(a).view(unsigned), np.abs(b).view(unsigned)) if is_signed(t) else (a, b)
        safe = np.where(y == 0, unsigned.type(1), y)
        result = x % safe if remainder else x // safe
        if is_signed(t):
            negative = (a < 0) if remainder else (a < 0) != (b < 0)
            result = np.where(negative, np.negative(result), result)
        return np.where(y == 0, a.view(unsigned) if remainder else ~unsigned.type(0), result)

    return Form((t.replace("s", "u"),), (t, t), divide)


@operation("min", "max", floating=False)
def _extreme(op: Opcode) -> Form:
    function = np.minimum if op.name == "min" else np.maximum
    relu = op.flag("relu")
    t = op.type(*INTEGERS, "u16x2", "s16x2")

    def extreme(a: Array, b: Array) -> Array:
        if t.endswith("x2"):
            half = "i2" if t == "s16x2" else "u2"
            a, b = (x.view(half).reshape(-1, 2) for x in np.broadcast_arrays(a, b))
        result = function(a, b)
        result = np.maximum(result, 0) if relu else result
        return np.ascontiguousarray(result).view(np.uint32)[:, 0] if t.endswith("x2") else result

    return Form((t,), (t, t), extreme)


@operation("abs", "neg", floating=False)
def _negate(op: Opcode) -> Form:
    t = op.type("s16", "s32", "s64")
    return Form((t,), (t,), np.abs if op.name == "abs" else np.negative)


COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def compare_form(op: Opcode, t: str, sources: tuple[str, str], compare) -> Form:
    """Form of setp and set: compare, combine with a predicate where the opcode says so, store one or two results."""
    combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    name = op.choice(*combine, default="")
    if op.name == "setp":
        out: tuple[str, ...] = ("pred", "pred")  # `p|q`; a single destination takes the first

        def setp(a: Array, b: Array, c: Array | None = None) -> tuple[Array, Array]:
            result = compare(a, b)
            other = ~result
            return (result, other) if c is None else (combine[name](result, c), combine[name](other, c))

        return Form(out, (*sources, "pred") if name else sources, setp)

    def set_(a: Array, b: Array, c: Array | None = None) -> Array:
        result = compare(a, b) if c is None else combine[name](compare(a, b), c)
        return result.astype(np.float32) if t == "f32" else np.where(result, np.array(-1), 0).astype(np.int32)

    return Form((t if t == "f32" else "s32",), (*sources, "pred") if name else sources, set_)


@operation("setp", "set", floating=False)
def _compare(op: Opcode) -> Form:
    compare = COMPARISONS[op.choice(*COMPARISONS)]
    result = op.type("u32", "s32", "f32") if op.name == "set" else ""
    t = op.type(*INTEGERS, *BITS)
    return compare_form(op, result, (t, t), compare)


@operation("selp")
def _select(op: Opcode) -> Form:
    t = op.type()
    bits = f"b{bits_of(t)}" if t[0] != "f" else t
    return Form((bits,), (bits, bits, "pred"), lambda a, b, p: np.where(p, a, b))


@operation("slct")
def _select_by_sign(op: Opcode) -> Form:
    op.flag("ftz")
    t, test = op.type(), op.type("s32", "f32")
    return Form((t,), (t, t, test), lambda a, b, c: np.where(c >= 0, a, b))


# Logic and shifts


@operation("and", "or", "xor", "not", floating=False)
def _logic(op: Opcode) -> Form:
    t = op.type("pred", *BITS)
    if op.name == "not":
        return Form((t,), (t,), np.invert)
    return Form((t,), (t, t), {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op.name])


@operation("cnot", floating=False)
def _cnot(op: Opcode) -> Form:
    t = op.type(*BITS)
    return Form((t,), (t,), lambda a: a == 0)


@cache
def _two_input(table: int):
    """Function of (b, c) whose bit for b, c is `table >> (2b + c) & 1`."""
    return {
        0b0000: lambda b, c: b ^ b, 0b1111: lambda b, c: ~(b ^ b),
        0b1000: lambda b, c: b & c, 0b0111: lambda b, c: ~(b & c),
        0b1110: lambda b, c: b | c, 0b0001: lambda b, c: ~(b | c),
        0b0110: lambda b, c: b ^ c, 0b1001: lambda b, c: ~(b ^ c),
        0b1100: lambda b, c: b, 0b0011: lambda b, c: ~b,
        0b1010: lambda b, c: c, 0b0101: lambda b, c: ~c,
        0b0100: lambda b, c: b & ~c, 0b1011: lambda b, c: c | ~b,
        0b0010: lambda b, c: c & ~b, 0b1101: lambda b, c: b | ~c,
    }[table]  # fmt: skip


def lop3(a: Array, b: Array, c: Array, table: int) -> Array:
    """Any bitwise function of three arrays: the result's bit for bits a, b, c is `table >> (4a + 2b + c) & 1`."""
    if_clear, if_set = table & 15, table >> 4 & 15
    difference = if_clear ^ if_set
    if not difference:
        return _two_input(if_clear)(b, c)
    toggled = a if difference == 15 else a & _two_input(difference)(b, c)
    return toggled ^ _two_input(if_clear)(b, c) if if_clear else toggled


@operation("lop3", floating=False)
def _lop3(op: Opcode) -> Form:
    combine = op.choice("or", "and", default="")
    op.type("b32")
    if not combine:
        return Form(("b32",), ("b32", "b32", "b32", "b32"), lambda a, b, c, t: lop3(a, b, c, int(t[0])))

    def with_predicate(a: Array, b: Array, c: Array, table: Array, q: Array) -> tuple[Array, Array]:
        result = lop3(a, b, c, int(table[0]))
        return result, (result != 0) | q if combine == "or" else (result != 0) & q

    return Form(("b32", "pred"), ("b32", "b32", "b32", "b32", "pred"), with_predicate)


@operation("shl", "shr", floating=False)
def _shift(op: Opcode) -> Form:
    t = op.type(*BITS, *(INTEGERS if op.name == "shr" else ()))
    shift, dtype, top = np.left_shift if op.name == "shl" else np.right_shift, DTYPES[t], bits_of(t)
    # NumPy gives 0 (or the sign) for a count that reaches the width, as PTX wants
    return Form((t,), (t, "u32"), lambda a, b: shift(a, np.minimum(b, top).astype(dtype)))


@operation("shf", floating=False)
def _funnel(op: Opcode) -> Form:
    left, wrap = op.choice("l", "r") == "l", op.choice("wrap", "clamp") == "wrap"
    op.type("b32")

    def funnel(a: Array, b: Array, c: Array) -> Array:
        count = (c & np.uint32(31) if wrap else np.minimum(c, 32)).astype(np.uint64)
        pair = b.astype(np.uint64) << np.uint64(32) | a
        shifted = (pair << count) >> np.uint64(32) if left else pair >> count
        return shifted.astype(np.uint32)

    return Form(("b32",), ("b32", "b32", "u32"), funnel)


# Bits


@operation("popc", "clz", "brev", "bfind", floating=False)
def _count(op: Opcode) -> Form:
    if op.name == "bfind":
        amount, t = op.flag("shiftamt"), op.type("u32", "u64", "s32", "s64")
    else:
        amount, t = False, op.type("b32", "b64")
    bits, unsigned = bits_of(t), f"u{bits_of(t)}"
    one = np.array([1], DTYPES[unsigned])

    def length(x: Array) -> Array:
        """Position of the highest set bit, plus one."""
        for shift in (1, 2, 4, 8, 16, 32)[: 5 if bits == 32 else 6]:
            x = x | x >> (one * shift).astype(x.dtype)
        return np.bitwise_count(x) if hasattr(np, "bitwise_count") else popcount(x)

    if op.name == "popc":
        return Form(("u32",), (t,), popcount)
    if op.name == "clz":
        return Form(("u32",), (t,), lambda a: bits - length(a).astype(np.uint32))
    if op.name == "brev":
        return Form((t,), (t,), reverse_bits)

    def find(a: Array) -> Array:
        value = np.where(a < 0, ~a, a).view(DTYPES[unsigned]) if is_signed(t) else a
        position = length(value).astype(np.int32) - 1
        return np.where(position >= 0, bits - 1 - position, position).astype(np.int32) if amount else position

    return Form(("s32",), (t,), find)


def popcount(x: Array) -> Array:
    """Number of set bits."""
    octets = np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1)
    return np.unpackbits(octets, axis=1).sum(axis=1, dtype=np.uint32)


def reverse_bits(x: Array) -> Array:
    """Bit 0 becomes the highest bit."""
    octets = np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1)
    flipped = np.packbits(np.unpackbits(octets, axis=1, bitorder="little")[:, ::-1], axis=1, bitorder="little")
    return flipped.view(x.dtype)[:, 0]


@operation("bfe", floating=False)
def _extract(op: Opcode) -> Form:
    t = op.type("u32", "u64", "s32", "s64")
    bits, dtype = bits_of(t), DTYPES[t]

    def extract(a: Array, b: Array, c: Array) -> Array:
        position, length = b & np.uint32(255), c & np.uint32(255)
        shifted = a >> np.minimum(position, bits).astype(dtype)
        spare = (bits - np.minimum(length, bits)).astype(dtype)
        field = np.where(length == 0, dtype.type(0), shifted << spare >> spare)
        if not is_signed(t):
            return field
        # beyond the operand's top bit, and nowhere else, its sign fills the field
        return np.where((position >= bits) & (length > 0), a >> dtype.type(bits - 1), field)

    return Form((t,), (t, "u32", "u32"), extract)


@operation("bfi", floating=False)
def _insert(op: Opcode) -> Form:
    t = op.type("b32", "b64")
    bits, dtype = bits_of(t), DTYPES[t]

    def insert(a: Array, b: Array, c: Array, d: Array) -> Array:
        position, length = (np.minimum(x & np.uint32(255), bits).astype(dtype) for x in (c, d))
        mask = ~(~dtype.type(0) << length) << position
        return (b & ~mask) | (a << position & mask)

    return Form((t,), (t, t, "u32", "u32"), insert)


@operation("bmsk", floating=False)
def _mask(op: Opcode) -> Form:
    wrap = op.choice("clamp", "wrap") == "wrap"
    op.type("b32")

    def mask(a: Array, b: Array) -> Array:
        position, length = ((x & np.uint32(31) if wrap else np.minimum(x, 32)).astype(np.uint64) for x in (a, b))
        return ((np.uint64(1) << length) - np.uint64(1) << position).astype(np.uint32)

    return Form(("b32",), ("u32", "u32"), mask)


@operation("szext", floating=False)
def _extend(op: Opcode) -> Form:
    wrap, t = op.choice("clamp", "wrap") == "wrap", op.type("u32", "s32")
    dtype = DTYPES[t]

    def extend(a: Array, b: Array) -> Array:
        kept = b & np.uint32(31) if wrap else np.minimum(b, 32)
        spare = (32 - kept).astype(dtype)
        return a << spare >> spare if t == "u32" else np.where(kept == 0, 0, a << spare >> spare)

    return Form((t,), (t, "u32"), extend)


@operation("prmt", floating=False)
def _permute(op: Opcode) -> Form:
    op.type("b32")
    mode = op.choice("f4e", "b4e", "rc8", "ecl", "ecr", "rc16", default="")
    special = {
        "f4e": [0x3210, 0x4321, 0x5432, 0x6543], "b4e": [0x5670, 0x6701, 0x7012, 0x0123],
        "rc8": [0x0000, 0x1111, 0x2222, 0x3333], "ecl": [0x3210, 0x3211, 0x3222, 0x3333],
        "ecr": [0x0000, 0x1110, 0x2210, 0x3210], "rc16": [0x1010, 0x3232, 0x1010, 0x3232],
    }  # fmt: skip

    def permute(a: Array, b: Array, c: Array) -> Array:
        if mode:
            c = np.array(special[mode], np.uint32)[c & np.uint32(3)]
        a, b = np.broadcast_arrays(a, b)
        pool = np.stack((a, b), axis=1).view(np.uint8)
        result = np.empty((max(len(a), len(c)), 4), np.uint8)
        for byte in range(4):
            nibble = c >> np.uint32(4 * byte)
            which = (nibble & np.uint32(7)).astype(np.intp)
            taken = pool[:, which[0]] if len(which) == 1 else pool[np.arange(len(pool)) % len(pool), which]
            replicate = (nibble & np.uint32(8)) != 0
            if replicate.any():  # the byte's sign instead of the byte
                taken = np.where(replicate, (taken.view(np.int8) >> 7).view(np.uint8), taken)
            result[:, byte] = taken
        return result.view(np.uint32)[:, 0]

    return Form(("b32",), ("b32", "b32", "b32"), permute)
