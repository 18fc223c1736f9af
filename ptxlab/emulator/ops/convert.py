"""Conversions: cvt between all integer and floating-point types, cvt.pack."""

import numpy as np

from ptxlab.emulator.front.opcode import Opcode, UnknownOpcode
from ptxlab.emulator.front.types import DTYPES, Array, bits_of, is_float, limits
from ptxlab.emulator.ops.alu import AluOperation, operation
from ptxlab.emulator.ops.floating import apply_bounds
from ptxlab.emulator.ops.narrow_floats import NARROW, floats, of_ue8m0, to_narrow, to_tf32, to_ue8m0
from ptxlab.emulator.ops.rounding import element, flush, round_and_flush, round_to, two_sum, widen

INTEGERS = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")
LARGEST = {"f16": 65504.0, "bf16": (2 - 2.0**-7) * 2.0**127}
INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@operation("cvt")
def _convert(op: Opcode) -> AluOperation:
    if op.flag("pack"):
        return _pack(op)
    mode = op.choice("rn", "rz", "rm", "rp", "rna", *INTEGRAL, default="")
    ftz, sat, relu, finite = op.flag("ftz"), op.flag("sat"), op.flag("relu"), op.flag("satfinite")
    if narrow := op.choice(*(f"{name}x2" for name in NARROW), "ue8m0x2", "tf32", default=""):
        if ftz or sat or (relu and narrow == "ue8m0x2"):
            raise UnknownOpcode(op.text)
        if narrow == "tf32":
            return _tf32(op, mode, relu, finite)
        return _power_of_two_pair(op, mode, finite) if narrow == "ue8m0x2" else _narrow(op, narrow, mode, relu, finite)
    target = op.type(*INTEGERS, *FLOATS, "f16x2", "bf16x2")
    source = op.type(*INTEGERS, *FLOATS)
    is_half_result = element(target) in LARGEST
    if (
        mode == "rna"
        or op.modifiers
        or (finite and (source != "f32" or not is_half_result or mode in ("rm", "rp") or ftz or sat))
    ):
        raise UnknownOpcode(op.text)
    _check_rounding(mode, target, source)
    if target.endswith("x2"):
        return _two_to_pair(target, source, mode, relu, finite)
    if not is_float(source):
        if is_float(target):
            return AluOperation(
                (target,),
                (source,),
                lambda a: round_to(*_split_exactly(a.clip(0, 1) if sat else a), target, mode or "rn"),
            )
        return AluOperation((target,), (source,), lambda a: _integer_to_integer(a, target, sat))
    if not is_float(target):
        return AluOperation(
            (target,), (source,), lambda a: _float_to_integer(a, source, target, INTEGRAL[mode or "rzi"], ftz)
        )

    def between_floats(a: Array) -> Array:
        wide_values = widen(a, source)
        wide_values = flush(wide_values, "f32") if ftz and source == "f32" else wide_values
        wide_values = INTEGRAL[mode](wide_values) if mode in INTEGRAL else wide_values
        wide_values = wide_values.clip(-LARGEST[target], LARGEST[target]) if finite else wide_values
        if source == target and not (ftz or sat or relu or mode in INTEGRAL):
            return a
        finish = round_and_flush if ftz and target == "f32" else round_to
        return apply_bounds(
            finish(wide_values, 0.0, target, mode if mode in ("rz", "rm", "rp") else "rn"), target, sat, relu
        )

    return AluOperation((target,), (source,), between_floats)


def _check_rounding(mode: str, target: str, source: str) -> None:
    """Raise ValueError unless a mode is given where the result may need rounding, and none where it cannot."""
    to_float, is_narrower = is_float(target), bits_of(target.removesuffix("x2")) < bits_of(source)
    if is_float(source) and (not to_float or (target == source and mode)):
        allowed_modes = tuple(INTEGRAL)
    elif to_float and (not is_float(source) or is_narrower):
        allowed_modes = ("rn", "rz", "rm", "rp")
    else:
        free = to_float and target != source and (source == "bf16" or bits_of(target) == bits_of(source))
        allowed_modes = (mode,) if free else ()
    if (mode or allowed_modes) and mode not in allowed_modes:
        rule = f"takes a rounding modifier: .{', .'.join(allowed_modes)}" if allowed_modes else "rounds nothing"
        raise ValueError(f"cvt.{target}.{source} {rule}")


def _split_exactly(a: Array) -> tuple[Array, Array]:
    """Represent integers exactly as float64 hi + lo."""
    if a.dtype.itemsize < 8:
        return a.astype(np.float64), np.zeros(len(a))
    upper_half, lower_half = a >> a.dtype.type(32), a & a.dtype.type(0xFFFFFFFF)
    return two_sum(upper_half.astype(np.float64) * 2.0**32, lower_half.astype(np.float64))


def _integer_to_integer(a: Array, target: str, sat: bool) -> Array:
    if not sat:
        return a.astype(DTYPES[target])
    low, high = limits(target)
    source_range = np.iinfo(a.dtype)
    return a.clip(max(low, int(source_range.min)), min(high, int(source_range.max))).astype(DTYPES[target])


def _float_to_integer(a: Array, source: str, target: str, integral: np.ufunc, ftz: bool) -> Array:
    x = widen(a, source)
    x = integral(flush(x, "f32") if ftz and source == "f32" else x)
    low, high = limits(target)
    values_in_range = np.where((x > low) & (x < high + 1), x, 0)  # `high + 1` is a power of two: exact as a float
    integers = values_in_range.astype(np.uint64 if target == "u64" else np.int64)
    integers = np.where(x <= low, low, np.where(x >= high + 1, np.array(high, integers.dtype), integers))
    nan = 0
    if source == "f64" or "64" in target:
        nan = low or 1 << bits_of(target) - 1
    return np.where(np.isnan(x), np.array([nan], integers.dtype), integers).astype(DTYPES[target])


def _two_to_pair(target: str, source: str, mode: str, relu: bool, finite: bool) -> AluOperation:
    if source != "f32":
        raise UnknownOpcode(f"cvt.{target}.{source}")

    def convert(a: Array, b: Array) -> Array:
        """Pack two numbers into a pair; the first source goes to the upper half."""
        pair = np.stack(np.broadcast_arrays(b, a), axis=1).astype(np.float64)
        pair = np.where(pair <= 0, 0.0, pair) if relu else pair
        largest = LARGEST[element(target)] if finite else np.inf
        return round_to(pair.clip(-largest, largest), 0.0, target, mode or "rn")

    return AluOperation((target,), (source, source), convert)


def _narrow(op: Opcode, pair: str, mode: str, relu: bool, finite: bool) -> AluOperation:
    """Convert between pairs of fp8, fp6 or fp4 and f32 or f16x2.

    To the narrow ones it always saturates, as `.satfinite` says.
    """
    is_packing, narrow = op.text.split(".")[-1] != pair, element(pair)
    is_fp4, wide = narrow == "e2m1", op.type(*["f32"] * is_packing, "f16x2")
    if op.modifiers or mode != "rn" or finite != is_packing:
        raise UnknownOpcode(op.text)

    def clamp(x: Array) -> Array:
        return np.where(x <= 0, 0.0, x) if relu else x

    def pack(a: Array, b: Array | None = None) -> Array:
        codes = np.ascontiguousarray(to_narrow(clamp(_widen_pair(wide, a, b)), narrow))
        return codes[:, 0] | codes[:, 1] << np.uint8(4) if is_fp4 else codes.view(np.uint16)[:, 0]

    def unpack(a: Array) -> Array:
        codes = np.ascontiguousarray(a).view(np.uint8).reshape(len(a), -1)
        codes = np.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis=1) if is_fp4 else codes
        return round_to(clamp(floats(codes, narrow)), 0.0, wide)

    bits = "b8" if is_fp4 else "b16"
    if not is_packing:
        return AluOperation((wide,), (bits,), unpack)
    return AluOperation((bits,), (wide,) * (2 if wide == "f32" else 1), pack)


def _widen_pair(type_name: str, a: Array, b: Array | None) -> Array:
    """Widen a pair to float64 [lanes, 2], low half first: of two f32 the first goes to the upper half."""
    return widen(a, type_name) if b is None else np.stack(np.broadcast_arrays(b, a), axis=1).astype(np.float64)


def _power_of_two_pair(op: Opcode, mode: str, finite: bool) -> AluOperation:
    """Convert between pairs of ue8m0 and f32 or bf16x2."""
    is_packing = not op.text.endswith("ue8m0x2")
    wide = op.type(*["f32"] * is_packing, "bf16x2")
    if op.modifiers or mode not in (("rz", "rp") if is_packing else ("rn",)) or (finite and not is_packing):
        raise UnknownOpcode(op.text)

    def pack(a: Array, b: Array | None = None) -> Array:
        return np.ascontiguousarray(to_ue8m0(_widen_pair(wide, a, b), mode == "rp", finite)).view(np.uint16)[:, 0]

    def unpack(a: Array) -> Array:
        return round_to(of_ue8m0(np.ascontiguousarray(a).view(np.uint8).reshape(-1, 2)), 0.0, wide)

    if not is_packing:
        return AluOperation((wide,), ("b16",), unpack)
    return AluOperation(("b16",), (wide,) * (2 if wide == "f32" else 1), pack)


def _tf32(op: Opcode, mode: str, relu: bool, finite: bool) -> AluOperation:
    op.type("f32")
    # sm_90 has relu for nearest even and towards zero, and saturation for ties away from zero alone
    exists = mode in ("rn", "rz", "rna") and not (relu and mode == "rna") and not (finite and mode != "rna")
    if op.modifiers or not exists or op.text.endswith("tf32"):
        raise UnknownOpcode(op.text)
    return AluOperation(("b32",), ("f32",), lambda x: to_tf32(np.where(x <= 0, x.dtype.type(0), x) if relu else x,
                                                             mode, finite))  # fmt: skip


def _pack(op: Opcode) -> AluOperation:
    """Pack two saturated integers; a third operand, shifted up, fills the bits above them: cvt.pack.sat."""
    if not op.flag("sat"):
        raise UnknownOpcode(op.text)
    narrow = op.choice("u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2")
    op.type("s32")
    bits = int(narrow[1:])
    lowest, highest = (-(1 << bits - 1), (1 << bits - 1) - 1) if narrow[0] == "s" else (0, (1 << bits) - 1)
    mask, width = np.uint32((1 << bits) - 1), np.uint32(bits)

    def pack(a: Array, b: Array, c: Array | None = None) -> Array:
        upper, lower = (x.clip(lowest, highest).view(np.uint32) & mask for x in (a, b))
        packed_word = upper << width | lower
        return packed_word if c is None else packed_word | c << np.uint32(2 * bits)

    if bits == 16:
        return AluOperation(("b32",), ("s32", "s32"), pack)
    op.choice("b32")
    return AluOperation(("b32",), ("s32", "s32", "b32"), pack)
