"""NumPy twins of `decode_layer`: `exact`, in the very integers that the kernels compute, and `in_float64`, unquantised.

A step of `exact` has the right bits, or a bound for what else a kernel may leave: attention, which is of floats, and
the quantised gate, whose exponential is approximate. Everything else is equal in every bit. `compare` holds the
launches of a layer against it one by one, each on what the one before it has really left.

Arrays are NumPy's or CuPy's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ptxlab.errors import ArgumentError, VerificationError
from ptxlab.llm.model.exact_products import (
    beside,
    gate_inputs,
    is_read,
    left_in,
    multiply,
    on_host,
    parts_of,
    read,
    shared,
)
from ptxlab.llm.model.layer import LayerBuffers
from ptxlab.llm.model.weights import LayerWeights
from ptxlab.lowbit import quant, reference
from ptxlab.lowbit.kernels.attention.sm90 import SM90
from ptxlab.lowbit.kernels.gemm import epilogues
from ptxlab.lowbit.kernels.gemm.common import DTYPES
from ptxlab.lowbit.kernels.moe import CHOOSE
from ptxlab.lowbit.kernels.quantize.rmsnorm import normalized
from ptxlab.lowbit.layout import ExpertWeights, KVCache, PackedWeight, ReorderedWeight, gather, unpack, write_slots
from ptxlab.lowbit.quant import QuantizedActivations
from ptxlab.lowbit.quant.tiled import with_arrays
from ptxlab.lowbit.reference.attention import F64
from ptxlab.spec.dtypes import floats, numbers, stored
from ptxlab.spec.tolerance import Allowed, misses


class Step(NamedTuple):
    """The result of a launch: an array, or what a product reads.

    `allowed` is None where every bit must be right, else the error bound; of what a product reads, one per array.
    """

    right: Any
    allowed: Any = None


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """Inputs of a layer, copied before it runs, as it writes the residual and the cache.

    `x` is None where it is the residual itself, to which nothing is added.
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
        added = None if x is residual else _copied(x)
        return cls(added, *(with_arrays(part, _copied) for part in (residual, cache, slots, rope)))


def exact(
    given: LayerInputs,
    weights: LayerWeights,
    left: Mapping[str, Any] | None = None,
    *,
    residual_epilogue: bool = False,
) -> dict[str, Step]:
    """Compute every step of a layer, by its name in `LayerBuffers`, and `pool` and `residual`.

    `left` has the outputs that launches wrote, by step (`left_by`); where a step has one, the next steps continue from
    it. With `residual_epilogue` the products that add to the residual stream write only the stream, after the last of
    them.
    """
    config, dtype = weights.config, weights.dtype
    steps: dict[str, Step] = {}

    def done(name: str, right: Any, allowed: Any = None) -> Any:
        steps[name] = Step(right, allowed)
        return (left or {}).get(name, right)

    stream = given.residual if given.x is None else _added(given.x, given.residual, dtype)
    qkv_in = done("qkv_in", read(weights.qkv, _norm(stream, weights.input_norm, config.eps)))
    qkv = done("qkv", multiply(qkv_in, weights.qkv, dtype, weights.qkv_bias))
    q, pool = _rotated_and_appended(qkv, given, config.heads, dtype)
    q, pool = done("q", q), done("pool", pool)
    attention = done("attention", *_attention(q, replace(given.cache, pool=pool), config.window_of(), dtype))
    if attention.dtype == np.float64:  # the right one, as nobody has left one
        attention = stored(attention.astype(np.float32), dtype)
    o_in = done("o_in", read(weights.o, floats(attention).reshape(len(attention), -1)))
    o = multiply(o_in, weights.o, dtype)
    stream = _added(stream, o if residual_epilogue else done("o", o), dtype)
    if config.experts or not residual_epilogue:
        stream = done("residual", stream)
    y = _norm(stream, weights.post_norm, config.eps)
    quantised: Any = read(weights.gate_up, y)
    if config.experts:
        tokens, y = done("tokens", quantised), done("normed", stored(y, dtype))
        chosen, share, allowed = _chosen(y, weights.router, config.chosen_experts, dtype)
        chosen, share = done("chosen", chosen), done("share", share, allowed)
        offsets, place = map(done, ("offsets", "place"), reference.rows_by_expert(chosen, config.experts))
        quantised = _taken(tokens, place.reshape(-1).argsort() // place.shape[1])

    def product(x: Any, weight: Any) -> Any:
        if not isinstance(weight, ExpertWeights):
            return multiply(x, weight, dtype)
        of_experts = [(e, slice(*map(int, pair))) for e, pair in enumerate(pairwise(offsets))]
        taken = [(e, rows) for e, rows in of_experts if rows.start < rows.stop]
        return np.concatenate([multiply(_taken(x, rows), weight.expert(e), dtype) for e, rows in taken])

    gate_up_in = done("gate_up_in", quantised)
    if getattr(weights.gate_up, "interleaved", False):
        h = done("gate_up", *_ended_gated(gate_up_in, weights.gate_up, dtype))
        h = stored(h.astype(np.float32), dtype) if h.dtype == np.float64 else h  # the right one, as of attention
        down_in = done("down_in", quant.quantize_activations(floats(h)))
    else:
        gate_up = done("gate_up", product(gate_up_in, weights.gate_up))
        down_in = done("down_in", *gate_inputs(weights.down, gate_up, config.activation, dtype))
    results = product(down_in, weights.down)
    if config.experts:
        results = stored(reference.combined(floats(done("results", results)), place, share), dtype)
    if config.experts or not residual_epilogue:
        done("hidden", results)
    else:
        done("residual", _added(stream, results, dtype))
    return steps


def left_by(buffers: LayerBuffers, weights: LayerWeights, residual: Any, cache: KVCache) -> dict[str, Any]:
    """Return what the launches of a layer have left, by step, as NumPy's or CuPy's arrays."""
    arrays_by_step = {name: getattr(buffers, name) for name in ("qkv", "q", "attention", "o", "gate_up", "hidden")}
    arrays_by_step = {name: shared(array) for name, array in arrays_by_step.items()}
    for name in weights.config.matrices:
        arrays_by_step[f"{name}_in"] = left_in(getattr(weights, name), getattr(buffers, f"{name}_in"))
    if buffers.routing is not None:
        routing, routed = buffers.routing, buffers.routing.routed
        arrays = {"normed": routing.normed, "results": routing.results, "chosen": routed.chosen}
        arrays |= {"share": routed.share, "offsets": routed.offsets, "place": routed.place}
        arrays_by_step |= {name: shared(array) for name, array in arrays.items()}
        arrays_by_step["tokens"] = left_in(weights.gate_up, routing.tokens)
    return {**arrays_by_step, "pool": shared(cache.pool), "residual": shared(residual)}


def compare(given: LayerInputs, weights: LayerWeights, buffers: LayerBuffers, residual: Any, cache: KVCache) -> str:
    """Hold every launch of a layer that has run against `exact`.

    Returns:
        What was compared, in a sentence.

    Raises:
        VerificationError: a step is not what it has to be; names the first, with the place.
    """
    left = left_by(buffers, weights, residual, cache)
    steps = exact(given, weights, left, residual_epilogue=buffers.residual_epilogue)
    for name, step in steps.items():
        _compare(name, left[name], step, weights.dtype)
    bounded = [name for name, step in steps.items() if step.allowed is not None]
    return f"{len(steps)} steps: {', '.join(bounded)} within bounds, all others equal in every bit"


def in_float64(given: LayerInputs, weights: LayerWeights) -> tuple[F64, F64]:
    """Compute (hidden, residual) f64 [M, H] from the packed weights and the tokens as they lie in the cache.

    Nothing else is quantised: neither activations nor the new token's key and value. Angles are float32, as always.
    """
    config, dtype = weights.config, weights.dtype
    x, stream = 0 if given.x is None else numbers(given.x, dtype), numbers(given.residual, dtype)
    norms = numbers(weights.input_norm, dtype), numbers(weights.post_norm, dtype)
    M, D = len(stream), config.head_dim

    def product(y: F64, weight: Any) -> F64:
        unpacked = weight if isinstance(weight, ReorderedWeight) else unpack(weight)
        outputs: F64 = y @ unpacked.dequantize().astype(np.float64).T
        return outputs

    def ffn(y: F64, gate_up: Any, down: Any) -> F64:
        return product(reference.gated(product(y, gate_up), config.activation), down)

    stream = stream + x
    qkv = product(reference.rms_norm(stream, norms[0], config.eps), weights.qkv)
    qkv = qkv if weights.qkv_bias is None else qkv + weights.qkv_bias
    heads = qkv.reshape(M, -1, D)
    q, k, v = heads[:, : config.heads], heads[:, config.heads : -config.kv_heads], heads[:, -config.kv_heads :]
    q, k = (given.cache.rotate(reference.rope(each, *_angles(given))) for each in (q, k))
    results = []
    for b, (keys, values) in enumerate(zip(*gather(given.cache), strict=True)):
        known = [np.concatenate([past.dequantize()[:-1], new[b : b + 1]]) for past, new in ((keys, k), (values, v))]
        results.append(reference.attention(q[b : b + 1], *known, scale=D**-0.5, window=config.window_of())[0])
    stream = stream + product(np.concatenate(results).reshape(M, -1), weights.o)
    y = reference.rms_norm(stream, norms[1], config.eps)
    if not config.experts:
        return ffn(y, weights.gate_up, weights.down), stream
    router = numbers(weights.router, dtype)
    chosen, shares = reference.top_experts(y @ router.T, config.chosen_experts)
    hidden = np.zeros_like(stream)
    for expert in range(config.experts):
        of_expert = (shares * (chosen == expert)).sum(axis=1, keepdims=True)
        hidden += of_expert * ffn(y, weights.gate_up.expert(expert), weights.down.expert(expert))
    return hidden, stream


# Steps


def _added(x: Any, residual: Any, dtype: str) -> Any:
    return stored(floats(x) + floats(residual), dtype)


def _norm(stream: Any, gamma: Any, eps: float) -> Any:
    """Return y f32 [M, H], in the kernel's order of additions, which is written for NumPy."""
    return beside(normalized(floats(on_host(stream)), floats(on_host(gamma)), eps), stream)


def _chosen(y: Any, router: Any, k: int, dtype: str) -> tuple[Any, Any, Allowed]:
    """Compute chosen and share of `RoutedTokens`, and the error that the shares may have.

    Logits are added in the kernel's order.
    """
    logical = {"x": floats(on_host(y)), "router": floats(on_host(router)), "k": k}
    config = {"IN": DTYPES.index(dtype)}
    right = CHOOSE.expected(logical, config)
    chosen, share = (
        beside(right[name].astype(kind), y) for name, kind in (("chosen", np.int32), ("share", np.float32))
    )
    return chosen, share, CHOOSE.allowed(logical, config)["share"]


def _taken(x: QuantizedActivations, rows: Any) -> QuantizedActivations:
    return QuantizedActivations(*(array[rows] for array in parts_of(x).values()))


def _angles(given: LayerInputs) -> tuple[Any, Any]:
    """Return (cos, sin) f32 [M, D/2] of the tokens."""
    cos, sin, *positions = given.rope
    at = positions[0] if positions else slice(len(given.residual))
    return cos[at], sin[at]


def _rotated_and_appended(qkv: Any, given: LayerInputs, Hq: int, dtype: str) -> tuple[Any, Any]:
    """Rotate queries and append the new tokens; return queries [M, Hq, D] and the pool."""
    cache = replace(given.cache, pool=given.cache.pool.copy())
    heads = floats(qkv).reshape(len(qkv), -1, cache.head_dim)
    Hkv, angles = cache.num_kv_heads, _angles(given)
    q, k, v = heads[:, :Hq], heads[:, Hq : Hq + Hkv], heads[:, Hq + Hkv :]
    here = given.slots >= 0
    keys, values = cache.quantize_keys(reference.rope(k, *angles)[here]), cache.quantize_values(v[here])
    write_slots(cache, keys, values, given.slots[here])
    return stored(reference.rope(q, *angles), dtype), cache.pool


def _attention(q: Any, cache: KVCache, window: int | None, dtype: str) -> tuple[Any, Allowed]:
    """Compute attention [M, Hq, D], rounded from float64, and the error that the kernel may have."""
    logical = {"q": floats(q)[:, None], "cache": cache, "blocks": 1, "window": window or 0}
    logical["softmax_scale"] = cache.head_dim**-0.5
    config = {"BF16": int(dtype == "bfloat16")}
    right, allowed = SM90.expected(logical, config)["out"][:, 0], SM90.allowed(logical, config)["out"]
    return right, Allowed(allowed.each[:, 0], None if allowed.rms is None else allowed.rms[:, 0])


def _ended_gated(x: QuantizedActivations, weight: PackedWeight, dtype: str) -> tuple[Any, Allowed]:
    """Compute SiLU(gate) · up [M, F] in float64, rounded to the dtype, and the error that the epilogue may have."""
    gate_up, OUT = on_host(multiply(x, weight, "float32")), DTYPES.index(dtype)
    return beside(epilogues.silu_mul(gate_up, OUT), x.q), Allowed(epilogues.silu_mul_error(gate_up, OUT))


def _compare(name: str, found: Any, step: Step, dtype: str) -> None:
    """Raise VerificationError where a step is not what it has to be."""
    parts = list(parts_of(found)) if is_read(found) else [""]
    bounds = step.allowed if isinstance(step.allowed, tuple) else (step.allowed,) * len(parts)
    for part, allowed in zip(parts, bounds, strict=True):
        got, right = (on_host(getattr(x, part) if part else x) for x in (found, step.right))
        if allowed is None:
            wrong = got.view(f"u{got.itemsize}") != right.view(f"u{right.itemsize}")
        else:
            allowed = Allowed(on_host(allowed.each), None if allowed.rms is None else on_host(allowed.rms))
            got = numbers(got, dtype) if right.dtype == np.float64 and not part else got
            wrong, rows = misses(got, right, allowed)
            wrong = wrong | rows.reshape(*rows.shape, *(1,) * (wrong.ndim - rows.ndim))
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            label, count = f"{name}.{part}" if part else name, f"{int(wrong.sum())} of {wrong.size} elements"
            raise VerificationError(
                f"{label}: {count} differ from the reference, first at {list(at)}: {got[at]} instead of {right[at]}"
            )
    if isinstance(found, QuantizedActivations) and (found.q.sum(axis=1) != found.token_sum).any():
        raise VerificationError(f"{name}.token_sum: is not the sum of what was written")


def _copied(array: Any) -> Any:
    return shared(array).copy()
