"""Problems for the GEMMs, drawn: weights at the limits of a byte, activations at -128, -127 and 127, of any shape."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ptxlab.lowbit import quant
from ptxlab.lowbit.kernels.gemm.common import GROUPS
from ptxlab.lowbit.kernels.gemm.grouped import offsets_of
from tests.support import strategies
from tests.support.random_weights import weight_of

_EDGES = strategies.near_edges((-128, -127, 127), -128, 127)  # of bytes that are multiplied as they are


@st.composite
def qoq(draw: st.DrawFn, tokens: int, rows: int, groups: int, group_sizes: Sequence[int] = GROUPS) -> dict[str, Any]:
    """Draw a QoQ problem: (q4 - zero) * scale, never beyond a signed byte, up to 127 often.

    Groups are of a size in `group_sizes`.
    """
    M, N, K, g = _sizes(draw, tokens, rows, groups, group_sizes)
    scale = draw(hnp.arrays(np.uint8, (N, K // g), elements=strategies.near_edges((1, 15, 16), 1, 16)))
    zero = np.minimum(draw(hnp.arrays(np.uint8, scale.shape, elements=st.integers(0, 15))), 127 // scale)
    largest = np.repeat(zero + 127 // scale, g, axis=1)
    q4 = np.minimum(draw(strategies.q4_matrix(N, K)), largest)
    weight = weight_of(quant.QoQWeight, q4, scale, zero=zero)
    return {"weight": weight, "x": _activations(draw, M, K)}


@st.composite
def lqq(draw: st.DrawFn, tokens: int, rows: int, groups: int, group_sizes: Sequence[int] = GROUPS) -> dict[str, Any]:
    """Draw an LQQ problem: q4 * scale + minimum.

    128 + minimum + 15 * scale reaches 255, the last byte that does not carry.
    """
    M, N, K, g = _sizes(draw, tokens, rows, groups, group_sizes)
    scale = draw(hnp.arrays(np.uint8, (N, K // g), elements=strategies.near_edges((1, 15, 16), 1, 16)))
    room = 127 - 15 * scale.astype(np.int16)  # the largest minimum
    slack = draw(hnp.arrays(np.int16, scale.shape, elements=strategies.near_edges((0, 1), 0, 254)))
    minimum = np.maximum(room - slack, -127).astype(np.int8)
    weight = weight_of(quant.LQQWeight, draw(strategies.q4_matrix(N, K)), scale, minimum=minimum)
    return {"weight": weight, "x": _activations(draw, M, K)}


@st.composite
def channel(draw: st.DrawFn, tokens: int, rows: int, groups: int) -> dict[str, Any]:
    """Draw a problem with weights per channel: all of 0..15 as weight and as zero point, K any multiple of 32."""
    M, N, K, _ = _sizes(draw, tokens, rows, 4 * groups, (32,))
    zero = draw(hnp.arrays(np.uint8, N, elements=strategies.near_edges((0, 15), 0, 15)))
    weight = quant.QoQChannelWeight(draw(strategies.q4_matrix(N, K)), np.ones(N, np.float32), zero)
    return {"weight": weight, "x": _activations(draw, M, K)}


@st.composite
def w8a8(draw: st.DrawFn, tokens: int, rows: int, sixteens: int) -> dict[str, Any]:
    """Draw a W8A8 problem of any bytes, K any multiple of 16."""
    M, N, K = draw(st.integers(1, tokens)), 8 * draw(st.integers(1, rows // 8)), 16 * draw(st.integers(1, sixteens))
    return {"w": draw(strategies.mostly_constant(np.int8, (N, K), _EDGES)), "x": _activations(draw, M, K)}


@st.composite
def grouped_experts(draw: st.DrawFn, experts: int, tokens: int, rows: int, groups: int) -> dict[str, Any]:
    """Draw experts of any scheme, some without tokens.

    `tokens` is the largest number of tokens of one expert.
    """
    kind = draw(st.sampled_from((lqq, qoq, channel)))
    counts = draw(st.lists(st.one_of(st.just(0), st.integers(1, tokens)), min_size=1, max_size=experts).filter(any))
    first = draw(kind(1, rows, groups))["weight"]
    order = np.array(draw(st.permutations(range(len(counts)))))
    weights = [_roll_rows(first, 3 * int(shift)) for shift in order]  # drawing each would be too much
    return {"weights": weights, "offsets": offsets_of(counts), "x": _activations(draw, sum(counts), first.shape[1])}


def _roll_rows(weight: Any, rows: int) -> Any:
    """Rotate the rows of a weight by `rows`."""
    arrays = {field.name: getattr(weight, field.name) for field in fields(weight)}
    return replace(
        weight, **{name: np.roll(a, rows, axis=0) for name, a in arrays.items() if isinstance(a, np.ndarray)}
    )


def _sizes(
    draw: st.DrawFn, tokens: int, rows: int, groups: int, group_sizes: Sequence[int]
) -> tuple[int, int, int, int]:
    g = draw(st.sampled_from(group_sizes))
    return draw(st.integers(1, tokens)), 8 * draw(st.integers(1, rows // 8)), g * draw(st.integers(1, groups)), g


def _activations(draw: st.DrawFn, M: int, K: int) -> np.ndarray:
    activations: np.ndarray = draw(strategies.mostly_constant(np.int8, (M, K), _EDGES))
    return activations
