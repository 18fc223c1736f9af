"""How far a kernel's attention may be from float64: what every rounding can do, with the problem's own numbers.

A score that is wrong by d changes its weight by the factor exp(d), and the output by p·(exp(d) - 1)·|v - out|: the
more, the larger queries and keys are. So no one tolerance fits all problems, and none is needed: all that the bound is
made of is known.

Of few tokens the bound is certain. Of many it would be hopeless, as roundings never all go one way: there it is what
they exceed by chance in less than one of 1e9 elements (`chance`), where that is less.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ptxlab.kernels.attention import chance
from ptxlab.quant import KV_SCHEMES, QuantizedKV
from ptxlab.quant.kv import KVScheme
from ptxlab.spec.tolerance import Allowed

F64: TypeAlias = npt.NDArray[np.float64]

HALF, SINGLE = 2.0**-11, 2.0**-24  # one rounding to FP16, to FP32
_CERTAIN = 60.0  # an error of a score that allows everything
BY_CHANCE = "; of 256 tokens and more, what all this exceeds by chance in less than one of 1e9 elements"
_MANY = 256  # tokens from which on chance evens roundings out
_HOPELESS = 2.0**-8  # of sums, by their certain error alone: several times what chance allows, which nobody computes


@dataclass(frozen=True)
class Roundings:
    """What a kernel may lose, as fractions of sums of magnitudes.

    Attributes:
        score: of a score, of Σ |q·(k - zero)|·scale.
        query: of each element of a query, of its largest element; by channel, of those that are scaled as keys are.
        weight: of each weight, in numerator and denominator alike.
        sum: of the weighted sum, of Σ weight·|v|: of its products.
        serial: tokens that are added one to another in FP32 are those of the sequence / `serial`.
        rescaled: of each weight, per token: sums so far are multiplied whenever a larger score turns up.
        floor: of each weight times scale, of the heaviest one; lost below the range of FP16.
        apart: whether products are of the integers as they are, and the zero's part is taken off at the end.
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
    apart: bool = False
    aligned: float = 0.0
    adding: float = 0.0
    in_bytes: bool = False
    levels: int = 0
    promoted: int = 0
    warps: int = 1


def allowed_error(
    q: npt.NDArray[np.float64],
    k: QuantizedKV,
    v: QuantizedKV,
    visible: npt.NDArray[np.bool_],
    *,
    scale: float,
    roundings: Roundings,
    stored: float,
) -> tuple[Allowed, Allowed]:
    """The error that attention of one sequence may have; NumPy or CuPy, but for `visible`.

    Args:
        q: queries [T, Hq, D], as the kernel is given them.
        k: keys [L, Hkv, D].
        v: values [L, Hkv, D].
        visible: which keys each query sees, one after the other, [T, L].
        scale: of the scores.
        roundings: the kernel's.
        stored: the rounding of the output, `HALF` or bfloat16's.

    Returns:
        (of the output [T, Hq, D], of the natural logarithm of the sum of exponentials [T, Hq]).
    """
    (T, Hq, D), (L, Hkv, _) = q.shape, k.shape
    out, lse = (Allowed(np.zeros_like(x), np.zeros_like(x[..., 0])) for x in (q, q[..., 0]))
    serial = 2 * (L / roundings.serial + 16) * SINGLE  # weights' sum and values' sum
    keys, values = Operand.of(k, roundings.apart), Operand.of(v, roundings.apart, roundings.in_bytes)
    for t in range(T):
        seen = np.flatnonzero(visible[t])
        if not len(seen):
            continue
        first, end = int(seen[0]), int(seen[-1]) + 1
        x, k_seen, v_seen = q[t].reshape(Hkv, Hq // Hkv, D), keys.slice(first, end), values.slice(first, end)
        scores = x @ k_seen.numbers.swapaxes(1, 2) * scale
        own = _error_of_scores(x, k_seen, roundings) * scale + roundings.weight
        wrong = own + keys.largest(x) @ np.abs(k_seen.numbers).swapaxes(1, 2) * (roundings.query * scale)
        most = np.minimum(wrong + roundings.rescaled * L, _CERTAIN)
        peak = scores.max(axis=-1, keepdims=True)
        p = np.exp(scores - peak)
        total = p.sum(axis=-1, keepdims=True)
        p, log_total = p / total, (peak + np.log(total))[..., 0]
        of_out, of_lse = (np.full_like(array, np.inf) for array in (x, log_total))
        many = end - first >= _MANY
        if not many or serial < _HOPELESS:
            of_out = _error_of_mean(p, most, first, v_seen, roundings, serial, stored)
            of_lse = np.log((p * np.exp(most)).sum(axis=-1)) + serial + 2.0**-22 * (1 + np.abs(log_total))
        rms = np.sqrt((of_out**2).mean(axis=-1)), np.sqrt((of_lse**2).mean())
        if many:
            by_chance = chance.likely(
                x,
                scores,
                p,
                log_total,
                k_seen,
                v_seen,
                first=first,
                first_order=np.minimum(own if roundings.levels else wrong, _CERTAIN),
                wrong=np.minimum(wrong, _CERTAIN),
                scale=scale,
                roundings=roundings,
                stored=stored,
            )
            heads = chance.rms_of_heads(by_chance.lse_fixed.ravel(), by_chance.lse_variance.ravel())
            rms = np.minimum(rms[0], by_chance.out_rms), np.minimum(rms[1], heads)
            of_out, of_lse = np.minimum(of_out, by_chance.out), np.minimum(of_lse, by_chance.lse)
        out.each[t], out.rms[t] = of_out.reshape(Hq, D), rms[0].reshape(Hq)
        lse.each[t], lse.rms[t] = of_lse.reshape(Hq), rms[1]
    return out, lse


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
    def of(cls, x: QuantizedKV, apart: bool, in_bytes: bool = False) -> "Operand":
        """Of tokens [L, Hkv, D]; `apart` and `in_bytes` as in `Roundings`."""
        (_, Hkv, D), scheme = x.shape, KV_SCHEMES[x.scheme]
        scale, zero = x.scale.astype(np.float64), x.zero.astype(np.float64)
        integers = x.values.astype(np.float64)
        low = (np.arange(D, like=scale) % 8 < 4) | (scheme.bits == 8)  # others are 16 times as large under their mask
        grains = np.tile(np.where(low, 2.0**10, 2.0**10 / 16), (Hkv, 1))
        channels = np.ones_like(grains)
        if scheme.by_channel:
            units, grains, channels = np.ones_like(integers[..., 0].T), grains * scale, channels * scale
        else:
            units, scale, zero = scale.T, scale[..., None], zero[..., None]
        if apart and x.values.dtype == np.int8:  # such kernels take them as unsigned bytes
            integers, zero = integers + 128, zero + 128
        size = added = integers + zero if apart else np.abs(integers - zero)
        if in_bytes and scheme.bits == 4:  # the low nibble of d - 4 is in two sums, of which one is taken off
            added, grains = size + 2 / 16 * np.roll(integers, 4, axis=-1) * ~low, grains * (1 + ~low)
        parts = (integers - zero) * scale, size * scale, added * scale
        numbers, size, added = (part.transpose(1, 0, 2) for part in parts)
        return cls(numbers, size, added, units, grains, channels, scheme)

    def largest(self, x: F64) -> F64:
        """Of queries x [Hkv, r, D], the largest element of each, as it counts where they are scaled as keys are."""
        scaled = self.channels[:, None]
        largest: F64 = (np.abs(x) * scaled).max(axis=-1, keepdims=True) / scaled
        return largest

    def slice(self, first: int, end: int) -> "Operand":
        """Those tokens alone."""
        return self._replace(
            numbers=self.numbers[:, first:end],
            size=self.size[:, first:end],
            added=self.added[:, first:end],
            units=self.units[:, first:end],
        )


def _error_of_scores(x: F64, keys: Operand, roundings: Roundings) -> F64:
    """Of the products of queries x [Hkv, r, D], as they are multiplied, with keys, before the scale: [Hkv, r, n]."""
    size = np.abs(x)
    wrong: F64 = size @ keys.size.transpose(0, 2, 1) * roundings.score
    if not roundings.levels:
        wrong += roundings.aligned * _cut_of_scores(size * keys.grains[:, None])[..., None] * keys.units[:, None]
    return wrong


def _error_of_mean(
    p: F64, wrong: F64, first: int, values: Operand, roundings: Roundings, serial: float, stored: float
) -> F64:
    """Of the mean [Hkv, r, D] of values, with weights p [Hkv, r, n] of scores off by `wrong`."""
    numbers, added = values.numbers[:, None], values.added[:, None]
    mean = p @ values.numbers
    least = (p * np.exp(-wrong)).sum(axis=-1, keepdims=True)
    moved = ((p * np.expm1(wrong))[:, :, None] @ np.abs(numbers - mean[:, :, None]))[:, :, 0] / least
    summed = p @ values.size * roundings.sum + p @ values.added * (roundings.adding + serial)
    weights = p * values.units[:, None]
    heaviest = weights.max(axis=-1, keepdims=True)
    lost = roundings.floor * heaviest * (values.size / values.units[..., None]).sum(axis=1)[:, None]
    cut = _cut_of_values(weights, first, values.grains * roundings.aligned, p[..., None] * added)
    most: F64 = 1.01 * (moved + summed + lost + cut + stored * np.abs(mean)) + 2.0**-25  # 1.01: products of errors
    return most


def _cut_of_scores(terms: F64) -> F64:
    """What the MMAs of scores [...] cut off, by what the queries' elements [..., D] count in them.

    An MMA has 16 of them and cuts off of the sum so far, twice if it goes about them by 8: the most is lost if the
    largest of all are in MMAs of their own. None counts less than the smallest normal number, as a query does too.
    """
    counted = np.sort(np.maximum(terms, terms.max(axis=-1, keepdims=True) * 2.0**-24), axis=-1)
    cut: F64 = 18 * counted[..., -terms.shape[-1] // 16 :].sum(axis=-1)
    return cut


def _cut_of_values(weights: F64, first: int, grains: F64, terms: F64) -> F64:
    """What the MMAs of values [Hkv, r, D] cut off: of each term [Hkv, r, n, D] no more than there is, of sums as above.

    Token `first`, and those that follow, have `weights` [Hkv, r, n]; an MMA takes 16 tokens from a multiple of 16 on.
    """
    n, before = weights.shape[-1], first % 16
    whole = np.pad(weights, [(0, 0), (0, 0), (before, -(before + n) % 16)])
    largest = whole.reshape(*whole.shape[:-1], -1, 16).max(axis=-1)
    largest = np.maximum(largest, weights.max(axis=-1, keepdims=True) * 2.0**-14)
    by_token = np.repeat(largest, 16, axis=-1)[..., before : before + n]
    of_terms = np.minimum(terms, by_token[..., None] * grains[:, None, None]).sum(axis=-2)
    cut: F64 = of_terms + 2 * largest.sum(axis=-1, keepdims=True) * grains[:, None]
    return cut
