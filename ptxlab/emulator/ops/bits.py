"""Logic, shifts, bit fields and permutations of bytes."""

from collections.abc import Callable
from functools import cache

import numpy as np

from ptxlab.emulator.front.opcode import Opcode
from ptxlab.emulator.front.types import DTYPES, Array, bits_of, is_signed
from ptxlab.emulator.ops.alu import COMBINE, AluOperation, operation
from ptxlab.emulator.ops.integer import BITS, INTEGERS

# Logic and shifts


@operation("and", "or", "xor", "not", floating=False)
def _logic(op: Opcode) -> AluOperation:
    t = op.type("pred", *BITS)
    if op.name == "not":
        return AluOperation((t,), (t,), np.invert)
    return AluOperation((t,), (t, t), COMBINE[op.name])


@operation("cnot", floating=False)
def _cnot(op: Opcode) -> AluOperation:
    t = op.type(*BITS)
    return AluOperation((t,), (t,), lambda a: a == 0)


@cache
def _two_input(table: int) -> Callable[[Array, Array], Array]:
    """Return the function of (b, c) whose bit for b, c is `table >> (2b + c) & 1`."""
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
    """Compute any bitwise function of three arrays: the bit for bits a, b, c is `table >> (4a + 2b + c) & 1`."""
    if_clear, if_set = table & 15, table >> 4 & 15
    difference = if_clear ^ if_set
    if not difference:
        return _two_input(if_clear)(b, c)
    toggled = a if difference == 15 else a & _two_input(difference)(b, c)
    return toggled ^ _two_input(if_clear)(b, c) if if_clear else toggled


@operation("lop3", floating=False)
def _lop3(op: Opcode) -> AluOperation:
    combine = op.choice("or", "and", default="")
    op.type("b32")
    if not combine:
        return AluOperation(("b32",), ("b32", "b32", "b32", "b32"), lambda a, b, c, t: lop3(a, b, c, int(t[0])))

    def with_predicate(a: Array, b: Array, c: Array, table: Array, q: Array) -> tuple[Array, Array]:
        combined_bits = lop3(a, b, c, int(table[0]))
        return combined_bits, (combined_bits != 0) | q if combine == "or" else (combined_bits != 0) & q

    return AluOperation(("b32", "pred"), ("b32", "b32", "b32", "b32", "pred"), with_predicate)


@operation("shl", "shr", floating=False)
def _shift(op: Opcode) -> AluOperation:
    t = op.type(*BITS, *(INTEGERS if op.name == "shr" else ()))
    shift, dtype, top = np.left_shift if op.name == "shl" else np.right_shift, DTYPES[t], bits_of(t)
    # NumPy gives 0 (or the sign) for a count that reaches the width, as PTX wants
    return AluOperation((t,), (t, "u32"), lambda a, b: shift(a, np.minimum(b, top).astype(dtype)))


@operation("shf", floating=False)
def _funnel(op: Opcode) -> AluOperation:
    shifts_left, wraps = op.choice("l", "r") == "l", op.choice("wrap", "clamp") == "wrap"
    op.type("b32")

    def funnel(a: Array, b: Array, c: Array) -> Array:
        count = (c & np.uint32(31) if wraps else np.minimum(c, 32)).astype(np.uint64)
        pair = b.astype(np.uint64) << np.uint64(32) | a
        shifted_pair = (pair << count) >> np.uint64(32) if shifts_left else pair >> count
        return shifted_pair.astype(np.uint32)

    return AluOperation(("b32",), ("b32", "b32", "u32"), funnel)


# Bits


@operation("fns", floating=False)
def _nth_set(op: Opcode) -> AluOperation:
    op.type("b32")

    def position(mask: Array, base: Array, offset: Array) -> Array:
        """Find the n-th set bit, counted from a bit upwards or downwards; all ones if there is none."""
        bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8).reshape(-1, 4), axis=1, bitorder="little") == 1
        indices, base, offset = np.arange(32), base[:, None], offset[:, None].astype(np.int64)
        is_set_above, is_set_below = bits & (indices >= base), bits & (indices <= base)
        is_nth_up = is_set_above & (is_set_above.cumsum(axis=1) == offset)
        is_nth_down = is_set_below & (is_set_below[:, ::-1].cumsum(axis=1)[:, ::-1] == -offset)
        is_nth = np.where(offset > 0, is_nth_up, np.where(offset < 0, is_nth_down, is_set_above & is_set_below))
        return np.where(is_nth.any(axis=1), is_nth.argmax(axis=1), 0xFFFFFFFF)

    return AluOperation(("b32",), ("b32", "b32", "s32"), position)


@operation("popc", "clz", "brev", "bfind", floating=False)
def _count(op: Opcode) -> AluOperation:
    if op.name == "bfind":
        wants_amount, t = op.flag("shiftamt"), op.type("u32", "u64", "s32", "s64")
    else:
        wants_amount, t = False, op.type("b32", "b64")
    bits, unsigned = bits_of(t), f"u{bits_of(t)}"
    one = np.array([1], DTYPES[unsigned])

    def length(x: Array) -> Array:
        """Find the position of the highest set bit, plus one."""
        for shift in (1, 2, 4, 8, 16, 32)[: 5 if bits == 32 else 6]:
            x = x | x >> (one * shift).astype(x.dtype)
        return np.bitwise_count(x) if hasattr(np, "bitwise_count") else popcount(x)

    if op.name == "popc":
        return AluOperation(("u32",), (t,), popcount)
    if op.name == "clz":
        return AluOperation(("u32",), (t,), lambda a: bits - length(a).astype(np.uint32))
    if op.name == "brev":
        return AluOperation((t,), (t,), reverse_bits)

    def find(a: Array) -> Array:
        magnitude = np.where(a < 0, ~a, a).view(DTYPES[unsigned]) if is_signed(t) else a
        position = length(magnitude).astype(np.int32) - 1
        return np.where(position >= 0, bits - 1 - position, position).astype(np.int32) if wants_amount else position

    return AluOperation(("s32",), (t,), find)


def popcount(x: Array) -> Array:
    """Count the set bits of each value."""
    octets = np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1)
    counts: Array = np.unpackbits(octets, axis=1).sum(axis=1, dtype=np.uint32)
    return counts


def reverse_bits(x: Array) -> Array:
    """Reverse the order of the bits: bit 0 becomes the highest one."""
    octets = np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1)
    flipped_octets = np.packbits(np.unpackbits(octets, axis=1, bitorder="little")[:, ::-1], axis=1, bitorder="little")
    return flipped_octets.view(x.dtype)[:, 0]


@operation("bfe", floating=False)
def _extract(op: Opcode) -> AluOperation:
    t = op.type("u32", "u64", "s32", "s64")
    bits, dtype = bits_of(t), DTYPES[t]

    def extract(a: Array, b: Array, c: Array) -> Array:
        # the 32-bit form takes the low bytes; the 64-bit one, which GPUs put together from others, does not
        position, length = (b & np.uint32(255), c & np.uint32(255)) if bits == 32 else (b, c)
        shifted_field = a >> np.minimum(position, bits).astype(dtype)
        spare_bits = (bits - np.minimum(length, bits)).astype(dtype)
        field: Array = np.where(length == 0, dtype.type(0), shifted_field << spare_bits >> spare_bits)
        if not is_signed(t):
            return field
        # beyond the operand's top bit, and nowhere else, its sign fills the field
        return np.where((position >= bits) & (length > 0), a >> dtype.type(bits - 1), field)

    return AluOperation((t,), (t, "u32", "u32"), extract)


@operation("bfi", floating=False)
def _insert(op: Opcode) -> AluOperation:
    t = op.type("b32", "b64")
    bits, dtype = bits_of(t), DTYPES[t]

    def insert(a: Array, b: Array, c: Array, d: Array) -> Array:
        position, length = (np.minimum(x & np.uint32(255), bits).astype(dtype) for x in (c, d))
        mask = ~(~dtype.type(0) << length) << position
        inserted: Array = (b & ~mask) | (a << position & mask)
        return inserted

    return AluOperation((t,), (t, t, "u32", "u32"), insert)


@operation("bmsk", floating=False)
def _mask(op: Opcode) -> AluOperation:
    wraps = op.choice("clamp", "wrap") == "wrap"
    op.type("b32")

    def mask(a: Array, b: Array) -> Array:
        position, length = ((x & np.uint32(31) if wraps else np.minimum(x, 32)).astype(np.uint64) for x in (a, b))
        return ((np.uint64(1) << length) - np.uint64(1) << position).astype(np.uint32)

    return AluOperation(("b32",), ("u32", "u32"), mask)


@operation("szext", floating=False)
def _extend(op: Opcode) -> AluOperation:
    wraps, t = op.choice("clamp", "wrap") == "wrap", op.type("u32", "s32")
    dtype = DTYPES[t]

    def extend(a: Array, b: Array) -> Array:
        width = b & np.uint32(31) if wraps else np.minimum(b, 32)
        spare_bits = (32 - width).astype(dtype)
        return a << spare_bits >> spare_bits if t == "u32" else np.where(width == 0, 0, a << spare_bits >> spare_bits)

    return AluOperation((t,), (t, "u32"), extend)


@operation("prmt", floating=False)
def _permute(op: Opcode) -> AluOperation:
    op.type("b32")
    mode = op.choice("f4e", "b4e", "rc8", "ecl", "ecr", "rc16", default="")
    special_modes = {
        "f4e": [0x3210, 0x4321, 0x5432, 0x6543], "b4e": [0x5670, 0x6701, 0x7012, 0x0123],
        "rc8": [0x0000, 0x1111, 0x2222, 0x3333], "ecl": [0x3210, 0x3211, 0x3222, 0x3333],
        "ecr": [0x0000, 0x1110, 0x2210, 0x3210], "rc16": [0x1010, 0x3232, 0x1010, 0x3232],
    }  # fmt: skip

    def permute(a: Array, b: Array, c: Array) -> Array:
        if mode:
            c = np.array(special_modes[mode], np.uint32)[c & np.uint32(3)]
        a, b = np.broadcast_arrays(a, b)
        pool = np.stack((a, b), axis=1).view(np.uint8)
        permuted_bytes = np.empty((max(len(a), len(c)), 4), np.uint8)
        for byte in range(4):
            nibble = c >> np.uint32(4 * byte)
            index = (nibble & np.uint32(7)).astype(np.intp)
            chosen = pool[:, index[0]] if len(index) == 1 else pool[np.arange(len(pool)) % len(pool), index]
            replicates_sign = (nibble & np.uint32(8)) != 0
            if replicates_sign.any():  # the byte's sign instead of the byte
                chosen = np.where(replicates_sign, (chosen.view(np.int8) >> 7).view(np.uint8), chosen)
            permuted_bytes[:, byte] = chosen
        return permuted_bytes.view(np.uint32)[:, 0]

    return AluOperation(("b32",), ("b32", "b32", "b32"), permute)
