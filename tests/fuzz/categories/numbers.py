"""Numbers of matrix instructions that every order of additions sums up exactly, and special ones."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ptxlab.emulator.ops.narrow_floats import NARROW, to_narrow
from tests.fuzz.domains import Values

Floats = npt.NDArray[np.float64]
SPECIALS = (np.nan, np.inf, -np.inf)  # e4m3 has its largest number in place of infinity
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "f64": 64, "e4m3": 8, "e5m2": 8}


def draw_exact(
    rng: np.random.Generator,
    t: str,
    count: int,
    few_bits: bool = False,
    special: float = 0.0,
    specials: Sequence[float] = SPECIALS,
) -> Values:
    """Draw registers of multiples of 1/4, or with `few_bits` of small integers; a share `special` are `specials`.

    A call draws a palette first, so that some registers have zeros of one sign, or one number alone.
    """
    width = max(32, BITS[t])
    size = count * width // BITS[t]
    positive = np.arange(1, 5) if few_bits else np.arange(1, 9 if BITS[t] == 8 else 33) / 4
    numbers = [*positive, *-positive, *(0.0, -0.0) * int(rng.integers(1, 9))]
    x = rng.choice(rng.choice(numbers, int(rng.integers(1, 24))), size)
    if special:
        x[rng.random(size) < special] = rng.choice(specials)
    return pack(x, t)


def pack(x: Floats, t: str) -> Values:
    """Pack numbers into registers of 32 bits, of f64 of 64; bf16 and tf32 lose bits, other types have to have them."""
    with np.errstate(invalid="ignore", over="ignore"):
        if t == "f64":
            return x.view(np.uint64)
        if t in ("f32", "tf32"):
            bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
            return bits & np.uint64(0xFFFFE000) if t == "tf32" else bits
        if t == "f16":
            return x.astype(np.float16).view(np.uint32).astype(np.uint64)
        if t == "bf16":
            return (
                (x.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16).view(np.uint32).astype("u8")
            )
    largest = NARROW[t][3]
    codes = np.where(np.isinf(x) & (t == "e5m2"), largest + 1 | np.signbit(x) << 7, to_narrow(x, t))
    return codes.astype(np.uint8).view(np.uint32).astype(np.uint64)


def draw_integers(rng: np.random.Generator, t: str, count: int) -> Values:
    """Draw registers of packed integers, or bits; sometimes all at an end of the range."""
    ends = {"s8": 0x80808080, "s4": 0x88888888}
    if rng.random() < 0.2:
        return np.full(count, ends.get(t, 0xFFFFFFFF), np.uint64)
    return rng.integers(0, 2**32, count, dtype=np.uint64)
