"""SmoothAttention changes no score, and at least halves what 4-bit keys with outlier channels cost."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxlab.errors import ArgumentError
from ptxlab.lowbit.quant import quantize_kv, smooth_attention
from ptxlab.lowbit.reference import attention, rope


def project(x, w, bias, D):
    return (x @ w.T + bias).reshape(len(x), -1, D)


def layer(rng, Hkv, ratio, D, K=24):
    """Make float64 projections of a layer, with biases, whose keys have outlier channels."""
    w_q, w_k = rng.standard_normal((Hkv * ratio * D, K)), rng.standard_normal((Hkv * D, K))
    w_k *= np.where(rng.random(Hkv * D) < 0.1, rng.uniform(10, 100, Hkv * D), 1)[:, None]
    return w_q, w_k, rng.standard_normal(len(w_q)), rng.standard_normal(len(w_k)) * 5


@pytest.mark.full
@given(
    Hkv=st.integers(1, 3), ratio=st.integers(1, 4), D=st.sampled_from([2, 8, 32]), alpha=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_scores_are_unchanged(Hkv, ratio, D, alpha, seed):
    """Through biases, grouped heads and RoPE, in float64."""
    rng = np.random.default_rng(seed)
    w_q, w_k, b_q, b_k = layer(rng, Hkv, ratio, D)
    x = rng.standard_normal((6, 24))
    angles = np.outer(np.arange(6), 10.0 ** -np.arange(D // 2))

    def rotate(y):
        a, b = y[..., : D // 2], y[..., D // 2 :]
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def scores(w_q, w_k, b_q, b_k):
        q, k = rotate(project(x, w_q, b_q, D)), rotate(project(x, w_k, b_k, D))
        return np.einsum("tghd,lgd->ghtl", q.reshape(6, Hkv, ratio, D), k)

    peaks = np.abs(project(x, w_k, b_k, D)).max(axis=0)
    smooth = smooth_attention(w_q, w_k, peaks, head_dim=D, b_q=b_q, b_k=b_k, alpha=alpha)
    plain_scores, smooth_scores = scores(w_q, w_k, b_q, b_k), scores(smooth.w_q, smooth.w_k, smooth.b_q, smooth.b_k)
    np.testing.assert_allclose(smooth_scores, plain_scores, rtol=1e-11, atol=1e-11 * np.abs(plain_scores).max())


def test_the_factors_are_the_paper_s():
    """The layer has one KV head of D 4 and two query heads: pairs (0, 2) and (1, 3), square roots, both heads."""
    keys_max = np.array([[4.0, 0.0, 9.0, 0.0]])
    smooth = smooth_attention(np.ones((8, 1)), np.ones((4, 1)), keys_max, head_dim=4, b_q=np.ones(8), b_k=np.ones(4))
    assert smooth.factor.tolist() == [[3, 1, 3, 1]]  # a dead pair stays as it is
    assert smooth.w_q[:, 0].tolist() == smooth.b_q.tolist() == [3, 1, 3, 1] * 2
    assert smooth.w_k[:, 0].tolist() == smooth.b_k.tolist() == [1 / 3, 1, 1 / 3, 1]


def test_every_kv_head_has_its_own_factors():
    smooth = smooth_attention(np.ones((8, 1)), np.ones((4, 1)), np.array([[4.0, 1], [16, 1]]), head_dim=2)
    assert smooth.w_q[:, 0].tolist() == [2] * 4 + [4] * 4  # query heads 0 and 1, then 2 and 3
    assert smooth.b_q is None and smooth.b_k is None


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize(("magnitude", "channels"), [(10, 2), (10, 4), (30, 4), (100, 2)])
def test_error_of_4_bit_keys_is_halved(magnitude, channels, rotate):
    """Keys of D 128 with a few channels 10 to 100 times the others, whose pairs queries weigh down, as trained ones do:
    so scores stay of order 1, and softmax does not saturate.
    """
    rng = np.random.default_rng(0)
    D, Hkv, ratio, K, tokens = 128, 2, 4, 64, 256
    w_q, w_k = (rng.standard_normal((heads, D, K)) / 8 for heads in (Hkv * ratio, Hkv))
    for head in range(Hkv):
        outliers = rng.choice(D, channels, replace=False)
        w_k[head, outliers] *= magnitude
        pairs = np.concatenate([outliers, (outliers + D // 2) % D])
        w_q[head * ratio : (head + 1) * ratio, pairs] /= magnitude
    w_q, w_k = w_q.reshape(-1, K), w_k.reshape(-1, K)
    x, v = rng.standard_normal((tokens, K)), rng.standard_normal((tokens, Hkv, D))
    angles = np.outer(np.arange(tokens), 10000.0 ** (-np.arange(D // 2) / (D // 2)))
    table = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def queries_and_keys(*weights):
        projected = [project(x, w, 0, D) for w in weights]
        return [rope(y, *table) for y in projected] if rotate else projected

    def error(*weights):
        q, k = queries_and_keys(*weights)
        out, _ = attention(q, quantize_kv(k).dequantize(), v, scale=D**-0.5)
        return np.linalg.norm(out - exact) / np.linalg.norm(exact)

    q, k = queries_and_keys(w_q, w_k)
    exact, _ = attention(q, k, v, scale=D**-0.5)
    smooth = smooth_attention(w_q, w_k, np.abs(k).max(axis=0), head_dim=D)
    plain_error, smooth_error = error(w_q, w_k), error(smooth.w_q, smooth.w_k)
    assert smooth_error <= 0.5 * plain_error, (plain_error, smooth_error)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_dtypes_stay(dtype):
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
    w = np.ones((4, 3)).astype(dtype)
    smooth = smooth_attention(w, w, np.full((1, 4), 3, np.float32), head_dim=4, b_k=w[:, 0])
    assert smooth.w_q.dtype == smooth.w_k.dtype == smooth.b_k.dtype == w.dtype
    np.testing.assert_array_equal(smooth.w_q, (w.astype(np.float64) * 3**0.5).astype(w.dtype), strict=True)
    assert (w == 1).all()


W = np.ones((8, 3), np.float32)
PEAKS = np.ones((2, 4), np.float32)
GOOD = {"w_q": W, "w_k": W, "keys_max": PEAKS, "head_dim": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": 1.5}, r"alpha: must lie in 0..1 \(got 1.5\)"),
        ({"alpha": float("nan")}, "alpha: must lie in 0..1"),
        ({"head_dim": 3}, "head_dim: must be a positive even number"),
        ({"head_dim": 0}, "head_dim: must be a positive even number"),
        ({"head_dim": 6}, r"w_k: must have a multiple of head_dim 6 rows \(got 8\)"),
        ({"w_q": W[:6]}, r"w_q: must have a multiple of head_dim 4 rows \(got 6\)"),
        ({"w_q": W[:4]}, r"w_q: must have a multiple of w_k's 2 heads \(got 1\)"),
        ({"w_q": W[:, :2]}, r"w_q: K must be w_k's 3 \(got 2\)"),
        ({"keys_max": PEAKS[:1]}, r"keys_max: must be \[2, 4\] as w_k is \(got shape \(1, 4\)\)"),
        ({"keys_max": -PEAKS}, "keys_max: must not be negative"),
        (
            {"keys_max": PEAKS * np.float32(np.nan)},
            r"keys_max: must be finite in float32 \(got keys_max\[0, 0\] is nan",
        ),
        ({"w_k": W * np.float32(np.inf)}, r"w_k: must be finite in float32 \(got w_k\[0, 0\] is inf"),
        ({"w_k": W.astype(int)}, "w_k: dtype must be one of"),
        ({"b_q": W[:7, 0]}, r"b_q: must be \[8\] \(got shape \(7,\)\)"),
        ({"b_k": W[:, 0] * np.float32(np.nan)}, r"b_k: must be finite .*b_k\[0\] is nan"),
        ({"b_k": [1.0] * 8}, "b_k: must be an array of NumPy, CuPy or PyTorch"),
        (
            {"w_q": W.astype(np.float16) * np.float16(60000), "keys_max": PEAKS * 4},
            r"w_q: must stay finite in float16 when smoothed \(got an overflow at w_q\[0, 0\]\)",
        ),
    ],
)
def test_refuses(change, message):
    with pytest.raises(ArgumentError, match=message) as error:
        smooth_attention(**GOOD | change)
    assert "\n" not in str(error.value)
