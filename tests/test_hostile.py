"""Whatever a public function is given, it works or says in one line what is wrong."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab.errors import ArgumentError, PtxlabError
from ptxlab.hardware.tensor_map import TensorMap
from ptxlab.llm.accuracy.parting import parting
from ptxlab.llm.model import (
    Config,
    FloatModel,
    FloatRunner,
    Footprint,
    LayerInputs,
    LayerWeights,
    NumpyRunner,
    QuantizedModel,
    decode_layer,
)
from ptxlab.llm.server import Request, Server
from ptxlab.lowbit import layout, quant
from ptxlab.lowbit.kernels.gemm import gemm_f16, gemm_w8a8
from tests.support.layers import TINY_MODEL, layer_problem

W = np.random.default_rng(0).standard_normal((64, 256), dtype=np.float32)
X = np.random.default_rng(1).integers(-128, 128, (5, 256), dtype=np.int8)
SUMS, SCALE = X.sum(axis=1, dtype=np.int32), np.full(5, 0.01, np.float32)
LQQ, CHANNEL = quant.quantize_lqq(W), quant.quantize_qoq_channel(W)
PACKED = {name: ptxlab.pack(LQQ, name) for name in ("dual_mma", "strips")}
PER_CHANNEL = ptxlab.pack(CHANNEL, "qserve")
ATOM = {name: ptxlab.pack_atom(quant.quantize_atom_weight(W, 64, 64), name) for name in layout.ATOM_LAYOUTS}
PAIRS = layout.pack_atom_activations(quant.quantize_atom_activations(W[:2], 64, 64), "pairs")
PLACE = quant.channel_places(np.arange(256))
BLOCKS = ptxlab.pack_block_weight(quant.quantize_block_weight(W), 1)
JOINED = layout.pack_block_activations(quant.quantize_blocks(W[:2], 1))
REORDERED = layout.pack_reordered(quant.quantize_atom_weight(W, 64, 64), np.arange(256))
EXPERTS = ptxlab.stack_experts([PACKED["strips"]] * 2)
CACHE = ptxlab.KVCache.empty(2, 2, 1, 64, page_size=16)
HALVES = W[:2].astype(np.float16)
ROWS = layout.pack_activations(quant.quantize_activations(W[:2]), "row_major")
CHOSEN = np.array([[0], [1]], np.int32)
ROUTED = ptxlab.RoutedTokens(rows=ROWS, offsets=np.arange(3, dtype=np.int32), place=CHOSEN, chosen=CHOSEN,
                             share=np.ones((2, 1), np.float32))  # fmt: skip
LAYER, GIVEN = layer_problem(), ("x", "residual", "cache", "slots", "rope")
KEYS = W.reshape(4, 64, 64)[:, :2]
EIGHT = quant.quantize_level1(W, 127)
FLOATS = FloatModel.random(TINY_MODEL)
MODEL = QuantizedModel.rounded(FLOATS, group=32, rounding="nearest")
RUNNER = NumpyRunner(MODEL, 1, 64)

THINGS: tuple[Any, ...] = (
    None, 1.5, -1, 0, True, "x", "", b"x", [], [1.0], {}, (), object(), np.float32(1), np.nan, float("inf"), 2**70,
    np.zeros(0, np.float32), np.zeros((0, 0), np.float32), np.array(1.0), np.zeros(3, object), np.array(["a"]),
    np.zeros((2, 3, 4, 5), np.float32), np.zeros(4, ">f4"), np.zeros(4, "M8[s]"), np.arange(8), complex(1, 2), np,
    np.ma.masked_less(W, 0), W[:, ::2], W.astype(">f4"), X[:, :0],
)  # fmt: skip
CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "lqq": (quant.quantize_lqq, {"w": W, "group": 64, "protective_range": 119, "rounding": "nearest"}),
    "qoq_channel": (quant.quantize_qoq_channel, {"w": W}),
    "int4": (quant.quantize_int4, {"w": W, "group": 64}),
    "kv": (quant.quantize_kv, {"x": KEYS, "scheme": "kv4_channel", "channel": None}),
    "smooth": (quant.smooth_attention, {"w_q": W, "w_k": W, "keys_max": np.ones((1, 64)), "head_dim": 64, "alpha": 1}),
    "pack": (ptxlab.pack, {"weight": LQQ, "layout": "strips"}),
    "unpack": (layout.unpack, {"packed": PACKED["strips"]}),
    "stack": (ptxlab.stack_experts, {"weights": [PACKED["strips"]]}),
    "to_device": (ptxlab.to_device, {"packed": 1}),
    "empty": (ptxlab.KVCache.empty, {"batch": 1, "max_pages": 1, "num_kv_heads": 1, "head_dim": 64, "scheme": "kv4",
                                     "k_channel": None, "like": None}),
    "cache": (ptxlab.KVCache, {"pool": CACHE.pool, "block_table": CACHE.block_table, "lengths": CACHE.lengths,
                               "page_size": 16, "head_dim": 64, "scheme": "kv4", "v_channel": None}),
    "gather": (layout.gather, {"cache": CACHE}),
    "activations": (ptxlab.PackedActivations, {"layout": "row_major", "M": 5, "K": 256, "rows": 1, "x_q": X,
                                               "scale": SCALE, "token_sum": SUMS}),
    "weight": (ptxlab.PackedWeight, {**vars(PACKED["dual_mma"])}),
    "experts": (ptxlab.ExpertWeights, {**vars(EXPERTS)}),
    "tensor map": (TensorMap, {"array": np.zeros((16, 128), np.int8), "box": (8, 128), "swizzle": 128}),
    "find": (ptxlab.find, {"name": "dequant_lqq"}),
    "gemm": (ptxlab.gemm_w4a8, {"x_q": None, "x_scale": SCALE, "weight": PER_CHANNEL, "x_sum": SUMS, "bias": None,
                                "out": None, "out_dtype": None, "kernel": None, "backend": "emulator",
                                "workspace": None, "programmatic": False}),
    "atom matrix": (quant.quantize_atom_activations, {"x": W, "group": 64, "outliers": 64, "clip": 0.9,
                                                      "rules": quant.ATOM_CODE}),
    "channel sizes": (quant.channel_sizes, {"x": W, "metric": "max"}),
    "outlier order": (quant.outlier_order, {"sizes": W[0], "outliers": 64, "rules": quant.ATOM_CODE}),
    "int8 blocks": (quant.int8_blocks, {"sizes": np.abs(W[0]), "outlier": 6.0, "most": 0.2, "block": 64}),
    "blocks": (quant.quantize_blocks, {"x": W, "int8": 1, "block": 64}),
    "pack atom": (ptxlab.pack_atom, {"weight": quant.quantize_atom_weight(W, 64, 64), "layout": "strips"}),
    "reordered": (layout.pack_reordered, {"weight": quant.quantize_atom_weight(W, 64, 64), "order": np.arange(256),
                                          "layout": "rows", "int8": None, "clip": 0.9}),
    "reordered weight": (layout.ReorderedWeight, {**vars(REORDERED)}),
    "atom weight": (ptxlab.AtomWeight, {**vars(ATOM["strips"])}),
    "atom activations": (ptxlab.AtomActivations, {**vars(PAIRS)}),
    "gemm w4a4": (ptxlab.gemm_w4a4, {"x": PAIRS, "weight": ATOM["rows"], "bias": None, "out": None, "out_dtype": None,
                                     "backend": "emulator", "programmatic": False}),
    "pack block weight": (ptxlab.pack_block_weight, {"weight": quant.quantize_block_weight(W), "int8": 1,
                                                     "layout": "rows"}),
    "block weight": (ptxlab.BlockWeight, {**vars(BLOCKS)}),
    "block activations": (ptxlab.BlockActivations, {**vars(JOINED)}),
    "gemm w4ax": (ptxlab.gemm_w4ax, {"x": JOINED, "weight": BLOCKS, "bias": None, "out": None, "out_dtype": None,
                                     "backend": "emulator", "programmatic": False}),
    "attention": (ptxlab.attention_kv4, {"q": None, "cache": CACHE, "scale": None, "window": None, "out": None,
                                         "kernel": None, "backend": "emulator", "workspace": None}),
    "append": (ptxlab.append_kv4, {"k": None, "v": None, "cache": CACHE, "slots": None, "rope": None}),
    "rope append": (ptxlab.rope_append_kv4, {"qkv": None, "cache": CACHE, "slots": None, "rope": None, "out": None,
                                             "keys": None, "check": False, "backend": "emulator"}),
    "norm": (ptxlab.rmsnorm_quantize, {"x": HALVES, "gamma": HALVES[0], "residual": None, "eps": 1e-5, "normed": None,
                                       "layout": "row_major", "rows": None, "out": None, "backend": "emulator",
                                       "programmatic": False}),
    "gate": (ptxlab.silu_mul_quantize, {"gate_up": HALVES, "activation": "silu", "backend": "emulator"}),
    "reorder": (ptxlab.reorder_quantize, {"x": HALVES, "place": PLACE, "outliers": 64, "group": 64, "layout": "pairs",
                                          "clip": 0.9, "rules": quant.ATOM_CODE, "out": PAIRS, "backend": "emulator",
                                          "programmatic": False}),
    "reorder norm": (ptxlab.rmsnorm_reorder_quantize, {"x": HALVES, "gamma": HALVES[0], "place": PLACE, "outliers": 64,
                                                       "group": 64, "residual": None, "normed": None, "eps": 1e-5,
                                                       "backend": "emulator"}),
    "reorder gate": (ptxlab.silu_mul_reorder_quantize, {"gate_up": np.tile(HALVES, 2), "place": PLACE, "outliers": 64,
                                                        "group": 64, "activation": "silu", "backend": "emulator"}),
    "reorder blocks": (ptxlab.reorder_quantize, {"x": HALVES, "place": PLACE, "int8": 1, "layout": "joined",
                                                 "out": None, "backend": "emulator", "programmatic": False}),
    "places": (quant.channel_places, {"order": np.arange(8)}),
    "route": (ptxlab.route_tokens, {"tokens": ROWS, "normed": HALVES, "router": HALVES, "k": 2, "out": None,
                                    "backend": "emulator", "programmatic": False}),
    "routed": (ptxlab.RoutedTokens, vars(ROUTED)),
    "combine": (ptxlab.combine_experts, {"results": HALVES, "routed": ROUTED, "out": None, "backend": "emulator"}),
    "config": (Config, vars(LAYER.weights.config)),
    "layer weights": (LayerWeights, {"config": LAYER.weights.config, **LAYER.weights.parts}),
    "layer inputs": (LayerInputs.of, {name: getattr(LAYER, name) for name in GIVEN}),
    "layer": (decode_layer, {**{name: getattr(LAYER, name) for name in GIVEN}, "x": None, "weights": LAYER.weights,
                             "buffers": LAYER.buffers, "backend": "emulator", "programmatic": False}),
    "gemm w8a8": (gemm_w8a8, {"x": ROWS, "weight": EIGHT, "bias": None, "out": None, "out_dtype": None,
                              "backend": "emulator", "programmatic": False}),
    "gemm f16": (gemm_f16, {"x": HALVES, "w": HALVES, "out": None, "backend": "emulator"}),
    "runner": (NumpyRunner, {"model": MODEL, "batch": 1, "context": 20, "chunk": 4, "pages": 1, "head": "int8",
                             "batch_invariant": True}),
    "server": (Server, {"runner": RUNNER}),
    "submit": (Server(RUNNER).submit, {"prompt": [1], "tokens": 2, "ends": (), "temperature": 0.0, "seed": 0,
                                       "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}),
    "float runner": (FloatRunner, {"model": FLOATS, "batch": 1, "context": 20, "chunk": 4, "pages": 1}),
    "parting": (parting, {"runner": RUNNER, "request": Request([1, 2], 2, tokens=[3])}),
    "footprint": (Footprint.of, {"config": TINY_MODEL, "batch": 1, "context": 20, "scheme": "lqq", "group": 32,
                                 "dtype": "float16", "chunk": None, "head": "int8"}),
    "run": (ptxlab.run, {"kernel": "dequant_lqq", "qweight": None, "scale": LQQ.group_scale, "g": 64, "checks": (),
                         "backend": "emulator", "unchecked": False, "seed": 0, "out": None, "out_dtype": None}),
}  # fmt: skip


@pytest.mark.default_cases(
    "lqq",
    "qoq_channel",
    "int4",
    "kv",
    "smooth",
    "pack",
    "unpack",
    "stack",
    "to_device",
    "empty",
    "cache",
    "gather",
    "activations",
    "weight",
    "experts",
    "tensor map",
    "find",
    "gemm",
    "atom matrix",
    "channel sizes",
    "outlier order",
    "int8 blocks",
    "blocks",
    "pack atom",
    "reordered",
    "reordered weight",
    "atom weight",
    "atom activations",
    "pack block weight",
)
@pytest.mark.parametrize("name", CALLS)
def test_every_argument_of_every_kind(name: str) -> None:
    call, arguments = CALLS[name]
    for argument in arguments:
        for thing in THINGS:
            try:
                call(**{**arguments, argument: thing})
            except PtxlabError as error:
                assert "\n" not in str(error) and len(str(error)) < 1000, (argument, error)


GEMM = {"strips": PACKED["strips"].buffers["strips"], "w_scale": LQQ.channel_scale, "x": X, "x_scale": SCALE}


@pytest.mark.default_cases("sums1-int32")
@pytest.mark.parametrize("dtype", [None, "bfloat16", np.float32, "int32"])
@pytest.mark.parametrize("sums", [None, SUMS])
def test_run_uses_all_that_it_is_given(dtype: Any, sums: np.ndarray | None) -> None:
    """The scales are not ignored for the sake of accumulators that nobody asked for."""
    arguments = GEMM if sums is None else {**GEMM, "x_sum": sums}
    output = ptxlab.run("gemm_w4a8_small_sm90", **arguments, g=64, out_dtype=dtype, backend="emulator").outputs["y"]
    spec, _ = ptxlab.find("gemm_w4a8_small_sm90")
    index = {None: 0, "bfloat16": 1, np.float32: 2, "int32": 3}[dtype]
    assert np.array_equal(output, spec.expected({"weight": LQQ, "x": X, "x_scale": SCALE}, {"OUT": index})["y"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_sum": SUMS + np.arange(5, dtype=np.int32)}, rf"x_sum: the sum of token 1 over K is {SUMS[1]} "),
        ({"out_dtype": "int8"}, r"out_dtype: one of float16, bfloat16, float32, int32 \(got int8\)"),
        ({"out": {"x": X}}, r"out: y \(got x\)"),
        ({"out": [X]}, r"out: arrays by name \(got list\)"),
        ({"out": {"y": np.frombuffer(bytes(2 * 5 * 64), np.float16).reshape(5, 64)}}, "y: must be writeable"),
        ({"g": 64.5}, r"g: an integer \(got 64.5\)"),
        ({"g": 0}, "sizes: .* must be a number"),
    ],
)  # fmt: skip
def test_run_refuses_what_it_would_ignore(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ptxlab.run("gemm_w4a8_small_sm90", **{"g": 64, **GEMM, **change}, backend="emulator")


@pytest.mark.parametrize(
    ("order", "weight"),
    [("row_major", PER_CHANNEL), *((order, weight) for order in ("row_major", "tiles") for weight in PACKED.values())],
)
def test_sums_that_belie_their_activations_are_refused(order: str, weight: ptxlab.PackedWeight) -> None:
    wrong = SUMS.copy()
    wrong[3] += 1
    quantised = quant.QuantizedActivations(X, SCALE, wrong)
    packed = layout.pack_activations(quantised, order, 8 if order == "tiles" else None)
    rule = rf"^gemm_w4a8: x_sum: the sum of token 3 over K is {SUMS[3]} \(got x_sum\[3\] = {wrong[3]}\)$"
    with pytest.raises(ArgumentError, match=rule):
        ptxlab.gemm_w4a8(packed, weight=weight, backend="emulator")


def test_sums_that_belie_the_activations_of_experts_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^gemm_w4a8_grouped: x_sum: the sum of token 0 over K is"):
        ptxlab.gemm_w4a8_grouped(
            X, SCALE, EXPERTS, np.array([0, 2, 5], np.int32), x_sum=SUMS + np.int32(1), backend="emulator"
        )
