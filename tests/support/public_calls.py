"""The public calls that launch kernels, with small arguments that they take, on the host or on a device."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

import ptxlab
from ptxlab.lowbit import layout, quant
from ptxlab.lowbit.kernels.attention.options import AppendOptions, AttentionOptions, RopeAppendOptions
from ptxlab.lowbit.kernels.gemm import gemm_w8a8
from ptxlab.lowbit.kernels.gemm.f16 import gemm_f16
from ptxlab.lowbit.kernels.gemm.options import GemmOptions, GroupedOptions, IntegerProductOptions, ProductOptions
from ptxlab.lowbit.kernels.moe.api import RoutedTokens, RouteOptions
from ptxlab.lowbit.kernels.options import LaunchOptions, Options
from ptxlab.lowbit.kernels.quantize.options import (
    GateOptions,
    GateReorderOptions,
    NormOptions,
    NormReorderOptions,
    QuantizeOptions,
    ReorderOptions,
)
from ptxlab.lowbit.layout import AtomActivations, BlockActivations, KVCache, PackedActivations
from ptxlab.lowbit.quant.atom import ATOM_CODE
from tests.support import gemm_calls

M, N, K, E, HEADS, D = 5, 40, 256, 2, 2, 64
CHANNELS = 256 + 128  # of `reorder_quantize`
ONES = np.ones((N, K), np.float32)
ATOM_WEIGHT = ptxlab.pack_atom(quant.quantize_atom_weight(np.tile(ONES, (1, 2)), 64, 64))
ATOM_TOKENS = layout.pack_atom_activations(quant.quantize_atom_activations(np.tile(ONES[:M], (1, 2)), 64, 64))
BLOCK_WEIGHT = ptxlab.pack_block_weight(quant.quantize_block_weight(ONES), 1)
BLOCK_TOKENS = layout.pack_block_activations(quant.quantize_blocks(ONES[:M], 1))
Tokens = TypeVar("Tokens", AtomActivations, BlockActivations)
ToArray = Callable[[np.ndarray], Any]
ToPlace = Callable[[Any], Any]


class PublicCall(NamedTuple):
    """A call, its options, and its parameters that are arrays, packed operands or memory."""

    call: Callable[..., Any]
    options: type[Options]
    operands: tuple[str, ...]

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """Parameters of the signature by name."""
        return dict(inspect.signature(self.call).parameters)


_NORM = ("x", "gamma", "residual", "normed", "out")
CALLS = {
    public_call.call.__name__: public_call
    for public_call in (
        PublicCall(
            ptxlab.gemm_w4a8,
            GemmOptions,
            ("x_q", "x_scale", "weight", "x_sum", "bias", "residual", "out", "workspace"),
        ),
        PublicCall(
            ptxlab.gemm_w4a8_grouped,
            GroupedOptions,
            ("x_q", "x_scale", "weights", "offsets", "x_sum", "bias", "out"),
        ),
        PublicCall(ptxlab.gemm_w4a4, ProductOptions, ("x", "weight", "bias", "out")),
        PublicCall(ptxlab.gemm_w4ax, ProductOptions, ("x", "weight", "bias", "out")),
        PublicCall(gemm_w8a8, IntegerProductOptions, ("x", "weight", "bias", "out")),
        PublicCall(gemm_f16, Options, ("x", "w", "out")),
        PublicCall(
            ptxlab.attention_kv4, AttentionOptions, ("q", "cache", "query_start_loc", "k", "v", "out", "workspace")
        ),
        PublicCall(ptxlab.append_kv4, AppendOptions, ("k", "v", "cache", "slots", "rope")),
        PublicCall(ptxlab.rope_append_kv4, RopeAppendOptions, ("qkv", "cache", "slots", "rope", "out", "keys")),
        PublicCall(ptxlab.quantize_activations, QuantizeOptions, ("x", "out")),
        PublicCall(ptxlab.rmsnorm_quantize, NormOptions, _NORM),
        PublicCall(ptxlab.silu_mul_quantize, GateOptions, ("gate_up", "out")),
        PublicCall(ptxlab.reorder_quantize, ReorderOptions, ("x", "place", "out")),
        PublicCall(ptxlab.rmsnorm_reorder_quantize, NormReorderOptions, (*_NORM, "place")),
        PublicCall(ptxlab.silu_mul_reorder_quantize, GateReorderOptions, ("gate_up", "place", "out")),
        PublicCall(ptxlab.route_tokens, RouteOptions, ("tokens", "normed", "router", "out")),
        PublicCall(ptxlab.combine_experts, LaunchOptions, ("results", "routed", "out")),
    )
}
# Another value of an option than the arguments have. `epilogue` goes with another weight.
OTHER: dict[str, Any] = {
    "backend": "gpu",
    "programmatic": True,
    "out_dtype": "float32",
    "kernel": "attention_kv4_mma_sm80",
    "scale": 0.5,
    "window": 3,
    "return_lse": True,
    "check": True,
    "batch_invariant": True,
    "layout": "fragment",
    "rows": 16,
    "eps": 1e-3,
    "activation": "gelu_tanh",
    "outliers": 64,
    "group": 64,
    "clip": 0.5,
    "rules": ATOM_CODE,
    "int8": 1,
    "k": 2,
}
OTHER_OF_CALL: dict[tuple[str, str], Any] = {
    ("gemm_w4a8", "epilogue"): "silu_mul",
    ("gemm_w4a8", "kernel"): "gemm_w4a8_sm90",
    **{(name, "layout"): "pairs" for name in CALLS if "reorder" in name},
}
# Arguments that go with an option.
WITH: dict[str, dict[str, Any]] = {"rows": {"layout": "tiles", "rows": 8}, "outliers": {"group": 64}}


def first_tokens(tokens: Tokens, rows: int) -> Tokens:
    """Cut packed activations off behind so many tokens."""
    arrays: dict[str, Any] = {name: array[:rows] for name, array in tokens.arrays.items()}
    return replace(tokens, M=rows, **arrays)


def other_value(name: str, option: str) -> Any:
    """Return a value of a call's option that `arguments` does not give it."""
    return OTHER_OF_CALL.get((name, option), OTHER.get(option))


def options_of_calls() -> Iterator[tuple[str, str]]:
    """Yield (call, option) for every option of every public call."""
    for name, public_call in CALLS.items():
        yield from ((name, option.name) for option in fields(public_call.options))


def arguments(to_array: ToArray, to_place: ToPlace, rows: int = M) -> dict[str, dict[str, Any]]:
    """Make arguments of every call without results, on the host or where the two functions bring arrays and operands.

    All tokens are zeros or ones; `rows` says how many there are.
    """

    def array(shape: tuple[int, ...], dtype: Any = np.float16) -> Any:
        return to_array(np.zeros(shape, dtype))

    def activations(count: int, channels: int) -> PackedActivations:
        x_q, sums = array((count, channels), np.int8), array((count,), np.int32)
        scale = to_array(np.ones(count, np.float32))
        return PackedActivations(layout="row_major", M=count, K=channels, x_q=x_q, scale=scale, token_sum=sums)

    pages = KVCache.empty(M, 2, HEADS, D, page_size=16)
    cache = to_place(replace(pages, block_table=pages.block_table[:rows], lengths=pages.lengths[:rows]))
    slots = to_array(np.arange(rows, dtype=np.int32))
    place = to_array(np.arange(CHANNELS, dtype=np.int16))
    routed = RoutedTokens(
        rows=activations(rows * 2, K),
        offsets=array((E + 1,), np.int32),
        place=to_array(np.arange(rows * 2, dtype=np.int32).reshape(rows, 2)),
        share=array((rows, 2), np.float32),
        chosen=array((rows, 2), np.int32),
    )
    gemm = {"x_q": array((rows, K), np.int8), "x_scale": array((rows,), np.float32)}
    reordered = {"x": array((rows, CHANNELS)), "place": place}
    return {
        "gemm_w4a8": {**gemm, "weight": to_place(gemm_calls.STRIPS["lqq"])},
        "gemm_w4a8_grouped": {
            **gemm,
            "weights": to_place(ptxlab.stack_experts([gemm_calls.STRIPS["lqq"]] * E)),
            "offsets": to_array(np.array([0, min(2, rows), rows], np.int32)),
        },
        "gemm_w4a4": {"x": to_place(first_tokens(ATOM_TOKENS, rows)), "weight": to_place(ATOM_WEIGHT)},
        "gemm_w4ax": {"x": to_place(first_tokens(BLOCK_TOKENS, rows)), "weight": to_place(BLOCK_WEIGHT)},
        "gemm_w8a8": {
            "x": activations(rows, K),
            "weight": quant.Level1Weight(array((N, K), np.int8), array((N,), np.float32), 127),
        },
        "gemm_f16": {"x": array((rows, K)), "w": array((N, K))},
        "attention_kv4": {"q": array((rows, HEADS, D)), "cache": cache},
        "append_kv4": {"k": array((rows, HEADS, D)), "v": array((rows, HEADS, D)), "cache": cache, "slots": slots},
        "rope_append_kv4": {
            "qkv": array((rows, 3 * HEADS * D)),
            "cache": cache,
            "slots": slots,
            "rope": (array((rows, D // 2), np.float32),) * 2,
        },
        "quantize_activations": {"x": array((rows, K))},
        "rmsnorm_quantize": {"x": array((rows, K)), "gamma": array((K,))},
        "silu_mul_quantize": {"gate_up": array((rows, 2 * K))},
        "reorder_quantize": reordered,
        "rmsnorm_reorder_quantize": {**reordered, "gamma": array((CHANNELS,))},
        "silu_mul_reorder_quantize": {"gate_up": array((rows, 2 * CHANNELS)), "place": place},
        "route_tokens": {
            "tokens": activations(rows, K),
            "normed": array((rows, K)),
            "router": array((4, K)),
            "k": 1,
        },
        "combine_experts": {"results": array((rows * 2, K)), "routed": routed},
    }
