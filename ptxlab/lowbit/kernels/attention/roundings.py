"""What a kernel of attention may lose by rounding, and keys and values as a bound on its error takes them."""

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ptxlab.lowbit.quant import KV_SCHEMES, QuantizedKV
from ptxlab.lowbit.quant.kv import KVScheme

F64: TypeAlias = npt.NDArray[np.float64]

HALF, SINGLE = 2.0**-11, 2.0**-24  # one rounding to FP16, to FP32


@dataclass(frozen=True)
class Roundings:
    """Errors that a kernel may make, as fractions of sums of magnitudes.

    Attributes:
        score: of a score, of Σ |q·(k - zero)|·scale.
        query: of each element of a query, of its largest element; by channel, of those that are scaled as keys are.
        weight: of each weight, in numerator and denominator alike.
        sum: of the weighted sum, of Σ weight·|v|: of its products.
        serial: tokens that are added one to another in FP32 are those of the sequence / `serial`.
        rescaled: of each weight, per token: sums so far are multiplied whenever a larger score turns up.
        floor: of each weight times scale, of the heaviest one; lost below the range of FP16.
        zero_at_end: whether products are of the integers as they are, and the zero's part is taken off at the end.
        aligned: of the largest product of an MMA, where integers are FP16 subnormals v·2⁻²⁴. Products, and the sum so
            far, are shifted to the largest of their exponents, and what is below a last bit is cut off. There, a
            subnormal has the exponent of the smallest normal number, 2⁻¹⁴, however small it is: so every integer, 0
            too, counts as 2¹⁰, or 2¹⁰/16 where a mask leaves it 16 times as large (Fasi et al. 2021).
        adding: of all that is added up for the weighted sum, in magnitude.
        in_bytes: whether a value's high nibble is added up with the low one of its byte, whose own sum is taken off.
        levels: of queries that are integers, the largest, so that scores are added up without an error; 0: of floats.
        promoted: tokens that a warp's MMAs add up before their sum is added to others in FP32; 0: all of its tokens.
        warps: that share a sequence's tokens, at least, where eight lanes of each add up weights.
    """

    score: float
    query: float
    weight: float
    sum: float
    serial: int
    rescaled: float = 0.0
    floor: float = 0.0
    zero_at_end: bool = False
    aligned: float = 0.0
    adding: float = 0.0
    in_bytes: bool = False
    levels: int = 0
    promoted: int = 0
    warps: int = 1


class Operand(NamedTuple):
    """Keys or values by head.

    Attributes:
        numbers: [Hkv, L, D].
        size: their own part of what is added up for them, in magnitude, [Hkv, L, D].
        added: all of it.
        units: what an integer counts where an MMA aligns it, [Hkv, L], times
        grains: [Hkv, D].
        channels: the scale of a channel, or 1, [Hkv, D].
        scheme: the quantiser's.
    """

    numbers: F64
    size: F64
    added: F64
    units: F64
    grains: F64
    channels: F64
    scheme: KVScheme

    @classmethod
    def of(cls, x: QuantizedKV, zero_at_end: bool, in_bytes: bool = False) -> "Operand":
        """Build the operand of tokens [L, Hkv, D]; `zero_at_end` and `in_bytes` as in `Roundings`."""
        (_, Hkv, D), scheme = x.shape, KV_SCHEMES[x.scheme]
        scale, zero = x.scale.astype(np.float64), x.zero.astype(np.float64)
        integers = x.values.astype(np.float64)
        # Others are 16 times as large under their mask.
        is_low_nibble = (np.arange(D, like=scale) % 8 < 4) | (scheme.bits == 8)
        grains = np.tile(np.where(is_low_nibble, 2.0**10, 2.0**10 / 16), (Hkv, 1))
        channels = np.ones_like(grains)
        if scheme.by_channel:
            units, grains, channels = np.ones_like(integers[..., 0].T), grains * scale, channels * scale
        else:
            units, scale, zero = scale.T, scale[..., None], zero[..., None]
        if zero_at_end and x.values.dtype == np.int8:  # such kernels take them as unsigned bytes
            integers, zero = integers + 128, zero + 128
        size = added_size = integers + zero if zero_at_end else np.abs(integers - zero)
        if in_bytes and scheme.bits == 4:  # the low nibble of d - 4 is in two sums, of which one is taken off
            added_size = size + 2 / 16 * np.roll(integers, 4, axis=-1) * ~is_low_nibble
            grains = grains * (1 + ~is_low_nibble)
        parts = (integers - zero) * scale, size * scale, added_size * scale
        numbers, size, added_size = (part.transpose(1, 0, 2) for part in parts)
        return cls(numbers, size, added_size, units, grains, channels, scheme)

    @classmethod
    def of_numbers(cls, x: npt.NDArray[Any], scheme: str) -> "Operand":
        """Build the operand of tokens [L, Hkv, D] for a kernel that restores `scheme`; each number is one term."""
        numbers = x.astype(np.float64).transpose(1, 0, 2)
        ones = np.ones_like(numbers)
        return cls(numbers, abs(numbers), abs(numbers), ones[..., 0], ones[:, 0], ones[:, 0], KV_SCHEMES[scheme])

    def largest(self, x: F64) -> F64:
        """Find the largest element of each query x [Hkv, r, D], as it counts where queries are scaled as keys are."""
        channel_scales = self.channels[:, None]
        largest: F64 = (np.abs(x) * channel_scales).max(axis=-1, keepdims=True) / channel_scales
        return largest

    def slice(self, first: int, end: int) -> "Operand":
        """Return the operand of tokens `first` to `end` alone."""
        return self._replace(
            numbers=self.numbers[:, first:end],
            size=self.size[:, first:end],
            added=self.added[:, first:end],
            units=self.units[:, first:end],
        )
