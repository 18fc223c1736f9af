"""`gemm_w4a8` and `quantize_activations` on a GPU: every array library, streams, CUDA graphs, allocations."""

import os
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.lowbit import quant, reference
from ptxlab.lowbit.kernels.gemm.common import DTYPES
from ptxlab.lowbit.layout import unpack_activations
from tests.support.gemm_calls import product

pytestmark = pytest.mark.gpu

M, N, K = 19, 264, 512
RNG = np.random.default_rng(0)
X = RNG.standard_normal((M, K), dtype=np.float32).astype(np.float16)
QUANTIZED = quant.quantize_activations(X)
BIAS = RNG.standard_normal(N, dtype=np.float32)
W = RNG.standard_normal((N, K), dtype=np.float32)
GROUPED, CHANNEL = quant.quantize_qoq(W, group=64), quant.quantize_qoq_channel(W)
LQQ = quant.quantize_lqq(W, group=64)
ON_HOPPER = pytest.mark.skipif(gpu.why_not("sm_90a", exact=True) is not None, reason="wgmma needs sm_90a")
SCHEMES = ("qoq", "qoq_channel", pytest.param("lqq", marks=ON_HOPPER))
LIBRARIES = ("cupy", "torch", "jax")


def expected_product(
    scheme: str, dtype: str = "float16", bias: np.ndarray | None = None, x: Any = QUANTIZED
) -> np.ndarray:
    weight = {"qoq": GROUPED, "lqq": LQQ, "qoq_channel": CHANNEL}[scheme]
    return product(weight, x.q, x.scale, bias, dtype)


@pytest.fixture(scope="module")
def cupy() -> Any:
    import cupy

    return cupy


@pytest.fixture(scope="module")
def weights() -> dict[str, Any]:
    packed = {"qoq": ptxlab.pack(GROUPED, "qserve"), "qoq_channel": ptxlab.pack(CHANNEL, "qserve")}
    if gpu.why_not("sm_90a", exact=True) is None:
        packed["lqq"] = ptxlab.pack(LQQ, "dual_mma")  # through a tensor map and clusters
    return {scheme: ptxlab.to_device(weight) for scheme, weight in packed.items()}


def sent(array: np.ndarray, library: str) -> Any:
    """Copy an array to the GPU, for the given library."""
    if library == "cupy":
        return pytest.importorskip("cupy").asarray(array)
    if library == "torch":
        return pytest.importorskip("torch").from_numpy(array.copy()).cuda()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPU is not JAX's alone
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    return jax.numpy.asarray(array)


def bits(array: Any) -> np.ndarray:
    """Copy a device array of any library to the host, as unsigned integers."""
    device_array = gpu.to_host(gpu.as_array("array", array))
    return device_array.view(f"u{device_array.itemsize}")


def equal_bits(got: Any, expected: np.ndarray) -> bool:
    return np.array_equal(bits(got), expected.view(f"u{expected.itemsize}"))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_output_of_every_library(weights, scheme: str, dtype: str, library: str) -> None:
    x, scale, bias = sent(QUANTIZED.q, library), sent(QUANTIZED.scale, library), sent(BIAS, library)
    y = ptxlab.gemm_w4a8(x, scale, weights[scheme], bias=bias, out_dtype=dtype)
    assert type(y) is type(x) and tuple(y.shape) == (M, N)
    assert dtype in str(y.dtype) or (library == "cupy" and dtype == "bfloat16" and y.dtype == np.uint16)
    assert equal_bits(y, expected_product(scheme, dtype, BIAS))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("order", "rows"), [("row_major", None), ("fragment", None), ("tiles", 16)])
def test_activations_of_every_library(library: str, order: str, rows: int | None) -> None:
    x = sent(X, library)
    got = ptxlab.quantize_activations(x, layout=order, rows=rows)
    assert type(got.x_q) is type(x) and type(got.scale) is type(x) and type(got.token_sum) is type(x)
    host = {name: gpu.to_host(gpu.as_array(name, getattr(got, name))) for name in ("x_q", "scale", "token_sum")}
    moved = ptxlab.PackedActivations(layout=got.layout, M=got.M, K=got.K, rows=got.rows, **host)
    assert np.array_equal(unpack_activations(moved).q, QUANTIZED.q)
    assert np.array_equal(moved.scale, QUANTIZED.scale) and np.array_equal(moved.token_sum, QUANTIZED.token_sum)


@ON_HOPPER
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("rows", [8, 32, 256])
def test_a_gemm_on_tiles(weights, library: str, rows: int) -> None:
    tiles = ptxlab.quantize_activations(sent(X, library), layout="tiles", rows=rows)
    assert equal_bits(ptxlab.gemm_w4a8(tiles, weight=weights["lqq"]), expected_product("lqq"))


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_bfloat16_goes_in_and_comes_out(weights, library: str) -> None:
    values = reference.from_bfloat16_bits(reference.bfloat16_bits(X.astype(np.float32)))
    x = sent(values, library)
    x = x.bfloat16() if library == "torch" else x.astype("bfloat16")
    y = ptxlab.gemm_w4a8(ptxlab.quantize_activations(x), weight=weights["qoq_channel"], out_dtype="bfloat16")
    assert y.dtype == x.dtype
    assert equal_bits(y, expected_product("qoq_channel", "bfloat16", x=quant.quantize_activations(values)))


@pytest.mark.parametrize("backend", [None, "gpu"])
def test_numpy_is_copied_there_and_back(backend: str | None) -> None:
    activations = ptxlab.quantize_activations(X, backend=backend)
    y = ptxlab.gemm_w4a8(activations, weight=ptxlab.pack(CHANNEL, "qserve"), bias=BIAS, backend=backend)
    assert isinstance(y, np.ndarray) and np.array_equal(y, expected_product("qoq_channel", bias=BIAS))


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_into_a_given_array(weights, library: str) -> None:
    x, scale = sent(QUANTIZED.q, library), sent(QUANTIZED.scale, library)
    out = sent(np.zeros((M, N), np.float32), library)
    assert ptxlab.gemm_w4a8(x, scale, weights["qoq"], out=out) is out
    assert equal_bits(out, expected_product("qoq", "float32"))


def test_torch_writes_bfloat16_into_its_own(weights) -> None:
    torch = pytest.importorskip("torch")
    out = torch.zeros(M, N, dtype=torch.bfloat16, device="cuda")
    ptxlab.gemm_w4a8(sent(QUANTIZED.q, "torch"), sent(QUANTIZED.scale, "torch"), weights["qoq"], out=out)
    assert equal_bits(out, expected_product("qoq", "bfloat16"))


def test_accumulators_without_scales(cupy, weights) -> None:
    y = ptxlab.gemm_w4a8(cupy.asarray(QUANTIZED.q), weight=weights["qoq"], out_dtype="int32")
    assert equal_bits(y, expected_product("qoq", "int32"))


def test_no_tokens(cupy, weights) -> None:
    x, scale = cupy.zeros((0, K), cupy.int8), cupy.zeros(0, cupy.float32)
    for weight in weights.values():
        y = ptxlab.gemm_w4a8(x, scale, weight, out_dtype="float32")
        assert y.shape == (0, N) and y.dtype == cupy.float32
    assert ptxlab.quantize_activations(cupy.zeros((0, K), cupy.float16)).M == 0


def test_on_cupys_current_stream(cupy, weights) -> None:
    """Work that was enqueued earlier on the caller's stream comes before the call."""
    stream = cupy.cuda.Stream(non_blocking=True)
    x, scale = cupy.zeros((M, K), cupy.int8), cupy.asarray(QUANTIZED.scale)
    source = cupy.asarray(QUANTIZED.q)
    ptxlab.gemm_w4a8(x, scale, weights["qoq_channel"])
    cupy.cuda.Device().synchronize()
    with stream:
        big = cupy.zeros(1 << 28, cupy.uint8)  # takes a while
        big += 1
        x[...] = source
        y = ptxlab.gemm_w4a8(x, scale, weights["qoq_channel"])
    stream.synchronize()
    assert equal_bits(y, expected_product("qoq_channel"))


def test_on_torchs_current_stream(weights) -> None:
    torch = pytest.importorskip("torch")
    x = torch.zeros(M, K, dtype=torch.int8, device="cuda")
    scale, source = sent(QUANTIZED.scale, "torch"), sent(QUANTIZED.q, "torch")
    ptxlab.gemm_w4a8(x, scale, weights["qoq_channel"])
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        x.copy_(source)
        y = ptxlab.gemm_w4a8(x, scale, weights["qoq_channel"])
        torch.cuda.current_stream().synchronize()
    assert equal_bits(y, expected_product("qoq_channel"))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_captured_graph_follows_its_inputs(cupy, weights, scheme: str) -> None:
    """Quantise and multiply in one graph, replayed after the floats have changed."""
    x = cupy.asarray(X)
    activations = ptxlab.quantize_activations(x)
    out = cupy.empty((M, N), cupy.float16)
    workspace = ptxlab.gemm_workspace(weights[scheme], M)

    def layer() -> None:
        ptxlab.quantize_activations(x, out=activations)
        ptxlab.gemm_w4a8(activations.x_q, activations.scale, weights[scheme], out=out, workspace=workspace)

    graph = gpu.capture([layer])
    for seed in range(3):
        changed = np.random.default_rng(seed).standard_normal((M, K), dtype=np.float32).astype(np.float16)
        x[...] = cupy.asarray(changed)
        out.fill(0)
        cupy.cuda.Device().synchronize()
        graph.replay()
        graph.synchronize()
        assert equal_bits(out, expected_product(scheme, x=quant.quantize_activations(changed)))


def test_torch_captures_and_replays(weights) -> None:
    torch = pytest.importorskip("torch")
    x, out = sent(X, "torch"), torch.empty(M, N, dtype=torch.float16, device="cuda")
    activations = ptxlab.quantize_activations(x)
    ptxlab.gemm_w4a8(activations, weight=weights["qoq_channel"], out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ptxlab.quantize_activations(x, out=activations)
        ptxlab.gemm_w4a8(activations, weight=weights["qoq_channel"], out=out)
    changed = RNG.standard_normal((M, K), dtype=np.float32).astype(np.float16)
    x.copy_(sent(changed, "torch"))
    graph.replay()
    torch.cuda.synchronize()
    assert equal_bits(out, expected_product("qoq_channel", x=quant.quantize_activations(changed)))


def test_a_capture_that_would_allocate_is_told_what_to_make(cupy, weights) -> None:
    x, scale = cupy.asarray(QUANTIZED.q), cupy.asarray(QUANTIZED.scale)
    weight, floats = weights["qoq_channel"], cupy.asarray(X)
    out = ptxlab.gemm_w4a8(x, scale, weight)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(ArgumentError, match=rf"workspace: must be given .*make gemm_workspace\(weight, {M}\)"):
                ptxlab.gemm_w4a8(x, scale, weight, out=out)
            with pytest.raises(ArgumentError, match=rf"out: must be given in a capture: make an array \[{M}, {N}\]"):
                ptxlab.gemm_w4a8(x, scale, weights["qoq"])
            with pytest.raises(ArgumentError, match=r"the first call of a shape loads its kernel"):
                ptxlab.gemm_w4a8(x[:3], scale[:3], weights["qoq"], out=out[:3])
            with pytest.raises(ArgumentError, match=r"quantize_activations: out: must be given in a capture"):
                ptxlab.quantize_activations(floats)
        finally:
            stream.end_capture()
    assert equal_bits(
        ptxlab.gemm_w4a8(x, scale, weight), expected_product("qoq_channel")
    )  # and nothing is left capturing


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_is_allocated_after_the_first_call_of_a_shape(cupy, weights, scheme: str) -> None:
    x, floats = cupy.asarray(QUANTIZED.q), cupy.asarray(X)
    scale, out = cupy.asarray(QUANTIZED.scale), cupy.empty((M, N), cupy.float16)
    activations = ptxlab.quantize_activations(floats)
    ptxlab.gemm_w4a8(x, scale, weights[scheme], out=out)
    requests: list[int] = []

    class Counting(cupy.cuda.MemoryHook):
        name = "counting"

        def malloc_preprocess(self, **options: Any) -> None:
            requests.append(options["size"])

    pool = cupy.get_default_memory_pool()
    pool_bytes = pool.used_bytes(), pool.total_bytes()
    with Counting():
        for _ in range(10):
            ptxlab.quantize_activations(floats, out=activations)
            ptxlab.gemm_w4a8(x, scale, weights[scheme], out=out)
    assert requests == []
    assert (pool.used_bytes(), pool.total_bytes()) == pool_bytes
    assert equal_bits(out, expected_product(scheme))


@pytest.mark.timing
def test_a_call_does_not_wait(cupy, weights) -> None:
    """The call returns while the stream is still busy."""
    x, scale = cupy.asarray(QUANTIZED.q), cupy.asarray(QUANTIZED.scale)
    out = cupy.empty((M, N), cupy.float16)
    ptxlab.gemm_w4a8(x, scale, weights["qoq_channel"], out=out)
    stream = cupy.cuda.Stream(non_blocking=True)
    big = cupy.zeros(1 << 30, cupy.uint8)
    with stream:
        ptxlab.gemm_w4a8(x, scale, weights["qoq_channel"], out=out)
        big += 1
        stream.synchronize()
        for _ in range(20):
            big += 1
        ptxlab.gemm_w4a8(x, scale, weights["qoq_channel"], out=out)
        assert not stream.done
    stream.synchronize()


def test_device_arrays_refused(cupy, weights) -> None:
    x, scale = cupy.asarray(QUANTIZED.q), cupy.asarray(QUANTIZED.scale)
    on_host = ptxlab.pack(GROUPED, "qserve")
    ptxlab.gemm_w4a8(x, scale, weights["qoq"])  # a call like it is remembered, and changes nothing
    for change, message in (
        ({"x_q": x[:, ::2]}, r"K must be 512"),
        ({"x_q": cupy.asfortranarray(x)}, r"x_q: C-contiguous"),
        ({"x_q": x.astype(cupy.int16)}, r"x_q: dtype int8 \(got int16\)"),
        ({"x_scale": scale[:3]}, rf"x_scale: shape \[{M}\] \(got \[3\]\)"),
        ({"x_scale": QUANTIZED.scale}, r"x_scale: an array on the GPU \(ptxlab.to_device brings it there\)"),
        ({"weight": on_host}, r"weight: an array on the GPU \(ptxlab.to_device brings it there\)"),
        ({"out": cupy.zeros((M, N + 8), cupy.float16)}, rf"out: shape \[{M}, {N}\]"),
        ({"out": cupy.zeros((M + 1, N), cupy.float16).ravel()[4:-260].reshape(M, N)}, r"out: aligned to 16 bytes"),
    ):
        arguments = {"x_q": x, "x_scale": scale, "weight": weights["qoq"], **change}
        with pytest.raises(ArgumentError, match=message):
            ptxlab.gemm_w4a8(**arguments)


def test_many_shapes_one_after_the_other(cupy, weights) -> None:
    for tokens in (1, 2, 7, 8, 16, 33, 64, 65, 128, 300):
        x = np.random.default_rng(tokens).standard_normal((tokens, K), dtype=np.float32)
        for scheme, weight in weights.items():
            y = ptxlab.gemm_w4a8(ptxlab.quantize_activations(cupy.asarray(x)), weight=weight, out_dtype="float32")
            assert equal_bits(y, expected_product(scheme, "float32", x=quant.quantize_activations(x)))
