"""cuBLAS and attention of PyTorch, and humming, in the same run as the kernels compared with them.

PyTorch and `humming-kernels` are needed only here; what is not installed is no peer.
"""

import gc
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from traceback import extract_tb
from typing import Any

from packaging.version import Version

from ptxlab import gpu
from ptxlab.errors import BenchmarkError, UnavailableError
from ptxlab.lowbit.bench.peers import Peers
from ptxlab.lowbit.bench.shapes import HEAD_DIM, Batch
from ptxlab.runtime.timing import GEMM_REPLAYS, combine_calls, copies_beyond_l2, measure

# Names are those of the stored times too (`benchmarks.stored`).
CUBLAS = ("cublas_fp8", "cublas_int8", "cublas_fp16")
HUMMING = {"humming_w4a8_g128": 128, "humming_w4a8_chn": 0}  # name -> weights that share a scale, 0: all of a channel
HUMMING_RELEASE = "0.1.19"  # that records were made with; of 0.1.10, which vLLM 0.26 brings, other names are public
SDPA_BACKENDS = {"sdpa_flash_f16": "FLASH_ATTENTION", "sdpa_cudnn_f16": "CUDNN_ATTENTION"}  # name -> PyTorch's backend
_UNGROUPED = "sdpa_cudnn_f16"  # takes a group's rows for the queries of a prompt: up to ten times flash's time
DEVICE = "cuda"
_INT8_ROWS = 32  # `_int_mm` takes more than 16 rows
_CHECKED_ROWS = 256  # of the weight
_TOLERANCE = 1e-2  # of the largest result: a wrong product shows, rounding does not


def importable() -> bool:
    """Tell whether PyTorch is installed and has a GPU."""
    if find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


def versions() -> dict[str, str]:
    """Return the versions of the peers' libraries, of those that are installed."""
    installed = {}
    for distribution in ("torch", "humming-kernels", "flashinfer-python", "liger-kernel", "vllm"):
        with suppress(metadata.PackageNotFoundError):
            installed[distribution] = metadata.version(distribution)
    return installed


def cublas(N: int, K: int, tokens: Sequence[int], names: Iterable[str] | None = None) -> dict[int, dict[str, float]]:
    """Time cuBLAS for a weight [N, K], rotated beyond the L2: microseconds by tokens and peer; empty without PyTorch.

    FP8: per-tensor scales, FP16 out. INT8: int32 out, nothing dequantised, at least 32 rows. FP16: FP16 out. The
    quantisation of the activations is in none of them.
    """
    times: dict[int, dict[str, float]] = {M: {} for M in tokens}
    if not importable():
        return times
    import torch

    for variant in names or CUBLAS:
        weights = _copy_weight(operand(variant, N, K, seed=0))
        for M in tokens:
            x = operand(variant, max(M, _INT8_ROWS) if variant == "cublas_int8" and M <= 16 else M, K, seed=M)
            times[M][variant] = measure(_calls(variant, x, weights), replays=GEMM_REPLAYS, capture=capture).us
        weights.clear()
    torch.cuda.empty_cache()  # what the graphs held; the kernels to be compared need memory too
    return times


def cublas_chain(matrices: Sequence[tuple[int, int]], tokens: Sequence[int]) -> dict[int, dict[str, float]]:
    """Time FP8 GEMMs of weights [N, K] one after the other, in microseconds by tokens.

    They are measured as `cublas` measures each alone.
    """
    times: dict[int, dict[str, float]] = {M: {} for M in tokens}
    if not importable():
        return times
    import torch

    peer = "cublas_fp8"
    matrix_bytes = sum(N * K for N, K in matrices)
    weights = [_copy_weight(operand(peer, N, K, seed=0), matrix_bytes) for N, K in matrices]
    for M in tokens:
        links = [_calls(peer, operand(peer, M, copies[0].shape[1], seed=M), copies) for copies in weights]
        chains = [combine_calls(calls) for calls in zip(*links, strict=True)]
        times[M][peer] = measure(chains, replays=GEMM_REPLAYS, capture=capture).us
    weights.clear()
    torch.cuda.empty_cache()
    return times


def humming(N: int, K: int, tokens: Sequence[int]) -> dict[int, dict[str, float]]:
    """Time humming's W4A8 GEMM as `cublas` is timed: microseconds by tokens and scheme; empty without the package.

    INT4 weights without zero points, INT8 activations that the package quantised by token before, FP16 out; kernels and
    tiles are those that its heuristics choose. It compiles them when a call is checked, before anything is timed. A
    case that it refuses is left out with a warning that says why.
    """
    times: dict[int, dict[str, float]] = {M: {} for M in tokens}
    if not importable() or find_spec("humming") is None:
        return times
    import torch

    for peer, group in HUMMING.items():
        layers: list[Any] = []
        with skip_with_warning(f"{peer}, {N} x {K}"):
            layers, weight, tiles = humming_layers(N, K, group, tokens)
        for M in tokens if layers else ():
            with skip_with_warning(f"{peer}, {N} x {K}, M = {M}"):
                calls = _humming_calls(peer, M, layers, weight, tiles)
                times[M][peer] = measure(calls, replays=GEMM_REPLAYS, capture=capture).us
        layers.clear()
    torch.cuda.empty_cache()
    return times


@contextmanager
def skip_with_warning(label: str) -> Iterator[None]:
    """Turn another library's exception into a warning that `label` is left out; wrong results stay an error."""
    try:
        yield
    except BenchmarkError:
        raise
    except Exception as error:
        message = str(error) or extract_tb(error.__traceback__)[-1].line or ""  # of a bare `assert` its line
        reason = message.partition("\n")[0]
        warnings.warn(f"{label}: left out, {type(error).__name__}: {reason}", stacklevel=4)


def missing_humming_release() -> str:
    """Say which release of humming is missing, or nothing."""
    release = metadata.version("humming-kernels")
    return (
        "" if Version(release) >= Version(HUMMING_RELEASE) else f"humming-kernels {HUMMING_RELEASE}: this is {release}"
    )


def humming_layers(
    N: int, K: int, group: int, tokens: Sequence[int], weight: Any = None, copies: int = 0
) -> tuple[list[Any], Any, str]:
    """Make layers of one weight (random if None), and return them, their first rows dequantised, and the tiles.

    There are enough layers to exceed the L2, unless `copies` are asked for.

    Tiles are those of the package's heuristics, for these numbers of tokens alone: the others would be compiled too. A
    launch looks the tile of one token up, whatever it takes. Raises UnavailableError for an older release.
    """
    import torch
    from humming.layer import HummingLayer
    from humming.tune import get_heuristics_config

    if reason := missing_humming_release():
        raise UnavailableError(reason)
    layers: list[Any] = []
    tensors: dict[str, Any] = {}
    weight = operand("fp16", N, K, seed=0) if weight is None else weight
    for _ in range(copies or copies_beyond_l2(N * K // 2)):
        with torch.device(DEVICE):
            layer = HummingLayer(
                shape_n=N,
                shape_k=K,
                weight_config={"dtype": "int4", "group_size": group},
                input_config={"dtype": "int8"},
                torch_dtype=torch.float16,
            )
        schema = layer.weight_schema
        tensors = tensors or schema.quant_tensor(weight, schema, torch.float16)
        layer.load_from_tensors(tensors)
        layer.transform()
        layers.append(layer)
    tiles = [
        (min_tokens, max_tokens, tile)
        for min_tokens, max_tokens, tile in get_heuristics_config(layer.humming_config)
        if any(min_tokens < M <= max_tokens for M in (1, *tokens))
    ]
    return layers, schema.dequant_tensors(tensors)[:_CHECKED_ROWS].double(), json.dumps(tiles)


def _humming_calls(name: str, M: int, layers: Sequence[Any], weight: Any, tiles: str) -> list[Callable[[], Any]]:
    """Make one call per layer, on quantised activations, and check the first call's results."""
    from humming.forward import may_quant_input

    first = layers[0]
    x, scales = may_quant_input(first.humming_config, operand("fp16", M, first.shape_k, seed=M))
    calls: list[Callable[[], Any]] = [partial(layer, x, input_scale=scales, tuning_config=tiles) for layer in layers]
    expected = x.double() * scales.double().reshape(M, 1) @ weight.t()
    check_close(name, calls[0]()[:, :_CHECKED_ROWS].double(), expected, _TOLERANCE)
    return calls


def _copy_weight(weight: Any, nbytes: int = 0) -> list[Any]:
    """Copy a weight until the copies exceed the L2; `nbytes`, if given, counts the whole that it is a part of."""
    return [weight.clone() for _ in range(copies_beyond_l2(nbytes or weight.nbytes))]


def operand(name: str, rows: int, K: int, seed: int) -> Any:
    """Make a random matrix [rows, K] of the peer's dtype."""
    import torch

    generator = torch.Generator(DEVICE).manual_seed(seed)
    if name == "cublas_int8":
        return torch.randint(-127, 128, (rows, K), dtype=torch.int8, device=DEVICE, generator=generator)
    values = torch.randn((rows, K), dtype=torch.float16, device=DEVICE, generator=generator)
    return values.to(torch.float8_e4m3fn) if name == "cublas_fp8" else values


def _calls(name: str, x: Any, weights: Sequence[Any]) -> list[Callable[[], Any]]:
    """Make one call per copy of the weight, and check the first call's results."""
    import torch

    unit_scale = torch.ones((), device=DEVICE)

    def product(weight: Any) -> Any:
        if name == "cublas_fp8":
            return torch._scaled_mm(x, weight.t(), scale_a=unit_scale, scale_b=unit_scale, out_dtype=torch.float16)
        if name == "cublas_int8":
            return torch._int_mm(x, weight.t())
        return torch.matmul(x, weight.t())

    expected = x.float().double() @ weights[0][:_CHECKED_ROWS].float().double().t()
    tolerance = 0 if name == "cublas_int8" else _TOLERANCE
    check_close(name, product(weights[0])[:, :_CHECKED_ROWS].double(), expected, tolerance)
    return [partial(product, weight) for weight in weights]


def sdpa(batch: Batch) -> dict[str, float]:
    """Time PyTorch's attention for sequences of equal length, rotated beyond the L2: microseconds by backend.

    Query heads of a group are rows of one head, so that no backend reads the cache more than once; cuDNN, which is slow
    with them, runs only if there are no groups. A backend that this PyTorch lacks is left out; empty without PyTorch.
    """
    if not importable():
        return {}
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    B, length = len(batch.lengths), batch.lengths[0]
    copies = copies_beyond_l2(2 * batch.tokens * batch.Hkv * HEAD_DIM * 2)
    q = _random_normal(B, batch.Hkv, batch.Hq // batch.Hkv, HEAD_DIM)
    caches = [tuple(_random_normal(B, batch.Hkv, length, HEAD_DIM) for _ in range(2)) for _ in range(copies)]
    times = {}
    for peer, backend in SDPA_BACKENDS.items():
        if peer == _UNGROUPED and batch.Hq > batch.Hkv:
            continue
        with sdpa_kernel(getattr(SDPBackend, backend)):
            calls = [partial(torch.nn.functional.scaled_dot_product_attention, q, k, v) for k, v in caches]
            if _check_backend(peer, calls[0], q, *caches[0]):
                times[peer] = measure(calls, capture=capture).us
    caches.clear()
    torch.cuda.empty_cache()  # the kernels to be compared need memory too
    return times


def _random_normal(*shape: int) -> Any:
    import torch

    return torch.randn(shape, dtype=torch.float16, device=DEVICE)


def _check_backend(name: str, call: Callable[[], Any], q: Any, k: Any, v: Any) -> bool:
    """Tell whether the backend is available, and check the first sequence's results."""
    import torch

    try:
        output = call()[0].double()
    except RuntimeError as error:
        if "No available kernel" in str(error):
            return False
        raise
    weights = torch.softmax(q[0].double() @ k[0].double().transpose(-1, -2) * HEAD_DIM**-0.5, dim=-1)
    expected = weights @ v[0].double()
    check_close(name, output, expected, _TOLERANCE)
    return True


def check_close(name: str, output: Any, expected: Any, tolerance: float) -> None:
    """Raise BenchmarkError if the largest error, relative to the largest expected value, exceeds the tolerance."""
    error = float((output - expected).abs().max() / expected.abs().max())
    if not error <= tolerance:
        raise BenchmarkError(f"{name}: wrong results, relative error {error:.2g}")


def capture(calls: Sequence[Callable[[], Any]]) -> gpu.Graph:
    """Capture calls with PyTorch's own graph: its allocator has to know of the graph."""
    import torch

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        torch.cuda.synchronize()
        gc.collect()
        gc.disable()  # what the collector destroys while a graph is captured makes the capture void
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator_state = generator.clone_state()
        graph.capture_begin(capture_error_mode="thread_local")  # what other threads do makes no capture void
        try:
            try:
                for call in calls:
                    call()
            finally:
                gc.enable()
                graph.capture_end()  # also where a call fails: a stream left capturing refuses what comes next
        except RuntimeError:  # a capture that is void leaves the generator capturing: it would draw no number again
            generator.graphsafe_set_state(generator_state)
            raise

    def replay() -> None:
        with torch.cuda.stream(stream):
            graph.replay()

    return gpu.wrap_graph(replay, stream.cuda_stream, len(calls))


PUBLIC = Peers(cublas=cublas, cublas_chain=cublas_chain, humming=humming, attention=sdpa)
