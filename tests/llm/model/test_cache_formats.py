"""Formats of the KV cache against the quantisers, the emulator's FP8, loops over groups, and pages of a real cache."""

from dataclasses import replace

import numpy as np
import pytest

from ptxlab.emulator.ops import narrow_floats
from ptxlab.llm.model.cache_formats import CACHE_FORMATS, StoredTensor, e4m3
from ptxlab.lowbit import layout, quant

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 70, 3, 64)).astype(np.float32)
X[..., 5] *= 20  # an outlier channel, as keys have


def error(tensor: StoredTensor) -> float:
    return float(np.linalg.norm(tensor.restore(X) - X) / np.linalg.norm(X))


def test_fp8_is_that_of_cvt() -> None:
    values = narrow_floats.floats(np.arange(127, dtype=np.uint8), "e4m3")
    ties = (values[1:] + values[:-1]) / 2
    spread = RNG.standard_normal(2000) * 10 ** RNG.uniform(-5, 4, 2000)  # from zero to what saturates
    x = np.concatenate([values, -values, ties, spread]).astype(np.float32)
    right = narrow_floats.floats(narrow_floats.to_narrow(x.astype(np.float64), "e4m3"), "e4m3")
    np.testing.assert_array_equal(e4m3(x), right.astype(np.float32), strict=True)


def test_keys_by_channel_share_constants_over_tokens() -> None:
    restored = StoredTensor("kv4", tokens=16).restore(X)
    for start in range(0, 64, 16):
        group = X[:, start : start + 16].transpose(0, 2, 3, 1)
        expected = quant.quantize_kv(group, "kv4").dequantize().transpose(0, 3, 1, 2)
        np.testing.assert_array_equal(restored[:, start : start + 16], expected)
    np.testing.assert_array_equal(restored[:, 64:], X[:, 64:])  # no group is full
    assert error(StoredTensor("kv4", tokens=16)) < 0.7 * error(StoredTensor("kv4"))


@pytest.mark.parametrize("D", [64, 128, 256])
def test_rotation_quantises_the_rotated_head(D: int) -> None:
    x = RNG.standard_normal((1, 2, 1, D)).astype(np.float32)
    block = min(D, 128)
    matrix = np.array([[(-1) ** (i & j).bit_count() for j in range(block)] for i in range(block)]) / np.sqrt(block)
    rotated = (x.reshape(-1, block) @ matrix.astype(np.float32)).reshape(x.shape)
    expected = quant.quantize_kv(rotated, "kv4").dequantize().reshape(-1, block) @ matrix
    restored = StoredTensor("kv4", rotated=True).restore(x)
    assert restored.dtype == x.dtype
    assert np.linalg.norm(restored - expected.reshape(x.shape)) < 0.02 * np.linalg.norm(x)  # a tie may fall otherwise
    identity = replace(StoredTensor("kv8"), rotated=True).restore(x)
    assert np.linalg.norm(identity - x) < 0.01 * np.linalg.norm(x)


def test_rotation_spreads_an_outlier() -> None:
    assert error(StoredTensor("kv4", rotated=True)) < 0.6 * error(StoredTensor("kv4"))
    with pytest.raises(ValueError, match=r"or a multiple of 128 \(got 192\)"):
        StoredTensor("kv4", rotated=True).restore(np.ones((1, 1, 1, 192), np.float32))


def test_centred_keys_give_up_what_they_have_in_common() -> None:
    shift = 30 * RNG.standard_normal((1, 1, 3, 64)).astype(np.float32)
    tensor = StoredTensor("kv4", centred=True)
    center = X[:, :64].mean(axis=1, keepdims=True)
    right = quant.quantize_kv(X - center, "kv4").dequantize() + center
    np.testing.assert_array_equal(tensor.restore(X), right)
    assert np.abs(tensor.restore(X + shift) - shift - tensor.restore(X)).max() < 0.5 * np.abs(X).max()
    plain = StoredTensor("kv4").restore(X + shift) - X - shift
    assert np.linalg.norm(tensor.restore(X + shift) - X - shift) < 0.7 * np.linalg.norm(plain)


@pytest.mark.parametrize("scheme", ["kv4", "kv8"])
def test_bytes_are_those_of_a_page(scheme: str) -> None:
    page = layout.page_bytes(scheme, 64, 128)  # of keys or values of one head
    assert CACHE_FORMATS[scheme].token_bytes(128, 8, 32) == 32 * 8 * 2 * page / 64


def test_bytes_by_hand() -> None:
    token_bytes = {name: form.token_bytes(64, 1, 1) for name, form in CACHE_FORMATS.items()}
    assert (token_bytes["kv4"], token_bytes["kv4_rotated"], token_bytes["kivi4"]) == (72, 72, 72)
    assert (token_bytes["k8v4"], token_bytes["fp8"]) == (104, 128)
