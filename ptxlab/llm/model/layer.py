"""`decode_layer`: one decoder layer, a token of every sequence, as a chain of launches (QServe, Fig. 11)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.llm.model.config import Config
from ptxlab.llm.model.inputs import (
    Inputs,
    calls_of,
    can_read,
    multiplicand,
    new_inputs,
    new_rows,
    operand,
    output_arguments,
)
from ptxlab.llm.model.weights import LayerWeights
from ptxlab.lowbit.kernels.attention import AttentionWorkspace, attention_kv4, attention_workspace, rope_append_kv4
from ptxlab.lowbit.kernels.attention.append import INDICES
from ptxlab.lowbit.kernels.attention.append_api import check_places
from ptxlab.lowbit.kernels.attention.call import MOST_RATIO, check_cache
from ptxlab.lowbit.kernels.attention.prefill import PREFILL
from ptxlab.lowbit.kernels.gemm import Workspace, gemm_w4a8_grouped, gemm_workspace
from ptxlab.lowbit.kernels.moe import RoutedTokens, combine_experts, route_tokens
from ptxlab.lowbit.kernels.moe.specs import MOST_CHOSEN, MOST_EXPERTS, MOST_WIDTH
from ptxlab.lowbit.kernels.operation import CallArray, dtype_of
from ptxlab.lowbit.kernels.quantize import quantize_activations
from ptxlab.lowbit.layout import KVCache, PackedActivations, PackedWeight, ReorderedWeight
from ptxlab.lowbit.quant.fmpq import BLOCK
from ptxlab.runtime.arguments import check_flags, require_on_host
from ptxlab.spec.dtypes import storage
from ptxlab.validate import shape_of

NAME = "decode_layer"
ORDER = "row_major"  # of activations: at no batch is another one faster over all four products of a layer


@dataclass(frozen=True, eq=False, kw_only=True)
class Routing:
    """Buffers between the launches that only layers of experts have.

    Attributes:
        tokens: normalised and quantised, row-major [M, H].
        normed: the same before quantisation, f16 or bf16 [M, H], which the router looks at.
        routed: rows for experts, which are the buffers' `gate_up_in`.
        expert_outputs: what the experts give, [M·chosen, H].
    """

    tokens: PackedActivations
    normed: Any
    routed: RoutedTokens
    expert_outputs: Any


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerBuffers:
    """Buffers between the launches of a layer, made once for M rows: all layers and steps of a decoder share them.

    A product `name` reads `name_in` and writes `name`. With experts, `gate_up` and `down` have a row for every chosen
    expert of every token, placed by `routing.routed`. All keep their contents until the next layer runs.

    Attributes:
        config, dtype: of the layers that they are for.
        qkv_in, o_in, gate_up_in, down_in: activations of M rows, as the weights read them (`inputs`).
        qkv: [M, (Hq + 2·Hkv)·D].
        q: rotated, [M, Hq, D]; likewise `attention`, the result of attention.
        keys: of prompts whose rows attend to their own keys and values in 16 bits, [M, Hkv, D]; else None, and these
            are the cache's.
        o: [M, H], what goes to the residual stream; likewise `hidden`, the layer's result.
        gate_up: [M, 2·F]; [M, F] for weights that are interleaved, whose product ends with SiLU·mul.
        routing: of experts, or None.
        workspaces: of the GEMMs on a GPU, by product; `attention_workspace` of attention.
        programmatic: whether launches inside a layer overlap (programmatic dependent launch).
        batch_invariant: whether attention splits a sequence by its own length alone (`attention_kv4`). Then a token
            has the same bits whatever else is in the batch; the other kernels see to that anyway.
        residual_epilogue: whether the products that go to the residual stream add to it themselves: `o` is not used,
            nor, without experts, `hidden`. The same bits; faster at every batch measured, without experts.
    """

    config: Config
    dtype: str
    qkv_in: Inputs
    qkv: Any
    q: Any
    attention: Any
    o_in: Inputs
    o: Any
    gate_up_in: Inputs
    gate_up: Any
    down_in: Inputs
    hidden: Any
    keys: Any = None
    routing: Routing | None = None
    workspaces: Mapping[str, Workspace] = field(default_factory=dict)
    attention_workspace: AttentionWorkspace | None = None
    programmatic: bool = True
    batch_invariant: bool = False
    residual_epilogue: bool = False

    @classmethod
    def empty(
        cls,
        weights: LayerWeights,
        cache: KVCache,
        *,
        tokens: int | None = None,
        order: str = ORDER,
        rows: int | None = None,
        programmatic: bool | None = None,
        batch_invariant: bool = False,
        residual_epilogue: bool | None = None,
        own_keys: bool = False,
    ) -> Self:
        """Allocate buffers for layers like this one, on the cache's batch.

        Arrays are of the cache's library, on its device.

        With `tokens`, for launches of so many rows of prompts (`layer_calls` with `query_start_loc`), which with
        `own_keys` attend to their own keys and values in 16 bits.

        `order` and `rows` are those of activations (`layout.PackedActivations`); experts take row-major ones. There is
        a `residual_epilogue` by default where there are no experts and the weights are in strips. Launches are
        `programmatic` by default where the products' kernels wait for each other: of weights in strips.
        """
        _check_weights(weights)
        if programmatic is None:
            programmatic = all(getattr(weights, name).layout == "strips" for name in weights.config.matrices)
        can_add = not weights.config.experts and not weights.four_bit_inputs
        adds_by_default = can_add and weights.o.layout == weights.down.layout == "strips"
        adds_to_stream = adds_by_default if residual_epilogue is None else residual_epilogue
        flags = {
            "programmatic": programmatic,
            "batch_invariant": batch_invariant,
            "residual_epilogue": adds_to_stream,
        }
        check_flags(**flags)
        if adds_to_stream and weights.four_bit_inputs:
            rule = "must be False: no product of W4A4 has one"
            raise ArgumentError(f"{NAME}: residual_epilogue", rule, adds_to_stream)
        _check_cache(weights.config, cache)
        _check_sizes(weights.config)
        config, pool, dtype = weights.config, cache.pool, weights.dtype
        M = cache.batch if tokens is None else tokens

        def array(*shape: int, of: str = dtype) -> Any:
            return np.empty(shape, storage(of)) if isinstance(pool, np.ndarray) else gpu.new(pool, shape, of)

        def inputs(name: str) -> Inputs:
            return new_inputs(getattr(weights, name), M, config.matrices[name][1], array, order=order, rows=rows)

        heads, H, F = (config.heads, config.head_dim), config.hidden, config.ffn
        rows_per_token = max(1, config.chosen_experts)
        row_major: dict[str, Any] = {"order": ORDER, "rows": None}
        on_gpu = gpu.is_device_array(pool)
        routing = None
        if config.experts:
            gate_up_in: Inputs = (expert_rows := new_rows(M * rows_per_token, H, array, **row_major))
            down_in: Inputs = new_rows(M * rows_per_token, F, array, **row_major)
            routed = RoutedTokens(
                rows=expert_rows,
                offsets=array(config.experts + 1, of="int32"),
                place=array(M, rows_per_token, of="int32"),
                share=array(M, rows_per_token, of="float32"),
                chosen=array(M, rows_per_token, of="int32"),
            )
            routing = Routing(
                tokens=new_rows(M, H, array, **row_major),
                normed=array(M, H),
                routed=routed,
                expert_outputs=array(M * rows_per_token, H),
            )
        else:
            gate_up_in, down_in = inputs("gate_up"), inputs("down")
        dense = {name: weight for name, weight in weights.parts.items() if isinstance(weight, PackedWeight)}
        return cls(
            config=config,
            dtype=dtype,
            qkv_in=inputs("qkv"),
            qkv=array(M, config.qkv_width),
            q=array(M, *heads),
            attention=array(M, *heads),
            keys=array(M, config.kv_heads, config.head_dim) if own_keys else None,
            o_in=inputs("o"),
            o=array(M, H),
            gate_up_in=gate_up_in,
            gate_up=array(M * rows_per_token, F if _has_gated_epilogue(weights) else 2 * F),
            down_in=down_in,
            hidden=array(M, H),
            routing=routing,
            workspaces={name: gemm_workspace(weight, M) for name, weight in dense.items()} if on_gpu else {},
            attention_workspace=_attention_workspace(cache, tokens, batch_invariant) if on_gpu else None,
            **flags,
        )

    def output(self, residual: Any) -> Any:
        """Return the array that holds a layer's output for this residual stream.

        It is `hidden`, or the stream itself if the last product adds to that.
        """
        return residual if self.residual_epilogue and self.routing is None else self.hidden


def decode_layer(
    x: Any,
    residual: Any,
    weights: LayerWeights,
    cache: KVCache,
    slots: Any,
    *,
    rope: tuple[Any, ...],
    buffers: LayerBuffers,
    index: int | None = None,
    backend: str | None = None,
    programmatic: bool = False,
) -> Any:
    """Decode one token of every sequence through one layer; the token's key and value are added to the cache.

    On the GPU it only enqueues, on the caller's stream, and after the first call allocates nothing, so that it can be
    captured into a CUDA graph and replayed on other tokens, slots, positions, lengths, tables. One GPU's share of a
    layer (`Config.share`) gives its part of a sum over GPUs at `o` and at the end, which nobody adds up here.

    Args:
        x: what is added to the residual stream first, [M, H] of the weights' dtype: the embedding of the batch, or the
            result of the layer before. With `residual_epilogue` that is `residual` itself, and nothing is added.
        residual: [M, H] of the same dtype, of other memory: the stream, written in place; zeros before the first layer.
        weights: where `x` is; likewise everything else. NumPy, CuPy, PyTorch.
        cache: M sequences, with lengths that include the new token.
        slots: where that goes, [M]; see `rope_append_kv4`.
        rope: (cos, sin) or (cos, sin, positions); see `rope_append_kv4`.
        buffers: `LayerBuffers.empty(weights, cache)`.
        index: the layer's number, which a model needs where only some layers have the window.
        backend: of every launch.
        programmatic: whether the first launch may overlap with the kernel before it too. It must not after a kernel
            that writes lengths, block table, slots, positions or tables of angles, which attention and append read
            ahead of their waits: so False for the first layer of a step. True for the others.

    Returns:
        `buffers.output(residual)`, [M, H]: `residual`, to which the last product has added, or with experts
        `buffers.hidden`. To be given to the next layer as `x`, with the same residual.

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched. On the host also for what a call in
            the midst refuses, an infinity above all, when the residual is no longer what it was.
        UnavailableError: a kernel does not run here.
    """
    options: dict[str, Any] = {"index": index, "backend": backend, "programmatic": programmatic}
    for call in layer_calls(x, residual, weights, cache, slots, rope=rope, buffers=buffers, **options):
        call()
    return buffers.output(residual)


@dataclass(frozen=True)
class LayerCall:
    """A call in the chain of calls that a layer consists of.

    Attributes:
        name: of a product that of its weight, of another call that of what it writes, in `LayerBuffers`.
        function, args, keywords: of the call.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def __call__(self, **overrides: Any) -> Any:
        """Make the call, perhaps with other keywords."""
        return self.function(*self.args, **{**self.keywords, **overrides})

    @property
    def launches(self) -> int:
        """Number of kernels that the call launches."""
        return 2 if self.function is route_tokens else 1


def layer_calls(
    x: Any,
    residual: Any,
    weights: LayerWeights,
    cache: KVCache,
    slots: Any,
    *,
    rope: tuple[Any, ...],
    buffers: LayerBuffers,
    index: int | None = None,
    query_start_loc: Any = None,
    backend: str | None = None,
    programmatic: bool = False,
) -> list[LayerCall]:
    """Return the calls that `decode_layer` of the same arguments makes, in order, without making them.

    With `query_start_loc`, s32 [B + 1], the rows are tokens of prompts (`attention_kv4`), M of any number, and buffers
    made for so many `tokens`. Rows behind the last start are padding: their slots must be -1.

    Raises ArgumentError for what belongs to another layer or batch.
    """
    _check_weights(weights)
    _check_cache(weights.config, cache)
    M = cache.batch if query_start_loc is None else shape_of(slots)[0]
    _check(x, residual, weights, cache, slots, rope, buffers, M)
    if M == 0:
        return []
    config, b, find_workspace = weights.config, buffers, buffers.workspaces.get
    adds_to_stream, ends_gated = b.residual_epilogue, _has_gated_epilogue(weights)
    epilogue: dict[str, Any] = {"epilogue": "silu_mul"} if ends_gated else {}
    attention_options: dict[str, Any] = {"window": config.window_of(index), "batch_invariant": b.batch_invariant}
    attention_options |= {"query_start_loc": query_start_loc, "workspace": b.attention_workspace, "out": b.attention}
    if b.keys is not None:
        values = b.qkv[:, -config.kv_heads * config.head_dim :].reshape(b.keys.shape)
        attention_options |= {"k": b.keys, "v": values}

    def call(name: str, function: Callable[..., Any], *args: Any, **keywords: Any) -> LayerCall:
        return LayerCall(name, function, args, {"backend": backend, "programmatic": b.programmatic, **keywords})

    def norm(name: str, x: Any, gamma: Any, weight: Any, out: Inputs, **options: Any) -> LayerCall:
        stream = None if adds_to_stream and x is residual else residual
        arguments = {"residual": stream, "eps": config.eps, **output_arguments(weight, out), **options}
        return call(name, calls_of(weight).normed, x, gamma, **arguments)

    def product(name: str, inputs: Inputs, weight: Any, out: Any, **options: Any) -> LayerCall:
        calls, x = calls_of(weight), operand(weight, inputs)
        options |= {} if weights.four_bit_inputs else {"workspace": find_workspace(name)}
        return call(name, calls.product, x, weight=multiplicand(weight), out=out, **options)

    def to_stream(name: str, inputs: Inputs, weight: Any, out: Any) -> LayerCall:
        target: dict[str, Any] = {"out": None, "residual": residual} if adds_to_stream else {"out": out}
        return product(name, inputs, weight, **target)

    calls = [
        norm("qkv_in", x, weights.input_norm, weights.qkv, b.qkv_in, programmatic=programmatic),
        product("qkv", b.qkv_in, weights.qkv, b.qkv, bias=weights.qkv_bias),
        call("q", rope_append_kv4, b.qkv, cache, slots, rope=rope, out=b.q, keys=b.keys),
        call("attention", attention_kv4, b.q, cache, **attention_options),
        call("o_in", calls_of(weights.o).plain, b.attention.reshape(M, -1), **output_arguments(weights.o, b.o_in)),
        to_stream("o", b.o_in, weights.o, b.o),
    ]
    o, into_down_in = residual if adds_to_stream else b.o, output_arguments(weights.down, b.down_in)
    if ends_gated:
        down_in = call("down_in", quantize_activations, b.gate_up, **into_down_in)
    else:
        quantise = calls_of(weights.down).gated
        down_in = call("down_in", quantise, b.gate_up, activation=config.activation, **into_down_in)
    if b.routing is None:
        return [
            *calls,
            norm("gate_up_in", o, weights.post_norm, weights.gate_up, b.gate_up_in),
            product("gate_up", b.gate_up_in, weights.gate_up, b.gate_up, **epilogue),
            down_in,
            to_stream("down", b.down_in, weights.down, b.hidden),
        ]
    tokens = b.routing.tokens
    normed = b.routing.normed
    routed = b.routing.routed
    expert_outputs = b.routing.expert_outputs

    def grouped_product(name: str, inputs: Inputs, weights: Any, out: Any) -> LayerCall:
        return call(name, gemm_w4a8_grouped, inputs, weights=weights, offsets=routed.offsets, out=out)

    return [
        *calls,
        norm("tokens", o, weights.post_norm, weights.gate_up, tokens, normed=normed),
        call("gate_up_in", route_tokens, tokens, normed, weights.router, config.chosen_experts, out=routed),
        grouped_product("gate_up", b.gate_up_in, weights.gate_up, b.gate_up),
        down_in,
        grouped_product("down", b.down_in, weights.down, expert_outputs),
        call("hidden", combine_experts, expert_outputs, routed, out=b.hidden),
    ]


def _attention_workspace(cache: KVCache, tokens: int | None, batch_invariant: bool) -> AttentionWorkspace | None:
    """Make what attention needs in a capture: of decoding, or of so many rows of prompts, whose contexts may be cut."""
    if tokens is None:
        return attention_workspace(cache, batch_invariant=batch_invariant)
    if batch_invariant or gpu.why_not(PREFILL.arch, exact=PREFILL.exact_arch):
        return None  # no context is cut
    return attention_workspace(cache, kernel=PREFILL.name)


def _check(
    x: Any, residual: Any, weights: LayerWeights, cache: KVCache, slots: Any, rope: Any, buffers: LayerBuffers, M: int
) -> None:
    """Raise ArgumentError for what belongs to another layer or batch, or what a call in the midst would refuse."""
    if not isinstance(buffers, LayerBuffers):
        raise ArgumentError(f"{NAME}: buffers", "must come from LayerBuffers.empty", type(buffers).__name__)
    H, config = weights.config.hidden, weights.config
    same_config = buffers.config is config or buffers.config == config
    if not same_config or (buffers.dtype, buffers.qkv_in.M) != (weights.dtype, M):
        rule = f"must be made for these weights, {weights.dtype}, and {M} rows"
        got = f"{buffers.config.name or 'a layer'}, {buffers.dtype}, {buffers.qkv_in.M} rows"
        raise ArgumentError(f"{NAME}: buffers", rule, got)
    if shape_of(buffers.gate_up)[1] != (config.ffn if _has_gated_epilogue(weights) else 2 * config.ffn):
        row_order = "rows in order" if _has_gated_epilogue(weights) else "interleaved rows"
        raise ArgumentError(f"{NAME}: buffers", "must be made for a gate_up as these weights have it", row_order)
    for name in config.matrices:
        if not can_read(getattr(weights, name), getattr(buffers, f"{name}_in")):
            rule = f"must be made for what {name} reads"
            raise ArgumentError(f"{NAME}: buffers", rule, type(getattr(buffers, f"{name}_in")).__name__)
    if not isinstance(rope, tuple) or len(rope) not in (2, 3):
        raise ArgumentError(f"{NAME}: rope", "must be (cos, sin) or (cos, sin, positions)", type(rope).__name__)
    cos, sin, *positions = rope
    (rows,) = max(shape_of(cos)[:1], (1 if positions else M,))
    floats, table = (weights.dtype,), (rows, config.head_dim // 2)
    on_gpu = gpu.is_device_array(buffers.hidden)
    device = gpu.view(f"{NAME}: buffers", buffers.hidden).device if on_gpu else -1
    for name, array, dtypes, shape in (
        ("x", x, floats, (M, H)),
        ("residual", residual, floats, (M, H)),
        ("slots", slots, INDICES, (M,)),
        ("rope cos", cos, ("float32",), table),
        ("rope sin", sin, ("float32",), table),
        *(("rope positions", index_array, (dtype_of(slots),), (M,)) for index_array in positions),
        ("cache.pool", cache.pool, ("uint8",), shape_of(cache.pool)),
        ("weights.input_norm", weights.input_norm, floats, (H,)),
    ):
        label, dtype = f"{NAME}: {name}", dtype_of(array)
        if shape_of(array) != shape or dtype not in dtypes:
            rule, got = f"must be {' or '.join(dtypes)} {list(shape)}", f"{dtype} {list(shape_of(array))}"
            raise ArgumentError(label, rule, got)
        if on_gpu:
            CallArray(name, label, array).view(device)
        else:
            require_on_host(label, array, dtype, shape, written=array is residual or array is cache.pool)
    if not on_gpu:
        check_places(NAME, cache, *(gpu.as_array(NAME, index_array) for index_array in (slots, *positions)), rows=rows)
        check_cache(NAME, cache)


def _check_weights(weights: Any) -> None:
    if not isinstance(weights, LayerWeights):
        raise ArgumentError(f"{NAME}: weights", "must be LayerWeights", type(weights).__name__)
    if weights.four_bit_inputs and weights.config.experts:
        raise ArgumentError(f"{NAME}: weights", "must be W4A8's where there are experts", "W4A4's")
    for name, weight in weights.parts.items():
        if isinstance(weight, ReorderedWeight) and weight.scheme == "fmpq" and weight.group != BLOCK:
            rule = f"must be in blocks of {BLOCK} in W4Ax; a NumpyRunner takes others"
            raise ArgumentError(f"{NAME}: weights.{name}", rule, weight.group)
    if _has_gated_epilogue(weights) and weights.config.activation != "silu":
        rule = "must have gate above up unless the activation is silu"
        raise ArgumentError(f"{NAME}: weights.gate_up", rule, f"interleaved rows, {weights.config.activation}")


def _has_gated_epilogue(weights: LayerWeights) -> bool:
    """Check whether the product of gate and up ends with SiLU·mul."""
    return getattr(weights.gate_up, "interleaved", False)


def _check_sizes(config: Config) -> None:
    """Raise ArgumentError for a layer that a kernel in its midst does not take."""
    for name, largest_size, step in (
        ("hidden", MOST_WIDTH, 32),
        ("ffn", MOST_WIDTH, 32),
        ("heads", MOST_RATIO * config.kv_heads, 1),
        ("experts", MOST_EXPERTS, 1),
        ("chosen_experts", MOST_CHOSEN, 1),
    ):
        size = getattr(config, name)
        if size > largest_size or size % step:
            rule = f"must be a multiple of {step} up to {largest_size}" if step > 1 else f"at most {largest_size}"
            raise ArgumentError(f"{NAME}: {name}", rule, size)


def _check_cache(config: Config, cache: KVCache) -> None:
    if not isinstance(cache, KVCache):
        raise ArgumentError(f"{NAME}: cache", "must be a KVCache", type(cache).__name__)
    if (cache.num_kv_heads, cache.head_dim) != (config.kv_heads, config.head_dim):
        rule = f"must have {config.kv_heads} kv heads of {config.head_dim}"
        raise ArgumentError(f"{NAME}: cache", rule, f"{cache.num_kv_heads} of {cache.head_dim}")
