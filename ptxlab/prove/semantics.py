"""Semantics of each instruction on bitvectors: the symbolic counterpart of `emulator.ops`.

Which instruction it is (its form, its operands' types, what its selectors name) is the emulator's to say:
`typed_operands`, `SimdForm`, `ScalarForm`. What that computes is written here a second time and shares no function with
the emulator: tests hold the one against the other, and both against vectors of a GPU. Sources come as z3 bitvectors of
their type's width (Bool for a predicate and the carry flag), so do results. An opcode that is not here is refused where
it stands.
"""

from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import z3

from ptxlab.emulator.front.opcode import Opcode, OpcodeTable, UnknownOpcode
from ptxlab.emulator.front.types import bits_of, is_float, is_signed, limits
from ptxlab.emulator.ops.rounding import CANONICAL_NAN
from ptxlab.emulator.ops.video import SCALAR_NAMES, SIMD_NAMES, ScalarForm, SimdForm
from ptxlab.prove.bitvectors import (
    SORTS,
    Bits,
    as_float,
    clamp,
    concatenate_fields,
    constant,
    extend,
    float_bits,
    split_fields,
)

Compute = Callable[..., Any]
_TABLE = OpcodeTable[Compute]()
_operation = _TABLE.enter


@cache
def computation(text: str, selectors: tuple[str, ...] = ()) -> Compute:
    """Return the function of an opcode such as "mad.lo.u32" with its operands' selectors.

    Raises `UnknownOpcode` if it is not modelled.
    """
    return _TABLE.find(text, selectors)


def _extreme_of(smaller: bool, signed: bool) -> Compute:
    is_less = (lambda a, b: a < b) if signed else z3.ULT
    return lambda a, b: z3.If(is_less(a, b) == smaller, a, b)


def _by_halves(compute: Compute) -> Compute:
    return lambda *sources: concatenate_fields(
        [compute(*parts) for parts in zip(*(split_fields(s, 16) for s in sources), strict=True)]
    )


# Add, subtract, multiply


@_operation("add", "sub", "addc", "subc", floating=False)
def _add(op: Opcode) -> Compute:
    carry_in, carry_out, saturate = op.name.endswith("c"), op.flag("cc"), op.flag("sat")
    subtracts, t = op.name.startswith("sub"), op.type()

    def wide(a: Bits, b: Bits) -> Bits:
        return a - b if subtracts else a + b

    if t.endswith("x2"):
        return _by_halves(wide)
    bits, (low, high) = bits_of(t), limits(t)
    if saturate:
        return lambda a, b: extend(
            clamp(wide(extend(a, bits + 1, True), extend(b, bits + 1, True)), low, high), bits, True
        )
    if not carry_in and not carry_out:
        return wide

    def with_carry(a: Bits, b: Bits, carry: Bits | None = None) -> Any:
        total = wide(z3.ZeroExt(1, a), z3.ZeroExt(1, b))
        if carry is not None:
            total = wide(total, z3.If(carry, constant(1, bits + 1), constant(0, bits + 1)))
        word = z3.Extract(bits - 1, 0, total)
        return (word, z3.Extract(bits, bits, total) == 1) if carry_out else word

    return with_carry


def _product(op: Opcode) -> tuple[str, Compute]:
    """Return (result type, function) of mul, mul24 and their multiply-adds."""
    is_24_bit = "24" in op.name
    part, t = op.choice("lo", "hi", "wide", default="lo" if is_24_bit else None), op.type()
    bits, signed = bits_of(t), is_signed(t)

    def product(a: Bits, b: Bits) -> Bits:
        if is_24_bit:
            a, b = z3.Extract(23, 0, a), z3.Extract(23, 0, b)
        if part == "lo":
            return extend(a, bits, signed) * extend(b, bits, signed)
        full_product = extend(a, 2 * bits, signed) * extend(b, 2 * bits, signed)
        shift = 16 if is_24_bit else bits
        return full_product if part == "wide" else z3.Extract(shift + bits - 1, shift, full_product)

    return f"{t[0]}{2 * bits}" if part == "wide" else t, product


@_operation("mul", "mul24", floating=False)
def _mul(op: Opcode) -> Compute:
    return _product(op)[1]


@_operation("mad", "mad24", "madc", floating=False)
def _mad(op: Opcode) -> Compute:
    carry_in, carry_out, saturate = op.name == "madc", op.flag("cc"), op.flag("sat")
    result_type, product = _product(op)
    bits, (low, high) = bits_of(result_type), limits(result_type)

    def mad(a: Bits, b: Bits, c: Bits, carry: Bits | None = None) -> Any:
        p = product(a, b)
        if saturate:
            return extend(clamp(z3.SignExt(1, p) + z3.SignExt(1, c), low, high), bits, True)
        if carry is None and not carry_out:
            return p + c
        total = z3.ZeroExt(1, p) + z3.ZeroExt(1, c)
        if carry_in:
            total = total + z3.If(carry, constant(1, bits + 1), constant(0, bits + 1))
        low_bits = z3.Extract(bits - 1, 0, total)
        return (low_bits, z3.Extract(bits, bits, total) == 1) if carry_out else low_bits

    return mad


@_operation("sad", floating=False)
def _sad(op: Opcode) -> Compute:
    t = op.type()
    larger_of, smaller_of = _extreme_of(False, is_signed(t)), _extreme_of(True, is_signed(t))
    return lambda a, b, c: c + larger_of(a, b) - smaller_of(a, b)


@_operation("dp4a", "dp2a", floating=False)
def _dot(op: Opcode) -> Compute:
    word_half = op.choice("lo", "hi") if op.name == "dp2a" else ""
    a_type, b_type = op.type(), op.type()

    def dot(a: Bits, b: Bits, c: Bits) -> Bits:
        left, right = split_fields(a, 16 if word_half else 8), split_fields(b, 8)
        right = {"": right, "lo": right[:2], "hi": right[2:]}[word_half]
        for x, y in zip(left, right, strict=True):
            c = c + extend(x, 32, a_type == "s32") * extend(y, 32, b_type == "s32")
        return c

    return dot


# Divide, compare, select


@_operation("div", "rem", floating=False)
def _div(op: Opcode) -> Compute:
    t, is_remainder = op.type(), op.name == "rem"
    # A divisor of 0 gives the dividend, or all ones, as GPUs do.
    unsigned_operation: Compute = z3.URem if is_remainder else z3.UDiv
    if not is_signed(t):
        return unsigned_operation

    def divide(a: Bits, b: Bits) -> Bits:
        size = unsigned_operation(z3.If(a < 0, -a, a), z3.If(b < 0, -b, b))
        signed = z3.If(a < 0 if is_remainder else z3.Xor(a < 0, b < 0), -size, size)
        return z3.If(b == 0, a if is_remainder else constant(-1, a.size()), signed)

    return divide


@_operation("min", "max", floating=False)
def _extreme(op: Opcode) -> Compute:
    relu, t = op.flag("relu"), op.type()
    extreme_of = _extreme_of(op.name == "min", is_signed(t))

    def clamp_extreme(a: Bits, b: Bits) -> Bits:
        selected_bits = extreme_of(a, b)
        return z3.If(selected_bits < 0, constant(0, selected_bits.size()), selected_bits) if relu else selected_bits

    return _by_halves(clamp_extreme) if t.endswith("x2") else clamp_extreme


@_operation("abs", "neg", floating=False)
def _negate(op: Opcode) -> Compute:
    op.type()
    return (lambda a: z3.If(a < 0, -a, a)) if op.name == "abs" else (lambda a: -a)


def _comparison(name: str, signed: bool) -> Compute:
    name = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(name, name)
    if name in ("eq", "ne"):
        return (lambda a, b: a == b) if name == "eq" else (lambda a, b: a != b)
    if signed:
        return {"lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
                "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b}[name]  # fmt: skip
    unsigned_comparisons: dict[str, Compute] = {"lt": z3.ULT, "le": z3.ULE, "gt": z3.UGT, "ge": z3.UGE}
    return unsigned_comparisons[name]


_COMBINE: dict[str, Compute] = {"and": z3.And, "or": z3.Or, "xor": z3.Xor}
_ORDER = ("eq", "ne", "lt", "le", "gt", "ge")


def _compare_with(op: Opcode, compare: Compute) -> Compute:
    """Build setp and set from a comparison of two sources."""
    name = op.choice(*_COMBINE, default="")

    def setp(a: Bits, b: Bits, c: Bits | None = None) -> tuple[Bits, Bits]:
        is_true = compare(a, b)
        pair = is_true, z3.Not(is_true)
        return pair if c is None else (_COMBINE[name](pair[0], c), _COMBINE[name](pair[1], c))

    if op.name == "setp":
        return setp
    true_bits = 0x3F800000 if op.type("u32", "s32", "f32") == "f32" else -1
    return lambda *sources: z3.If(setp(*sources)[0], constant(true_bits, 32), constant(0, 32))


@_operation("setp", "set", floating=False)
def _compare(op: Opcode) -> Compute:
    signed = is_signed(op.modifiers[-1])
    name = op.choice(*_ORDER, "lo", "ls", "hi", "hs")
    op.modifiers.pop()
    return _compare_with(op, _comparison(name, signed))


@_operation("selp")
def _select(op: Opcode) -> Compute:
    op.type()
    return lambda a, b, p: z3.If(p, a, b)


@_operation("slct")
def _select_by_sign(op: Opcode) -> Compute:
    op.type()
    if op.type() != "s32":
        raise UnknownOpcode(op.text)
    return lambda a, b, c: z3.If(c >= 0, a, b)


# Logic, shifts, bits


@_operation("and", "or", "xor", "not", "cnot", floating=False)
def _logic(op: Opcode) -> Compute:
    if op.name == "cnot":
        bits = bits_of(op.type())
        return lambda a: z3.If(a == 0, constant(1, bits), constant(0, bits))
    if op.type() == "pred":
        flags: dict[str, Compute] = {**_COMBINE, "not": z3.Not}
        return flags[op.name]
    words: dict[str, Compute] = {
        "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "not": lambda a: ~a,
    }  # fmt: skip
    return words[op.name]


@_operation("lop3", floating=False)
def _lop3(op: Opcode) -> Compute:
    op.type()

    def logic(a: Bits, b: Bits, c: Bits, table: Bits) -> Bits:
        """Combine the products of a, b and c or their complements that the table selects, each by its bit."""
        products = ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for i in range(8))
        selected_products = (product for i, product in enumerate(products) if table.as_long() >> i & 1)
        return reduce(lambda x, y: x | y, selected_products, constant(0, 32))

    return logic


@_operation("shl", "shr", floating=False)
def _shift(op: Opcode) -> Compute:
    t = op.type()
    bits, signed = bits_of(t), is_signed(t)

    def shift(a: Bits, count: Bits) -> Bits:  # a count beyond the width leaves 0, or the sign, in SMT-LIB as in PTX
        width = max(bits, 32)
        n, x = extend(count, width, False), extend(a, width, signed)
        return extend(x << n if op.name == "shl" else x >> n if signed else z3.LShR(x, n), bits, False)

    return shift


@_operation("shf", floating=False)
def _funnel(op: Opcode) -> Compute:
    shifts_left, wraps = op.choice("l", "r") == "l", op.choice("wrap", "clamp") == "wrap"
    op.type()

    def funnel(a: Bits, b: Bits, c: Bits) -> Bits:
        n = z3.ZeroExt(32, c & 31 if wraps else z3.If(z3.ULT(c, 32), c, constant(32, 32)))
        pair = z3.Concat(b, a)
        return z3.Extract(63, 32, pair << n) if shifts_left else z3.Extract(31, 0, z3.LShR(pair, n))

    return funnel


@_operation("popc", "clz", "brev", "bfind", floating=False)
def _count(op: Opcode) -> Compute:
    amount, t = op.flag("shiftamt"), op.type()
    bits = bits_of(t)

    def highest(a: Bits) -> Bits:  # its position, -1 if there is none
        return reduce(
            lambda position, i: z3.If(z3.Extract(i, i, a) == 1, constant(i, 32), position),
            range(bits),
            constant(-1, 32),
        )

    def find(a: Bits) -> Bits:
        position = highest(z3.If(a < 0, ~a, a) if is_signed(t) else a)
        return z3.If(position == -1, position, bits - 1 - position) if amount else position

    return {
        "popc": lambda a: reduce(lambda x, y: x + y, (z3.ZeroExt(31, bit) for bit in split_fields(a, 1))),
        "clz": lambda a: bits - 1 - highest(a),
        "brev": lambda a: concatenate_fields(split_fields(a, 1)[::-1]),
        "bfind": find,
    }[op.name]


@_operation("bfe", floating=False)
def _extract(op: Opcode) -> Compute:
    t = op.type()
    bits, signed = bits_of(t), is_signed(t)

    def at_most(x: Bits) -> Bits:  # the 32-bit form takes the low bytes
        x = x & 255 if bits == 32 else z3.ZeroExt(32, x)
        return z3.If(z3.ULT(x, bits), x, constant(bits, bits))

    def extract(a: Bits, b: Bits, c: Bits) -> Bits:
        position, length = at_most(b), at_most(c)
        spare_bits = bits - length
        if signed:  # a shift by all bits leaves the sign or 0
            return a >> position << spare_bits >> spare_bits
        return z3.LShR(z3.LShR(a, position) << spare_bits, spare_bits)

    return extract


@_operation("bfi", floating=False)
def _insert(op: Opcode) -> Compute:
    bits = bits_of(op.type())

    def at_most(x: Bits) -> Bits:
        low_byte = z3.ZeroExt(bits - 32, x & 255)
        return z3.If(z3.ULT(low_byte, bits), low_byte, constant(bits, bits))

    def insert(a: Bits, b: Bits, c: Bits, d: Bits) -> Bits:
        position, length = at_most(c), at_most(d)
        mask = ~(constant(-1, bits) << length) << position
        return (b & ~mask) | (a << position & mask)

    return insert


@_operation("bmsk", floating=False)
def _mask(op: Opcode) -> Compute:
    wraps = op.choice("clamp", "wrap") == "wrap"
    op.type()

    def mask(a: Bits, b: Bits) -> Bits:
        position, length = (x & 31 if wraps else x for x in (a, b))
        return ~(constant(-1, 32) << length) << position

    return mask


@_operation("szext", floating=False)
def _extend(op: Opcode) -> Compute:
    wraps, t = op.choice("clamp", "wrap") == "wrap", op.type()

    def sign_or_zero_extend(a: Bits, b: Bits) -> Bits:
        spare_bits = 32 - (b & 31 if wraps else z3.If(z3.ULT(b, 32), b, constant(32, 32)))
        if t == "u32":
            return z3.LShR(a << spare_bits, spare_bits)
        return z3.If(spare_bits == 32, constant(0, 32), a << spare_bits >> spare_bits)

    return sign_or_zero_extend


_PERMUTATIONS = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543), "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333), "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210), "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}  # fmt: skip


@_operation("prmt", floating=False)
def _permute(op: Opcode) -> Compute:
    op.type()
    mode = op.choice(*_PERMUTATIONS, default="")

    def permute(a: Bits, b: Bits, c: Bits) -> Bits:
        if mode:
            c = _pick(c & 3, [constant(word, 32) for word in _PERMUTATIONS[mode]])
        pool = split_fields(a, 8) + split_fields(b, 8)
        octets = []
        for shift in (0, 4, 8, 12):
            byte = _pick(z3.Extract(shift + 2, shift, c), pool)
            octets.append(z3.If(z3.Extract(shift + 3, shift + 3, c) == 1, byte >> 7, byte))
        return concatenate_fields(octets)

    return permute


def _pick(index: Bits, choices: list[Bits]) -> Bits:
    """Select the item of that index, which must be in range."""
    index = z3.simplify(index)
    if z3.is_bv_value(index):
        return choices[index.as_long()]
    return reduce(lambda selected, i: z3.If(index == i, choices[i], selected), range(len(choices) - 1), choices[-1])


# Video


def _average(a: Bits, b: Bits) -> Bits:
    total = a + b
    return z3.If(total >= 0, total + 1, total) >> 1  # halves are rounded away from zero


def _distance(a: Bits, b: Bits) -> Bits:
    return z3.If(a < b, b - a, a - b)


_VIDEO: dict[str, Compute] = {
    "vadd": lambda a, b: a + b,
    "vsub": lambda a, b: a - b,
    "vavrg": _average,
    "vabsdiff": _distance,
    "vmin": _extreme_of(True, True),
    "vmax": _extreme_of(False, True),
}


def _lane_function(function: str, wide: int) -> Compute:
    """Return a function of `_VIDEO`, or a comparison that returns 1 or 0."""
    if function in _VIDEO:
        return _VIDEO[function]
    compare = _comparison(function, signed=True)
    return lambda a, b: z3.If(compare(a, b), constant(1, wide), constant(0, wide))


@_operation(*SIMD_NAMES, floating=False)
def _simd(op: Opcode) -> Compute:
    form, wide = SimdForm.of(op), 34
    bits, function = 32 // form.count, _lane_function(form.function, wide)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if form.signed else (0, (1 << bits) - 1)

    def simd(a: Bits, b: Bits, c: Bits) -> Bits:
        pool, lanes, total = split_fields(a, bits) + split_fields(b, bits), split_fields(c, bits), c
        for lane in (lane for lane in range(form.count) if form.is_computed[lane]):
            x, y = (
                extend(pool[picks[lane]], wide, signed)
                for picks, signed in zip(form.picks, form.sources_signed, strict=True)
            )
            number = function(x, y)
            number = clamp(number, low, high) if form.saturate else number
            lanes[lane] = z3.Extract(bits - 1, 0, number)
            total = total + z3.Extract(31, 0, number)
        return total if form.accumulate else concatenate_fields(lanes)

    return simd


@_operation(*SCALAR_NAMES, floating=False)
def _scalar(op: Opcode) -> Compute:
    form, wide = ScalarForm.of(op), 64  # bits that a GPU compares, as signed

    def function(a: Bits, b: Bits) -> Bits:
        if form.function in ("vshl", "vshr"):
            count = b & 31 if form.wrap else z3.If(b < 32, b, constant(32, wide))
            return a << count if form.function == "vshl" else a >> count
        return _lane_function(form.function, wide)(a, b)

    def scalar(a: Bits, b: Bits, c: Bits | None = None) -> Bits:
        x, y = (
            extend(split_fields(word, bits)[part], wide, signed)
            for word, (bits, part), signed in zip((a, b), form.parts, form.sources_signed, strict=True)
        )
        number, (size, position) = function(x, y), form.target or (32, 0)
        if form.saturate and form.signed:
            number = clamp(number, -(1 << size - 1), (1 << size - 1) - 1)
        elif form.saturate:  # as GPUs have it: an unsigned word has no upper bound, its parts have no lower one
            top = (1 << size) - 1
            number = clamp(number, 0, (1 << 63) - 1) if size == 32 else clamp(number & 0xFFFFFFFF, 0, top)
        if form.target:
            fields = split_fields(c, size)
            fields[position] = z3.Extract(size - 1, 0, number)
            return concatenate_fields(fields)
        if form.second:
            third = extend(c, wide, form.signed)
            if form.function in ("vadd", "vsub"):  # the others pass their result on with all its bits
                number = extend(z3.Extract(31, 0, number), wide, form.signed)
            extremes = {"min": _extreme_of(True, True), "max": _extreme_of(False, True)}
            number = number + third if form.second == "add" else extremes[form.second](number, third)
        return z3.Extract(31, 0, number)

    return scalar


# Floats: IEEE 754 as z3 has it, with the hardware's NaN

_MODES: dict[str, Any] = {"rn": z3.RNE, "rz": z3.RTZ, "rm": z3.RTN, "rp": z3.RTP}
_INTEGRAL = {"rni": z3.RNE, "rzi": z3.RTZ, "rmi": z3.RTN, "rpi": z3.RTP}


def _on_floats(type_name: str, compute: Compute) -> Compute:
    element = type_name.removesuffix("x2")

    def compute_bits(*sources: Bits) -> Bits:
        return float_bits(compute(*(as_float(s, element) for s in sources)), element)

    return _by_halves(compute_bits) if type_name.endswith("x2") else compute_bits


@_operation("add", "sub", "mul", "fma", floating=True)
def _arithmetic(op: Opcode) -> Compute:
    mode, t = _MODES[op.choice(*_MODES, default="rn")](), op.type(*SORTS, "f16x2", "bf16x2")
    function = {"add": z3.fpAdd, "sub": z3.fpSub, "mul": z3.fpMul, "fma": z3.fpFMA}[op.name]
    return _on_floats(t, lambda *numbers: function(mode, *numbers))


@_operation("abs", "neg", floating=True)
def _sign(op: Opcode) -> Compute:
    t = op.type()
    bits = bits_of(t)
    sign = 1 << bits - 1 | (0x8000 if t.endswith("x2") else 0)
    return (lambda x: x & ~constant(sign, bits)) if op.name == "abs" else (lambda x: x ^ constant(sign, bits))


@_operation("min", "max", floating=True)
def _extreme_of_floats(op: Opcode) -> Compute:
    propagates_nan, t = op.flag("NaN"), op.type(*SORTS, "f16x2", "bf16x2")
    element = t.removesuffix("x2")

    def extreme_bits(a: Bits, b: Bits) -> Bits:
        x, y = as_float(a, element), as_float(b, element)
        is_below = z3.Or(z3.fpLT(x, y), z3.And(z3.fpEQ(x, y), a < 0))  # -0 is below +0
        x_is_none, y_is_none = z3.fpIsNaN(x), z3.fpIsNaN(y)
        nan = constant(CANONICAL_NAN[element], bits_of(element))
        extreme = z3.If(x_is_none, b, z3.If(y_is_none, a, z3.If(is_below == (op.name == "min"), a, b)))
        return z3.If((z3.Or if propagates_nan else z3.And)(x_is_none, y_is_none), nan, extreme)

    return _by_halves(extreme_bits) if t.endswith("x2") else lambda *numbers: reduce(extreme_bits, numbers)


@_operation("copysign", floating=True)
def _copysign(op: Opcode) -> Compute:
    sign = constant(0x80000000, bits_of(op.type("f32")))
    return lambda a, b: (a & sign) | (b & ~sign)


@_operation("setp", "set", floating=True)
def _compare_floats(op: Opcode) -> Compute:
    t, name = op.modifiers.pop(), op.choice(*_ORDER, *(f"{n}u" for n in _ORDER), "num", "nan")
    if t not in SORTS or any(m in op.modifiers for m in SORTS if m != "f32"):
        raise UnknownOpcode(op.text)
    ordered_comparisons = {"lt": z3.fpLT, "le": z3.fpLEQ, "gt": z3.fpGT, "ge": z3.fpGEQ, "eq": z3.fpEQ}

    def compare(a: Bits, b: Bits) -> Bits:
        x, y = as_float(a, t), as_float(b, t)
        is_unordered = z3.Or(z3.fpIsNaN(x), z3.fpIsNaN(y))
        if name in ("num", "nan"):
            return is_unordered if name == "nan" else z3.Not(is_unordered)
        base = name[:-1] if name.endswith("u") else name
        is_true = z3.Not(z3.fpEQ(x, y)) if base == "ne" else ordered_comparisons[base](x, y)
        return z3.Or(is_true, is_unordered) if name.endswith("u") else z3.And(is_true, z3.Not(is_unordered))

    return _compare_with(op, compare)


# Conversions


@_operation("cvt")
def _convert(op: Opcode) -> Compute:
    if op.flag("pack"):
        return _pack(op)
    mode, saturate = op.choice(*_MODES, *_INTEGRAL, default=""), op.flag("sat")
    target, source = op.type(), op.type()
    bits, signed = bits_of(target), is_signed(source)
    if is_float(source) or is_float(target):
        if saturate or target not in SORTS or (is_float(source) and source not in SORTS):
            raise UnknownOpcode(op.text)
        if mode in _INTEGRAL:
            if source != target:
                raise UnknownOpcode(op.text)
            rounding_mode = _INTEGRAL[mode]()
            return lambda a: float_bits(z3.fpRoundToIntegral(rounding_mode, as_float(a, target)), target)
        target_sort, rounding = z3.FPSort(*SORTS[target]), _MODES[mode or "rn"]()
        if is_float(source):
            if source == target:
                return lambda a: a
            return lambda a: float_bits(z3.fpFPToFP(rounding, as_float(a, source), target_sort), target)
        convert = z3.fpSignedToFP if signed else z3.fpUnsignedToFP
        return lambda a: float_bits(convert(rounding, a, target_sort), target)
    if not saturate:
        return lambda a: extend(a, bits, signed)
    wide, (low, high) = max(bits, bits_of(source)) + 1, limits(target)
    return lambda a: extend(clamp(extend(a, wide, signed), low, high), bits, True)


def _pack(op: Opcode) -> Compute:
    op.flag("sat")
    narrow = op.choice("u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2")
    op.type("s32")
    bits = int(narrow[1:])
    lowest, highest = (-(1 << bits - 1), (1 << bits - 1) - 1) if narrow[0] == "s" else (0, (1 << bits) - 1)
    if bits < 16:
        op.choice("b32")

    def pack(a: Bits, b: Bits, c: Bits | None = None) -> Bits:
        packed_fields = [z3.Extract(bits - 1, 0, clamp(x, lowest, highest)) for x in (b, a)]
        return concatenate_fields(packed_fields if c is None else [*packed_fields, z3.Extract(31 - 2 * bits, 0, c)])

    return pack
