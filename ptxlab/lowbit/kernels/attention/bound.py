"""How far a kernel's attention may be from float64: what every rounding can do, with the problem's own numbers.

A score that is wrong by d changes its weight by the factor exp(d), and the output by p·(exp(d) - 1)·|v - out|: the
more, the larger queries and keys are. So no one tolerance fits all problems, and none is needed: all that the bound is
made of is known.

Of few tokens the bound is certain. Of many it would be hopeless, as roundings never all go one way: there it is what
they exceed by chance in less than one of 1e9 elements (`chance`), where that is less.
"""

import numpy as np
import numpy.typing as npt

from ptxlab.lowbit.kernels.attention import chance
from ptxlab.lowbit.kernels.attention.roundings import F64, SINGLE, Operand, Roundings
from ptxlab.lowbit.quant import QuantizedKV
from ptxlab.spec.tolerance import Allowed

_CERTAIN = 60.0  # an error of a score that allows everything
BY_CHANCE = "; of 256 tokens and more, what all this exceeds by chance in less than one of 1e9 elements"
_LONG = 256  # tokens from which on chance evens roundings out
_HOPELESS = 2.0**-8  # of sums, by their certain error alone: several times what chance allows, which nobody computes


def allowed_error(
    q: npt.NDArray[np.float64],
    k: QuantizedKV | Operand,
    v: QuantizedKV | Operand,
    visible: npt.NDArray[np.bool_],
    *,
    scale: float,
    roundings: Roundings,
    stored: float,
) -> tuple[Allowed, Allowed]:
    """Bound the error that attention of one sequence may have; NumPy or CuPy, except `visible`.

    Args:
        q: queries [T, Hq, D], as the kernel is given them.
        k: keys [L, Hkv, D], or what is made of them.
        v: values, likewise.
        visible: which keys each query sees, one after the other, [T, L].
        scale: of the scores.
        roundings: the kernel's.
        stored: the rounding of the output, `HALF` or bfloat16's.

    Returns:
        (of the output [T, Hq, D], of the natural logarithm of the sum of exponentials [T, Hq]).
    """
    keys = k if isinstance(k, Operand) else Operand.of(k, roundings.zero_at_end)
    values = v if isinstance(v, Operand) else Operand.of(v, roundings.zero_at_end, roundings.in_bytes)
    (T, Hq, D), (Hkv, L, _) = q.shape, keys.numbers.shape
    out, lse = (Allowed(np.zeros_like(x), np.zeros_like(x[..., 0])) for x in (q, q[..., 0]))
    serial = 2 * (L / roundings.serial + 16) * SINGLE  # weights' sum and values' sum
    for t in range(T):
        seen_tokens = np.flatnonzero(visible[t])
        if not len(seen_tokens):
            continue
        first, end = int(seen_tokens[0]), int(seen_tokens[-1]) + 1
        x, k_seen, v_seen = q[t].reshape(Hkv, Hq // Hkv, D), keys.slice(first, end), values.slice(first, end)
        scores = x @ k_seen.numbers.swapaxes(1, 2) * scale
        score_error = _bound_score_error(x, k_seen, roundings) * scale + roundings.weight
        weight_error = score_error + keys.largest(x) @ np.abs(k_seen.numbers).swapaxes(1, 2) * (roundings.query * scale)
        largest_error = np.minimum(weight_error + roundings.rescaled * L, _CERTAIN)
        peak = scores.max(axis=-1, keepdims=True)
        p = np.exp(scores - peak)
        total = p.sum(axis=-1, keepdims=True)
        p, log_total = p / total, (peak + np.log(total))[..., 0]
        out_error, lse_error = (np.full_like(array, np.inf) for array in (x, log_total))
        is_long = end - first >= _LONG
        if not is_long or serial < _HOPELESS:
            out_error = _bound_mean_error(p, largest_error, first, v_seen, roundings, serial, stored)
            lse_error = np.log((p * np.exp(largest_error)).sum(axis=-1)) + serial + 2.0**-22 * (1 + np.abs(log_total))
        rms = np.sqrt((out_error**2).mean(axis=-1)), np.sqrt((lse_error**2).mean())
        if is_long:
            chance_errors = chance.estimate_errors(
                x,
                scores,
                p,
                log_total,
                k_seen,
                v_seen,
                first=first,
                first_order=np.minimum(score_error if roundings.levels else weight_error, _CERTAIN),
                score_error=np.minimum(weight_error, _CERTAIN),
                scale=scale,
                roundings=roundings,
                stored=stored,
            )
            heads = chance.rms_of_heads(chance_errors.lse_fixed.ravel(), chance_errors.lse_variance.ravel())
            rms = np.minimum(rms[0], chance_errors.out_rms), np.minimum(rms[1], heads)
            out_error, lse_error = np.minimum(out_error, chance_errors.out), np.minimum(lse_error, chance_errors.lse)
        out.per_element[t], out.rms[t] = out_error.reshape(Hq, D), rms[0].reshape(Hq)
        lse.per_element[t], lse.rms[t] = lse_error.reshape(Hq), rms[1]
    return out, lse


def _bound_score_error(x: F64, keys: Operand, roundings: Roundings) -> F64:
    """Bound the error of scores before the scale, [Hkv, r, n]: products of queries x [Hkv, r, D] with keys.

    The queries x are as they are multiplied.
    """
    size = np.abs(x)
    error: F64 = size @ keys.size.transpose(0, 2, 1) * roundings.score
    if not roundings.levels:
        error += (
            roundings.aligned * _bound_score_truncation(size * keys.grains[:, None])[..., None] * keys.units[:, None]
        )
    return error


def _bound_mean_error(
    p: F64, weight_error: F64, first: int, values: Operand, roundings: Roundings, serial: float, stored: float
) -> F64:
    """Bound the error of the mean of values [Hkv, r, D], with weights p [Hkv, r, n] of scores off by `weight_error`."""
    numbers, added_numbers = values.numbers[:, None], values.added[:, None]
    mean = p @ values.numbers
    smallest_sum = (p * np.exp(-weight_error)).sum(axis=-1, keepdims=True)
    moved_by_weights = ((p * np.expm1(weight_error))[:, :, None] @ np.abs(numbers - mean[:, :, None]))[
        :, :, 0
    ] / smallest_sum
    summed = p @ values.size * roundings.sum + p @ values.added * (roundings.adding + serial)
    weights = p * values.units[:, None]
    heaviest_weight = weights.max(axis=-1, keepdims=True)
    underflow_error = roundings.floor * heaviest_weight * (values.size / values.units[..., None]).sum(axis=1)[:, None]
    truncation_error = _bound_value_truncation(
        weights, first, values.grains * roundings.aligned, p[..., None] * added_numbers
    )
    # 1.01: products of errors.
    bound: F64 = (
        1.01 * (moved_by_weights + summed + underflow_error + truncation_error + stored * np.abs(mean)) + 2.0**-25
    )
    return bound


def _bound_score_truncation(terms: F64) -> F64:
    """Bound the bits that the MMAs of scores [...] cut off, from the terms of the queries' elements [..., D].

    An MMA has 16 terms and cuts off of the sum so far, twice if it takes them by 8. The most is lost if the largest
    terms are in MMAs of their own. No term counts less than the smallest normal number, as a query does too.
    """
    sorted_terms = np.sort(np.maximum(terms, terms.max(axis=-1, keepdims=True) * 2.0**-24), axis=-1)
    truncation_error: F64 = 18 * sorted_terms[..., -terms.shape[-1] // 16 :].sum(axis=-1)
    return truncation_error


def _bound_value_truncation(weights: F64, first: int, grains: F64, terms: F64) -> F64:
    """Bound the bits that the MMAs of values [Hkv, r, D] cut off.

    Of each term [Hkv, r, n, D] no more is lost than there is; of sums, as much as in `_bound_score_truncation`. Token
    `first` and those that follow have `weights` [Hkv, r, n]. An MMA takes 16 tokens from a multiple of 16 on.
    """
    n, leading_tokens = weights.shape[-1], first % 16
    padded_weights = np.pad(weights, [(0, 0), (0, 0), (leading_tokens, -(leading_tokens + n) % 16)])
    largest = padded_weights.reshape(*padded_weights.shape[:-1], -1, 16).max(axis=-1)
    largest = np.maximum(largest, weights.max(axis=-1, keepdims=True) * 2.0**-14)
    largest_by_token = np.repeat(largest, 16, axis=-1)[..., leading_tokens : leading_tokens + n]
    term_errors = np.minimum(terms, largest_by_token[..., None] * grains[:, None, None]).sum(axis=-2)
    truncation_error: F64 = term_errors + 2 * largest.sum(axis=-1, keepdims=True) * grains[:, None]
    return truncation_error
