"""KV caches from the host to the GPU; packed weights and activations are with their GEMM."""

from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import gpu
from ptxlab.lowbit.layout import KVCache


@pytest.mark.parametrize("scheme", ["kv4", "kv8_channel"])
def test_every_array_of_a_cache_is_copied(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "device_info", lambda: None)
    monkeypatch.setattr(gpu, "to_device", lambda array: array.copy())
    channel = None
    if scheme == "kv8_channel":
        channel = np.full((2, 64), 0.5, np.float32), np.zeros((2, 64), np.float32)
    cache = KVCache.empty(2, 3, 2, 64, page_size=16, scheme=scheme, k_channel=channel, v_channel=channel)
    cache.lengths[:] = 5, 7
    moved = ptxlab.to_device(cache)
    assert (moved.scheme, moved.page_size, moved.head_dim) == (scheme, 16, 64)
    arrays = [(getattr(cache, name), getattr(moved, name)) for name in ("pool", "block_table", "lengths")]
    if channel is not None:
        arrays += zip(cache.k_channel + cache.v_channel, moved.k_channel + moved.v_channel, strict=True)
    for original, copy in arrays:
        np.testing.assert_array_equal(copy, original, strict=True)
        assert not np.shares_memory(copy, original)


@pytest.mark.gpu
def test_a_cache_on_the_gpu(cupy: Any) -> None:
    moved = ptxlab.to_device(KVCache.empty(2, 3, 2, 64, page_size=16))
    assert all(isinstance(array, cupy.ndarray) for array in (moved.pool, moved.block_table, moved.lengths))
    moved.check()
