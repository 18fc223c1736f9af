"""Operators around the grouped products of a mixture of experts: `route_tokens` and `combine_experts`.

They are as those of `operators`. Rows are in the order of experts, then of tokens.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ptxlab.errors import ArgumentError
from ptxlab.llm.torch.operators import array_of, define, tensor_of
from ptxlab.lowbit import reference
from ptxlab.lowbit.kernels import moe
from ptxlab.lowbit.kernels.moe.specs import MOST_CHOSEN, MOST_EXPERTS, router_logits
from ptxlab.lowbit.layout import PackedActivations
from ptxlab.lowbit.quant.inputs import extremes
from ptxlab.spec.dtypes import convert_to_dtype, floats, name_of
from ptxlab.validate import is_integer

Routed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_RESULTS = ("row_x_q", "row_scale", "row_sum", "offsets", "place", "share", "chosen")  # by the kernels' names
_HALVES = ("float16", "bfloat16")


def _empty_routes(x_q: Tensor, x_scale: Tensor, x_sum: Tensor, normed: Tensor, router: Tensor, k: int) -> Routed:
    (M, H), E = x_q.shape, router.shape[0]
    s32, f32 = torch.int32, torch.float32
    shapes = (
        ((M * k, H), torch.int8),
        ((M * k,), f32),
        ((M * k,), s32),
        ((E + 1,), s32),
        ((M, k), s32),
        ((M, k), f32),
        ((M, k), s32),
    )
    return tuple(x_q.new_empty(shape, dtype=dtype) for shape, dtype in shapes)


def _route_on_cuda(x_q: Tensor, x_scale: Tensor, x_sum: Tensor, normed: Tensor, router: Tensor, k: int) -> Routed:
    M, H = x_q.shape
    tokens = PackedActivations(layout="row_major", M=M, K=H, x_q=x_q, scale=x_scale, token_sum=x_sum)
    empty = _empty_routes(x_q, x_scale, x_sum, normed, router, k)
    moe.route_tokens(tokens, normed, router, k, out=moe.RoutedTokens.of(dict(zip(_RESULTS, empty, strict=True))))
    return empty


def _route_on_cpu(x_q: Tensor, x_scale: Tensor, x_sum: Tensor, normed: Tensor, router: Tensor, k: int) -> Routed:
    name = "route_tokens"
    x = array_of(f"{name}: x_q", x_q, "int8", "M", "H")
    M, H = x.shape
    scale = array_of(f"{name}: x_scale", x_scale, "float32", M)
    sums = array_of(f"{name}: x_sum", x_sum, "int32", M)
    y = floats(array_of(f"{name}: normed", normed, _HALVES, M, H))
    router_rows = floats(array_of(f"{name}: router", router, name_of(normed.dtype), "E", H))
    E = len(router_rows)
    if not 1 <= E <= MOST_EXPERTS:
        raise ArgumentError(f"{name}: router", f"must have 1 to {MOST_EXPERTS} experts", E)
    if not is_integer(k) or not 1 <= k <= min(E, MOST_CHOSEN):
        raise ArgumentError(f"{name}: k", f"must be an integer in 1..{min(E, MOST_CHOSEN)}", k)
    extremes(f"{name}: normed", y), extremes(f"{name}: router", router_rows)  # refuse what is not finite
    chosen, share = reference.top_experts(router_logits(y, router_rows).astype(np.float64), k)
    offsets, place = reference.rows_by_expert(chosen, E)
    token = place.reshape(-1).argsort() // k
    arrays = x[token], scale[token], sums[token], offsets, place, share.astype(np.float32), chosen.astype(np.int32)
    return tuple(map(torch.from_numpy, arrays))


def _combine_on_cuda(outputs: Tensor, place: Tensor, share: Tensor) -> Tensor:
    routed: Any = object.__new__(moe.RoutedTokens)  # its own checks are for the rows, which nothing reads here
    vars(routed).update(place=place, share=share)
    out = outputs.new_empty((place.shape[0], outputs.shape[1]))
    combined: Tensor = moe.combine_experts(outputs, routed, out=out)
    return combined


def _combine_on_cpu(outputs: Tensor, place: Tensor, share: Tensor) -> Tensor:
    name, dtype = "combine_experts", name_of(outputs.dtype)
    places = array_of(f"{name}: place", place, "int32", "M", "k")
    shares = array_of(f"{name}: share", share, "float32", *places.shape)
    rows = floats(array_of(f"{name}: results", outputs, _HALVES, places.size, "H"))
    if places.size and not 0 <= places.min() <= places.max() < len(rows):
        raise ArgumentError(f"{name}: place", f"must be rows in 0..{len(rows) - 1}", f"{places.min()}..{places.max()}")
    return tensor_of(convert_to_dtype(reference.combine_expert_rows(rows, places, shares), dtype), outputs.dtype)


define(
    "route_tokens(Tensor x_q, Tensor x_scale, Tensor x_sum, Tensor normed, Tensor router, int k)"
    " -> (Tensor x_q, Tensor x_scale, Tensor x_sum, Tensor offsets, Tensor place, Tensor share, Tensor chosen)",
    cuda=_route_on_cuda,
    cpu=_route_on_cpu,
    fake=_empty_routes,
)
define(
    "combine_experts(Tensor outputs, Tensor place, Tensor share) -> Tensor",
    cuda=_combine_on_cuda,
    cpu=_combine_on_cpu,
    fake=lambda outputs, place, share: outputs.new_empty((place.shape[0], outputs.shape[1])),
)
