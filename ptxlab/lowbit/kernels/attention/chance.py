"""A statistical bound on the rounding errors of attention: many roundings rarely all go the same way.

Each is a random variable: bounded, of mean 0, independent of all others unless the same numbers are rounded. So it is
sub-Gaussian (Hoeffding), of variance u²/3 if evenly spread in ±u, and at most u² otherwise. A sum of them is further
off than `_SIGMAS` standard deviations with a probability of less than 2·exp(-_SIGMAS²/2) < 1e-9; and so is the norm of
a row of errors of covariance C from sqrt(tr C) + _SIGMAS·sqrt(|C|) up (Hsu, Kakade, Zhang 2012).
Other errors count in full: truncation by tensor cores has one sign, and some errors are the same for all tokens.
"""

from typing import Any, NamedTuple

import numpy as np

from ptxlab.lowbit.kernels.attention.roundings import F64, SINGLE, Operand, Roundings

_SIGMAS = 6.6
_SHARED = 8 * SINGLE  # of all scores alike: by the scale, log2(e), the queries' unit, and their products
_APPROXIMATE = 2.0**-20  # of a sum of weights: what ex2, lg2 and rcp may be off in one direction
_RESCALINGS = 16  # of sums: larger scores turn up ln(tiles) times if they come in any order
_ALIKE = 2.0**-17  # scores nearer than this are rounded alike
_MMA = 16  # tokens
_CUT = 20  # of what is aligned: an MMA's 16 products, and its sum (Hopper), or two (Ampere), twice as much each


class LikelyErrors(NamedTuple):
    """Errors that are exceeded with a probability below 1e-9.

    Attributes:
        out: of each element, [Hkv, r, D].
        out_rms: of each query, [Hkv, r].
        lse: [Hkv, r].
        lse_fixed: of it, what is no chance.
        lse_variance: of the rest.
    """

    out: F64
    out_rms: F64
    lse: F64
    lse_fixed: F64
    lse_variance: F64


def estimate_errors(
    x: F64,
    scores: F64,
    p: F64,
    log_total: F64,
    keys: Operand,
    values: Operand,
    *,
    first: int,
    first_order: F64,
    score_error: F64,
    scale: float,
    roundings: Roundings,
    stored: float,
) -> LikelyErrors:
    """Estimate the errors of attention of one query per head, which sees the n tokens of `keys` and `values`.

    Args:
        x: queries [Hkv, r, D].
        scores: natural, [Hkv, r, n].
        p: their softmax.
        log_total: the logarithm of the sum of exponentials, [Hkv, r].
        keys: n of them.
        values: n of them.
        first: token of the sequence, of those n.
        first_order: what each score may be off by its own roundings, and its weight, [Hkv, r, n].
        score_error: by the query's too.
        scale: of the scores.
        roundings: the kernel's.
        stored: the rounding of the output.
    """
    n, numbers = p.shape[-1], values.numbers
    mean = p @ numbers
    value_spread = np.sqrt(np.maximum(p @ numbers**2 - mean**2, 0))
    rounds_alike = roundings.aligned > 0 and not roundings.levels  # MMAs cut off of all scores in one direction

    lse_fixed_error, fixed_error = _query_rounding_changes(x, p, keys, mean, values, scale, roundings)
    second_order = np.expm1(score_error) - score_error
    lse_fixed_error += _SHARED * np.abs((p * scores).sum(axis=-1)) + _APPROXIMATE + 2.0**-22 * np.abs(log_total)
    lse_fixed_error += (p * second_order).sum(axis=-1)
    weighted = p**2 * _count_equal_scores(scores)
    moved_by_scores = weighted * first_order**2
    chains = max(roundings.serial, 8 * roundings.warps)
    additions = n / chains * (1 / chains + (p**2).sum(axis=-1)) + 32  # a heavy token makes its chain's sum large
    sums = SINGLE**2 * (additions / 3 + 4 * _RESCALINGS)
    lse_variance = sums + moved_by_scores.sum(axis=-1)
    if rounds_alike or keys.scheme.by_channel:  # where zeros are by channel, their part is one for all scores
        lse_fixed_error += (p * first_order).sum(axis=-1)

    fixed_error += _SHARED * np.abs(_change_of_mean(p * scores, mean, numbers))
    fixed_error += np.sqrt((p * second_order**2).sum(axis=-1, keepdims=True)) * value_spread
    if rounds_alike:
        fixed_error += np.sqrt((p * first_order**2).sum(axis=-1, keepdims=True)) * value_spread
    truncation_error, variance = _estimate_truncation(p, first, values, roundings)
    underflow_error, underflow_variance = _estimate_underflow(p, values, roundings.floor)
    added_sizes = p @ values.size
    serial = n / roundings.promoted if roundings.promoted else 0 if roundings.aligned else n / roundings.serial
    variance += (
        underflow_variance
        + sums[..., None] * mean**2
        + SINGLE**2 * ((serial + 32) / 3 + 4 * _RESCALINGS) * added_sizes**2
    )
    fixed_error += truncation_error + underflow_error

    covariance = np.empty((*p.shape[:2], *numbers.shape[-1:] * 2), like=p)
    for query_row in range(p.shape[1]):  # one after the other: weighted values are as large as all values
        variance_by_weight = moved_by_scores[:, query_row] + weighted[:, query_row] * (roundings.sum**2 / 3)
        covariance[:, query_row] = (numbers * variance_by_weight[..., None]).swapaxes(1, 2) @ numbers
        shift = (moved_by_scores[:, query_row][:, None] @ numbers).swapaxes(1, 2) * mean[:, query_row, None]
        covariance[:, query_row] += (
            moved_by_scores[:, query_row].sum(axis=-1)[:, None, None]
            * mean[:, query_row, :, None]
            * mean[:, query_row, None]
        )
        covariance[:, query_row] -= shift + shift.swapaxes(1, 2)
    diagonal = np.arange(numbers.shape[-1], like=p)
    covariance[..., diagonal, diagonal] += variance
    variance = np.maximum(covariance[..., diagonal, diagonal], 0)
    out = 1.01 * (fixed_error + _SIGMAS * np.sqrt(variance) + stored * np.abs(mean)) + 2.0**-25

    covariance[..., diagonal, diagonal] += (stored * mean) ** 2 / 3
    fourth = covariance @ covariance  # its Frobenius norm is the square of one that is no smaller than |C|
    norm = (fourth**2).sum(axis=(-1, -2)) ** 0.25
    trace = np.maximum(covariance[..., diagonal, diagonal].sum(axis=-1), 0)
    chance_error = (np.sqrt(trace) + _SIGMAS * np.sqrt(norm)) / numbers.shape[-1] ** 0.5
    out_rms = 1.01 * (np.sqrt((fixed_error**2).mean(axis=-1)) + chance_error) + 2.0**-25
    lse_fixed_error *= 1.01
    return LikelyErrors(out, out_rms, lse_fixed_error + _SIGMAS * np.sqrt(lse_variance), lse_fixed_error, lse_variance)


def rms_of_heads(fixed: F64, variance: F64) -> Any:
    """Compute the RMS over heads [..., Hq] of errors with a fixed part and a random part per head."""
    chance_error = np.sqrt(variance.mean(axis=-1)) + _SIGMAS * np.sqrt(variance.max(axis=-1) / variance.shape[-1])
    return np.sqrt((fixed**2).mean(axis=-1)) + chance_error


def _query_rounding_changes(
    x: F64, p: F64, keys: Operand, mean: F64, values: Operand, scale: float, roundings: Roundings
) -> tuple[Any, Any]:
    """Compute the change from rounding queries x: of the logarithm of the sum [Hkv, r], of the output [Hkv, r, D].

    All tokens share it. Queries that become integers have a known rounding, except elements so near the middle of two
    integers that an error of the unit decides: these count half a unit, each by itself. Other queries are rounded to
    next to nothing, which counts with the scores' own roundings.
    """
    lse, out = np.zeros_like(p[..., 0]), np.zeros_like(mean)
    if not roundings.levels:
        return lse, out
    unit = np.maximum(keys.largest(x) / roundings.levels, 2.0**-126)
    rounding_error = np.rint(x / unit) * unit - x
    is_undecided = np.abs(np.abs(rounding_error) / unit - 0.5) < 2.0**-21 * np.abs(x / unit) + 2.0**-10
    parts, rank = [np.where(is_undecided, 0, rounding_error)], np.cumsum(is_undecided, axis=-1)
    parts += [np.where(is_undecided & (rank == i + 1), unit / 2, 0) for i in range(int(rank.max()))]
    for part in parts:
        score_changes = p * (part @ keys.numbers.swapaxes(1, 2)) * scale
        lse += np.abs(score_changes.sum(axis=-1))
        out += np.abs(_change_of_mean(score_changes, mean, values.numbers))
    return lse, out


def _change_of_mean(weights: F64, mean: F64, values: F64) -> F64:
    """Compute the change of the mean that changes of the weights [Hkv, r, n] make."""
    mean_change: F64 = weights @ values - weights.sum(axis=-1, keepdims=True) * mean
    return mean_change


def _count_equal_scores(scores: F64) -> Any:
    """Count the tokens of a row [..., n] that have a token's score, itself included: their roundings add up."""
    rounded_scores: Any = (
        np.clip(np.rint(scores / _ALIKE), -(2.0**44), 2.0**44).astype(np.int64).reshape(-1, scores.shape[-1])
    )
    rounded_scores = (
        rounded_scores + np.arange(len(rounded_scores), like=rounded_scores)[:, None] * 2**46
    ).ravel()  # rows apart
    ordered_scores = np.sort(rounded_scores)
    counts = np.searchsorted(ordered_scores, rounded_scores, side="right") - np.searchsorted(
        ordered_scores, rounded_scores, side="left"
    )
    return counts.reshape(scores.shape)


def _estimate_truncation(p: F64, first: int, values: Operand, roundings: Roundings) -> tuple[Any, Any]:
    """Estimate (fixed part, variance) [Hkv, r, D] of the bits that the MMAs of values cut off.

    Of terms and sum at most `cut_share` of their largest is cut off, evenly spread: half of it in the mean. Sums grow
    until they are promoted. So the part of one token is cut in all MMAs that follow it in its window, which are half
    of the window's in the mean, and all in the worst case.
    """
    cut_share, n = _CUT * roundings.aligned, p.shape[-1]
    tokens = n / roundings.warps
    tokens = min(tokens, roundings.promoted) if roundings.promoted else tokens
    mmas = tokens / _MMA + 1
    weights, leading_tokens = p * values.units[:, None], first % _MMA
    padded_weights = np.pad(weights, [(0, 0), (0, 0), (leading_tokens, -(leading_tokens + n) % _MMA)])
    largest = padded_weights.reshape(*p.shape[:2], -1, _MMA).max(axis=-1)
    grains, added_sizes, squares = values.grains[:, None], p @ values.added, tokens * (p**2 @ values.added**2)
    fixed_error = cut_share / 2 * mmas * np.minimum(added_sizes, added_sizes / 2 + _SIGMAS / 2 * np.sqrt(squares))
    fixed_error += cut_share / 2 * largest.sum(axis=-1, keepdims=True) * grains
    variance = (cut_share / 10) ** 2 * mmas * squares + (cut_share / 4 * grains) ** 2 * (largest**2).sum(
        axis=-1, keepdims=True
    )
    return fixed_error, variance


def _estimate_underflow(p: F64, values: Operand, floor: float) -> tuple[Any, Any]:
    """Estimate (mean, variance) [Hkv, r, D] of the loss of weights below FP16's normal numbers.

    The smallest weights lose all that they are.
    """
    weights = p * values.units[:, None]
    smallest = floor * weights.max(axis=-1, keepdims=True)
    size = np.abs(values.numbers) / values.units[..., None]
    mean = np.where(weights < 2 * smallest, np.minimum(weights, smallest), 0.0) @ size
    return mean, smallest**2 / 3 * (size**2).sum(axis=1)[:, None]
