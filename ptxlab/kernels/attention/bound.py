"""How far a kernel's attention may be from float64: what every rounding can do, with the problem's own numbers.

A score that is wrong by d changes its weight by the factor exp(d), and the output by p·(exp(d) - 1)·|v - out|: the
more, the larger queries and keys are. So no one tolerance fits all problems, and none is needed: all that the bound is
made of is known.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ptxlab.quant import QuantizedKV

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
    """

    score: float
    query: float
    weight: float
    sum: float
    serial: int
    rescaled: float = 0.0
    floor: float = 0.0
    apart: bool = False


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
    out, lse = np.zeros_like(q), np.zeros_like(q[..., 0])
    serial = 2 * (L / roundings.serial + 16) * SINGLE  # weights' sum and values' sum
    operands = [part.transpose(1, 0, 2) for x in (k, v) for part in _with_magnitude(x, roundings.apart)]
    by_token = v.scale.dtype == np.float16
    units = v.scale.astype(np.float64).T if by_token else np.ones_like(operands[0][..., 0])
    for t in range(T):
        seen = np.flatnonzero(visible[t])
        if not len(seen):
            continue
        at = slice(seen[0], seen[-1] + 1)
        keys, key_size, values, value_size, unit = (part[:, at] for part in (*operands, units))
        query = q[t].reshape(Hkv, Hq // Hkv, D)
        off, lse_off = _of_query(
            query, keys, key_size, values, value_size, unit, scale, roundings, serial, roundings.rescaled * L, stored
        )
        out[t], lse[t] = off.reshape(Hq, D), lse_off.reshape(Hq)
    return out, lse


def _of_query(
    x: F64,
    keys: F64,
    key_size: F64,
    values: F64,
    value_size: F64,
    units: F64,
    scale: float,
    roundings: Roundings,
    serial: float,
    rescaled: float,
    stored: float,
) -> tuple[F64, F64]:
    """The error of one token's queries x [Hkv, Hq / Hkv, D], by keys, values [Hkv, n, D], units [Hkv, n] they see."""
    size = np.abs(x)
    scores = x @ keys.transpose(0, 2, 1) * scale
    wrong = (size * roundings.score + size.max(axis=-1, keepdims=True) * roundings.query) @ key_size.transpose(0, 2, 1)
    wrong = np.minimum(wrong * scale + roundings.weight + rescaled, _CERTAIN)
    peak = scores.max(axis=-1, keepdims=True)
    p = np.exp(scores - peak)
    total, least = p.sum(axis=-1, keepdims=True), (p * np.exp(-wrong)).sum(axis=-1, keepdims=True)
    mean = p @ values / total
    away = np.abs(values[:, None] - mean[:, :, None])
    moved = ((p * np.expm1(wrong))[:, :, None] @ away)[:, :, 0] / least
    summed = p @ value_size / total * (roundings.sum + serial)
    heaviest = (p * units[:, None]).max(axis=-1, keepdims=True) / total
    lost = roundings.floor * heaviest * (value_size / units[..., None]).sum(axis=1)[:, None]
    out = 1.01 * (moved + summed + lost + stored * np.abs(mean)) + 2.0**-25  # 1.01: products of errors
    log_total = (peak + np.log(total))[..., 0]
    spread = np.log((p * np.exp(wrong)).sum(axis=-1) / total[..., 0])
    return out, spread + serial + 2.0**-22 * (1 + np.abs(log_total))


def _with_magnitude(x: QuantizedKV, apart: bool) -> tuple[F64, F64]:
    """The numbers [L, Hkv, D], and the magnitude of what is added up for them."""
    scale, zero = x.scale.astype(np.float64), x.zero.astype(np.float64)
    if x.scale.dtype == np.float16:
        scale, zero = scale[..., None], zero[..., None]
    integers = x.values.astype(np.float64)
    if apart and x.values.dtype == np.int8:  # such kernels take them as unsigned bytes
        integers, zero = integers + 128, zero + 128
    size = integers + zero if apart else np.abs(integers - zero)
    return (integers - zero) * scale, size * scale
