"""Fake quantisation against the quantisers, and 4-bit activations against loops."""

from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError
from ptxlab.llm.model.numerics import FakeQuantized
from ptxlab.lowbit import quant

X = np.random.default_rng(0).standard_normal((2, 3, 40)).astype(np.float32)
ORDER = np.random.default_rng(1).permutation(40)


def test_8_bits_and_the_cache_are_the_quantisers() -> None:
    numerics = FakeQuantized(acts=8, kv="kv4")
    right = quant.quantize_activations(X.reshape(6, 40)).dequantize().reshape(X.shape)
    np.testing.assert_array_equal(numerics.input(X), right, strict=True)
    keys = X.reshape(2, 3, 5, 8)
    for rounded, original in zip(numerics.round_to_cache(keys, -keys, {}), (keys, -keys), strict=True):
        np.testing.assert_array_equal(rounded, quant.quantize_kv(original, "kv4").dequantize(), strict=True)
    assert FakeQuantized(acts=None).input(X) is X and FakeQuantized(kv=None).round_to_cache(X, X, {}) == (X, X)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("group", [8, None])
@pytest.mark.parametrize("order", [ORDER, None])
def test_4_bits_in_groups_along_an_order(order: Any, group: int | None, bits: int) -> None:
    """The groups are of the ordered channels but the last 16, which have one scale and more bits.

    The rounded values return to their places.
    """
    rounded = FakeQuantized(acts=4, group=group, kept=16, kept_bits=bits, clip=0.9).input(X, order)
    channels = list(range(40) if order is None else order)
    four = [channels[i : i + (group or 24)] for i in range(0, 24, group or 24)]
    for token, seen in zip(X.reshape(6, 40), rounded.reshape(6, 40), strict=True):
        outlier_format = {8: (1.0, -128, 127, 127.5, np.float16), 16: (1.0, -32767, 32767, 32767, np.float32)}[bits]
        for channels_of_group, clip, low, high, steps, stored in [(g, 0.9, -8, 7, 7.5, np.float16) for g in four] + [
            (channels[24:], *outlier_format)
        ]:
            scale = np.float32(stored(np.float32(clip) * max(abs(token[channels_of_group])) / np.float32(steps)))
            right = [
                np.float32(min(max(round(number / scale), low), high)) * scale for number in token[channels_of_group]
            ]
            np.testing.assert_array_equal(seen[channels_of_group], right)


@pytest.mark.parametrize("kept", [0, 64])
def test_4_bits_are_rounded_as_for_atoms_gemm(kept: int) -> None:
    x, order = (np.random.default_rng(2).standard_normal((2, 3, 192)) * 9).astype(np.float32), np.arange(192)[::-1]
    rows = quant.quantize_atom_activations(x.reshape(6, 192)[:, order], 64, kept, clip=0.9)
    rounded = FakeQuantized(acts=4, group=64, kept=kept, clip=0.9).input(x, order)
    np.testing.assert_array_equal(rounded.reshape(6, 192)[:, order], rows.dequantize(), strict=True)


@pytest.mark.parametrize("int8", [0, 1, 3])
def test_int8_blocks_are_rounded_as_for_comets_gemm(int8: int) -> None:
    x, order = (np.random.default_rng(2).standard_normal((2, 3, 192)) * 9).astype(np.float32), np.arange(192)[::-1]
    rows = quant.quantize_blocks(x.reshape(6, 192)[:, order], int8, 64)
    numerics = FakeQuantized(acts=4, group=64, clip=0.9)  # which COMET does not have
    layer = {"o": np.eye(192, dtype=np.float32), "o_order": order, "o_int8": np.array(int8)}
    product = numerics.product("o", x, layer).reshape(6, 192)
    np.testing.assert_array_equal(product[:, order], rows.dequantize(), strict=True)
    with pytest.raises(ArgumentError, match=r"group: must divide 192 channels, 4 groups in INT8 \(got 64\)"):
        numerics.product("o", x, {**layer, "o_int8": np.array(4)})


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
def test_bad_settings_are_refused(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        FakeQuantized(**how).input(X)
