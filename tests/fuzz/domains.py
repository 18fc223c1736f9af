"""The values that operands take: by domain the width, what a register of it holds, and how values are drawn.

Half of the values are those at which instructions turn: ends of ranges, powers of two, NaNs, subnormals.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.uint64]  # of registers, as bits


@dataclass(frozen=True)
class Domain:
    """Values of an operand; `kind` is what its register holds: integers or bits ("i"), floats of a type, or "pred"."""

    bits: int
    kind: str
    draw: Callable[[np.random.Generator, int], Values]
    literal: str = ""  # how a constant is written: as an integer ("u" or "s") or by the bits of a float ("f")
    fresh: bool = False  # no result of another instruction will do


def _draw_turning_or(rng: np.random.Generator, turning: list[int], drawn: Values, share: float = 0.5) -> Values:
    """Draw values at which instructions turn, or take those of `drawn`."""
    chosen = np.array(turning, np.uint64)[rng.integers(0, len(turning), len(drawn))]
    return np.where(rng.random(len(drawn)) < share, chosen, drawn)


# Integers


@cache
def turning_integers(bits: int) -> list[int]:
    """List powers of two and their neighbours, both ends of every narrower range, repeated bytes and halves."""
    mask = (1 << bits) - 1
    near = {(sign * (1 << power) + step) & mask for power in range(bits) for sign in (1, -1) for step in (-1, 0, 1)}
    pairs = [(0x80, 0x80), (0x7F, 0x7F), (1, 1), (0, 0xFF), (0xFF, 0x7F), (0, 0x80), (1, 0x80)]
    repeated = {int.from_bytes(bytes(pair) * 4, "little") & mask for pair in pairs}
    return sorted(near | repeated | {0, mask})


def _draw_integers(bits: int) -> Callable[[np.random.Generator, int], Values]:
    """Return a function that draws integers, many of which are turning ones."""

    def draw(rng: np.random.Generator, count: int) -> Values:
        raw = rng.integers(0, 2**64, count, dtype=np.uint64) >> np.uint64(64 - bits)
        short = raw >> rng.integers(0, bits, count).astype(np.uint64)  # of every magnitude
        drawn = np.where(rng.random(count) < 0.5, raw, short)
        return _draw_turning_or(rng, turning_integers(bits), drawn)

    return draw


def _draw_among(*numbers: int) -> Callable[[np.random.Generator, int], Values]:
    """Return a function that draws some of these numbers."""
    return lambda rng, count: np.array(numbers, np.uint64)[rng.integers(0, len(numbers), count)]


def _draw_below(limit: int, *turning: int) -> Callable[[np.random.Generator, int], Values]:
    """Return a function that draws integers below a limit, some of them turning ones."""

    def draw(rng: np.random.Generator, count: int) -> Values:
        drawn = rng.integers(0, limit, count).astype(np.uint64)
        return _draw_turning_or(rng, list(turning), drawn) if turning else drawn

    return draw


def _draw_nonzero(bits: int) -> Callable[[np.random.Generator, int], Values]:
    """Return a function that draws integers without 0."""
    draw = _draw_integers(bits)
    return lambda rng, count: np.maximum(draw(rng, count), np.uint64(1))


def _draw_few_distinct(bits: int) -> Callable[[np.random.Generator, int], Values]:
    """Return a function that draws few different numbers, so that lanes agree."""
    draw = _draw_integers(bits)
    return lambda rng, count: draw(rng, 3)[rng.integers(0, 3 if rng.random() < 0.7 else 1, count)]


# Floats

_LAYOUTS = {"f16": (16, 10), "bf16": (16, 7), "f32": (32, 23), "f64": (64, 52)}  # bits, those of the significand
_LIMITS = (1.5, 2.5, 3.5, 127.5, 255.5, 448.0, 464.0, 57344.0, 65504.0, 65520.0, 32767.5, *(2.0**p for p in (
    -25, -24, -14, -9, 7, 15, 16, 23, 31, 32, 53, 63, 64, -126, -149)))  # fmt: skip


@cache
def turning_floats(t: str) -> list[int]:
    """List zeros, ones and their neighbours, ends of the ranges, halfway numbers, limits of other types, NaNs."""
    bits, significand = _LAYOUTS[t]
    one, infinity = (
        ((1 << bits - significand - 2) - 1) << significand,
        ((1 << bits - 1 - significand) - 1) << significand,
    )
    unit = 1 << significand
    special = [0, 1, 2, unit - 1, unit, unit + 1, one, one + 1, one - 1, one - unit, infinity - 1, infinity]
    nans = [infinity + 1, infinity + unit // 2, infinity + unit - 1]
    limits = [round_to_bits(limit, t) for limit in _LIMITS]
    positive = {*special, *nans, *limits}
    return sorted(positive | {x | 1 << bits - 1 for x in positive})


def round_to_bits(x: float, t: str) -> int:
    """Return the bits of a number in its type."""
    with np.errstate(over="ignore"):
        if t == "bf16":
            return int(np.float32(x).view(np.uint32)) >> 16
        return int(np.dtype(f"f{_LAYOUTS[t][0] // 8}").type(x).view(f"u{_LAYOUTS[t][0] // 8}"))


def _draw_floats(t: str) -> Callable[[np.random.Generator, int], Values]:
    """Return a function that draws the bits of floats, many of which are turning ones."""
    bits, significand = _LAYOUTS[t]

    def draw(rng: np.random.Generator, count: int) -> Values:
        raw = rng.integers(0, 2**64, count, dtype=np.uint64) >> np.uint64(64 - bits)
        bias = (1 << bits - significand - 2) - 1
        exponents = (bias + rng.integers(-12, 13, count)).astype(np.uint64) << np.uint64(significand)
        ordinary = raw & np.uint64(1 << bits - 1 | (1 << significand) - 1) | exponents
        drawn = np.where(rng.random(count) < 0.4, raw, ordinary)
        return _draw_turning_or(rng, turning_floats(t), drawn, 0.4)

    return draw


def _draw_pairs(t: str) -> Callable[[np.random.Generator, int], Values]:
    """Return a function that draws registers of two floats."""
    draw = _draw_floats(t)
    return lambda rng, count: draw(rng, count) | draw(rng, count) << np.uint64(16)


def _draw_angles(rng: np.random.Generator, count: int) -> Values:
    return rng.uniform(-3.1, 3.1, count).astype(np.float32).view(np.uint32).astype(np.uint64)


def _draw_f32_without_nan(rng: np.random.Generator, count: int) -> Values:
    """Draw the bits of f32 that are no NaN."""
    bits = _draw_floats("f32")(rng, count)
    return np.where(bits & np.uint64(0x7FFFFFFF) > 0x7F800000, bits & np.uint64(0xFF800000), bits)


_COUNTS = (0, 1, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 257, 1 << 31, (1 << 32) - 1)
DOMAINS = {
    **{f"{kind}{bits}": Domain(bits, "i", _draw_integers(bits), literal="s" if kind == "s" else "u")
       for kind in "usb" for bits in (16, 32, 64)},
    **{f"nonzero{bits}": Domain(bits, "i", _draw_nonzero(bits), fresh=True) for bits in (16, 32, 64)},
    **{f"alike{bits}": Domain(bits, "i", _draw_few_distinct(bits), fresh=True) for bits in (32, 64)},
    **{t: Domain(bits, t, _draw_floats(t), literal="f" if bits > 16 else "") for t, (bits, _) in _LAYOUTS.items()},
    "f16x2": Domain(32, "f16x2", _draw_pairs("f16")), "bf16x2": Domain(32, "bf16x2", _draw_pairs("bf16")),
    "count": Domain(32, "i", _draw_below(80, *_COUNTS), literal="u"),  # of bits
    "byte": Domain(32, "i", _draw_below(80, *(c for c in _COUNTS if c < 256)), fresh=True),
    "lane": Domain(32, "i", _draw_below(32), fresh=True),
    "step": Domain(32, "i", _draw_among(*(n & 0xFFFFFFFF for n in (0, 1, -1, 2, -2, 5, -7, 40))), fresh=True),
    "flag": Domain(32, "i", _draw_below(2), fresh=True),
    "pred": Domain(1, "pred", _draw_below(2)),
    "angle": Domain(32, "f32", _draw_angles, fresh=True),
    "number": Domain(32, "f32", _draw_f32_without_nan, fresh=True),
}  # fmt: skip


def literal(name: str, bits: int) -> str:
    """Write a constant of a domain as PTX has it."""
    domain = DOMAINS[name]
    if domain.literal == "f":
        return f"0f{bits:08X}" if domain.bits == 32 else f"0d{bits:016X}"
    if domain.literal == "s" and bits >> domain.bits - 1:
        return str(bits - (1 << domain.bits))
    return str(bits)
