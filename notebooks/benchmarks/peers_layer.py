"""A decoder layer of public parts: GEMMs of cuBLAS (FP16, FP8) or humming (W4A8), attention of FlashInfer or PyTorch,
and what lies between them by `torch.compile`. What is not installed is left out.

A mix is timed as ptxlab's own layer is: a CUDA graph of layers in turn, each with weights and cache of its own, which
together exceed the L2.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.util import find_spec
from types import FunctionType
from typing import Any, ClassVar, NamedTuple

from benchmarks import peers
from ptxlab.errors import BenchmarkError
from ptxlab.llm.layer_chain import LENGTH, batch_of
from ptxlab.llm.model import Config
from ptxlab.lowbit.bench.shapes import HEAD_DIM, PAGE
from ptxlab.runtime.timing import GEMM_REPLAYS, copies_beyond_l2, measure

EPS = 1e-5
FP8_MOST = 448.0
_WEIGHTS = 10_000  # first seed of the weights; inputs have the batch for a seed, and an equal one makes rows alike
STATIC = 16.0 / FP8_MOST  # scale of all tensors of the tensor-wise mix, as calibration would have set it before


class Format(NamedTuple):
    """Number formats of a mix.

    Attributes:
        dtype: of the floats between the GEMMs, by name.
        scheme: what a GEMM is given: floats, FP8 by token or by one scale that is known before, or INT8 by token.
        weight_bytes: of a weight.
        tolerance: how far off the FP16 mix's results its own may be, rms; what is wired wrongly is about 1.4 off.
    """

    dtype: str
    scheme: str
    weight_bytes: float
    tolerance: float


# PyTorch's FP8 product with scales by row writes bfloat16 alone.
MIXES = {
    "fp16": Format("float16", "none", 2, 0.0),
    "fp8_row": Format("bfloat16", "fp8", 1, 0.4),
    "fp8_tensor": Format("float16", "fp8_static", 1, 0.4),
    "humming_chn": Format("float16", "int8", 0.5, 0.8),
    "humming_g128": Format("float16", "int8", 0.5, 0.8),
}
OF_EXPERTS = ("fp16", "fp8_row")  # mixes that PyTorch has grouped GEMMs for


class MixTime(NamedTuple):
    """Microseconds of a layer, of that layer without attention, and of its GEMMs alone, one after the other."""

    layer: float
    without_attention: float
    gemms: float


# --- what lies between the GEMMs -------------------------------------------------------------------------------------


def quantize(y: Any, scheme: str, dtype: Any) -> tuple[Any, Any]:
    """Quantise f32 [M, K] for a GEMM: operand [M, K], and scales f32 [M, 1], or None if the format has none."""
    import torch

    if scheme == "none":
        return y.to(dtype), None
    if scheme == "fp8_static":
        return (y * (1 / STATIC)).clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn), None
    magnitude = y.abs().amax(1, keepdim=True).clamp(min=1e-12)
    if scheme == "int8":
        scale = magnitude * (1 / 127)
        return (y / scale).round().to(torch.int8), scale
    scale = magnitude * (1 / FP8_MOST)
    return (y / scale).clamp(-FP8_MOST, FP8_MOST).to(torch.float8_e4m3fn), scale


def norm(x: Any, residual: Any, gamma: Any, scheme: str, keep_floats: bool = False) -> tuple[Any, Any, Any]:
    """Add x to residual in place, and return the sum's RMSNorm.

    It is (operand, scales, floats of x's dtype if `keep_floats`), all [M, H].
    """
    import torch

    residual.add_(x)
    floats = residual.float()
    y = floats * torch.rsqrt(floats.square().mean(1, keepdim=True) + EPS) * gamma.float()
    return *quantize(y, scheme, x.dtype), y.to(x.dtype) if keep_floats else None


def silu_mul(gate_up: Any, scheme: str) -> tuple[Any, Any]:
    """Compute silu(gate) * up of [M, 2·F], gate in the first half of the columns, as (operand, scales)."""
    import torch

    gate, up = gate_up.chunk(2, 1)
    return quantize(torch.nn.functional.silu(gate.float()) * up.float(), scheme, gate_up.dtype)


def requantize(x: Any, scheme: str) -> tuple[Any, Any]:
    """Quantise the output of attention [M, Hq·D] as (operand, scales)."""
    return quantize(x.float(), scheme, x.dtype)


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    """Apply RoPE on halves, in a form that compiles to one kernel.

    x [.., T, H, D], cos and sin f32 [T, 1, D] (`_tables`).
    """
    return (x.float() * cos + x.float().roll(HEAD_DIM // 2, -1) * sin).to(x.dtype)


def append(qkv: Any, tables: Any, positions: Any, keys: Any, values: Any, kv_heads: int) -> Any:
    """Rotate q and k and write k and v into caches [B, Hkv, L, D] in place; q [B, Hq, D]."""
    import torch

    heads = qkv.view(qkv.shape[0], -1, HEAD_DIM)
    cos, sin = tables[positions].split(1, 1)
    rows = torch.arange(qkv.shape[0], device=qkv.device)
    keys[rows, :, positions] = rotate(heads[:, -2 * kv_heads : -kv_heads], cos, sin).to(keys.dtype)
    values[rows, :, positions] = heads[:, -kv_heads:].to(values.dtype)
    return rotate(heads[:, : -2 * kv_heads], cos, sin)


def append_paged(qkv: Any, tables: Any, positions: Any, table: Any, keys: Any, values: Any, kv_heads: int) -> Any:
    """Append the keys and values of one token per sequence to pages [pages, page, Hkv, D]; return rotated queries."""
    import torch

    heads = qkv.view(qkv.shape[0], -1, HEAD_DIM)
    cos, sin = tables[positions].split(1, 1)
    pages, offsets = torch.gather(table, 1, (positions // PAGE).unsqueeze(1)).squeeze(1), positions % PAGE
    keys[pages, offsets] = rotate(heads[:, -2 * kv_heads : -kv_heads], cos, sin).to(keys.dtype)
    values[pages, offsets] = heads[:, -kv_heads:].to(values.dtype)
    return rotate(heads[:, : -2 * kv_heads], cos, sin)


def append_prompts(qkv: Any, tables: Any, keys: Any, values: Any, kv_heads: int) -> Any:
    """Append whole prompts to caches [prompts, Hkv, L, D], and return the rotated queries.

    q [prompts, Hq, L, D], in memory as [prompts, L, Hq, D].
    """
    prompts, _, length, _ = keys.shape
    heads, (cos, sin) = qkv.view(prompts, length, -1, HEAD_DIM), tables.split(1, 1)
    keys.copy_(rotate(heads[:, :, -2 * kv_heads : -kv_heads], cos, sin).transpose(1, 2))
    values.copy_(heads[:, :, -kv_heads:].transpose(1, 2))
    return rotate(heads[:, :, : -2 * kv_heads], cos, sin).transpose(1, 2)


_OF_TOKENS = {
    norm: (0, 1),
    silu_mul: (0,),
    requantize: (0,),
    append: (0, 2, 3, 4),
    append_paged: (0, 2, 3, 4, 5),
    append_prompts: (),
}


_WITHOUT_CACHES = {"fx_graph_cache": False, "autotune_local_cache": False}


@cache
def compile_function(function: Callable[..., Any], *key: str | int, fresh: bool = False) -> Callable[..., Any]:
    """Compile one of the functions above by `torch.compile`, for one format and width and any number of tokens.

    `append_prompts` is compiled for each number of prompts. A name of its own keeps PyTorch from making widths dynamic;
    the first axis of arguments in `_OF_TOKENS` is dynamic, but for a single token, which PyTorch always compiles for
    itself. The function is tuned to the tokens of the first call. PyTorch's caches on disk do not tell these numbers
    apart, so that call may have been another process's, unless `fresh`.
    """
    import torch

    function_name = "_".join((function.__name__, *map(str, key))).replace(".", "_")
    code = function.__code__.replace(co_name=function_name, co_qualname=function_name)
    renamed = FunctionType(code, function.__globals__, function_name, function.__defaults__)
    compiled = torch.compile(renamed, options=_WITHOUT_CACHES if fresh else None)

    def call(*args: Any) -> Any:
        for index in _OF_TOKENS[function]:
            torch._dynamo.maybe_mark_dynamic(args[index], 0)
        return compiled(*args)

    return call


# --- GEMMs -----------------------------------------------------------------------------------------------------------


def _product(name: str, weight: Any) -> Callable[[Any, Any], Any]:
    """Quantise a weight f16 [N, K] and return the mix's GEMM: (operand, its scale) -> floats [M, N]."""
    import torch

    if name == "fp16":
        return lambda x, _: torch.matmul(x, weight.t())
    if name == "fp8_row":
        q, scale = quantize(weight.float(), "fp8", None)
        row_scales = scale.t().contiguous()
        return lambda x, s: torch._scaled_mm(
            x, q.t(), scale_a=s, scale_b=row_scales, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    _require_mix(name, "fp8_tensor")
    tensor_scale = weight.float().abs().max() / FP8_MOST
    q, static_scale = (
        (weight.float() / tensor_scale).to(torch.float8_e4m3fn),
        torch.full((), STATIC, device=weight.device),
    )
    return lambda x, _: torch._scaled_mm(
        x, q.t(), scale_a=static_scale, scale_b=tensor_scale, out_dtype=torch.float16, use_fast_accum=True
    )


def _require_mix(name: str, mix: str) -> None:
    """Raise ValueError for a mix without a product of its own: it would be measured as another."""
    if name != mix:
        raise ValueError(f"{name}: a mix of MIXES needs a product of its own")


def _grouped_product(name: str, weights: Any) -> Callable[[Any, Any, Any], Any]:
    """Quantise all experts' weights bf16 [E, N, K] and return their GEMM: (rows sorted by expert, scales, ends)."""
    import torch

    if name == "fp16":
        return lambda x, _, ends: torch._grouped_mm(x, weights.transpose(1, 2), offs=ends)
    _require_mix(name, "fp8_row")
    E, N, K = weights.shape
    q, scale = quantize(weights.reshape(E * N, K).float(), "fp8", None)
    q, row_scales = q.view(E, N, K), scale.view(E, N)
    return lambda x, s, ends: torch._scaled_grouped_mm(
        x, q.transpose(1, 2), s.view(-1), row_scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _weights(name: str, config: Config, copies: int, tokens: Sequence[int]) -> list[dict[str, Any]]:
    """Make the GEMMs of `copies` layers, by name.

    The random weights are the same in every mix and layer; each layer has its own copy.
    """
    import torch

    layers: list[dict[str, Any]] = [{} for _ in range(copies)]
    for number, (matrix, (N, K)) in enumerate(config.matrices.items()):
        experts = config.experts if matrix in ("gate_up", "down") else 0
        generator = torch.Generator(peers.DEVICE).manual_seed(_WEIGHTS + number)
        size = (experts, N, K) if experts else (N, K)
        deviation = K**-0.5 * (0.1 if matrix in ("o", "down") else 1)  # layers add little each, so that none overflows
        weight = torch.randn(size, dtype=torch.float16, device=peers.DEVICE, generator=generator) * deviation
        gemms: list[Any]
        if experts:
            gemms = [_grouped_product(name, weight.to(torch.bfloat16)) for _ in layers]
        elif name in HUMMING:
            gemms = _humming_products(weight, HUMMING[name], copies, tokens)
        else:
            gemms = [_product(name, weight.to(_dtype(name, config), copy=True)) for _ in layers]
        for layer, gemm in zip(layers, gemms, strict=True):
            layer[matrix] = gemm
    if config.experts:
        router = torch.randn(
            (config.experts, config.hidden),
            device=peers.DEVICE,
            generator=torch.Generator(peers.DEVICE).manual_seed(_WEIGHTS + 9),
        )
        for layer in layers:
            layer["router"] = router.to(torch.bfloat16)
    return layers


def _dtype(name: str, config: Config) -> Any:
    """Return the dtype of the floats between GEMMs; with experts, PyTorch's grouped GEMMs write bfloat16 alone."""
    import torch

    return torch.bfloat16 if config.experts else getattr(torch, MIXES[name].dtype)


HUMMING = {"humming_chn": 0, "humming_g128": 128}  # weights that share a scale; 0: all of a channel


def _humming_products(weight: Any, group: int, copies: int, tokens: Sequence[int]) -> list[Callable[[Any, Any], Any]]:
    """Quantise a weight [N, K] for humming, and return the GEMM of each copy."""
    N, K = weight.shape
    layers, tiles = peers.humming_layers(N, K, group, tokens, weight=weight, copies=copies)[::2]
    return [partial(_humming_product, layer, tiles) for layer in layers]


def _humming_product(layer: Any, tiles: str, x: Any, scale: Any) -> Any:
    return layer(x, input_scale=scale, tuning_config=tiles)


# --- attention -------------------------------------------------------------------------------------------------------


class _Attention:
    """Decode attention of PyTorch over contiguous caches [B, Hkv, L, D] of the floats' dtype, one cache per layer.

    Backends: cuDNN, and flash with the query heads of a group as rows of one head; the faster one is taken.
    """

    name = "sdpa"
    tolerance = 2e-2  # of the largest result
    fastest_at: ClassVar[dict[tuple[Any, ...], str]] = {}  # of these `mixes`: mixes may have the same caches

    def __init__(self, config: Config, B: int, copies: int, dtype: Any, length: int = 0) -> None:
        import torch

        self.config, self.B, self.dtype, self.length = config, B, dtype, length or LENGTH
        generator = torch.Generator(peers.DEVICE).manual_seed(B)
        size = (B, config.kv_heads, self.length, HEAD_DIM)
        keys, values = (
            torch.randn(size, dtype=torch.float16, device=peers.DEVICE, generator=generator).to(dtype) for _ in "kv"
        )
        self.caches = [self.store(keys, values) for _ in range(copies)]
        self.tables = _tables(self.length)
        self.positions = torch.full((B,), self.length - 1, device=peers.DEVICE)

    def attend(self, q: Any, layer: int) -> Any:
        """Compute the attention of a layer, [B, Hq·D]."""
        return self.call(q, layer)

    @cached_property
    def call(self) -> Callable[[Any, int], Any]:
        """The attention of a layer, chosen and checked at its first use."""
        q = self.caches[0][0].new_empty((self.B, self.config.heads, HEAD_DIM), dtype=self.dtype).normal_()
        return self.fastest(q)

    def store(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Copy keys and values [B, Hkv, L, D] into a cache."""
        return keys.clone(), values.clone()

    def append(self, qkv: Any, layer: int) -> Any:
        """Write the new tokens of a layer; q [B, Hq, D]."""
        append_tokens = compile_function(append, str(self.dtype), self.config.heads, self.config.kv_heads)
        return append_tokens(qkv, self.tables, self.positions, *self.caches[layer], self.config.kv_heads)

    def fastest(self, q: Any) -> Callable[[Any, int], Any]:
        """Check and time the backends that run here, and return the faster one.

        On caches of a known shape, the backend that was faster before is taken.
        """
        key = self.config.heads, self.config.kv_heads, self.B, self.length, self.dtype, len(self.caches)
        cached_name, times = self.fastest_at.get(key), dict[str, float]()
        for backend_name in (cached_name,) if cached_name else ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
            calls = [partial(self.sdpa, backend_name, q, copy) for copy in range(len(self.caches))]
            try:
                output = calls[0]()
            except RuntimeError:  # no such backend, or not for such heads
                continue
            self.check(backend_name, q, output)
            times[backend_name] = 0.0 if cached_name else measure(calls, replays=3, capture=peers.capture).us
        if not times:
            raise BenchmarkError(f"PyTorch has no decode attention for {batch_of(self.config, self.B)}")
        self.fastest_at[key] = min(times, key=times.__getitem__)
        return partial(self.sdpa, self.fastest_at[key])

    def sdpa(self, backend: str, q: Any, layer: int) -> Any:
        """Compute PyTorch's attention [B, Hq·D] of q [B, Hq, D]."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        keys, values = self.caches[layer]
        is_grouped = self.config.heads > self.config.kv_heads
        attention = torch.nn.functional.scaled_dot_product_attention
        backend_context = sdpa_kernel(getattr(SDPBackend, backend)) if keys.is_cuda else nullcontext()
        with backend_context:
            if backend == "FLASH_ATTENTION":
                out = attention(q.view(self.B, self.config.kv_heads, -1, HEAD_DIM), keys, values)
            else:
                out = attention(q.unsqueeze(2), keys, values, enable_gqa=is_grouped)
        return out.reshape(self.B, -1)

    def check(self, name: str, q: Any, output: Any) -> None:
        """Compare the first sequence's results with float64."""
        import torch

        keys, values = (x[0].double().cpu() for x in self.first_keys_values())
        query = q[0].view(self.config.kv_heads, -1, HEAD_DIM).double().cpu()
        weights = torch.softmax(query @ keys.transpose(1, 2) * HEAD_DIM**-0.5, 2)
        peers.check_close(name, output[0].double().cpu(), (weights @ values).reshape(-1), self.tolerance)

    def first_keys_values(self) -> tuple[Any, Any]:
        """Return keys and values of the first layer's first sequence, [1, Hkv, L, D]."""
        keys, values = self.caches[0]
        return keys[:1], values[:1]


class _Paged(_Attention):
    """FlashInfer's XQA over pages [pages, page, Hkv, D] in FP8."""

    name = "xqa_fp8"
    tolerance = 0.1

    def __init__(self, config: Config, B: int, copies: int, dtype: Any, length: int = 0) -> None:
        import torch

        super().__init__(config, B, copies, dtype, length)
        pages = self.B * self.length // PAGE
        self.table = torch.arange(pages, dtype=torch.int32, device=peers.DEVICE).view(self.B, -1)
        self.lengths = torch.full((self.B,), self.length, dtype=torch.int32, device=peers.DEVICE)
        self.workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=peers.DEVICE)

    def store(self, keys: Any, values: Any) -> tuple[Any, Any]:
        import torch

        def to_pages(x: Any) -> Any:
            pages = x.view(self.B, self.config.kv_heads, self.length // PAGE, PAGE, HEAD_DIM).permute(0, 2, 3, 1, 4)
            return pages.reshape(-1, PAGE, self.config.kv_heads, HEAD_DIM).to(torch.float8_e4m3fn)

        return to_pages(keys), to_pages(values)

    def append(self, qkv: Any, layer: int) -> Any:
        append_tokens = compile_function(append_paged, str(self.dtype), self.config.heads, self.config.kv_heads)
        return append_tokens(
            qkv, self.tables, self.positions, self.table.long(), *self.caches[layer], self.config.kv_heads
        )

    def fastest(self, q: Any) -> Callable[[Any, int], Any]:
        self.check(self.name, q, self.xqa(q, 0))
        return self.xqa

    def xqa(self, q: Any, layer: int) -> Any:
        """Compute FlashInfer's XQA attention [B, Hq·D] of q [B, Hq, D]."""
        from flashinfer.decode import xqa_batch_decode_with_kv_cache

        out = xqa_batch_decode_with_kv_cache(
            q, self.caches[layer], self.workspace, self.table, self.lengths, self.length, bmm1_scale=HEAD_DIM**-0.5
        )
        return out.reshape(self.B, -1)

    def first_keys_values(self) -> tuple[Any, Any]:
        """Return keys and values of the first layer's first sequence as float32, [1, Hkv, L, D]."""
        first_sequence = (x[: self.length // PAGE].float() for x in self.caches[0])
        keys, values = (
            x.reshape(1, self.length, self.config.kv_heads, HEAD_DIM).transpose(1, 2) for x in first_sequence
        )
        return keys, values


class _Prompts(_Attention):
    """Causal attention of PyTorch over whole prompts of `length` tokens, whose keys and values go to a cache of theirs
    [prompts, Hkv, L, D] of the floats' dtype; B counts all their tokens."""

    name = "causal"

    def __init__(self, config: Config, B: int, copies: int, dtype: Any, length: int = 0) -> None:
        super().__init__(config, B // (length or LENGTH), copies, dtype, length)

    def append(self, qkv: Any, layer: int) -> Any:
        """Append the prompts to the cache of a layer, and return q [prompts, Hq, L, D]."""
        append_tokens = compile_function(append_prompts, str(self.dtype), self.config.heads, self.config.kv_heads)
        return append_tokens(qkv, self.tables, *self.caches[layer], self.config.kv_heads)

    def attend(self, q: Any, layer: int) -> Any:
        """Compute causal attention [prompts·L, Hq·D] by the backend that PyTorch chooses."""
        import torch

        is_grouped = self.config.heads > self.config.kv_heads
        attention = torch.nn.functional.scaled_dot_product_attention
        out = attention(q, *self.caches[layer], is_causal=True, enable_gqa=is_grouped)
        return out.transpose(1, 2).reshape(self.B * self.length, -1)


@cache
def _tables(length: int) -> Any:
    """Return cosines of every position for both halves, and sines, negative for the first half: f32 [L, 2, D]."""
    import torch

    rates = 1e4 ** -(torch.arange(0, HEAD_DIM, 2, device=peers.DEVICE) / HEAD_DIM)
    angles = torch.arange(length, device=peers.DEVICE)[:, None] * rates
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)), 1)


def has_flashinfer() -> bool:
    """Tell whether FlashInfer is installed."""
    return find_spec("flashinfer") is not None


# --- the layer -------------------------------------------------------------------------------------------------------


@dataclass
class _Decoder:
    """Layers of one mix at one batch.

    Attributes:
        name: of the mix.
        weights: GEMMs by name, of each layer.
        x: input of the first layer, [B, H]; `output` is the output of the last one that ran.
        residual: [B, H], written in place.
        gamma: of every norm, [H].
        attention: with a cache for each layer.
        last_inputs: the inputs that each GEMM had last, by name.
    """

    name: str
    config: Config
    weights: list[dict[str, Any]]
    x: Any
    residual: Any
    gamma: Any
    attention: _Attention

    def __post_init__(self) -> None:
        self.scheme = MIXES[self.name].scheme
        self.last_inputs: dict[str, tuple[Any, ...]] = {}
        self.output = self.x

    def calls(self, attention_output: Any = None) -> list[Callable[[], None]]:
        """Return one call per layer.

        `attention_output` [B, Hq·D], if given, replaces the output of attention, which then does not run.
        """
        return [partial(self.layer, index, attention_output) for index in range(len(self.weights))]

    def layer(self, index: int, attention_output: Any = None) -> None:
        """Run layer `index` on the output of the layer before; the first one runs on x."""
        weights = self.weights[index]
        x = self.x if index == 0 else self.output
        q, scale, _ = self.norm(x, False)
        qkv = self.gemm(weights, "qkv", q, scale)
        query = self.attention.append(qkv, index)
        out = self.attention.attend(query, index) if attention_output is None else attention_output
        if self.scheme != "none":
            q, scale = self.between(requantize, out.shape[1])(out, self.scheme)
        else:
            q, scale = out, None
        o = self.gemm(weights, "o", q, scale)
        q, scale, normed = self.norm(o, bool(self.config.experts))
        if self.config.experts:
            self.output = self.experts(weights, q, scale, normed)
            return
        gate_up = self.gemm(weights, "gate_up", q, scale)
        self.output = self.gemm(weights, "down", *self.gate(gate_up))

    def between(self, function: Callable[..., Any], width: int) -> Callable[..., Any]:
        """Compile a function between the GEMMs for its width; prompts and steps are compiled apart."""
        return compile_function(
            function, self.scheme, str(self.x.dtype), width, fresh=isinstance(self.attention, _Prompts)
        )

    def norm(self, x: Any, keep_floats: bool) -> tuple[Any, Any, Any]:
        function = self.between(norm, self.config.hidden)
        q, scale, normed = function(x, self.residual, self.gamma, self.scheme, keep_floats)
        return q, scale, normed

    def gate(self, gate_up: Any) -> tuple[Any, Any]:
        q, scale = self.between(silu_mul, self.config.ffn)(gate_up, self.scheme)
        return q, scale

    def gemm(self, weights: dict[str, Any], matrix: str, *inputs: Any) -> Any:
        self.last_inputs[matrix] = inputs
        return weights[matrix](*inputs)

    def experts(self, weights: dict[str, Any], q: Any, scale: Any, normed: Any) -> Any:
        """Compute the chosen experts of every token, weighted by their softmax, with one grouped GEMM for all."""
        import torch

        logits = (normed @ weights["router"].t()).float()
        chosen_logits, expert_indices = logits.topk(self.config.chosen_experts, 1)
        order = expert_indices.flatten().argsort(stable=True)
        tokens = order // self.config.chosen_experts
        all_experts = torch.arange(self.config.experts, device=expert_indices.device)
        ends = (expert_indices.flatten()[:, None] == all_experts).sum(0).cumsum(0).to(torch.int32)
        gate_up = self.gemm(weights, "gate_up", q[tokens], None if scale is None else scale[tokens], ends)
        down = self.gemm(weights, "down", *self.gate(gate_up), ends)
        share = torch.softmax(chosen_logits, 1).flatten()[order].unsqueeze(1)
        out = torch.zeros_like(self.x, dtype=torch.float32).index_add_(0, tokens, down.float() * share)
        return out.to(self.x.dtype)

    def gemms(self) -> list[Callable[[], None]]:
        """Return one call per layer, which runs its GEMMs one after the other on the inputs that each had last."""
        inputs = {
            matrix: tuple(x if x is None else x.clone() for x in operands)
            for matrix, operands in self.last_inputs.items()
        }

        def run_gemms(weights: dict[str, Any]) -> None:
            for matrix, operands in inputs.items():
                weights[matrix](*operands)

        return [partial(run_gemms, weights) for weights in self.weights]


def mixes(
    config: Config,
    batches: Sequence[int],
    names: Sequence[str],
    progress: Callable[[str], None],
    length: int = 0,
    extra_batches: Mapping[str, Collection[int]] | None = None,
) -> Iterator[tuple[int, dict[str, MixTime]]]:
    """Time a layer of each `MIX/ATTENTION`, batch by batch; a mix that fails here is left out with a warning.

    Sequences have `length` tokens, a multiple of a page (`LENGTH`). `extra_batches` are batches of one `MIX/ATTENTION`
    alone. The largest batch comes first: functions are tuned to it. Meanwhile the weights of all mixes are in memory,
    those of a layer or of as many as exceed the L2.
    """
    extra_batches = extra_batches or {}
    batches_to_time = sorted(
        {*batches, *(B for further_batches in extra_batches.values() for B in further_batches)}, reverse=True
    )
    _Attention.fastest_at.clear()
    if not peers.importable():
        yield from ((B, {}) for B in batches_to_time)
        return
    import torch

    batches_by_kind = {
        mix: {kind: {*batches, *extra_batches.get(f"{mix}/{kind.name}", ())} for kind in _attentions(mix)}
        for mix in _supported_mixes(config, names)
    }
    weights: dict[str, list[dict[str, Any]]] = {}
    for mix, kinds in batches_by_kind.items():
        progress(f"{config.name}: {mix}")
        tokens = tuple(B for B in batches_to_time if any(B in kind_batches for kind_batches in kinds.values()))
        with peers.skip_with_warning(f"{mix}, {config.name}"):
            weights[mix] = _weights(
                mix, config, max(_copies_beyond_l2(mix, config, B) for B in batches_to_time), tokens
            )
    fp16_outputs: dict[int, Any] = {}  # of the FP16 mix, by batch
    for B in batches_to_time:
        progress(f"{config.name}, batch {B}: mixes")
        times: dict[str, MixTime] = {}
        for mix in weights:
            copies = _copies_beyond_l2(mix, config, B)
            for attention in (kind for kind, kind_batches in batches_by_kind[mix].items() if B in kind_batches):
                label = f"{mix}/{attention.name}"
                with peers.skip_with_warning(f"{label}, {config.name}, batch {B}"):
                    times[label] = _time_mix(mix, config, B, weights[mix][:copies], attention, fp16_outputs, length)
            torch.cuda.empty_cache()
        yield B, times
    weights.clear()
    torch.cuda.empty_cache()


PROMPTS_AT_ONCE = 4  # of `prefills`, in one launch


def prefills(config: Config, names: Sequence[str], length: int, progress: Callable[[str], None]) -> dict[str, MixTime]:
    """Time one layer of a prompt of `length` tokens, by mix, with `PROMPTS_AT_ONCE` prompts together."""
    if not peers.importable():
        return {}
    import torch

    times_by_mix: dict[str, MixTime] = {}
    fp16_outputs: dict[int, Any] = {}  # of the FP16 mix
    T = PROMPTS_AT_ONCE * length
    for mix in _supported_mixes(config, names):
        progress(f"{config.name}: prompts of {mix}")
        with peers.skip_with_warning(f"prompts of {mix}, {config.name}"):
            layers = _weights(mix, config, 1, (T,))
            times = _time_mix(mix, config, T, layers, _Prompts, fp16_outputs, length)
            times_by_mix[mix] = MixTime(*(us / PROMPTS_AT_ONCE for us in times))
            layers.clear()
        torch.cuda.empty_cache()
    return times_by_mix


def trace_kernels(run: Callable[[], None]) -> list[tuple[str, float, float]]:
    """Run a function, and list all kernels that run meanwhile: name, begin and end in microseconds.

    CUPTI records them through PyTorch, also those of other code, and of a graph that is captured inside. Empty without
    PyTorch.
    """
    if not peers.importable():
        return []
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    spans = [(event.name, event.time_range.start, event.time_range.end) for event in events]
    return sorted((s for s in spans if not s[0].startswith(("Memcpy", "Memset"))), key=lambda span: span[1])


Job = tuple[Callable[..., None], tuple[Any, ...]]


def compile_jobs(
    configs: Sequence[Config], batches: Sequence[int], names: Sequence[str], prompts: Sequence[int] = ()
) -> list[Job]:
    """List the jobs that fill PyTorch's and humming's caches on disk with the functions that `mixes` compiles.

    `prompts` are further numbers of tokens for humming's GEMMs.
    """
    if not peers.importable():
        return []
    matrices = {size for config in configs if _takes_humming(config) for size in config.matrices.values()}
    groups = [HUMMING[mix] for mix in names if mix in HUMMING and find_spec("humming") is not None]
    jobs: list[Job] = [
        (_warm_humming, (N, K, group, (*batches, *prompts)))
        for N, K in sorted(matrices, reverse=True)
        for group in groups
    ]
    # Mixes of one format compile the same functions between the GEMMs.
    mix_by_format = {MIXES[mix][:2]: mix for mix in names}
    jobs += [(_warm_between, (mix, config, max(batches))) for mix in mix_by_format.values() for config in configs]
    return jobs


def names_of(config: Config, names: Sequence[str]) -> list[str]:
    """List the `MIX/ATTENTION` names that `mixes` can measure for a model here."""
    return [f"{mix}/{kind.name}" for mix in _supported_mixes(config, names) for kind in _attentions(mix)]


def _supported_mixes(config: Config, names: Sequence[str]) -> list[str]:
    """Select the mixes that exist for a model."""
    if config.experts:
        return [mix for mix in names if mix in OF_EXPERTS]
    return [mix for mix in names if mix not in HUMMING or _takes_humming(config)]


def _takes_humming(config: Config) -> bool:
    """Tell whether humming is measured for a model: only for whole dense ones.

    humming compiles half a minute for each matrix of a share, and has no experts here.
    """
    return not config.experts and " " not in config.name


def _warm_humming(N: int, K: int, group: int, tokens: Sequence[int]) -> None:
    import torch

    weight = peers.operand("fp16", N, K, seed=0)
    product = _humming_products(weight, group, 1, tokens)[0]
    for M in tokens:
        q, scale = quantize(peers.operand("fp16", M, K, seed=M).float(), "int8", None)
        product(q, scale)
    torch.cuda.synchronize()


def _warm_between(name: str, config: Config, largest: int) -> None:
    """Compile all functions between the GEMMs, tuned to the largest batch, and for a batch of one.

    Products are replaced by zeros.
    """
    import torch

    def product(N: int) -> Callable[..., Any]:
        return lambda x, *_: torch.zeros((x.shape[0], N), dtype=_dtype(name, config), device=peers.DEVICE)

    weights: dict[str, Any] = {matrix: product(N) for matrix, (N, _) in config.matrices.items()}
    if config.experts:
        weights["router"] = torch.zeros((config.experts, config.hidden), dtype=torch.bfloat16, device=peers.DEVICE)
    for B in (largest, 1):
        decoder = _decoder(name, config, B, [weights], _Attention, PAGE)  # short caches: 14 such jobs run side by side
        decoder.layer(0, torch.zeros((B, config.heads * HEAD_DIM), dtype=decoder.x.dtype, device=peers.DEVICE))
    torch.cuda.synchronize()


_FUSED = {"rmsnorm_quantize": norm, "silu_mul_quantize": silu_mul, "quantize_activations": requantize}


def time_public_versions(kernel: str, M: int, K: int, copies: int) -> dict[str, float]:
    """Time the public versions of a fused kernel over `copies` inputs, in microseconds; empty without PyTorch.

    `torch_compile`: to INT8 by token. `rmsnorm_quantize` of [M, K] with a residual, `silu_mul_quantize` of [M, 2·K],
    `quantize_activations`. `liger_f16`: Liger's kernel for the floats alone, which leaves FP16 (`_liger_calls`).
    """
    if not peers.importable():
        return {}
    times: dict[str, float] = {}
    for name, make_calls, is_available in (
        ("torch_compile", _fused_calls, True),
        ("liger_f16", _liger_calls, has_liger()),
    ):
        with peers.skip_with_warning(f"{name}, {kernel}, {M} x {K}"):
            if is_available and (calls := make_calls(kernel, M, K, copies)):
                times[name] = measure(calls, replays=GEMM_REPLAYS, capture=peers.capture).us
    return times


def has_liger() -> bool:
    """Tell whether `liger-kernel` is installed."""
    return find_spec("liger_kernel") is not None


def _liger_calls(kernel: str, M: int, K: int, copies: int) -> list[Callable[[], Any]]:
    """Make calls of Liger's fused add and RMSNorm, or SiLU·mul, FP16 in and out; empty for other kernels.

    The first results are checked. Liger quantises nothing, writes the residual's sum to an array of its own, and takes
    gate and up as two arrays.
    """
    import torch
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward
    from liger_kernel.ops.swiglu import swiglu_forward

    inputs = torch.randn((copies, 2, M, K), dtype=torch.float16, device=peers.DEVICE)
    a, b = inputs[0]
    calls: list[Callable[[], Any]]
    if kernel == "rmsnorm_quantize":
        gamma = torch.randn(K, dtype=torch.float16, device=peers.DEVICE)
        calls = [partial(fused_add_rms_norm_forward, *pair, gamma, EPS, 0.0, "llama") for pair in inputs]
        output, sum_output = calls[0]()[:2]
        exact_sum = (a + b).double()
        expected = exact_sum * torch.rsqrt(exact_sum.square().mean(1, keepdim=True) + EPS) * gamma.double()
        peers.check_close("liger_f16, residual", sum_output.double(), exact_sum, 0)
    elif kernel == "silu_mul_quantize":
        calls = [partial(swiglu_forward, *pair) for pair in inputs]
        output, expected = calls[0]()[2], torch.nn.functional.silu(a.double()) * b.double()
    else:
        return []
    peers.check_close(f"liger_f16, {kernel}", output.double(), expected, 1e-2)
    return calls


def _fused_calls(kernel: str, M: int, K: int, copies: int) -> list[Callable[[], Any]]:
    import torch

    function = _FUSED[kernel]
    compiled = compile_function(function, "int8", "torch.float16", K, fresh=True)
    columns = 2 * K if function is silu_mul else K
    inputs = torch.randn((copies, 2, M, columns), dtype=torch.float16, device=peers.DEVICE)
    if function is not norm:
        return [partial(compiled, x, "int8") for x, _ in inputs]
    gamma = torch.ones(K, dtype=torch.float16, device=peers.DEVICE)
    return [partial(compiled, x, residual, gamma, "int8") for x, residual in inputs]


def _attentions(name: str) -> Iterator[type[_Attention]]:
    yield _Attention
    if has_flashinfer() and name != "fp16":
        yield _Paged


def _copies_beyond_l2(name: str, config: Config, B: int) -> int:
    """Return how many layers together exceed the L2; caches count one byte per element."""
    matrix_elements = {name: N * K for name, (N, K) in config.matrices.items()}
    weight_elements = sum(matrix_elements.values()) + max(0, config.experts - 1) * (
        matrix_elements["gate_up"] + matrix_elements["down"]
    )
    cache_bytes = batch_of(config, B).tokens * config.kv_heads * 2 * HEAD_DIM
    return copies_beyond_l2(int(weight_elements * MIXES[name].weight_bytes) + cache_bytes)


def _time_mix(
    name: str,
    config: Config,
    B: int,
    layers: list[dict[str, Any]],
    kind: type[_Attention],
    fp16_outputs: dict[int, Any],
    length: int = 0,
) -> MixTime:
    """Time one mix at one batch, and compare its first layer's results with the FP16 mix's."""
    decoder = _decoder(name, config, B, layers, kind, length)
    decoder.layer(0)
    output = decoder.output.double()
    if name == "fp16":
        fp16_outputs[B] = output
    elif B in fp16_outputs:
        error = float((output - fp16_outputs[B]).square().mean().sqrt() / fp16_outputs[B].square().mean().sqrt())
        if not error <= (MIXES[name].tolerance if not config.experts else 1.2):  # a token may take another expert
            raise BenchmarkError(f"{name}/{kind.name}, {config.name}: {error:.2g} off the FP16 mix (rms)")
    attention_output = decoder.x.new_empty((B, config.heads * HEAD_DIM)).normal_(std=0.05)

    def time_us(calls: Sequence[Callable[[], None]]) -> float:
        return measure(calls, replays=GEMM_REPLAYS, capture=peers.capture).us

    try:
        return MixTime(time_us(decoder.calls()), time_us(decoder.calls(attention_output)), time_us(decoder.gemms()))
    finally:
        decoder.attention.caches.clear()  # gigabytes, which something that refers to itself would keep


def _decoder(
    name: str, config: Config, B: int, layers: list[dict[str, Any]], kind: type[_Attention], length: int = 0
) -> _Decoder:
    """Make a decoder with random states, which are the same for every mix."""
    import torch

    dtype = _dtype(name, config)
    generator = torch.Generator(peers.DEVICE).manual_seed(B)
    size = (B, config.hidden)
    x, residual = (torch.randn(size, device=peers.DEVICE, generator=generator).to(dtype) for _ in range(2))
    gamma = torch.ones(config.hidden, dtype=dtype, device=peers.DEVICE)
    attention = kind(config, B, len(layers), dtype, length)
    return _Decoder(name, config, layers, x, residual, gamma, attention)
