"""NumPy twins of `decode_layer`: `exact`, in the very integers that the kernels compute, and `in_float64`, in floats.

Both start from packed weights and a quantised cache; `in_float64` quantises nothing else.

A step of `exact` has the right bits, and for some steps a bound of what else a kernel may leave: for attention, which
is computed in floats, and for the experts' shares and the gate, whose exponentials are approximate. Everything else is
equal in every bit. `compare` holds the launches of a layer against it one by one, each on what the one before it has
really left.

Arrays are NumPy's or CuPy's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ptxlab.errors import ArgumentError, VerificationError
from ptxlab.llm.model.exact_products import (
    arrays_of,
    as_view,
    gate_inputs,
    is_quantized_input,
    match_device,
    multiply,
    quantize_input,
    read_outputs,
    to_numpy,
)
from ptxlab.llm.model.layer import LayerBuffers
from ptxlab.llm.model.weights import LayerWeights
from ptxlab.lowbit import quant, reference
from ptxlab.lowbit.kernels.attention.sm90 import SM90
from ptxlab.lowbit.kernels.gemm import epilogues
from ptxlab.lowbit.kernels.gemm.common import DTYPES
from ptxlab.lowbit.kernels.moe import CHOOSE
from ptxlab.lowbit.kernels.quantize.rmsnorm import normalize_rows
from ptxlab.lowbit.layout import ExpertWeights, KVCache, PackedWeight, ReorderedWeight, gather, unpack, write_slots
from ptxlab.lowbit.quant import QuantizedActivations
from ptxlab.lowbit.quant.tiled import with_arrays
from ptxlab.lowbit.reference.attention import F64
from ptxlab.spec.dtypes import convert_to_dtype, floats, numbers
from ptxlab.spec.tolerance import Allowed, misses


class Step(NamedTuple):
    """Output that a launch has to write.

    Attributes:
        right: an array, or the quantised activations that a product reads (`QuantizedInput`). An array in float64
            stands for one in the layer's dtype.
        allowed: None where every bit must be right, else the error bound; for quantised activations a tuple with one
            for each of their arrays.
    """

    right: Any
    allowed: Any = None


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """Inputs of a layer, copied before it runs, because the layer overwrites the residual and the cache.

    Attributes:
        x: what is added to the residual stream first, [M, H]; None where the caller passes the residual itself as `x`,
            to which nothing is added.
        residual, cache, slots, rope: as `decode_layer` takes them.
    """

    x: Any
    residual: Any
    cache: KVCache
    slots: Any
    rope: tuple[Any, ...]

    @classmethod
    def of(cls, x: Any, residual: Any, cache: KVCache, slots: Any, rope: tuple[Any, ...]) -> "LayerInputs":
        """Copy arrays of any library to NumPy's or CuPy's."""
        if not isinstance(cache, KVCache) or not isinstance(rope, tuple):
            got = f"{type(cache).__name__}, {type(rope).__name__}"
            raise ArgumentError("LayerInputs: cache, rope", "must be a KVCache and a tuple of arrays", got)
        added = None if x is residual else _copy_array(x)
        return cls(added, *(with_arrays(part, _copy_array) for part in (residual, cache, slots, rope)))


def exact(
    inputs: LayerInputs,
    weights: LayerWeights,
    outputs: Mapping[str, Any] | None = None,
    *,
    residual_epilogue: bool = False,
) -> dict[str, Step]:
    """Compute every step of a layer, by its name in `LayerBuffers` or its `routing`.

    The steps `pool` and `residual` are the cache's pool and the residual stream, which the layer overwrites.

    `outputs` has the outputs that launches wrote, by step (`outputs_by_step`); where a step has one, the next steps
    continue from it. With `residual_epilogue` the product o, and without experts down too, adds to the stream itself.
    Then there is no step `o`, nor without experts `hidden`, and `residual` is the stream after the last such product.
    """
    config, dtype = weights.config, weights.dtype
    steps: dict[str, Step] = {}

    def add_step(name: str, right: Any, allowed: Any = None) -> Any:
        steps[name] = Step(right, allowed)
        return (outputs or {}).get(name, right)

    stream = inputs.residual if inputs.x is None else _add_to_stream(inputs.x, inputs.residual, dtype)
    qkv_in = add_step("qkv_in", quantize_input(weights.qkv, _norm(stream, weights.input_norm, config.eps)))
    qkv = add_step("qkv", multiply(qkv_in, weights.qkv, dtype, weights.qkv_bias))
    q, pool = _rope_and_append(qkv, inputs, config.heads, dtype)
    q, pool = add_step("q", q), add_step("pool", pool)
    attention = add_step("attention", *_attention(q, replace(inputs.cache, pool=pool), config.window_of(), dtype))
    attention = _as_written(attention, dtype)
    o_in = add_step("o_in", quantize_input(weights.o, floats(attention).reshape(len(attention), -1)))
    o = multiply(o_in, weights.o, dtype)
    stream = _add_to_stream(stream, o if residual_epilogue else add_step("o", o), dtype)
    if config.experts or not residual_epilogue:  # else down will add to the stream
        stream = add_step("residual", stream)
    y = _norm(stream, weights.post_norm, config.eps)
    quantised_input: Any = quantize_input(weights.gate_up, y)
    if config.experts:
        tokens, normed = add_step("tokens", quantised_input), add_step("normed", convert_to_dtype(y, dtype))
        chosen, share, allowed = _choose_experts(normed, weights.router, config.chosen_experts, dtype)
        chosen, share = add_step("chosen", chosen), add_step("share", share, allowed)
        offsets, place = map(add_step, ("offsets", "place"), reference.rows_by_expert(chosen, config.experts))
        # `place` [M, k] has the row of each choice; its inverse has the choice of each row, and so the row's token.
        token_of_row = place.reshape(-1).argsort() // place.shape[1]
        quantised_input = _select_rows(tokens, token_of_row)

    def product(x: Any, weight: Any) -> Any:
        if not isinstance(weight, ExpertWeights):
            return multiply(x, weight, dtype)
        expert_rows = [(e, slice(*map(int, pair))) for e, pair in enumerate(pairwise(offsets))]
        used_experts = [(e, rows) for e, rows in expert_rows if rows.start < rows.stop]
        return np.concatenate([multiply(_select_rows(x, rows), weight.expert(e), dtype) for e, rows in used_experts])

    gate_up_in = add_step("gate_up_in", quantised_input)
    if getattr(weights.gate_up, "interleaved", False):  # then the product's epilogue computes SiLU(gate) · up
        h = add_step("gate_up", *_silu_mul_outputs(gate_up_in, weights.gate_up, dtype))
        down_in = add_step("down_in", quant.quantize_activations(floats(_as_written(h, dtype))))
    else:
        gate_up = add_step("gate_up", product(gate_up_in, weights.gate_up))
        down_in = add_step("down_in", *gate_inputs(weights.down, gate_up, config.activation, dtype))
    ffn_output = product(down_in, weights.down)
    if config.experts:
        ffn_output = convert_to_dtype(
            reference.combine_expert_rows(floats(add_step("expert_outputs", ffn_output)), place, share), dtype
        )
    if config.experts or not residual_epilogue:
        add_step("hidden", ffn_output)
    else:
        add_step("residual", _add_to_stream(stream, ffn_output, dtype))
    return steps


def outputs_by_step(buffers: LayerBuffers, weights: LayerWeights, residual: Any, cache: KVCache) -> dict[str, Any]:
    """Return what the launches of a layer have left, by step, as NumPy's or CuPy's arrays."""
    arrays_by_step = {name: getattr(buffers, name) for name in ("qkv", "q", "attention", "o", "gate_up", "hidden")}
    arrays_by_step = {name: as_view(array) for name, array in arrays_by_step.items()}
    for name in weights.config.matrices:
        arrays_by_step[f"{name}_in"] = read_outputs(getattr(weights, name), getattr(buffers, f"{name}_in"))
    if buffers.routing is not None:
        routing, routed = buffers.routing, buffers.routing.routed
        arrays = {"normed": routing.normed, "expert_outputs": routing.expert_outputs, "chosen": routed.chosen}
        arrays |= {"share": routed.share, "offsets": routed.offsets, "place": routed.place}
        arrays_by_step |= {name: as_view(array) for name, array in arrays.items()}
        arrays_by_step["tokens"] = read_outputs(weights.gate_up, routing.tokens)
    return {**arrays_by_step, "pool": as_view(cache.pool), "residual": as_view(residual)}


def compare(inputs: LayerInputs, weights: LayerWeights, buffers: LayerBuffers, residual: Any, cache: KVCache) -> str:
    """Hold every launch of a layer that has run against `exact`.

    Returns:
        What was compared, in a sentence.

    Raises:
        VerificationError: a step is not what it has to be; names the first, with the place.
    """
    outputs = outputs_by_step(buffers, weights, residual, cache)
    steps = exact(inputs, weights, outputs, residual_epilogue=buffers.residual_epilogue)
    for name, step in steps.items():
        _compare_step(name, outputs[name], step, weights.dtype)
    bounded = [name for name, step in steps.items() if step.allowed is not None]
    return f"{len(steps)} steps: {', '.join(bounded)} within bounds, all others equal in every bit"


def in_float64(inputs: LayerInputs, weights: LayerWeights) -> tuple[F64, F64]:
    """Compute (hidden, residual) f64 [M, H] from the packed weights and the tokens as they lie in the cache.

    Nothing else is quantised: neither activations nor the new token's key and value. RoPE's tables are those of the
    inputs, in float32.
    """
    config, dtype = weights.config, weights.dtype
    x, stream = 0 if inputs.x is None else numbers(inputs.x, dtype), numbers(inputs.residual, dtype)
    norms = numbers(weights.input_norm, dtype), numbers(weights.post_norm, dtype)
    M, D = len(stream), config.head_dim

    def product(y: F64, weight: Any) -> F64:
        unpacked_weight = weight if isinstance(weight, ReorderedWeight) else unpack(weight)
        outputs: F64 = y @ unpacked_weight.dequantize().astype(np.float64).T
        return outputs

    def ffn(y: F64, gate_up: Any, down: Any) -> F64:
        return product(reference.apply_gate(product(y, gate_up), config.activation), down)

    stream = stream + x
    qkv = product(reference.rms_norm(stream, norms[0], config.eps), weights.qkv)
    qkv = qkv if weights.qkv_bias is None else qkv + weights.qkv_bias
    heads = qkv.reshape(M, -1, D)
    q, k, v = heads[:, : config.heads], heads[:, config.heads : -config.kv_heads], heads[:, -config.kv_heads :]
    # If the cached keys are rotated, so must be what they are multiplied with and what is appended to them.
    q, k = (inputs.cache.rotate(reference.rope(head, *_angles(inputs))) for head in (q, k))
    attended = []
    for b, (keys, values) in enumerate(zip(*gather(inputs.cache), strict=True)):
        past_and_new = (keys, k), (values, v)
        keys_values = [  # the cache's lengths include the new token, whose place, the last, is not written yet
            np.concatenate([cached_keys_values.dequantize()[:-1], new_keys_values[b : b + 1]])
            for cached_keys_values, new_keys_values in past_and_new
        ]
        attended.append(reference.attention(q[b : b + 1], *keys_values, scale=D**-0.5, window=config.window_of())[0])
    stream = stream + product(np.concatenate(attended).reshape(M, -1), weights.o)
    y = reference.rms_norm(stream, norms[1], config.eps)
    if not config.experts:
        return ffn(y, weights.gate_up, weights.down), stream
    router = numbers(weights.router, dtype)
    chosen, shares = reference.top_experts(y @ router.T, config.chosen_experts)
    hidden = np.zeros_like(stream)
    for expert in range(config.experts):
        expert_share = (shares * (chosen == expert)).sum(axis=1, keepdims=True)
        hidden += expert_share * ffn(y, weights.gate_up.expert(expert), weights.down.expert(expert))
    return hidden, stream


def _as_written(output: Any, dtype: str) -> Any:
    """Return an output in the layer's dtype: as a launch wrote it, or the right one in float64, converted."""
    return convert_to_dtype(output.astype(np.float32), dtype) if output.dtype == np.float64 else output


def _add_to_stream(x: Any, residual: Any, dtype: str) -> Any:
    return convert_to_dtype(floats(x) + floats(residual), dtype)


def _norm(stream: Any, gamma: Any, eps: float) -> Any:
    """Return y f32 [M, H], in the kernel's order of additions, which is written for NumPy."""
    return match_device(normalize_rows(floats(to_numpy(stream)), floats(to_numpy(gamma)), eps), stream)


def _choose_experts(y: Any, router: Any, k: int, dtype: str) -> tuple[Any, Any, Allowed]:
    """Compute chosen and share of `RoutedTokens`, and the error that the shares may have.

    Logits are added in the kernel's order.
    """
    arguments = {"x": floats(to_numpy(y)), "router": floats(to_numpy(router)), "k": k}
    constants = {"IN": DTYPES.index(dtype)}  # of the kernel's variant
    right = CHOOSE.expected(arguments, constants)
    chosen, share = (
        match_device(right[name].astype(kind), y) for name, kind in (("chosen", np.int32), ("share", np.float32))
    )
    return chosen, share, CHOOSE.allowed(arguments, constants)["share"]


def _select_rows(x: QuantizedActivations, rows: Any) -> QuantizedActivations:
    return QuantizedActivations(*(array[rows] for array in arrays_of(x).values()))


def _angles(inputs: LayerInputs) -> tuple[Any, Any]:
    """Return (cos, sin) f32 [M, D/2] of the tokens."""
    cos, sin, *positions = inputs.rope
    rows = positions[0] if positions else slice(len(inputs.residual))
    return cos[rows], sin[rows]


def _rope_and_append(qkv: Any, inputs: LayerInputs, Hq: int, dtype: str) -> tuple[Any, Any]:
    """Rotate queries and append the new tokens; return queries [M, Hq, D] and the pool."""
    cache = replace(inputs.cache, pool=inputs.cache.pool.copy())
    heads = floats(qkv).reshape(len(qkv), -1, cache.head_dim)
    Hkv, angles = cache.num_kv_heads, _angles(inputs)
    q, k, v = heads[:, :Hq], heads[:, Hq : Hq + Hkv], heads[:, Hq + Hkv :]
    has_slot = inputs.slots >= 0  # of a row of padding it is negative, and nothing is written
    keys, values = cache.quantize_keys(reference.rope(k, *angles)[has_slot]), cache.quantize_values(v[has_slot])
    write_slots(cache, keys, values, inputs.slots[has_slot])
    return convert_to_dtype(reference.rope(q, *angles), dtype), cache.pool


def _attention(q: Any, cache: KVCache, window: int | None, dtype: str) -> tuple[Any, Allowed]:
    """Compute attention [M, Hq, D] in float64, and the error that the kernel may have.

    Both are those of the kernel for sm_90a, on any device. Its `blocks` only size scratch, which is not looked at.
    """
    arguments = {"q": floats(q)[:, None], "cache": cache, "blocks": 1, "window": window or 0}
    arguments["softmax_scale"] = cache.head_dim**-0.5
    constants = {"BF16": int(dtype == "bfloat16")}
    right, allowed = SM90.expected(arguments, constants)["out"][:, 0], SM90.allowed(arguments, constants)["out"]
    return right, Allowed(allowed.per_element[:, 0], None if allowed.rms is None else allowed.rms[:, 0])


def _silu_mul_outputs(x: QuantizedActivations, weight: PackedWeight, dtype: str) -> tuple[Any, Allowed]:
    """Compute SiLU(gate) · up [M, F] in float64, rounded to the dtype, and the error that the epilogue may have."""
    gate_up, OUT = to_numpy(multiply(x, weight, "float32")), DTYPES.index(dtype)
    return match_device(epilogues.silu_mul(gate_up, OUT), x.q), Allowed(epilogues.silu_mul_error(gate_up, OUT))


def _compare_step(name: str, output: Any, step: Step, dtype: str) -> None:
    """Raise VerificationError where a step is not what it has to be."""
    parts = list(arrays_of(output)) if is_quantized_input(output) else [""]
    bounds = step.allowed if isinstance(step.allowed, tuple) else (step.allowed,) * len(parts)
    for part, allowed_error in zip(parts, bounds, strict=True):
        got, right = (to_numpy(getattr(x, part) if part else x) for x in (output, step.right))
        if allowed_error is None:  # bits, so that -0 is not 0, and a NaN equals itself
            is_wrong = got.view(f"u{got.itemsize}") != right.view(f"u{right.itemsize}")
        else:
            allowed_error = Allowed(
                to_numpy(allowed_error.per_element), None if allowed_error.rms is None else to_numpy(allowed_error.rms)
            )
            # An array in the layer's dtype may be bfloat16, held as its bits; no part of quantised activations is.
            got = numbers(got, dtype) if right.dtype == np.float64 and not part else got
            is_wrong, wrong_rows = misses(got, right, allowed_error)
            is_wrong = is_wrong | wrong_rows[..., None]  # where a row is wrong as a whole, all of it is
        if is_wrong.any():
            index = tuple(int(i) for i in np.argwhere(is_wrong)[0])
            label, count = f"{name}.{part}" if part else name, f"{int(is_wrong.sum())} of {is_wrong.size} elements"
            raise VerificationError(
                f"{label}: {count} differ from the reference, first at {list(index)}: "
                f"{got[index]} instead of {right[index]}"
            )
    # Where q may be off by its bound, the sums must still be those of the q that was written.
    if isinstance(output, QuantizedActivations) and (output.q.sum(axis=1) != output.token_sum).any():
        raise VerificationError(f"{name}.token_sum: is not the sum of what was written")


def _copy_array(array: Any) -> Any:
    return as_view(array).copy()
