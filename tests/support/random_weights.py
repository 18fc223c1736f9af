"""Random quantised weights, and keys and values, for the tests of packing; and when two are the same."""

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from ptxlab.lowbit.quant import GROUPS, KV_SCHEMES, LQQWeight, QoQChannelWeight, QoQWeight, QuantizedKV

every_scheme = pytest.mark.parametrize("scheme", KV_SCHEMES)


def random_weight(kind: type, N: int, K: int, group: int, seed: int):
    """Make a weight of random integers, within the range that the quantisers give at protective range 119."""
    rng = np.random.default_rng(seed)
    q4 = rng.integers(0, 16, (N, K), np.uint8)
    scale_of_row = rng.standard_normal(N).astype(np.float32)
    if kind is QoQChannelWeight:
        return QoQChannelWeight(q4, scale_of_row, rng.integers(0, 16, N, np.uint8))
    shape = (N, K // group)
    group_scale = rng.integers(1, 9, shape, np.uint8)
    level2 = (
        {"minimum": rng.integers(-119, -1, shape, np.int8)}
        if kind is LQQWeight
        else {"zero": rng.integers(0, 16, shape, np.uint8)}
    )
    return kind(q4=q4, group_scale=group_scale, channel_scale=scale_of_row, protective_range=119, **level2)


def weight_of(
    kind: type, q4: np.ndarray, group_scale: np.ndarray, protective_range: int = 119, **level2: np.ndarray
) -> Any:
    """Make a weight of these integers, with `minimum` or `zero`; its channels are not scaled."""
    ones = np.ones(len(q4), np.float32)
    return kind(q4=q4, group_scale=group_scale, channel_scale=ones, protective_range=protective_range, **level2)


KINDS = (LQQWeight, QoQWeight, QoQChannelWeight)
weights = st.builds(
    lambda kind, n, groups, group, seed: random_weight(kind, 8 * n, groups * group, group, seed),
    st.sampled_from(KINDS),
    st.sampled_from([1, 3, 5, 8, 9, 17]),
    st.integers(1, 5),
    st.sampled_from(GROUPS),
    st.integers(0, 2**32 - 1),
)


def random_kv(scheme: str, tokens: int, heads: int, D: int, seed: int = 0) -> QuantizedKV:
    """Make a KV page's tokens of any integers, with any bits for the constants stored beside them, NaN included."""
    rng, kv_scheme = np.random.default_rng(seed), KV_SCHEMES[scheme]
    values = rng.integers(-128 if kv_scheme.low else 0, kv_scheme.high + 1, (tokens, heads, D)).astype(kv_scheme.dtype)
    if kv_scheme.by_channel:
        scale, zero = rng.standard_normal((2, heads, D)).astype(np.float32)
    else:
        scale, zero = rng.integers(0, 2**16, (2, tokens, heads), np.uint16).view(np.float16)
    return QuantizedKV(scheme, values, scale, zero)


def assert_equal(a: Any, b: Any) -> None:
    """Assert that two objects have the same fields with the same bits, NaN included."""
    assert type(a) is type(b)
    for name, field_a in vars(a).items():
        field_b = getattr(b, name)
        if isinstance(field_a, np.ndarray):
            assert (field_b.dtype, field_b.shape) == (field_a.dtype, field_a.shape), name
            assert field_b.tobytes() == field_a.tobytes(), name
        else:
            assert field_b == field_a, name
