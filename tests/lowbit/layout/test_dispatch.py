"""Packing and quantising with arrays that are not NumPy's: what CuPy would refuse fails here, without a GPU."""

from typing import Any

import numpy as np
import pytest

from ptxlab.lowbit import layout, quant, reference
from ptxlab.lowbit.layout import (
    LAYOUTS,
    KVCache,
    from_fragment_order,
    from_swizzled_tiles,
    gather,
    pack,
    pack_pages,
    scatter,
    to_fragment_order,
    to_swizzled_tiles,
    unpack,
    unpack_pages,
)
from ptxlab.lowbit.quant.tiled import with_arrays
from tests.support.dispatching_array import DispatchingArray, to_device
from tests.support.random_weights import KINDS, random_weight


def assert_same(on_device: Any, on_host: Any) -> None:
    for name, expected in vars(on_host).items():
        if isinstance(expected, np.ndarray):
            actual = getattr(on_device, name)
            assert isinstance(actual, DispatchingArray), name
            np.testing.assert_array_equal(actual.array, expected, strict=True, err_msg=name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("N", "K", "group"), [(8, 32, 32), (72, 192, 32), (40, 320, 64), (64, 256, 128)])
def test_packing(layout: str, kind: type, N: int, K: int, group: int) -> None:
    weight = random_weight(kind, N, K, group, 0)
    fields = {name: to_device(field) for name, field in vars(weight).items()}
    packed, expected = pack(type(weight)(**fields), layout), pack(weight, layout)
    for name, array in expected.buffers.items():
        np.testing.assert_array_equal(packed.buffers[name].array, array, strict=True, err_msg=name)
    assert_same(unpack(packed), weight)


def test_activations() -> None:
    x = np.random.default_rng(0).integers(-128, 128, (19, 200), np.int8)
    fragments, tiles = to_fragment_order(DispatchingArray(x)), to_swizzled_tiles(DispatchingArray(x), 16)
    np.testing.assert_array_equal(fragments.array, to_fragment_order(x), strict=True)
    np.testing.assert_array_equal(tiles.array, to_swizzled_tiles(x, 16), strict=True)
    np.testing.assert_array_equal(from_fragment_order(fragments, 19, 200).array, x, strict=True)
    np.testing.assert_array_equal(from_swizzled_tiles(tiles, 19, 200, 16).array, x, strict=True)


@pytest.mark.parametrize(
    "quantise",
    [
        quant.quantize_level1,
        quant.quantize_lqq,
        quant.quantize_qoq,
        quant.quantize_qoq_channel,
        quant.quantize_activations,
    ],
)
def test_quantisers(quantise: Any) -> None:
    w = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
    assert_same(quantise(DispatchingArray(w)), quantise(w))


def kv() -> Any:
    return np.random.default_rng(0).standard_normal((40, 2, 64)).astype(np.float16)


@pytest.mark.parametrize("scheme", quant.KV_SCHEMES)
def test_pages_and_the_paged_cache(scheme: str) -> None:
    expected, quantized = quant.quantize_kv(kv(), scheme), quant.quantize_kv(DispatchingArray(kv()), scheme)
    assert_same(quantized, expected)
    np.testing.assert_array_equal(quantized.dequantize().array, expected.dequantize(), strict=True)
    pages = pack_pages(quantized, 16)
    np.testing.assert_array_equal(pages.array, pack_pages(expected, 16), strict=True)
    channel = (quantized.scale, quantized.zero) if quant.KV_SCHEMES[scheme].by_channel else None
    assert_same(unpack_pages(pages, scheme, 64, 16, 40, channel), expected)

    cache = KVCache.empty(
        1, 3, 2, 64, page_size=16, scheme=scheme, k_channel=channel, v_channel=channel, like=DispatchingArray(kv())
    )
    cache.lengths[:] = 40
    scatter(cache, [quantized], [quantized])
    for part in gather(cache):
        assert_same(part[0], expected)
    np.testing.assert_array_equal(cache.pool.array[:, 1], pages.array)


def test_smooth_attention() -> None:
    w_q, w_k = np.random.default_rng(0).standard_normal((2, 8, 3)).astype(np.float32)
    peaks = np.arange(8, dtype=np.float32).reshape(2, 4)
    arguments = {"w_q": w_q, "w_k": w_k, "keys_max": peaks, "b_q": w_q[:, 0].copy(), "b_k": w_k[:, 0].copy()}
    on_device = {name: DispatchingArray(array) for name, array in arguments.items()}
    smooth = quant.smooth_attention(**on_device, head_dim=4)
    assert_same(smooth, quant.smooth_attention(**arguments, head_dim=4))


def test_attention() -> None:
    q, k, v = kv()[:3], kv()[:, :1], -kv()[:, :1]
    for length, window in ((40, None), (40, 7), (2, None), (0, None)):
        arguments = q, k[:length], v[:length]
        results_on_device = reference.attention(*map(DispatchingArray, arguments), scale=0.2, window=window)
        for on_device, on_host in zip(
            results_on_device, reference.attention(*arguments, scale=0.2, window=window), strict=True
        ):
            np.testing.assert_array_equal(on_device.array, on_host, strict=True)
    table = np.linspace(-1, 1, 3 * 32, dtype=np.float32).reshape(3, 32)
    rotated = reference.rope(DispatchingArray(q), DispatchingArray(table), DispatchingArray(-table))
    np.testing.assert_array_equal(rotated.array, reference.rope(q, table, -table), strict=True)


@pytest.mark.parametrize("name", layout.ATOM_LAYOUTS)
def test_atoms_weights_come_back(name: str) -> None:
    w = np.random.default_rng(0).standard_normal((24, 320), dtype=np.float32)
    rows = quant.quantize_atom_weight(w, 64, 64)
    right, packed = layout.pack_atom(rows, name), layout.pack_atom(with_arrays(rows, DispatchingArray), name)
    for buffer, array in packed.buffers.items():
        np.testing.assert_array_equal(array.array, right.buffers[buffer], strict=True)
    for field, array in vars(layout.unpack_atom(packed)).items():
        np.testing.assert_array_equal(array.array, getattr(rows, field), strict=True, err_msg=field)
