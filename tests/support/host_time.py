"""Host time of repeat calls on the GPU that is there: `python -m tests.support.host_time [--json] > FILE`.

Median over 2000 calls; every hundred calls the device is waited for, outside of what is timed, so that the queue stays
short. Shapes are a decoder's: M=16, N=K=4096; 16 sequences, 32/8 heads of 128.
"""

import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import ptxlab
from ptxlab import gpu
from ptxlab.lowbit import quant

CALLS, BETWEEN = 2000, 100
To = Callable[[Any], Any]  # a NumPy array to a library's on the GPU


def host_us(call: Callable[[], Any]) -> float:
    """Time a call on the host: the median, in microseconds."""
    import cupy

    for _ in range(50):
        call()
    times_us = []
    for i in range(CALLS):
        if i % BETWEEN == 0:
            cupy.cuda.Device().synchronize()
        start = time.perf_counter_ns()
        call()
        times_us.append((time.perf_counter_ns() - start) / 1e3)
    cupy.cuda.Device().synchronize()
    return statistics.median(times_us)


def calls(to: To, width: int = 4096) -> dict[str, Callable[[], Any]]:
    """List the public calls by operands; `width` is N and K of the dense weights, at least 512."""
    return {**gemm_calls(to, width), **attention_calls(to)}


def gemm_calls(to: To, width: int) -> dict[str, Callable[[], Any]]:
    rng = np.random.default_rng(0)
    M, N, K, E = 16, width, width, 8
    w = rng.standard_normal((N, K), dtype=np.float32)
    strips = ptxlab.to_device(ptxlab.pack(quant.quantize_lqq(w, group=128), "strips"))
    channel = ptxlab.to_device(ptxlab.pack(quant.quantize_qoq_channel(w), "qserve"))
    small = ptxlab.pack(quant.quantize_lqq(w[:512, :512], group=128), "strips")
    experts = ptxlab.to_device(ptxlab.stack_experts([small] * E))
    a = to(rng.standard_normal((M, K), dtype=np.float32).astype(np.float16))
    x, y = ptxlab.quantize_activations(a), to(np.zeros((M, N), np.float16))
    narrow_x = ptxlab.quantize_activations(to(rng.standard_normal((M, 512), dtype=np.float32).astype(np.float16)))
    offsets, of_experts = to(np.linspace(0, M, E + 1).astype(np.int32)), to(np.zeros((M, 512), np.float16))
    return {
        "gemm_w4a8, out given": lambda: ptxlab.gemm_w4a8(x, weight=strips, out=y),
        "gemm_w4a8, out made": lambda: ptxlab.gemm_w4a8(x, weight=strips),
        "gemm_w4a8, arrays, no sums, out given": lambda: ptxlab.gemm_w4a8(x.x_q, x.scale, strips, out=y),
        "gemm_w4a8, per channel, sums made (2 launches)": lambda: ptxlab.gemm_w4a8(x.x_q, x.scale, channel, out=y),
        "gemm_w4a8_grouped, out given": lambda: ptxlab.gemm_w4a8_grouped(
            narrow_x, weights=experts, offsets=offsets, out=of_experts
        ),
        "quantize_activations, out given": lambda: ptxlab.quantize_activations(a, out=x),
        "quantize_activations, out made": lambda: ptxlab.quantize_activations(a),
    }


def attention_calls(to: To) -> dict[str, Callable[[], Any]]:
    rng = np.random.default_rng(0)
    B, Hq, Hkv, D, P = 16, 32, 8, 128, 16
    host = ptxlab.KVCache.empty(B, P, Hkv, D, page_size=64)
    host.lengths[:] = 700
    pool = rng.integers(0, 256, host.pool.shape, dtype=np.uint8)
    pool[..., -64 * 4 :] = np.frombuffer(np.float16(0.01).tobytes() * 2 * 64, np.uint8)  # finite scales and zeros
    arrays = {"pool": to(pool), "block_table": to(host.block_table), "lengths": to(host.lengths)}
    cache = ptxlab.KVCache(**arrays, page_size=64, head_dim=D)
    q, out = to(rng.standard_normal((B, Hq, D)).astype(np.float16)), to(np.zeros((B, Hq, D), np.float16))
    workspace = ptxlab.attention_workspace(cache)
    kv, slots = to(np.ones((B, Hkv, D), np.float16)), to((np.arange(B) * P * 64 + 700).astype(np.int32))
    return {
        "attention_kv4, out given": lambda: ptxlab.attention_kv4(q, cache, out=out),
        "attention_kv4, out and workspace given": lambda: ptxlab.attention_kv4(q, cache, out=out, workspace=workspace),
        "attention_kv4, out made": lambda: ptxlab.attention_kv4(q, cache),
        "append_kv4": lambda: ptxlab.append_kv4(kv, kv, cache, slots),
    }


def main() -> None:
    """Measure with CuPy's arrays, then with PyTorch's where it is installed: once imported, it slows CuPy's down."""
    import cupy

    libraries: dict[str, To] = {"cupy": cupy.asarray}
    if importlib.util.find_spec("torch"):
        libraries["torch"] = lambda a: importlib.import_module("torch").from_numpy(a.copy()).cuda()
    host_times = {
        name: {call_name: round(host_us(call), 1) for call_name, call in calls(to).items()}
        for name, to in libraries.items()
    }
    if "--json" in sys.argv:
        origin = {"device": gpu.device_info().name, "version": ptxlab.__version__}
        print(json.dumps({**origin, "host_us": host_times}, indent=1))
        return
    for library, times in host_times.items():
        print(f"{library}: host µs, median of {CALLS} calls")
        print(*(f"  {call_name:50} {us:6.1f}" for call_name, us in times.items()), sep="\n")


if __name__ == "__main__":
    main()
