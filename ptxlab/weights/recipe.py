"""A model through a recipe: calibrated and quantised layer by layer, each on what the quantised ones before it give."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ptxlab.model.floats import FloatModel
from ptxlab.quant.numerics import FakeQuantized
from ptxlab.quant.recipe import gptq as gptq_steps
from ptxlab.quant.recipe.grids import ChannelGrid, Grid, LQQGrid, QoQGrid, SymmetricGrid
from ptxlab.quant.recipe.reorder import reorder_down, reorder_heads
from ptxlab.quant.recipe.rotation import fold_norms, hadamard, rotate_ends, rotate_heads, rotate_stream
from ptxlab.quant.recipe.smoothing import smooth_down, smooth_keys
from ptxlab.reference import Layer, Numerics

FUSED = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    scheme: str | None = "lqq"
    group: int | None = 64
    protective_range: int = 119
    rotate: bool = True
    rotate_heads: bool = True
    smooth: tuple[float, float] | None = (0.3, 0.7)
    smooth_keys: float | None = 0.5
    reorder: bool = True
    clip: bool = True
    gptq: bool = True
    acts: int | None = 8
    kv: str | None = "kv4"
    kept: int = 0
    act_clip: float = 1.0

    def numerics(self) -> FakeQuantized:
        return FakeQuantized(acts=self.acts, kv=self.kv, group=self.group, kept=self.kept, clip=self.act_clip)

    def grid(self, w: Any) -> Grid:
        if self.scheme == "lqq":
            return LQQGrid(w, self.group, clip=self.clip, protective_range=self.protective_range)
        if self.scheme == "qoq":
            return QoQGrid(w, self.group, clip=self.clip, protective_range=self.protective_range)
        if self.scheme == "qoq_channel":
            return ChannelGrid(w, clip=self.clip)
        if self.scheme == "int8":
            return SymmetricGrid(w, None, bits=8, clip=self.clip)
        return SymmetricGrid(w, self.group, kept=self.kept, clip=self.clip)


class _Reached(Exception):
    pass


class _Tap(Numerics):
    def __init__(self, inner: Numerics, seen: Callable[[str, Any], None], until: str | None = None) -> None:
        self.inner, self.seen, self.until = inner, seen, until

    def product(self, name: str, x: Any, layer: Layer) -> Any:
        self.seen(name, x)
        if name == self.until:
            raise _Reached
        return self.inner.product(name, x, layer)

    def cached(self, keys: Any, values: Any) -> Any:
        self.seen("keys", keys)
        return self.inner.cached(keys, values)


def turned_ends(model: FloatModel, rotation: Any) -> FloatModel:
    e, n, h = rotate_ends(model.embedding, model.final_norm, model.head, rotation)
    return replace(model, embedding=e, final_norm=n, head=h, config=replace(model.config, tied_head=False))


def quantized(model: FloatModel, tokens: Any, recipe: Recipe, log=lambda *a: None) -> FloatModel:
    config = model.config
    rotation = np.asarray(hadamard(config.hidden), like=model.embedding) if recipe.rotate else None
    per_head = np.asarray(hadamard(config.head_dim), like=model.embedding) if recipe.rotate_heads else None
    new = turned_ends(model, rotation) if rotation is not None else model
    states = [new.embedding[t][None] for t in tokens]
    layers = []
    for i, layer in enumerate(model.layers):
        layer = fold_norms(layer)
        if rotation is not None:
            layer = rotate_stream(layer, rotation)
        if per_head is not None:
            layer = rotate_heads(layer, per_head)
        layer, states = quantize_layer(model, layer, states, recipe)
        layers.append(layer)
        log(i)
    return replace(new, layers=layers)


def quantize_layer(model, layer, states, recipe):
    config, numerics = model.config, recipe.numerics()
    if recipe.smooth or recipe.smooth_keys or recipe.reorder:
        peaks = {}
        def seen(name, x):
            if name in ("o", "down", "keys"):
                p = np.abs(x).reshape(-1, *(x.shape[-2:] if name == "keys" else x.shape[-1:])).max(axis=0)
                peaks[name] = np.maximum(peaks[name], p) if name in peaks else p
        for x in states:
            model.run_layer(x, layer, _Tap(Numerics(), seen))
        if recipe.smooth_keys:
            layer = smooth_keys(layer, peaks["keys"], recipe.smooth_keys)
        if recipe.smooth:
            before = layer["up"]
            layer = smooth_down(layer, peaks["down"], *recipe.smooth)
            peaks["down"] = peaks["down"] * (np.abs(layer["up"]).max(axis=1)/np.maximum(np.abs(before).max(axis=1),1e-30))
        if recipe.reorder:
            layer = reorder_down(layer, peaks["down"])
            layer = reorder_heads(layer, peaks["o"].reshape(-1, config.head_dim))
    if recipe.scheme is not None:
        layer = dict(layer)
        needs = recipe.gptq or recipe.clip or recipe.kept
        for fused, names in FUSED.items():
            w = np.concatenate([layer[n] for n in names])
            K = w.shape[1]
            H = np.eye(K)
            order = None
            if needs:
                H = np.zeros((K, K))
                def seen(name, x):
                    nonlocal H
                    if name == names[0]:
                        x = numerics.input(x) if numerics.acts == 8 else x
                        x = x.reshape(-1, K)
                        H += x.T @ x
                for x in states:
                    try: model.run_layer(x, layer, _Tap(numerics, seen, names[0]))
                    except _Reached: pass
            if recipe.kept:
                order = np.argsort(np.diagonal(H), kind="stable")
                w, H = w[:, order], H[order][:, order]
            grid = recipe.grid(w)
            found = gptq_steps.gptq(w, H, grid) if recipe.gptq else gptq_steps.rounded(w, H, grid)
            v = found.values.astype(np.float32)
            if order is not None:
                v = v[:, np.argsort(order)]
            for n in names:
                layer[n], v = v[: len(layer[n])], v[len(layer[n]):]
                if order is not None: layer[f"{n}_order"] = order
    numerics = recipe.numerics()
    states = [model.run_layer(x, layer, numerics) for x in states]
    return layer, states
