"""Claims about what quantisers emit, and about the sums that kernels add up: what the kernels' claims presuppose."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.lowbit.quant import LQQWeight, QoQWeight, TwoLevelWeight, lqq_groups, qoq_groups
from ptxlab.prove.claims import Claim, register
from ptxlab.prove.solve import Enumeration, Query

_GROUP = 32  # a group's two ends decide scale and offset; how many weights lie between does not

Bytes = npt.NDArray[np.int8]


@register
def ranges() -> Iterator[Claim]:
    """Yield claims for each quantiser: it is safe at its protective range, and not at the next one."""
    kinds: tuple[tuple[str, Callable[[Bytes], TwoLevelWeight], int], ...] = (
        ("qoq", _qoq, 119),
        ("lqq nearest", lambda q8: _lqq(q8, "nearest"), 120),
        ("lqq ceiling", lambda q8: _lqq(q8, "ceiling"), 120),
        ("lqq with any scale in 1..16", _lqq_of_any_scale, 119),
    )
    for name, quantise, largest_safe in kinds:
        for limit in sorted({119, largest_safe, largest_safe + 1}):
            yield Claim(
                subject=f"quantiser {name}",
                name=f"restored bytes fit s8 at range {limit}",
                text=f"for all -{limit} <= min <= max <= {limit} of a group: no weight of it is restored outside s8",
                build=partial(_all_groups, quantise, limit),
                expect="proved" if limit <= largest_safe else "refuted",
            )


@register
def predicate() -> Iterable[Claim]:
    """List the claims that a group's least and greatest nibble decide if it overflows."""
    return [
        Claim(
            subject="overflow predicate",
            name="the ends decide",
            text="low <= q <= high, scale 1..255, offset s8; low, high restored within s8 => q restored within s8",
            build=_ends_decide,
        ),
        Claim(
            subject="overflow predicate",
            name="no carry in LQQ's word",
            text="q in 0..15, scale 1..255, q*scale + min <= 127 => q*scale + (128 + min) fits a byte",
            build=_no_carry,
        ),
    ]


@register
def sums() -> Iterator[Claim]:
    """Yield the claims on the longest K at which a sum still fits an INT32 accumulator."""
    for operands, low, high, largest_safe in (
        ("u8 x s8", -255 * 128, 255 * 127, 65793),
        ("s8 x s8", -128 * 127, 128 * 128, 131071),
        ("16*u4 x s8, COMET's and per-channel bytes", -240 * 128, 240 * 127, 69905),
    ):
        for K in (largest_safe, largest_safe + 1):
            yield Claim(
                subject=f"accumulator {operands}",
                name=f"fits s32 up to K = {K:,}",
                text=f"K <= {K:,}, every product in {low}..{high}: the sum lies in s32",
                build=partial(_sum_fits, low, high, K, 2**31 - 1),
                expect="proved" if largest_safe == K else "refuted",
            )
    for operands, low, high, largest_safe in (
        ("s4 x s4", -56, 64, 262144),
        ("16*s4 x s8, W4Ax's bytes", -16256, 16384, 1024),
    ):
        for K in (largest_safe, largest_safe + 1):
            yield Claim(
                subject=f"accumulator {operands}",
                name=f"exact in FP32 up to K = {K:,}",
                text=f"K <= {K:,}, every product in {low}..{high}: the sum lies within 2^24, so FP32 holds it",
                build=partial(_sum_fits, low, high, K, 2**24),
                expect="proved" if largest_safe == K else "refuted",
            )
    yield Claim(
        subject="unsigned LQQ's epilogue",
        name="removes 128 from every byte",
        text="s32 arithmetic: sum of (w + 128)*x minus 128 * (sum of x) is the sum of w*x, if that fits s32",
        build=_epilogue_removes_128,
    )


def _all_groups(quantise: Callable[[Bytes], TwoLevelWeight], limit: int) -> Enumeration:
    """Check every (min, max) of a group at protective range `limit` for overflow.

    A nibble grows with its weight, so both ends are restored wherever any weight between them is.
    """
    low, high = (ends_grid.reshape(-1) for ends_grid in np.mgrid[-limit : limit + 1, -limit : limit + 1])
    low, high = low[low <= high], high[low <= high]
    q8 = np.repeat(low[:, None], _GROUP, axis=1)
    q8[:, 1] = high
    weight = quantise(q8.astype(np.int8))
    is_wrong = weight.overflows()[:, 0]
    cases = len(is_wrong) * (len(weight.q4) // len(low))
    if not is_wrong.any():
        return Enumeration(cases)
    row = int(is_wrong.argmax())
    restored_weights = weight.exact_level1()[row]
    group = {
        "min": int(low[row % len(low)]),
        "max": int(high[row % len(low)]),
        "scale": int(weight.group_scale[row, 0]),
    }
    return Enumeration(
        cases,
        {**group, "restored": int(restored_weights.min() if restored_weights.min() < -128 else restored_weights.max())},
    )


def _qoq(q8: Bytes) -> QoQWeight:
    q4, scale, zero = qoq_groups(q8, _GROUP)
    return QoQWeight(q4=q4, group_scale=scale, zero=zero, channel_scale=_ones(q8), protective_range=127)


def _lqq(q8: Bytes, rounding: Any) -> LQQWeight:
    q4, scale, minimum = lqq_groups(q8, _GROUP, rounding)
    return LQQWeight(q4=q4, group_scale=scale, minimum=minimum, channel_scale=_ones(q8), protective_range=127)


def _lqq_of_any_scale(q8: Bytes) -> LQQWeight:
    """Quantise the groups once for every scale in 1..16, that is, all choices of a search."""
    scale = np.repeat(np.arange(1, 17, dtype=np.uint8), len(q8))[:, None]
    groups = np.tile(q8.astype(np.int32), (16, 1))
    minimum = groups.min(axis=1, keepdims=True)
    q4 = np.rint((groups - minimum) / scale).clip(0, 15).astype(np.uint8)
    level2: dict[str, Any] = {"group_scale": scale, "minimum": minimum.astype(np.int8)}
    return LQQWeight(q4=q4, channel_scale=_ones(q4), protective_range=127, **level2)


def _ones(rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return np.ones(len(rows), np.float32)


def _ends_decide() -> Query:
    """Build the query that a nibble between two that are restored within s8 is so too."""
    import z3

    low, q, high, scale, offset = (z3.BitVec(name, 32) for name in ("low", "q", "high", "scale", "offset"))

    def fits(nibble: Any) -> Any:
        restored_weight = nibble * scale + offset
        return z3.And(restored_weight >= -128, restored_weight <= 127)

    assumptions = [low >= 0, low <= q, q <= high, high <= 15, scale >= 1, scale <= 255, offset >= -65536, offset <= 127]
    values = {"low": low, "q": q, "high": high, "scale": scale, "offset": offset}
    return Query(holds=fits(q), assume=[*assumptions, fits(low), fits(high)], values=values)


def _no_carry() -> Query:
    """Build the query that q*scale + (128 + min) fits a byte if the restored weight is at most 127."""
    import z3

    q, scale, minimum = (z3.BitVec(name, 32) for name in ("q", "scale", "min"))
    byte = q * scale + minimum + 128
    assumptions = [q >= 0, q <= 15, scale >= 1, scale <= 255, minimum >= -128, minimum <= 127]
    values = {"q": q, "scale": scale, "min": minimum}
    condition = z3.And(byte >= 0, byte <= 255)
    return Query(holds=condition, assume=[*assumptions, q * scale + minimum <= 127], values=values)


def _sum_fits(low: int, high: int, K: int, limit: int) -> Query:
    """Build the query that a sum of at most K products, each in low..high, lies within -limit..limit."""
    import z3

    terms, total = z3.BitVec("K", 64), z3.BitVec("sum", 64)
    bounds = [terms >= 1, terms <= K, terms * low <= total, total <= terms * high]
    return Query(holds=z3.And(total >= -limit, total <= limit), assume=bounds, values={"K": terms, "sum": total})


def _epilogue_removes_128() -> Query:
    """Build the query that the epilogue, which subtracts 128 times the token sum, restores the sum of products."""
    import z3

    products, tokens = z3.BitVec("products", 64), z3.BitVec("tokens", 64)  # the two exact sums
    accumulator = z3.Extract(31, 0, products + 128 * tokens)  # as the kernel holds it, modulo 2^32
    left_side = accumulator - 128 * z3.Extract(31, 0, tokens)
    assumptions = [products >= -(2**31), products < 2**31, tokens >= -(2**31), tokens < 2**31]
    return Query(
        holds=z3.SignExt(32, left_side) == products, assume=assumptions, values={"products": products, "tokens": tokens}
    )
