"""Floating-point arithmetic on f16, bf16, f32, f64 and packed pairs, comparison and the approximate functions."""

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from ptxlab.emulator.front.opcode import Opcode, UnknownOpcode
from ptxlab.emulator.front.types import DTYPES, Array, bits_of
from ptxlab.emulator.ops.alu import AluOperation, operation
from ptxlab.emulator.ops.integer import COMPARISONS, compare_operation, set_results
from ptxlab.emulator.ops.rounding import (
    CANONICAL_NAN,
    TINY,
    directed_sum,
    element,
    flush,
    fused_multiply_add,
    pack,
    remainder_sign,
    round_and_flush,
    round_to,
    unpack,
    widen,
)  # fmt: skip

FLOATS = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f64")
TINIEST = 2.0**-1074  # stands for "a little more" in hi + lo
OUTSIDE_NAN = 0x7FF7  # of 16 bits; the manual calls it OOB NaN and does not say which
MODES = ("rn", "rz", "rm", "rp")
DIRECT = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


def saturate(x: Array) -> Array:
    """Clamp to [0, 1]; NaN gives 0."""
    return np.where(x > 0, np.minimum(x, 1), 0).astype(x.dtype)


def canonical(x: Array, type_name: str) -> Array:
    """Replace every NaN by the canonical NaN of the type, which hardware returns."""
    if type_name not in CANONICAL_NAN:
        return x
    nan = np.array([CANONICAL_NAN[type_name]], f"u{bits_of(type_name) // 8}").view(x.dtype)
    return np.where(np.isnan(x), nan, x)


def apply_bounds(raw: Array, type_name: str, sat: bool, relu: bool) -> Array:
    """Clamp register values as .sat or .relu says."""
    if not (sat or relu):
        return raw
    wide_values = widen(raw, type_name)
    wide_values = saturate(wide_values) if sat else wide_values
    return round_to(np.where(wide_values <= 0, 0.0, wide_values) if relu else wide_values, 0.0, type_name)


def wide_operation(
    type_name: str, arity: int, exact: Callable[..., Any], mode: str, ftz: bool, sat: bool, relu: bool = False
) -> AluOperation:
    """Build the operation of `exact`, a function of float64 arrays that returns (hi, lo) or rounded values."""

    def compute(*raw: Array) -> Array:
        inputs = [widen(x, type_name) for x in raw]
        if ftz:
            inputs = [flush(x, type_name) for x in inputs]
        finish = round_and_flush if ftz else round_to
        values = exact(*inputs)
        if isinstance(values, tuple):
            hi, lo = values
            values = finish(hi, lo, type_name, mode)
        return apply_bounds(values, type_name, sat, relu)

    return AluOperation((type_name,), (type_name,) * arity, compute)


def modifiers(op: Opcode, *types: str, default: str = "") -> tuple[str, str, bool, bool]:
    """Consume the modifiers (type, rounding mode, ftz, sat); without `default` a rounding mode is required."""
    mode, ftz, sat = op.choice(*MODES, default=default), op.flag("ftz"), op.flag("sat")
    t = op.type(*(types or FLOATS))
    if sat and t == "f32x2":
        raise UnknownOpcode(op.text)
    if not mode and not op.modifiers:  # one that is left is not known, which is said elsewhere
        raise ValueError(f"{op.name} takes a rounding modifier: .rn, .rz, .rm or .rp")
    return t, mode, ftz, sat


@operation("add", "sub", "mul", floating=True)
def _arithmetic(op: Opcode) -> AluOperation:
    t, mode, ftz, sat = modifiers(op, *FLOATS, "f32x2", default="rn")
    direct, kind = DIRECT[op.name], element(t)
    if kind != "bf16" and mode == "rn" and not (ftz and op.name == "mul"):
        # NumPy rounds as IEEE 754 does; float32 has more than twice the bits of float16, so rounding twice does no harm
        wide_dtype = DTYPES["f32" if kind == "f16" else kind]

        def numbers(raw: Array) -> Array:
            wide_numbers = (unpack(raw, t) if t.endswith("x2") else raw).astype(wide_dtype, copy=False)
            return flush(wide_numbers, t) if ftz else wide_numbers

        def compute(a: Array, b: Array) -> Array:
            rounded_result = direct(numbers(a), numbers(b)).astype(DTYPES[kind], copy=False)
            rounded_result = flush(rounded_result, t) if ftz else rounded_result
            rounded_result = saturate(rounded_result) if sat else canonical(rounded_result, kind)
            return pack(rounded_result, t) if t.endswith("x2") else rounded_result

        return AluOperation((t,), (t, t), compute)
    if op.name == "mul":
        return wide_operation(t, 2, lambda a, b: _multiply_add(a, b, np.copysign(0.0, a * b), t, mode), mode, ftz, sat)
    return wide_operation(t, 2, lambda a, b: directed_sum(a, b if op.name == "add" else -b, mode), mode, ftz, sat)


@operation("fma", "mad", floating=True)
def _fma(op: Opcode) -> AluOperation:
    is_oob = op.name == "fma" and op.flag("oob")
    t, mode, ftz, sat = modifiers(op, *FLOATS, *["f32x2"] * (op.name == "fma"))
    fma = wide_operation(t, 3, lambda a, b, c: _multiply_add(a, b, c, t, mode), mode, ftz, sat, op.flag("relu"))
    if not is_oob:
        return fma
    if element(t) not in ("f16", "bf16") or ftz:
        raise UnknownOpcode(op.text)
    return replace(fma, compute=lambda a, b, c: _clear_outside(fma.compute(a, b, c), a, b, t))


def _clear_outside(raw: Array, a: Array, b: Array, type_name: str) -> Array:
    """Clear the result of fma.oob where a or b is the NaN, of either sign, that tensor copies fill in outside."""
    halves, *factors = (np.ascontiguousarray(x).view(np.uint16).reshape(len(x), -1) for x in (raw, a, b))
    is_outside = [x & np.uint16(0x7FFF) == OUTSIDE_NAN for x in factors]
    cleared_halves = np.where(is_outside[0] | is_outside[1], np.uint16(0), halves)
    return np.ascontiguousarray(cleared_halves).view(DTYPES[type_name])[:, 0]


def _multiply_add(a: Array, b: Array, c: Array, type_name: str, mode: str) -> Array | tuple[Array, Array]:
    """Compute a * b + c: of f64 rounded, of narrower types, whose products are exact, as hi + lo."""
    return fused_multiply_add(a, b, c, mode) if type_name == "f64" else directed_sum(a * b, c, mode)


@operation("div", floating=True)
def _div(op: Opcode) -> AluOperation:
    approximation = op.choice("approx", "full", default="")
    t, mode, ftz, sat = modifiers(op, "f32", "f64", default="rn" if approximation else "")

    def divide(a: Array, b: Array) -> tuple[Array, Array]:
        q = a / b
        return q, remainder_sign(a, q, b, t) * np.copysign(TINIEST, b)

    if mode == "rn":

        def divide_to_nearest(a: Array, b: Array) -> Array:
            a, b = (flush(a, t), flush(b, t)) if ftz else (a, b)
            quotient = canonical(a / b, t)
            return flush(quotient, t) if ftz else quotient

        return AluOperation((t,), (t, t), divide_to_nearest)
    return wide_operation(t, 2, divide, mode, ftz, sat)


@operation("rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2", "tanh", floating=True)
def _function(op: Opcode) -> AluOperation:
    """Compute `.approx` functions in float64 and round: their hardware results are near, not equal."""
    is_approximate = op.flag("approx")
    t, mode, ftz, _ = modifiers(op, default="rn" if is_approximate or op.name not in ("rcp", "sqrt") else "")
    if not is_approximate and op.name not in ("rcp", "sqrt"):
        raise UnknownOpcode(op.text)
    functions: dict[str, Callable[[Array], Array]] = {
        "rcp": lambda x: 1 / x, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin, "cos": np.cos,
        "lg2": np.log2, "ex2": np.exp2, "tanh": np.tanh,
    }  # fmt: skip
    function = functions[op.name]
    if t == "f64" and is_approximate and ftz:
        return AluOperation((t,), (t,), lambda x: _of_upper_words(function, x))

    def exact(x: Array) -> tuple[Array, Array]:
        y = function(x)
        if mode == "rn" or is_approximate:
            return y, np.zeros_like(y)
        if op.name == "rcp":
            return y, remainder_sign(np.ones_like(x), y, x, t) * np.copysign(TINIEST, x)
        return y, remainder_sign(x, y, y, t) * TINIEST

    return wide_operation(t, 1, exact, mode, ftz, sat=False)


def _of_upper_words(function: Callable[[Array], Array], x: Array) -> Array:
    """Apply a function of f64 to the upper 32 bits alone, as .approx.ftz does; those below are zeros in the result."""
    upper_mask = np.uint64(0xFFFFFFFF << 32)

    def cut(values: Array) -> Array:
        return flush((values.view(np.uint64) & upper_mask).view(np.float64), "f64")

    y = function(cut(x))
    return cut(np.where(np.isnan(y), np.uint64(0x7FFFFFFF << 32).view(np.float64), y))


@operation("abs", "neg", floating=True)
def _sign(op: Opcode) -> AluOperation:
    ftz, t = op.flag("ftz"), op.type(*FLOATS)
    bits = f"b{bits_of(t)}"
    sign = np.array([1 << bits_of(t) - 1 | (0x8000 if t.endswith("x2") else 0)], DTYPES[bits])

    def change(x: Array) -> Array:
        x = round_to(flush(widen(x, t), t), 0.0, t).view(DTYPES[bits]) if ftz else x.view(DTYPES[bits])
        signed_values: Array = (x & ~sign if op.name == "abs" else x ^ sign).view(DTYPES[t])
        return signed_values

    return AluOperation((t,), (t,), change)


@operation("copysign", floating=True)
def _copysign(op: Opcode) -> AluOperation:
    t = op.type("f32", "f64")
    return AluOperation((t,), (t, t), lambda a, b: np.copysign(b, a))


def choose_extreme(smaller: bool, nan: bool) -> Callable[[Array, Array], Array]:
    """Build a function that takes the smaller or the larger of two numbers.

    Where one of them is a NaN it takes the NaN if `nan`, else the other number.
    """

    def choose(x: Array, y: Array) -> Array:
        x_is_smaller = (x < y) | ((x == y) & np.signbit(x))  # -0 is below +0
        number = np.where(np.isnan(x) | (~np.isnan(y) & (x_is_smaller != smaller)), y, x)
        return np.where(np.isnan(x) | np.isnan(y), np.nan, number) if nan else number

    return choose


@operation("min", "max", floating=True)
def _extreme(op: Opcode) -> AluOperation:
    ftz, nan, xorsign, magnitude = (op.flag(name) for name in ("ftz", "NaN", "xorsign", "abs"))
    t = op.type(*FLOATS)
    takes_three = t == "f32" and not xorsign
    if (xorsign and not magnitude) or (magnitude and not xorsign and not takes_three):
        raise UnknownOpcode(op.text)
    choose = choose_extreme(op.name == "min", nan)

    def extreme(*numbers: Array) -> tuple[Array, Array]:
        chosen = reduce(choose, [np.abs(x) if magnitude else x for x in numbers])
        if xorsign:
            a, b = numbers
            chosen = np.where(np.signbit(a) != np.signbit(b), -chosen, chosen)
        return chosen, np.zeros_like(chosen)

    if takes_three and magnitude:
        return wide_operation(t, 3, extreme, "rn", ftz, sat=False)
    operation = wide_operation(t, 2, extreme, "rn", ftz, sat=False)
    return replace(operation, optional=t) if takes_three else operation


@operation("setp", "set", floating=True)
def _compare(op: Opcode) -> AluOperation:
    ordered_comparisons = {name: COMPARISONS[name] for name in ("eq", "ne", "lt", "le", "gt", "ge")}
    name = op.choice(*ordered_comparisons, *(f"{n}u" for n in ordered_comparisons), "num", "nan")
    ftz, t = op.flag("ftz"), op.modifiers.pop()
    if t not in FLOATS:
        raise UnknownOpcode(op.text)

    def compare(a: Array, b: Array) -> Array:
        x, y = widen(a, t), widen(b, t)
        x, y = (flush(x, t), flush(y, t)) if ftz else (x, y)
        unordered: Array = np.isnan(x) | np.isnan(y)
        if name in ("num", "nan"):
            return unordered if name == "nan" else np.logical_not(unordered)
        if name in ordered_comparisons:
            holds: Array = ordered_comparisons[name](x, y) & ~unordered
        else:
            holds = ordered_comparisons[name[:-1]](x, y) | unordered
        return holds

    return compare_operation(op, op.type(*set_results(t)) if op.name == "set" else "", t, compare)


@operation("testp", floating=True)
def _test(op: Opcode) -> AluOperation:
    kind = op.choice("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    t = op.type("f32", "f64")

    def test(x: Array) -> Array:
        is_subnormal = (np.abs(x) < TINY[element(t)]) & (x != 0)
        is_of_kind: Array = {
            "finite": np.isfinite(x), "infinite": np.isinf(x), "number": ~np.isnan(x), "notanumber": np.isnan(x),
            "normal": np.isfinite(x) & ~is_subnormal, "subnormal": is_subnormal,  # zero is normal
        }[kind]  # fmt: skip
        return is_of_kind

    return AluOperation(("pred",), (t,), test)
