"""The same code packs CuPy arrays, to the same bytes, and fast enough for the largest layer of a 70B model."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ptxlab.lowbit.layout import LAYOUTS, KVCache, gather, load, pack, pack_pages, save, scatter, unpack, unpack_pages
from ptxlab.lowbit.layout.activations import (
    from_fragment_order,
    from_swizzled_tiles,
    to_fragment_order,
    to_swizzled_tiles,
)
from ptxlab.lowbit.quant import KV_SCHEMES, LQQWeight, quantize_kv, quantize_lqq
from tests.support.random_weights import KINDS, random_weight

pytestmark = pytest.mark.gpu
N, K = 57344, 8192  # gate and up of LLaMA-2-70B


def on_gpu(weight):
    import cupy

    fields = {n: cupy.asarray(v) if isinstance(v, np.ndarray) else v for n, v in vars(weight).items()}
    return type(weight)(**fields)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns", "group"), [(8, 32, 32), (72, 192, 32), (40, 320, 64), (64, 256, 128)])
def test_weights(cupy: Any, layout: str, kind: type, rows: int, columns: int, group: int) -> None:
    weight = random_weight(kind, rows, columns, group, 0)
    expected, packed = pack(weight, layout), pack(on_gpu(weight), layout)
    for name, array in expected.buffers.items():
        assert isinstance(packed.buffers[name], cupy.ndarray)
        np.testing.assert_array_equal(packed.buffers[name].get(), array, strict=True, err_msg=name)
    unpacked = unpack(packed)
    for name, field in vars(weight).items():
        if isinstance(field, np.ndarray):
            np.testing.assert_array_equal(getattr(unpacked, name).get(), field, strict=True, err_msg=name)


def test_activations(cupy: Any) -> None:
    x = np.random.default_rng(0).integers(-128, 128, (19, 200), np.int8)
    fragments, tiles = to_fragment_order(cupy.asarray(x)), to_swizzled_tiles(cupy.asarray(x), 16)
    np.testing.assert_array_equal(fragments.get(), to_fragment_order(x), strict=True)
    np.testing.assert_array_equal(tiles.get(), to_swizzled_tiles(x, 16), strict=True)
    np.testing.assert_array_equal(from_fragment_order(fragments, 19, 200).get(), x, strict=True)
    np.testing.assert_array_equal(from_swizzled_tiles(tiles, 19, 200, 16).get(), x, strict=True)


@pytest.mark.parametrize("scheme", KV_SCHEMES)
def test_pages_and_the_paged_cache(cupy: Any, scheme: str) -> None:
    x = np.random.default_rng(0).standard_normal((40, 2, 64)).astype(np.float16)
    expected = quantize_kv(x, scheme)
    quantized = on_gpu(expected)
    pages = pack_pages(quantized, 16)
    assert isinstance(pages, cupy.ndarray)
    np.testing.assert_array_equal(pages.get(), pack_pages(expected, 16), strict=True)
    channel = (quantized.scale, quantized.zero) if KV_SCHEMES[scheme].by_channel else None
    sizes = {"page_size": 16, "scheme": scheme, "k_channel": channel, "v_channel": channel}
    cache = KVCache.empty(1, 3, 2, 64, like=pages, **sizes)
    cache.block_table[:] = cupy.asarray([[2, 0, 1]])
    cache.lengths[:] = 40
    scatter(cache, [quantized], [quantized])
    for read in (unpack_pages(pages, scheme, 64, 16, 40, channel), *(part[0] for part in gather(cache))):
        for name in ("values", "scale", "zero"):
            np.testing.assert_array_equal(getattr(read, name).get(), getattr(expected, name), strict=True)
    np.testing.assert_array_equal(cache.pool[cupy.asarray([2, 0, 1]), 1].get(), pages.get())


def test_saving_copies_from_the_gpu(tmp_path) -> None:
    pytest.importorskip("cupy")
    weight = random_weight(LQQWeight, 24, 192, 64, 0)
    save(pack(on_gpu(weight), "dual_mma"), tmp_path / "w")
    loaded, expected = load(tmp_path / "w"), pack(weight, "dual_mma")
    np.testing.assert_array_equal(loaded.buffers["blocks"], expected.buffers["blocks"], strict=True)


@pytest.fixture(scope="module")
def large(cupy):

    def hash_of_places(rows: int, columns: int, below: int):
        """Compute u8 [rows, columns] in 0..below-1: the upper bits of a multiplicative hash of the place."""
        places = cupy.arange(rows * columns, dtype=cupy.uint32)
        return ((places * cupy.uint32(2654435761) >> cupy.uint32(24)) % below).astype(cupy.uint8).reshape(rows, columns)

    return LQQWeight(
        q4=hash_of_places(N, K, 16),
        group_scale=hash_of_places(N, K // 64, 16) + cupy.uint8(1),
        minimum=hash_of_places(N, K // 64, 6).view(cupy.int8) - cupy.int8(119),  # and 15 steps of 16 end at 126
        channel_scale=cupy.ones(N, cupy.float32),
        protective_range=119,
    )


@pytest.mark.timing
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_largest_layer_packs_in_two_seconds(cupy: Any, layout: str, large) -> None:
    pack(first_rows(large), layout)  # compiles CuPy's kernels
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    bytes_before = pool.total_bytes()
    cupy.cuda.Device().synchronize()
    start = time.perf_counter()
    packed = pack(large, layout)
    cupy.cuda.Device().synchronize()
    seconds, pool_growth = time.perf_counter() - start, pool.total_bytes() - bytes_before
    print(f"{layout}: {seconds:.3f} s, {pool_growth / large.q4.nbytes:.2f} times the input in memory, result included")
    assert seconds < 2
    assert pool_growth < 3 * large.q4.nbytes
    assert (unpack(packed).q4 == large.q4).all()


def first_rows(weight: LQQWeight) -> LQQWeight:
    """Return the weight's first 64 rows."""
    return replace(weight, **{n: getattr(weight, n)[:64] for n in ("q4", "group_scale", "minimum", "channel_scale")})


@pytest.mark.timing
def test_the_largest_layer_quantises_in_bounded_memory(cupy: Any) -> None:
    w = cupy.random.default_rng(0).standard_normal((N, K), dtype=cupy.float32)
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    bytes_before = pool.total_bytes()
    start = time.perf_counter()
    quantize_lqq(w)
    cupy.cuda.Device().synchronize()
    seconds, pool_growth = time.perf_counter() - start, pool.total_bytes() - bytes_before
    print(f"quantize_lqq: {seconds:.3f} s, {pool_growth / w.size:.2f} bytes per weight beside the input")
    assert pool_growth < 4 * w.size
