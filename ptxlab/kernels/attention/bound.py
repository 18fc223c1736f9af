"""How far a kernel's attention may be from float64: what every rounding can do, with the problem's own numbers.

A score that is wrong by d changes its weight by the factor exp(d), and the output by p·(exp(d) - 1)·|v - out|: the
more, the larger queries and keys are. So no one tolerance fits all problems, and none is needed: all that the bound is
made of is known.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ptxlab.quant import KV_SCHEMES, QuantizedKV

F64: TypeAlias = npt.NDArray[np.float64]

HALF, SINGLE = 2.0**-11, 2.0**-24  # one rounding to FP16, to FP32
_CERTAIN = 60.0  # an error of a score that allows everything


@dataclass(frozen=True)
class Roundings:
    """What a kernel may lose, as fractions of sums of magnitudes.

    Attributes:
        score: of a score, of Σ |q·(k - zero)|·scale.
        query: of each element of a query, of its largest element.
        weight: of each weight, in numerator and denominator alike.
        sum: of the weighted sum, of Σ weight·|v|.
        serial: tokens that are added one to another in FP32 are those of the sequence / `serial`.
        rescaled: of each weight, per token: sums so far are multiplied whenever a larger score turns up.
        floor: of each weight times scale, of the heaviest one; lost below the range of FP16.
        apart: whether products are of the integers as they are, and the zero's part is taken off at the end.
        aligned: of the largest product of an MMA, where integers are FP16 subnormals v·2⁻²⁴. Products, and the sum so
            far, are shifted to the largest of their exponents, and what is below a last bit is cut off. There, a
            subnormal has the exponent of the smallest normal number, 2⁻¹⁴, however small it is: so every integer, 0
            too, counts as 2¹⁰, or 2¹⁰/16 where a mask leaves it 16 times as large (Fasi et al. 2021).
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


def allowed_error(
    q: npt.NDArray[np.float64],
    k: QuantizedKV,
    v: QuantizedKV,
    visible: npt.NDArray[np.bool_],
    *,
    scale: float,
    roundings: Roundings,
    stored: float,
) -> tuple[F64, F64]:
    """The error that attention of one sequence may have.

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
    out, lse = np.zeros((T, Hq, D)), np.zeros((T, Hq))
    serial = 2 * (L / roundings.serial + 16) * SINGLE  # weights' sum and values' sum
    keys, key_size = _with_magnitude(k, roundings.apart)
    values, value_size = _with_magnitude(v, roundings.apart)
    (key_units, key_grains), (units, grains) = _as_aligned(k), _as_aligned(v)
    for t, h in np.ndindex(T, Hq):
        seen = np.flatnonzero(visible[t])
        if not len(seen):
            continue
        at, x = (slice(seen[0], seen[-1] + 1), h // (Hq // Hkv)), q[t, h]
        scores = keys[at] @ x * scale
        wrong = key_size[at] @ (np.abs(x) * roundings.score + np.abs(x).max() * roundings.query) * scale
        wrong += roundings.aligned * _cut_of_scores(np.abs(x) * key_grains[at[1]]) * key_units[at] * scale
        wrong = np.minimum(wrong + roundings.weight + roundings.rescaled * L, _CERTAIN)
        p = np.exp(scores - scores.max())
        total, least = p.sum(), (p * np.exp(-wrong)).sum()
        mean = p @ values[at] / total
        moved = (p * np.expm1(wrong)) @ np.abs(values[at] - mean) / least
        summed = p @ value_size[at] / total * (roundings.sum + serial)
        weights = p * units[at] / total
        heaviest = weights.max()
        lost = roundings.floor * heaviest * (value_size[at] / units[at][:, None]).sum(axis=0)
        cut = _cut_of_values(weights, seen[0], grains[at[1]] * roundings.aligned, p[:, None] * value_size[at] / total)
        out[t, h] = 1.01 * (moved + summed + lost + cut + stored * np.abs(mean)) + 2.0**-25  # 1.01: products of errors
        log_total = scores.max() + np.log(total)
        lse[t, h] = np.log((p * np.exp(wrong)).sum() / total) + serial + 2.0**-22 * (1 + abs(log_total))
    return out, lse


def _with_magnitude(x: QuantizedKV, apart: bool) -> tuple[F64, F64]:
    """The numbers [L, Hkv, D], and the magnitude of what is added up for them."""
    scale, zero = (np.asarray(c, np.float64) for c in (x.scale, x.zero))
    if x.scale.dtype == np.float16:
        scale, zero = scale[..., None], zero[..., None]
    integers = x.values.astype(np.float64)
    if apart and x.values.dtype == np.int8:  # such kernels take them as unsigned bytes
        integers, zero = integers + 128, zero + 128
    size = integers + zero if apart else np.abs(integers - zero)
    return (integers - zero) * scale, size * scale


def _as_aligned(x: QuantizedKV) -> tuple[F64, F64]:
    """What an integer counts where an MMA aligns it: per token and head [L, Hkv], times per head and dim [Hkv, D]."""
    (L, Hkv, D), scheme, scale = x.shape, KV_SCHEMES[x.scheme], x.scale.astype(np.float64)
    high = (np.arange(D) % 8 >= 4) & (scheme.bits == 4)  # nibbles of a word, 16 times as large under their mask
    grains = np.where(high, 2.0**10 / 16, 2.0**10)
    return (np.ones((L, Hkv)), grains * scale) if scheme.by_channel else (scale, np.tile(grains, (Hkv, 1)))


def _cut_of_scores(terms: F64) -> float:
    """What the MMAs of a score cut off, by what a query's elements [D] count in them.

    An MMA has 16 of them and cuts off of the sum so far, twice if it goes about them by 8: the most is lost if the
    largest of all are in MMAs of their own. None counts less than the smallest normal number, as a query does too.
    """
    return 18 * float(np.sort(np.maximum(terms, terms.max() * 2.0**-24))[-len(terms) // 16 :].sum())


def _cut_of_values(weights: F64, first: int, grains: F64, terms: F64) -> F64:
    """What the MMAs of the values [D] cut off: of each term [n, D] no more than there is, of the sums so far as above.

    Token `first`, and those that follow, have `weights` [n]; an MMA takes 16 tokens from a multiple of 16 on.
    """
    group = (first + np.arange(len(weights))) // 16 - first // 16
    largest = np.maximum.reduceat(np.maximum(weights, weights.max() * 2.0**-14), np.unique(group, return_index=True)[1])
    return np.minimum(terms, largest[group, None] * grains).sum(axis=0) + 2 * largest.sum() * grains
