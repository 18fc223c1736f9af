"""Claims on the FP16 tricks of 4-bit KV caches: few cases, all tried."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import numpy as np

from ptxlab.prove.claims import Claim, register
from ptxlab.prove.solve import Enumeration


def _half(bits: int) -> float:
    return float(np.array([bits], np.uint16).view(np.float16)[0])


def _fits(x: float) -> bool:
    """Tell if a float64 is an FP16 number, so that FP16 arithmetic with this result does not round."""
    return float(np.float16(x)) == x


@register
def kv4_claims() -> Iterator[Claim]:
    """Yield the claims that `cuda_src/include/dequant.cuh` makes for all nibbles v and zero points z, both 0..15."""
    for name, text, build_formula in (
        (
            "subnormal",
            "the nibble v as the bits of an FP16 number is v * 2^-24, and 2^24 times that is v",
            lambda v, z: _half(v) == v * 2.0**-24 and np.float32(_half(v)) * np.float32(2.0**24) == v,
        ),
        (
            "magic number",
            "0x6400 | v is 1024 + v; less 1024 + z, itself FP16, it is v - z without a rounding",
            lambda v, z: _half(0x6400 | v) == 1024 + v and _fits(1024 + z) and _fits(v - z),
        ),
        (
            "magic number, high nibble",
            "0x6400 | 16 v is 1024 + 16 v; one fma of 1/16 and -(64 + z), itself FP16, gives v - z without a rounding",
            lambda v, z: _half(0x6400 | 16 * v) / 16 - (64 + z) == v - z and _fits(64 + z) and _fits(v - z),
        ),
    ):
        yield Claim("kv4 in FP16", name, text, partial(_all_nibbles, build_formula))


def _all_nibbles(holds: Callable[[int, int], bool]) -> Enumeration:
    cases = list(product(range(16), range(16)))
    return Enumeration(len(cases), next(({"v": v, "z": z} for v, z in cases if not holds(v, z)), None))
