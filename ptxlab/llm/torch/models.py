"""`quantize_model`: a model of `transformers` with 4-bit weights, INT8 activations and a KV4 cache, on the operators.

The library's decoder layers stay; what they consist of is exchanged. Norms hand quantised activations to attention and
FFN instead of floats, so that a layer computes what `ptxlab.decode_layer` computes, to the bit, and a model generates
the tokens of `ptxlab.llm.model`'s runners.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ptxlab.errors import ArgumentError
from ptxlab.llm.checkpoints.open import tensor_name
from ptxlab.llm.model import Config, FloatModel, LayerWeights, QuantizedModel
from ptxlab.llm.model.decoder import BIASES, NORMS, ROUTER, expert_of
from ptxlab.llm.model.floats import MappedLayers
from ptxlab.llm.model.quantized import convert_ends, pack_layer
from ptxlab.llm.recipe import Recipe, find_recipe
from ptxlab.llm.recipe.calibrate import prepare_model, quantize_layers
from ptxlab.llm.recipe.settings import PACKED
from ptxlab.llm.torch.cache import IMPLEMENTATION, KV4Cache, Past
from ptxlab.llm.torch.linear import PackedModule, Uncast, W4A8Grouped, W4A8Linear
from ptxlab.llm.torch.operators import Quantized
from ptxlab.lowbit.kernels.gemm import layout_here
from ptxlab.lowbit.quant.kv import BY_CHANNEL
from ptxlab.spec.dtypes import name_of

_EXPERT_LAYOUT = "strips"  # the layout that `gemm_w4a8_grouped` takes
_DTYPES = (torch.float16, torch.bfloat16)
_MOST_CONTEXT = 1 << 20  # positions, for which a table of angles is made
# Attributes of `Config` in which a quantised model must agree with the model that takes its weights.
_BY_TOKEN = "a KV4Cache has scales by token"
_MATCHING = (
    "hidden", "ffn", "heads", "kv_heads", "head_dim", "layers", "vocabulary", "qkv_bias", "window", "window_layers",
    "experts", "chosen_experts",
)  # fmt: skip


def quantize_model(
    model: PreTrainedModel,
    recipe: Recipe | QuantizedModel | str = "rtn",
    *,
    tokens: Any = None,
    layout: str | None = None,
    progress: Callable[[str], None] = lambda label: None,
) -> PreTrainedModel:
    """Quantise a causal model of the Llama family in place: Llama, SmolLM, Yi, Mistral, Mixtral, Qwen2.

    `model.generate` then takes a `KV4Cache` as `past_key_values`, which every forward pass needs.

    Args:
        model: of float16 or bfloat16, with its whole weights on one device.
        recipe: the steps of quantising, by themselves or by name (`llm.recipe.RECIPES`); or this model quantised
            already, as `ptxlab.llm.checkpoints.folder.load` reads it, and repacked if no kernel takes its layout here.
        tokens: the calibration text, integers [S, T], for recipes that need one.
        layout: of the packed weights; by default `strips`, or what a kernel that runs on this GPU takes. With experts
            `strips` alone.
        progress: called before each layer with its name.

    Returns:
        The model.

    Raises ArgumentError for another kind of model, a recipe that no kernel supports or that lacks its text, and a
    weight that cannot be quantised; the model is then what it was.
    """
    config, dtype = _check_model(model), name_of(model.dtype)
    is_packed = isinstance(recipe, QuantizedModel)
    if not isinstance(recipe, QuantizedModel):
        steps = find_recipe(recipe) if isinstance(recipe, str) else recipe
        recipe = _quantize_by_recipe(float_model(model), steps, tokens, layout, dtype, progress)
    _check_same(config, recipe, dtype)
    _replace_modules(model, recipe, repack=is_packed)
    return model


def float_model(model: PreTrainedModel) -> FloatModel:
    """Read a model's weights as float32 NumPy arrays, a layer each time it is needed.

    Raises ArgumentError for a model of another architecture, or one whose dtype or devices are mixed.
    """
    config = _check_model(model)

    def read(part: str, layer: int = 0) -> Any:
        return _parameter_of(model, part, layer).detach().float().cpu().numpy()

    other_parts = (*(BIASES if config.qkv_bias else ()), *((ROUTER,) if config.experts else ()), *NORMS)
    parts = (*config.separate_matrices, *other_parts)
    return FloatModel(
        config=config,
        embedding=read("embedding"),
        layers=MappedLayers(range(config.layers), lambda index: {part: read(part, index) for part in parts}),
        final_norm=read("final_norm"),
        head=None if config.tied_head else read("head"),
    )


def _parameter_of(model: PreTrainedModel, part: str, layer: int) -> Tensor:
    """Return a parameter by the name of `decoder`; an expert's is a slice of transformers' stack of all experts."""
    expert, ffn_name = expert_of(part), f"model.layers.{layer}.mlp"
    if part == ROUTER:
        return model.get_parameter(f"{ffn_name}.gate.weight")
    if expert is None:
        return model.get_parameter(tensor_name(part, layer))
    if part.startswith("down"):
        return model.get_parameter(f"{ffn_name}.experts.down_proj")[expert]
    gate, up = model.get_parameter(f"{ffn_name}.experts.gate_up_proj")[expert].chunk(2)
    return gate if part.startswith("gate") else up


def _check_model(model: Any) -> Config:
    """Check a model and return its config. Raises as `float_model` does."""
    if not isinstance(model, PreTrainedModel):
        raise ArgumentError("model", "must be a model of transformers", type(model).__name__)
    config = Config.from_json(model.config.to_dict())
    if not hasattr(model, "lm_head"):
        raise ArgumentError("model", "must be a causal model", type(model).__name__)
    if config.experts and not hasattr(model.model.layers[0], "mlp"):
        raise ArgumentError("model", "needs transformers 5 where it has experts", transformers.__version__)
    if packed_module := next((module for module in model.modules() if isinstance(module, PackedModule)), None):
        raise ArgumentError("model", "must not be quantised yet", packed_module)
    if (config.context or 0) > _MOST_CONTEXT:
        raise ArgumentError("model: max_position_embeddings", f"must be at most {_MOST_CONTEXT}", config.context)
    embedding_weight = model.get_input_embeddings().weight
    if embedding_weight.dtype not in _DTYPES:
        rule = f"must be of {' or '.join(map(name_of, _DTYPES))}"
        raise ArgumentError(f"model: {tensor_name('embedding', 0)}", rule, name_of(embedding_weight.dtype))
    for name, parameter in model.named_parameters():
        if parameter.dtype != embedding_weight.dtype or parameter.device != embedding_weight.device:
            rule = f"must be {name_of(embedding_weight.dtype)} on {embedding_weight.device} as the embedding"
            got = name_of(parameter.dtype)
            raise ArgumentError(f"model: {name}", rule, f"{got} on {parameter.device}")
    # A file may hold a head that its config denies.
    return replace(config, tied_head=model.lm_head.weight is embedding_weight)


def _quantize_by_recipe(
    model: FloatModel, recipe: Recipe, tokens: Any, layout: str | None, dtype: str, progress: Callable[[str], None]
) -> QuantizedModel:
    if not isinstance(recipe, Recipe) or recipe.scheme not in PACKED:
        got = recipe.scheme if isinstance(recipe, Recipe) else type(recipe).__name__
        raise ArgumentError("recipe", f"must be a Recipe or its name, of scheme {', '.join(PACKED)}", got)
    if recipe.calibrates_cache:
        raise ArgumentError(
            "recipe: kv", f"must not be by channel: {_BY_TOKEN}, as recipe.but(kv='kv4') has", recipe.kv
        )
    layout = layout or (_EXPERT_LAYOUT if model.config.experts else layout_here(recipe.scheme))
    prepared_model = prepare_model(model, recipe)
    text = np.zeros((0, 1), np.int64) if tokens is None else np.asarray(tokens)
    ends, layers = convert_ends(prepared_model, dtype), []
    for index, quantized_layer in enumerate(quantize_layers(prepared_model, text, recipe)):
        progress(f"layer {index}")
        assert quantized_layer is not None
        layers.append(pack_layer(prepared_model.config, quantized_layer.floats, quantized_layer.weights, layout, dtype))
    return QuantizedModel(config=prepared_model.config, layers=layers, recipe=recipe.to_json(), **ends)


def _check_same(config: Config, quantized: QuantizedModel, dtype: str) -> None:
    """Raise ArgumentError for a quantised model of other sizes or dtype."""
    for name in _MATCHING:
        our_setting, their_setting = getattr(config, name), getattr(quantized.config, name)
        if our_setting != their_setting:
            raise ArgumentError("recipe", f"must be of a model with {name}={our_setting}", f"{name}={their_setting}")
    if quantized.cache in BY_CHANNEL:
        raise ArgumentError("recipe", f"must be of a model without a cache by channel: {_BY_TOKEN}", quantized.cache)
    if config.experts and (layout := quantized.layers[0].gate_up.layout) != _EXPERT_LAYOUT:
        raise ArgumentError("recipe", f"must be of a model in {_EXPERT_LAYOUT} where it has experts", layout)
    if quantized.layers[0].dtype != dtype:
        raise ArgumentError("recipe", f"must be of a model of {dtype}", quantized.layers[0].dtype)


def _replace_modules(model: PreTrainedModel, quantized: QuantizedModel, *, repack: bool) -> None:
    """Put the quantised parts into the place of the model's own, with `repack` as kernels here take them."""
    config, decoder, device, dtype = quantized.config, model.model, model.device, model.dtype
    for index, (layer, packed_layer) in enumerate(zip(decoder.layers, quantized.layers, strict=True)):
        weights = packed_layer.in_layout_here() if repack else packed_layer
        layer.input_layernorm = QuantizingNorm(weights.input_norm, config.eps, dtype).to(device)
        layer.self_attn = KV4Attention(model.config, index, weights, config, dtype).to(device)
        norm, ffn = (RoutingNorm, W4A8Experts) if config.experts else (QuantizingNorm, W4A8FFN)
        layer.post_attention_layernorm = norm(weights.post_norm, config.eps, dtype).to(device)
        layer.mlp = ffn(weights, config, dtype).to(device)
    decoder.norm = Norm(quantized.final_norm, config.eps, dtype).to(device)
    decoder.rotary_emb = RopeTables(config).to(device)
    embedding = _parameter(quantized.embedding, dtype, device)
    decoder.embed_tokens.weight = embedding
    model.lm_head.weight = embedding if quantized.head is None else _parameter(quantized.head, dtype, device)
    model.config.tie_word_embeddings = quantized.head is None
    model.set_attn_implementation(IMPLEMENTATION)
    model.eval()


def _to_tensor(array: Any, dtype: torch.dtype) -> Tensor:
    """Convert NumPy's or CuPy's f16, or bits of bf16, to a tensor of `dtype`."""
    tensor = torch.as_tensor(array)
    return (tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor).to(dtype)


def _parameter(array: Any, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(_to_tensor(array, dtype).to(device), requires_grad=False)


class Norm(nn.Module):
    """RMSNorm of [.., H], as the kernel computes it: in float32, rounded once."""

    def __init__(self, weight: Any, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.eps = _parameter(weight, dtype, torch.device("cpu")), eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x; y has x's shape and dtype."""
        rows = x.reshape(-1, x.shape[-1])
        y = torch.empty_like(rows)
        torch.ops.ptxlab.rmsnorm_quantize(rows, self.weight, None, self.eps, y)
        return y.view(x.shape)


class QuantizingNorm(Norm):
    """RMSNorm whose result is quantised without being rounded before."""

    def forward(self, x: Tensor) -> Quantized:
        """Normalise and quantise x: x_q s8 [.., H], scale f32 [..], token_sum s32 [..]."""
        x_q, *per_token = torch.ops.ptxlab.rmsnorm_quantize(x.reshape(-1, x.shape[-1]), self.weight, None, self.eps)
        scale, token_sum = (tensor.view(x.shape[:-1]) for tensor in per_token)
        return x_q.view(x.shape), scale, token_sum


class W4A8FFN(nn.Module):
    """down(act(gate x) · up x), with gate and up in one product."""

    def __init__(self, weights: LayerWeights, config: Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj = W4A8Linear(weights.gate_up, dtype=dtype)
        self.down_proj, self.activation = W4A8Linear(weights.down, dtype=dtype), config.activation

    def forward(self, x: Quantized) -> Tensor:
        """Compute the feed-forward part [.., H] from quantised activations [.., H]."""
        gate_up = self.gate_up_proj(x)
        gated = torch.ops.ptxlab.silu_mul_quantize(gate_up.flatten(0, -2), self.activation)
        return self.down_proj(gated).unflatten(0, gate_up.shape[:-1])


class RoutingNorm(Norm):
    """RMSNorm whose result goes to the products of experts quantised, and to the router rounded."""

    def forward(self, x: Tensor) -> tuple[Quantized, Tensor]:
        """Normalise tokens; return them quantised, and as y of x's shape and dtype.

        The quantised tokens are x_q s8 [M, H], scale f32 [M], token_sum s32 [M].
        """
        rows = x.reshape(-1, x.shape[-1])
        y = torch.empty_like(rows)
        return torch.ops.ptxlab.rmsnorm_quantize(rows, self.weight, None, self.eps, y), y.view(x.shape)


class W4A8Experts(nn.Module):
    """Experts of each token, added up by their shares; each is down(act(gate x) · up x)."""

    def __init__(self, weights: LayerWeights, config: Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = _parameter(weights.router, dtype, torch.device("cpu"))
        self.gate_up_proj, self.down_proj = (W4A8Grouped(w, dtype=dtype) for w in (weights.gate_up, weights.down))
        self.activation, self.chosen_experts = config.activation, config.chosen_experts

    def forward(self, x: tuple[Quantized, Tensor]) -> Tensor:
        """Compute the experts' output [B, T, H] from a `RoutingNorm`'s outputs."""
        tokens, normed = x
        rows = normed.view(-1, normed.shape[-1])
        routed = torch.ops.ptxlab.route_tokens(*tokens, rows, self.gate, self.chosen_experts)
        rows_by_expert, (offsets, place, share, _) = routed[:3], routed[3:]
        gated = torch.ops.ptxlab.silu_mul_quantize(self.gate_up_proj(rows_by_expert, offsets), self.activation)
        combined: Tensor = torch.ops.ptxlab.combine_experts(self.down_proj(gated, offsets), place, share)
        return combined.view(normed.shape)


class KV4Attention(nn.Module):
    """Queries, keys and values in one product; rotated and appended to a `KV4Cache`; attention; the product with o."""

    def __init__(self, config: Any, index: int, weights: LayerWeights, sizes: Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, index, sizes.head_dim  # as transformers names them
        self.scaling, self.sliding_window, self.is_causal = sizes.head_dim**-0.5, sizes.window_of(index), True
        bias = None if weights.qkv_bias is None else torch.as_tensor(weights.qkv_bias)
        self.qkv_proj = W4A8Linear(weights.qkv, bias, dtype=dtype)
        self.o_proj = W4A8Linear(weights.o, dtype=dtype)

    def forward(
        self,
        hidden_states: Quantized,
        position_embeddings: tuple[Tensor, Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        cache: Any = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention [B, T, H] of quantised [B, T, H]; `attention_mask`, bool [B, T], is False for padding.

        The `KV4Cache` comes as `cache` from transformers 5.24 on, as `past_key_values` before.
        """
        cache = self._check_cache(past_key_values if cache is None else cache)
        cos, sin, positions = position_embeddings
        B, T, _ = hidden_states[0].shape
        rows = cache.rows(positions, attention_mask, B)
        if self.layer_idx == 0:
            cache.advance(T)
        qkv, pool = self.qkv_proj(hidden_states).flatten(0, 1), cache.pools[self.layer_idx]
        options = {"head_dim": self.head_dim, "scheme": cache.scheme, "rotated": cache.rotated}
        q = torch.ops.ptxlab.rope_append_kv4(qkv, pool, rows.slots, cos, sin, rows.positions, **options)
        past = Past(cache, pool, rows)
        attend_past = ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION]
        queries, window = q.view(B, T, -1, self.head_dim).transpose(1, 2), self.sliding_window
        out, _ = attend_past(self, queries, past, past, attention_mask, scaling=self.scaling, sliding_window=window)
        return self.o_proj(out.flatten(2)), None

    def _check_cache(self, cache: Any) -> KV4Cache:
        """Check the cache and return it.

        Raises ArgumentError for none, another model's, and for another implementation of attention.
        """
        if not isinstance(cache, KV4Cache):
            rule = "past_key_values must be a ptxlab.llm.torch.KV4Cache(model, batch, context)"
            raise ArgumentError("quantised model", rule, type(cache).__name__)
        own_sizes = self.config.num_hidden_layers, self.config.num_key_value_heads, self.head_dim
        theirs = len(cache), cache.pools[0].shape[2], cache.head_dim
        if theirs != own_sizes:
            rule = "must be of this model: {} layers, {} kv heads of {}".format(*own_sizes)
            raise ArgumentError("KV4Cache", rule, "{} layers, {} kv heads of {}".format(*theirs))
        if self.config._attn_implementation != IMPLEMENTATION:
            rule = f"must be {IMPLEMENTATION} for a quantised model"
            raise ArgumentError("attn_implementation", rule, self.config._attn_implementation)
        return cache


class RopeTables(Uncast):
    """Angles of all positions in float32, in the place of the rotary embedding of one dtype."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        cos, sin = config.rope_tables(config.context or 2048)
        self.register_buffer("cos", torch.from_numpy(cos), persistent=False)
        self.register_buffer("sin", torch.from_numpy(sin), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (cos, sin) f32 [positions, D/2] and the positions s64 [B or 1, T] to read.

        Layers take them as `position_embeddings`.
        """
        return self.cos, self.sin, position_ids
