"""Fake quantisation against the quantisers, and 4-bit activations against loops."""

from typing import Any

import numpy as np
import pytest

from ptxlab import quant
from ptxlab.errors import ArgumentError
from ptxlab.quant.numerics import FakeQuantized

X = np.random.default_rng(0).standard_normal((2, 3, 40)).astype(np.float32)
ORDER = np.random.default_rng(1).permutation(40)


def test_8_bits_and_the_cache_are_the_quantisers() -> None:
    numerics = FakeQuantized(acts=8, kv="kv4")
    right = quant.quantize_activations(X.reshape(6, 40)).dequantize().reshape(X.shape)
    np.testing.assert_array_equal(numerics.input(X), right, strict=True)
    keys = X.reshape(2, 3, 5, 8)
    for found, given in zip(numerics.cached(keys, -keys), (keys, -keys), strict=True):
        np.testing.assert_array_equal(found, quant.quantize_kv(given, "kv4").dequantize(), strict=True)
    assert FakeQuantized(acts=None).input(X) is X and FakeQuantized(kv=None).cached(X, X) == (X, X)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("group", [8, None])
@pytest.mark.parametrize("order", [ORDER, None])
def test_4_bits_in_groups_along_an_order(order: Any, group: int | None, bits: int) -> None:
    """Groups of the ordered channels but the last 16, which have one scale and more bits; then each in its place."""
    found = FakeQuantized(acts=4, group=group, kept=16, kept_bits=bits, clip=0.9).input(X, order)
    channels = list(range(40) if order is None else order)
    four = [channels[i : i + (group or 24)] for i in range(0, 24, group or 24)]
    for token, seen in zip(X.reshape(6, 40), found.reshape(6, 40), strict=True):
        for some, clip, low, high in [(g, 0.9, -8, 7) for g in four] + [
            (channels[24:], 1.0, 1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1)
        ]:
            scale = np.float32(clip * max(abs(token[some])) / high)
            right = [min(max(round(value / scale), low), high) * scale for value in token[some]]
            np.testing.assert_allclose(seen[some], right, rtol=1e-6)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"acts": 5}, r"acts: must be one of 8, 4, None \(got 5\)"),
        ({"kv": "kv3"}, r"kv: must be one of kv4, .*, None \(got kv3\)"),
        ({"kept": -1}, r"kept: must be an integer, 0 or more \(got -1\)"),
        ({"kept_bits": 4}, r"kept_bits: must be one of 8, 16 \(got 4\)"),
        ({"group": -64}, r"group: must be an integer, 1 or more \(got -64\)"),
        ({"clip": 0}, r"clip: must be a number in 0.01..1 \(got 0\)"),
        ({"acts": 4, "group": 12, "kept": 2}, r"group: must divide 40 channels less 2 \(got 12\)"),
        ({"acts": 4, "kept": 40}, r"group: must divide 40 channels less 40 \(got None\)"),
    ],
)
def test_what_is_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        FakeQuantized(**how).input(X)
