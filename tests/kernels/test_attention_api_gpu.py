"""`attention_kv4` on a GPU: arrays of every library, streams, CUDA graphs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import gpu
from ptxlab.kernels.attention import sm90
from ptxlab.kernels.attention.steps import choose
from ptxlab.quant import KV_SCHEMES
from ptxlab.spec.dtypes import stored
from tests.support import attention_problems as problems
from tests.support.attention_calls import CACHE, CONTRACT, LENGTHS, SM80, SM90, Q, hold
from tests.support.attention_problems import moved

ON_GPU = pytest.mark.skipif(gpu.why_not("sm_80") is not None, reason="the kernels run from sm_80 on")
HERE = [name for name in (SM90, SM80) if gpu.why_not("sm_90a" if name == SM90 else "sm_80", exact=name == SM90) is None]


def read(array: Any) -> np.ndarray:
    return gpu.to_host(gpu.as_array("array", array))


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("library", ["cupy", "torch"])
@pytest.mark.parametrize("kernel", HERE)
@pytest.mark.parametrize("case", CONTRACT, ids=lambda c: "-".join(map(str, c.values())))
def test_every_library(case: dict[str, Any], kernel: str, library: str) -> None:
    """Twice, with the same bits; PyTorch has a bfloat16 of its own."""
    module = pytest.importorskip(library)
    to = module.asarray if library == "cupy" else lambda array: module.from_numpy(array.copy()).cuda()
    sizes = {name: size for name, size in case.items() if name not in ("window", "dtype")}
    host, cache = problems.problem(1, (*LENGTHS, 5000), **sizes)
    host = stored(host, case["dtype"])
    q = to(host)
    if library == "torch" and case["dtype"] == "bfloat16":
        q = q.view(module.bfloat16)
    how: dict[str, Any] = {"window": case["window"] or None, "return_lse": True, "kernel": kernel, "check": True}
    out, lse = ptxlab.attention_kv4(q, moved(cache, to), **how)
    again, _ = ptxlab.attention_kv4(q, moved(cache, to), **how)
    assert out.dtype == q.dtype and type(out) is type(q)
    hold(host, cache, read(out), read(lse), window=case["window"])
    assert np.array_equal(read(out), read(again))


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("programmatic", [False, True])
@pytest.mark.parametrize("kernel", HERE)
def test_a_graph_is_replayed_on_other_lengths(kernel: str, programmatic: bool) -> None:
    """With a kernel before it that writes the queries, which a programmatic launch has to wait for."""
    if programmatic and kernel == SM80:
        pytest.skip("it does not wait by itself")
    cupy = pytest.importorskip("cupy")
    source, q, cache = cupy.asarray(Q), cupy.zeros_like(cupy.asarray(Q)), moved(CACHE, cupy.asarray)
    out, lse = cupy.zeros_like(q), cupy.zeros(q.shape[:-1], cupy.float32)
    workspace = ptxlab.attention_workspace(cache, kernel=kernel)

    def layer() -> None:
        cupy.multiply(source, 1, out=q)
        options: dict[str, Any] = {"kernel": kernel, "programmatic": programmatic, "workspace": workspace}
        ptxlab.attention_kv4(q, cache, out=(out, lse), return_lse=True, **options)

    layer()
    graph = gpu.capture([layer])
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lengths = [rng.integers(0, length + 1) for length in LENGTHS]
        queries = rng.standard_normal(Q.shape).astype(np.float16)
        source[...], cache.lengths[...] = cupy.asarray(queries), cupy.asarray(lengths)
        out.fill(np.nan)
        cupy.cuda.Device().synchronize()
        graph.replay()
        graph.synchronize()
        hold(queries, replace(CACHE, lengths=np.array(lengths, np.int32)), out.get(), lse.get())
        assert not any(workspace.views[name].owner.any() for name in choose(kernel, backend="gpu").kept)


@pytest.mark.gpu
@pytest.mark.timing
@ON_GPU
@pytest.mark.parametrize("kernel", HERE)
def test_a_call_goes_to_the_callers_stream_and_does_not_wait(kernel: str) -> None:
    """Nothing is allocated after the first call; with the stream busy, the call is back before the stream is done."""
    cupy = pytest.importorskip("cupy")
    q, cache = cupy.asarray(Q), moved(CACHE, cupy.asarray)
    out, workspace = cupy.zeros_like(q), ptxlab.attention_workspace(cache, kernel=kernel)
    ptxlab.attention_kv4(q, cache, out=out, workspace=workspace, kernel=kernel)
    big = cupy.zeros(1 << 30, cupy.uint8)
    big += 1  # so that its kernel is loaded, and the next one
    cupy.negative(cupy.negative(q, out=q), out=q)
    cupy.cuda.Device().synchronize()
    pool, stream = cupy.get_default_memory_pool(), cupy.cuda.Stream(non_blocking=True)
    before = pool.used_bytes(), pool.total_bytes()
    with stream:
        for _ in range(20):
            big += 1
        cupy.negative(q, out=q)
        ptxlab.attention_kv4(q, cache, out=out, workspace=workspace, kernel=kernel)
        assert not stream.done
    stream.synchronize()
    hold(-Q, CACHE, out.get())
    assert (pool.used_bytes(), pool.total_bytes()) == before


@pytest.mark.gpu
@ON_GPU
def test_torch_captures_and_replays() -> None:
    torch = pytest.importorskip("torch")

    def to(array: np.ndarray) -> Any:
        return torch.from_numpy(array.copy()).cuda()

    q, cache = to(Q), moved(CACHE, to)
    out, workspace = torch.empty_like(q), ptxlab.attention_workspace(cache)
    ptxlab.attention_kv4(q, cache, out=out, workspace=workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ptxlab.attention_kv4(q, cache, out=out, workspace=workspace)
    lengths = np.array([3, 0, 1, 290], np.int32)
    cache.lengths.copy_(to(lengths))
    graph.replay()
    torch.cuda.synchronize()
    hold(Q, replace(CACHE, lengths=lengths), read(out))


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize("scheme", KV_SCHEMES)
def test_the_bound_is_worked_out_on_the_device_too(scheme: str) -> None:
    """As benchmarks do: CuPy has not all that NumPy has."""
    q, cache = problems.problem(0, (75, 300), Hq=4, Hkv=2, scheme=scheme, page_size=32)
    q, sizes = q.astype(np.float16), {"softmax_scale": 0.1, "blocks": 1}
    assert sm90.SM90.bound is not None
    on_host = sm90.SM90.bound(q, cache, **sizes)
    on_device = sm90.SM90.bound(gpu.to_device(q), moved(cache, gpu.to_device), **sizes)
    for here, there in zip(on_host[:2], on_device[:2], strict=True):
        np.testing.assert_allclose(read(there.each), here.each, rtol=1e-6)
        np.testing.assert_allclose(read(there.rms), here.rms, rtol=1e-6)
