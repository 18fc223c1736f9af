"""The attention oracle against loops over single elements, and what it says where nothing is seen."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxlab.lowbit.reference import attention, dequantize_kv, rope, rope_tables, rotate_heads


def naive(q, k, v, scale, window):
    """Compute attention with every score, weight and sum by itself, in Python's floats."""
    (T, Hq, D), (L, Hkv, _) = q.shape, k.shape
    out, lse = np.zeros((T, Hq, D)), np.full((T, Hq), -np.inf)
    for t in range(T):
        position = L - T + t
        first = 0 if window is None else max(0, position - window + 1)
        for h in range(Hq):
            kv = h // (Hq // Hkv)
            scores = {j: scale * math.fsum(q[t, h] * k[j, kv]) for j in range(first, position + 1)}
            if not scores:
                continue
            peak = max(scores.values())
            total = math.fsum(math.exp(s - peak) for s in scores.values())
            lse[t, h] = peak + math.log(total)
            for d in range(D):
                out[t, h, d] = math.fsum(math.exp(s - lse[t, h]) * v[j, kv, d] for j, s in scores.items())
    return out, lse


@pytest.mark.full
@given(
    T=st.integers(1, 8),
    L=st.integers(0, 20),
    Hkv=st.integers(1, 3),
    ratio=st.integers(1, 4),
    window=st.none() | st.integers(1, 24),
    magnitude=st.sampled_from([0.1, 1.0, 300.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_against_a_loop(T, L, Hkv, ratio, window, magnitude, seed):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((T, Hkv * ratio, 8)) * magnitude
    k, v = rng.standard_normal((2, L, Hkv, 8))
    out, lse = attention(q, k, v, scale=0.35, window=window)
    expected_out, expected_lse = naive(q, k, v, 0.35, window)
    assert out.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(out, expected_out, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-12)


def test_the_tokens_that_ask_are_causal():
    """Query t of T = 3 sees L - 2 + t of the L tokens: what follows it changes nothing."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 8)), *rng.standard_normal((2, 5, 1, 8))
    out, lse = attention(q, k, v, scale=0.3)
    for t in range(3):
        seen = 5 - 3 + t + 1
        alone = attention(q[t : t + 1], k[:seen], v[:seen], scale=0.3)
        np.testing.assert_allclose(out[t : t + 1], alone[0])
        np.testing.assert_allclose(lse[t : t + 1], alone[1])


def test_a_window_of_one_is_the_token_itself():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((2, 4, 8)), *rng.standard_normal((2, 6, 2, 8))
    out, lse = attention(q, k, v, scale=0.3, window=1)
    np.testing.assert_allclose(out, np.repeat(v[-2:], 2, axis=1), rtol=1e-15)
    np.testing.assert_allclose(lse, 0.3 * (q * np.repeat(k[-2:], 2, axis=1)).sum(axis=-1))


def test_nothing_seen_gives_zeros_and_minus_infinity():
    q = np.ones((3, 2, 8), np.float16)
    empty = np.ones((0, 1, 8), np.float16)
    out, lse = attention(q, empty, empty, scale=1.0)
    assert not out.any() and (lse == -np.inf).all() and out.shape == q.shape and lse.shape == (3, 2)
    one = np.ones((1, 1, 8), np.float16)  # of three queries, the first two lie before the sequence's only token
    out, lse = attention(q, one, one, scale=1.0)
    assert not out[:2].any() and (lse[:2] == -np.inf).all()
    assert (out[2] == 1).all() and (lse[2] == 8).all()


def test_lse_is_a_natural_logarithm():
    zeros = np.zeros((5, 1, 8))
    assert attention(zeros[:1], zeros, zeros, scale=1.0)[1].item() == pytest.approx(math.log(5), rel=1e-15)


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="2 KV heads must divide its heads \\(got 3\\)"):
        attention(np.zeros((1, 3, 8)), np.zeros((1, 2, 8)), np.zeros((1, 2, 8)), scale=1.0)


@given(st.integers(0, 2**32 - 1))
def test_rope_rounds_every_operation(seed):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((3, 2, 8)).astype(np.float16)
    angle = rng.uniform(0, 1000, (3, 4))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    rotated = rope(x, cos, sin)
    assert rotated.dtype == np.float32 and rotated.shape == x.shape
    for t, h, i in np.ndindex(3, 2, 4):
        a, b = np.float32(x[t, h, i]), np.float32(x[t, h, i + 4])
        assert rotated[t, h, i] == a * cos[t, i] - b * sin[t, i]
        assert rotated[t, h, i + 4] == b * cos[t, i] + a * sin[t, i]


def sylvester(D):
    """Compute the matrix f64 [D, D] of blocks of min(D, 128).

    An element is (-1)^(bits that row and column have in common) / √block.
    """
    block, dims = min(D, 128), np.arange(D)
    common = np.bitwise_count(dims[:, None] & dims & (block - 1))
    return np.where(dims[:, None] // block == dims // block, (-1.0) ** common / np.sqrt(block), 0)


@pytest.mark.full
@given(
    D=st.sampled_from([64, 128, 256]), outlier=st.sampled_from([1.0, 100.0, 2.0**-20]), seed=st.integers(0, 2**32 - 1)
)
def test_rotated_heads(D, outlier, seed):
    """Sylvester's matrix; twice is x; scores stay. Errors: log2(block) + 1 roundings of at most the block's norm."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, 3, D)).astype(np.float32)
    k[:, 5] *= outlier
    bound = 8 * 2.0**-24 * np.linalg.norm(k, axis=-1, keepdims=True)
    rotated = rotate_heads(k)
    assert rotated.dtype == np.float32 and rotate_heads(k.astype(np.float64)).dtype == np.float64
    assert (np.abs(rotated - k.astype(np.float64) @ sylvester(D)) <= bound).all()
    assert (np.abs(rotate_heads(rotated).astype(np.float64) - k) <= 3 * np.sqrt(min(D, 128)) * bound).all()
    scores = (rotate_heads(q).astype(np.float64) * rotated).sum(axis=-1)
    norms = np.linalg.norm(q.astype(np.float64), axis=-1) * np.linalg.norm(k.astype(np.float64), axis=-1)
    assert (np.abs(scores - (q.astype(np.float64) * k).sum(axis=-1)) <= 2 * 8 * 2.0**-24 * np.sqrt(D) * norms).all()


def test_rotated_heads_are_rounded_in_order():
    """Sums of dims 1 apart come first: 2^24 + 1 is 2^24, and what is taken off it later does not bring the 1 back."""
    x = np.zeros(64, np.float32)
    x[:3] = 2.0**24, 1, -(2.0**24)
    assert rotate_heads(x)[0] == 0 and rotate_heads(x.astype(np.float64))[0] == 1 / 8


@pytest.mark.parametrize("D", [1, 96, 192])
def test_heads_that_have_no_rotation(D):
    with pytest.raises(ValueError, match=rf"x: D must be a power of two, or a multiple of 128 \(got {D}\)"):
        rotate_heads(np.ones((2, D), np.float32))


def test_scores_of_rotated_pairs_depend_on_the_distance_alone():
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 8))
    table = np.outer(np.arange(32), 10.0 ** -np.arange(4)).astype(np.float32)

    def score(at, of):
        rotated = [rope(x, np.cos(table[p : p + 1]), np.sin(table[p : p + 1])) for x, p in ((q, at), (k, of))]
        return float((rotated[0] * rotated[1]).sum())

    assert score(25, 20) == pytest.approx(score(7, 2), rel=1e-5)
    assert score(25, 20) != pytest.approx(score(7, 3), rel=1e-2)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3_frequency(i, base=500000.0, D=128):
    """Compute the frequency of one pair by wavelengths, as Meta's release does."""
    f = base ** (-2 * i / D)
    wavelength = 2 * math.pi / f
    if wavelength < 8192 / 4:
        return f
    if wavelength > 8192:
        return f / 8
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return (1 - smooth) * f / 8 + smooth * f


@pytest.mark.parametrize(
    ("scaling", "frequency"),
    [
        (None, lambda i: 500000.0 ** (-2 * i / 128)),
        ({"type": "linear", "factor": 4}, lambda i: 500000.0 ** (-2 * i / 128) / 4),
        (LLAMA3, llama3_frequency),
    ],
    ids=["plain", "linear", "llama3"],
)
def test_tables_are_rounded_once(scaling, frequency):
    positions = np.array([[0, 1, 77], [8191, 100_000, 131_071]])
    cos, sin = rope_tables(positions, 128, 500000.0, scaling)
    assert cos.shape == sin.shape == (2, 3, 64) and cos.dtype == sin.dtype == np.float32
    angle = np.array([[[p * frequency(i) for i in range(64)] for p in row] for row in positions.tolist()])
    for table, expected in ((cos, np.cos(angle)), (sin, np.sin(angle))):
        assert np.abs(table - expected).max() < 2**-24 + 1e-10  # a rounding; the angle's own in float64


def test_frequencies_of_llama3_are_kept_mixed_and_divided():
    plain, scaled = (rope_tables(np.array([1]), 128, 500000.0, scaling)[1][0] for scaling in (None, LLAMA3))
    ratio = np.arcsin(scaled) / np.arcsin(plain)
    assert np.allclose(ratio[:29], 1) and np.allclose(ratio[35:], 1 / 8) and (np.diff(ratio) < 1e-6).all()
    assert ((ratio > 0.126) & (ratio < 0.999)).any()


@pytest.mark.parametrize(
    ("D", "scaling", "message"),
    [
        (7, None, "head_dim: must be even, 2 or more \\(got 7\\)"),
        (8, {"rope_type": "yarn"}, "rope_type must be one of default, linear, llama3, per_pair \\(got yarn\\)"),
        (8, {"rope_type": "linear"}, "linear needs the number factor \\(got None\\)"),
        (8, {**LLAMA3, "high_freq_factor": 1}, "0 < low_freq_factor < high_freq_factor \\(got 1, 1\\)"),
    ],
)
def test_tables_that_are_not_known(D, scaling, message):
    with pytest.raises(ValueError, match=message):
        rope_tables(np.arange(3), D, scaling=scaling)


def test_dequantised_values():
    values = np.array([[[0, 15], [7, 8]]], np.uint8)  # one token of two heads
    scale, zero = np.array([[0.5, 2]], np.float16), np.array([[0, 8]], np.float16)
    expected = np.array([[[0, 7.5], [-2, 0]]], np.float32)
    np.testing.assert_array_equal(dequantize_kv(values, scale, zero), expected, strict=True)
    by_channel = np.array([[0.5, 2], [4, 8]], np.float32), np.array([[1, 0], [8, 0]], np.float32)
    expected = np.array([[[-0.5, 30], [-4, 64]]], np.float32)
    np.testing.assert_array_equal(dequantize_kv(values, *by_channel), expected, strict=True)


def test_no_tokens_are_rotated_to_none() -> None:
    assert rotate_heads(np.zeros((0, 2, 64), np.float32)).shape == (0, 2, 64)
