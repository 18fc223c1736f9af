"""Quantise a model by a recipe, layer by layer; each layer is calibrated on the output of the quantised layers before.

Memory holds one layer's weights, the residual stream of the calibration text twice (before the layer and after
attention), and the temporaries of the batches that are computed at once: one on a GPU, up to eight on a CPU.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ptxlab.errors import ArgumentError, naming
from ptxlab.llm.model.decoder import EXACT, ROUTER, Layer, Numerics, expert_of
from ptxlab.llm.model.floats import FloatModel, MappedLayers, Tokens
from ptxlab.llm.model.numerics import FakeQuantized
from ptxlab.llm.model.quantized import CACHE_CONSTANTS, fused_parts
from ptxlab.llm.model.threads import map_streams
from ptxlab.llm.recipe import (
    Recipe,
    fold_norms,
    gptq,
    hadamard,
    objective,
    reorder_down,
    reorder_heads,
    rotate_ends,
    rotate_heads,
    rotate_stream,
    round_to_nearest,
    search_factor,
    smooth_down,
    smooth_heads,
    smooth_input,
    smooth_keys,
)
from ptxlab.llm.recipe.grids import SHRINKS
from ptxlab.llm.recipe.settings import ROTATIONS
from ptxlab.llm.recipe.smoothing import matrices_by_input
from ptxlab.lowbit.quant.fmpq import int8_blocks
from ptxlab.lowbit.quant.kv import calibrate_kv
from ptxlab.lowbit.quant.tiled import with_arrays
from ptxlab.validate import require_integer

LEAST_TOKENS = 256  # tokens of the calibration text that an expert needs; with fewer it is rounded to nearest
SEARCHED = 1024  # rows of a product's input on which smoothing strengths are compared
CLIP_TOKENS = 2048  # tokens, in the text's first sequences, on which the clip ratios of q and k are compared
CLIP_RATIOS = (None, *SHRINKS)  # None: no ratio; each group has the levels with the least error of the product


class InputChannels(NamedTuple):
    """Order in which a matrix takes the channels of its 4-bit input.

    Attributes:
        order: the input channels in the order in which the product reads them, [K].
        int8: how many groups at the end of that order are INT8 (COMET); None with Atom.
    """

    order: Any
    int8: int | None


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer after the recipe.

    Attributes:
        floats: the layer with dequantised weights.
        weights: quantised matrices by the names of `fused_parts`, each None in a format that no kernel takes.
        errors: squared error of each matrix's output over the calibration data, relative to the squared output; None
            without calibration, and of an expert that fewer than `LEAST_TOKENS` tokens take.
        inputs: how each matrix takes its input, by the same names; empty unless the recipe reorders 4-bit inputs.
    """

    floats: Layer
    weights: dict[str, Any]
    errors: dict[str, float | None]
    inputs: dict[str, InputChannels] = field(default_factory=dict)


def draw_samples(tokens: Tokens, count: int = 128, length: int = 1024, seed: int = 0) -> Tokens:
    """Draw samples [count, length] of tokens [T] from random places. Raises ArgumentError for a shorter text."""
    for name, number, smallest in (("count", count, 1), ("length", length, 1), ("seed", seed, 0)):
        require_integer(name, number, smallest)
    if len(tokens) < length:
        raise ArgumentError("length", f"at most the text's {len(tokens)} tokens", length)
    starts = np.random.default_rng(seed).integers(0, len(tokens) - length + 1, count)
    drawn_tokens: Tokens = tokens[starts[:, None] + np.arange(length)]
    return drawn_tokens


def rotate_model(model: FloatModel, rotation: Any = None, head_rotation: Any = None) -> FloatModel:
    """Rotate a model's residual stream and its heads' values; layers are rotated when they are read.

    What the model computes does not change.

    Args:
        model: a model in floats.
        rotation: of the stream, orthogonal [H, H], or None.
        head_rotation: of every head's values, orthogonal [D, D], or None.
    """
    rotation, head_rotation = (
        None if q is None else np.asarray(q, like=model.embedding) for q in (rotation, head_rotation)
    )

    def rotate(layer: Layer) -> Layer:
        layer = layer if rotation is None else rotate_stream(fold_norms(layer), rotation)
        return layer if head_rotation is None else rotate_heads(layer, head_rotation)

    rotated_model = replace(model, layers=MappedLayers(model.layers, rotate))
    if rotation is None:
        return rotated_model
    embedding, final_norm, head = rotate_ends(model.embedding, model.final_norm, model.head, rotation)
    config = replace(model.config, tied_head=False)  # the final norm is folded into the head, not the embedding
    return replace(rotated_model, config=config, embedding=embedding, final_norm=final_norm, head=head)


def prepare_model(model: FloatModel, recipe: Recipe) -> FloatModel:
    """Rotate a model as the recipe says, without quantising it.

    Raises ArgumentError for a recipe that is for dense models alone where there are experts.
    """
    config = model.config
    if config.experts and recipe.reorders:  # an order of input channels is W4A4's
        raise ArgumentError("recipe", "W4A4 is for dense models: grouped GEMMs are W4A8's", f"{config.experts} experts")
    stream = ROTATIONS[recipe.rotate](config.hidden) if recipe.rotate else None
    return rotate_model(model, stream, hadamard(config.head_dim) if recipe.rotate_heads else None)


def quantize_layers(
    model: FloatModel,
    tokens: Tokens,
    recipe: Recipe,
    load_finished: Callable[[int], Layer | None] = lambda index: None,
) -> Iterator[QuantizedLayer | None]:
    """Quantise every layer of a prepared model by the recipe, in order.

    Args:
        model: as `prepare_model` gives it.
        tokens: the calibration text, [S, T]; a recipe that needs none takes [0, T].
        recipe: the steps.
        load_finished: returns the floats of a layer that was quantised before, else None. A finished layer yields
            None. It is called again after a layer was yielded: if the caller has stored that layer meanwhile, the next
            one is calibrated on the output of the stored weights.
    """
    require_text(recipe, tokens)
    states = [model.embed(batch) for batch in model.batches(tokens)]
    numerics = recipe.numerics()
    for index in range(len(model.layers)):
        floats = load_finished(index)
        if floats is None:
            with naming(f"layer {index}"):
                quantized_layer = quantize_layer(model, model.layers[index], states, recipe, index)
            yield quantized_layer
            floats = load_finished(index) or quantized_layer.floats
        else:
            yield None
        run = partial(model.run_layer, layer=floats, numerics=numerics, index=index)
        for i, x in enumerate(map_streams(run, states)):
            states[i] = x  # at once, so that memory does not hold the stream before and after the layer


def require_text(recipe: Recipe, tokens: Tokens) -> None:
    """Raise ArgumentError for a recipe that calibrates, without a sample."""
    if recipe.is_calibrated and not len(tokens):
        raise ArgumentError("tokens", "this recipe needs a text to calibrate on", "none")


def quantize_layer(
    model: FloatModel, layer: Layer, states: Sequence[Any], recipe: Recipe, index: int | None = None
) -> QuantizedLayer:
    """Quantise one layer of a prepared model.

    Matrices that read the same input are quantised together, in the order of the layer. Their inputs thus have the
    errors of the matrices quantised before them. The matrices of an expert are calibrated on the tokens that take it;
    an expert that fewer than `LEAST_TOKENS` take is rounded to nearest.

    Args:
        model: as `prepare_model` gives it.
        layer: its matrices in floats.
        states: the calibration text's residual stream before the layer, [B, T, H] of every batch.
        recipe: the steps.
        index: the layer's number, which a model needs where only some layers have the window.
    """
    # Constants that a cache was given by an earlier quantisation would be used instead of this recipe's.
    layer = {name: part for name, part in layer.items() if name not in CACHE_CONSTANTS}
    layer = smooth_and_reorder(model, layer, states, recipe, index)
    if recipe.smooth_search is not None:
        layer = smooth_layer(model, layer, states, recipe, index)
    new_layer: dict[str, Any] = dict(layer)
    numerics = recipe.numerics()
    weights: dict[str, Any] = {}
    errors: dict[str, float | None] = {}
    input_channels: dict[str, InputChannels] = {}
    attention_outputs: list[Any] = []  # what o reads
    middle_states: list[Any] = []  # the stream after attention
    for fused, names in fused_parts(model.config).items() if recipe.scheme else ():
        w, expert = np.concatenate([new_layer[name] for name in names]), expert_of(fused)
        hessian: Any = None  # stays None without inputs to calibrate on
        order = int8_groups = None
        searches_ratios = fused == "qkv" and recipe.clip_block
        if recipe.needs_hessian:
            run: Callable[..., Any] = partial(model.run_layer, index=index)
            streams = states
            if fused not in ("qkv", "o"):  # attention, which takes longest, need not run again
                run, streams = partial(model.run_feed_forward, only=expert), middle_states
            input_batches: Iterable[Any] = capture_inputs(names[0], run, streams, new_layer, numerics)
            if fused == "o":
                input_batches = attention_outputs = [*input_batches]
            if expert is not None:  # few tokens count as none: no Hessian, so the expert is rounded to nearest
                input_batches = [*input_batches]
                input_batches = input_batches if sum(map(len, input_batches)) >= LEAST_TOKENS else []
            hessian, peaks = statistics(input_batches, numerics)
            if recipe.reorders:
                order, int8_groups = channel_order(recipe, hessian, peaks)
                input_channels[fused] = InputChannels(order, int8_groups)
                w, hessian = w[:, order], hessian[order][:, order]
        ratios = block_ratios(model, new_layer, states, recipe, hessian, index) if searches_ratios else None
        grid = recipe.grid(w, ratios)
        if recipe.gptq and hessian is not None:
            rounded_matrix = gptq(w, hessian, grid, damping=recipe.damping)
        else:
            rounded_matrix = round_to_nearest(w, hessian, grid)
        errors[fused] = None if hessian is None else _relative_error(w, rounded_matrix.values, hessian)
        weights[fused] = grid.weight(rounded_matrix.q, rounded_matrix.constants)
        values = rounded_matrix.values if order is None else rounded_matrix.values[:, np.argsort(order)]
        for name in names:
            rows = len(new_layer[name])
            new_layer[name], values = values[:rows].astype(np.float32), values[rows:]
            if order is not None:  # `FakeQuantized` finds order and number of INT8 groups in the layer
                new_layer[f"{name}_order"] = order
            if int8_groups is not None:
                new_layer[f"{name}_int8"] = np.asarray(int8_groups, like=order)
        if fused == "qkv" and recipe.calibrates_cache:
            new_layer |= cache_constants(model, new_layer, states, recipe, index)
        if fused == "o" and attention_outputs:
            # Each output is dropped once it is used, so that memory never holds all of them beside all middle states.
            middle_states = [x + numerics.product("o", attention_outputs.pop(0), new_layer) for x in states]
    if recipe.scheme is None and recipe.calibrates_cache:
        new_layer |= cache_constants(model, new_layer, states, recipe, index)
    quantized_layer = QuantizedLayer(new_layer, weights, errors, input_channels)
    return quantized_layer if recipe.int8 is None else fold_down_order(quantized_layer)


def cache_constants(
    model: FloatModel, layer: Layer, states: Sequence[Any], recipe: Recipe, index: int | None = None
) -> dict[str, Any]:
    """Calibrate a cache by channel: (scale, zero) f32 [2, Hkv, D] of keys and values, by names of `CACHE_CONSTANTS`.

    They are of all tokens of the calibration text. `states` is the stream before the layer, [B, T, H] of every batch.
    The layer's q, k and v are those that the model will have: quantised, unless the recipe leaves weights in floats.
    """
    assert recipe.kv is not None
    numerics = recipe.numerics()

    def read_ranges(x: Any) -> dict[str, Any]:
        """Return the least and the largest of every channel, [2, Hkv, D]."""
        ranges: dict[str, Any] = {}

        def keep(name: str, x: Any) -> None:
            if name in ("keys", "values"):
                ranges[name] = np.stack([x.min(axis=(0, 1)), x.max(axis=(0, 1))])

        with contextlib.suppress(_ReachedError):
            model.run_layer(x, layer, _Tap(numerics, keep, until="values"), index=index)
        return ranges

    batches = [*map_streams(read_ranges, states)]
    # `calibrate_kv` takes the extremes of every batch as if they were tokens: the range over all of them is the text's.
    ranges_of_text = (np.concatenate([ranges[kind] for ranges in batches]) for kind in ("keys", "values"))
    return {name: np.stack(calibrate_kv(x, recipe.kv)) for name, x in zip(CACHE_CONSTANTS, ranges_of_text, strict=True)}


def block_ratios(
    model: FloatModel, layer: Layer, states: Sequence[Any], recipe: Recipe, H: Any, index: int | None = None
) -> Any:
    """Return the clip ratio of every row of q, k and v, [N], by `search_block`.

    NaN leaves a row to the search of each group's levels (`Grid.ratio`): the rows of v, and of q or k without a ratio.
    """
    ratios = search_block(model, layer, states, recipe, H, index)
    return np.concatenate([np.full_like(layer[name][:, 0], ratios.get(name) or np.nan) for name in ("q", "k", "v")])


def search_block(
    model: FloatModel, layer: Layer, states: Sequence[Any], recipe: Recipe, H: Any, index: int | None = None
) -> dict[str, float | None]:
    """Return the clip ratios of q and k with the least squared error of the attention block's output (QServe Eq. 10).

    One of `CLIP_RATIOS` for q, with k in floats; then one for k, with q quantised. Weights are rounded to nearest; the
    block is attention with the product o, on the first `CLIP_TOKENS` of the stream, with the recipe's activations and
    cache. A cache by channel has no constants yet; it is calibrated on the block's own keys and values.

    Args:
        model: as `prepare_model` gives it.
        layer: its matrices in floats, after smoothing and reordering.
        states: the stream before the layer, [B, T, H] of every batch.
        recipe: has the grid and the numerics.
        H: Xᵀ X of the layer's input, [K, K]: the Hessian.
        index: the layer's number, as `FloatModel.run_layer` takes it.
    """
    numerics, trial = recipe.numerics(), dict(layer)
    run = partial(model.run_layer, index=index)
    sequences = max(1, CLIP_TOKENS // states[0].shape[1])
    streams = [  # the text's first sequences, from as many batches as hold them
        x[: sequences - preceding_sequences]
        for preceding_sequences, x in _count_sequences(states)
        if preceding_sequences < sequences
    ]

    def block_outputs() -> list[Any]:
        return [numerics.product("o", x, trial) for x in capture_inputs("o", run, streams, trial, numerics)]

    def round_at(name: str, ratio: float | None) -> Any:
        w = layer[name]
        rows = None if ratio is None else np.full_like(w[:, 0], ratio)
        return round_to_nearest(w, H, recipe.grid(w, rows)).values.astype(w.dtype)

    # The target: all weights are still in floats, activations and cache are those of the trials.
    target_outputs, ratios = block_outputs(), dict[str, float | None]()
    for name in ("q", "k"):
        smallest = np.inf
        for ratio in CLIP_RATIOS:
            trial[name] = round_at(name, ratio)
            pairs = zip(block_outputs(), target_outputs, strict=True)
            error = sum(float(np.square(y - target, dtype=np.float64).sum()) for y, target in pairs)
            if error < smallest:
                smallest, ratios[name] = error, ratio
        trial[name] = round_at(name, ratios[name])
    return ratios


def _count_sequences(states: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Yield every batch [B, T, H] with the number of sequences before it."""
    preceding_sequences = 0
    for x in states:
        yield preceding_sequences, x
        preceding_sequences += len(x)


def channel_order(recipe: Recipe, H: Any, largest: Any) -> tuple[Any, int | None]:
    """Sort a matrix's input channels, the largest last; return the order and the number of its INT8 groups.

    Atom sorts by the squares over the calibration data, the diagonal of H = Xᵀ X, and has a fixed number of outliers,
    so no such groups. COMET sorts by the largest magnitude, `largest` [K].
    """
    if recipe.int8 is None:
        return np.argsort(np.diagonal(H), kind="stable"), None
    assert recipe.group is not None
    int8_groups = int8_blocks(largest, recipe.outlier, recipe.int8, block=recipe.group)
    return np.argsort(largest, kind="stable"), int8_groups


def fold_down_order(layer: QuantizedLayer) -> QuantizedLayer:
    """Fold the order of down's input into the rows of gate and up; the layer computes the same.

    The other orders cannot be folded: the residual stream has one order for all layers, and a head's values stay
    together. There the kernel that quantises the input reorders it; with Atom it reorders down's input too.
    """
    order, int8_groups = layer.inputs["down"]
    F = len(order)
    floats: dict[str, Any] = dict(layer.floats)
    floats |= {name: floats[name][order] for name in ("gate", "up")} | {"down": floats["down"][:, order]}
    gate_up, rows = layer.weights["gate_up"], np.concatenate([order, F + order])
    floats["down_order"] = np.arange(F, like=order)  # the input comes in order; packing and numerics still look one up
    weights = {**layer.weights, "gate_up": with_arrays(gate_up, lambda array: array[rows])}
    input_channels = {**layer.inputs, "down": InputChannels(floats["down_order"], int8_groups)}
    return replace(layer, floats=floats, weights=weights, inputs=input_channels)


def smooth_and_reorder(
    model: FloatModel, layer: Layer, states: Sequence[Any], recipe: Recipe, index: int | None = None
) -> Layer:
    """Smooth and reorder a layer's channels as the recipe says; what the layer computes does not change."""
    if not recipe.needs_peaks:
        return layer
    D = model.config.head_dim
    peaks: dict[str, Any] = {}
    token_counts: dict[str, int] = {}

    def peaks_of(x: Any) -> dict[str, tuple[Any, int]]:
        """Find max|x| of every channel of the keys and of the inputs of o and down, each with its number of tokens.

        With experts every down has its own, `down.0` and so on; the layer then runs to its end.
        """
        peaks_by_name: dict[str, tuple[Any, int]] = {}

        def keep(name: str, x: Any) -> None:
            if name.partition(".")[0] in ("keys", "o", "down"):
                rows = np.abs(x).reshape(-1, x.shape[-1] if name != "keys" else x.shape[-2] * D)
                peaks_by_name[name] = rows.max(axis=0), len(rows)

        with contextlib.suppress(_ReachedError):
            model.run_layer(x, layer, _Tap(EXACT, keep, until="down"), index=index)
        return peaks_by_name

    for batch_peaks in map_streams(peaks_of, states):
        for name, (largest_values, count) in batch_peaks.items():
            peaks[name] = np.maximum(peaks.get(name, 0), largest_values)
            token_counts[name] = token_counts.get(name, 0) + count
    if recipe.smooth_keys is not None:
        layer = smooth_keys(layer, peaks["keys"].reshape(-1, D), recipe.smooth_keys)
    for name, largest_values in peaks.items():
        expert = expert_of(name)
        is_down, has_few_tokens = name.partition(".")[0] == "down", token_counts[name] < LEAST_TOKENS
        if not is_down or (expert is not None and has_few_tokens):
            continue
        if recipe.smooth is not None:
            layer, factor = smooth_down(layer, largest_values, *recipe.smooth, expert=expert)
            largest_values = largest_values / factor
        if recipe.reorder:
            layer = reorder_down(layer, largest_values, expert)
    if recipe.smooth_heads is not None:
        layer, factor = smooth_heads(layer, peaks["o"].reshape(-1, D), *recipe.smooth_heads)
        queries_per_kv_head = peaks["o"].size // factor.size
        peaks["o"] = peaks["o"].reshape(-1, D) / np.repeat(factor, queries_per_kv_head, axis=0)
    return reorder_heads(layer, peaks["o"].reshape(-1, D)) if recipe.reorder else layer


def smooth_layer(
    model: FloatModel, layer: Layer, states: Sequence[Any], recipe: Recipe, index: int | None = None
) -> Layer:
    """Search SmoothQuant's strength for the inputs of qkv, of gate and up, and of down, and smooth them.

    Each input is divided by its λ (`recipe.smoothing`), the factor that belongs to the best strength; what the layer
    computes does not change. The error is that of the text's first `SEARCHED` rows, with INT8 activations and
    weights rounded to nearest; peaks are those of the whole text. With experts, gates and ups have one λ, searched for
    all of them on all tokens; the input of a down is not smoothed where fewer than `LEAST_TOKENS` tokens take it.
    """
    assert recipe.smooth_search is not None
    numerics, input_matrices = recipe.numerics(), matrices_by_input(model.config)

    def read_rows(x: Any) -> dict[str, Any]:
        """Return what each matrix reads of a batch, [B·T, K]."""
        batch_inputs: dict[str, Any] = {}

        def keep(name: str, x: Any) -> None:
            if name in input_matrices:
                batch_inputs[name] = x.reshape(-1, x.shape[-1])

        with contextlib.suppress(_ReachedError):
            model.run_layer(x, layer, _Tap(EXACT, keep, until="down"), index=index)
        return batch_inputs

    def round_weight(w: Any) -> Any:
        return round_to_nearest(w, None, recipe.grid(w)).values.astype(w.dtype)

    rows_by_input: dict[str, list[Any]] = {name: [] for name in input_matrices}
    token_counts = dict.fromkeys(input_matrices, 0)
    peaks: dict[str, Any] = {}
    for batch_inputs in map_streams(read_rows, states):
        for name, rows in batch_inputs.items():
            missing_rows = SEARCHED - sum(map(len, rows_by_input[name]))
            if missing_rows > 0:
                rows_by_input[name].append(rows[:missing_rows].copy())  # a view would keep the whole batch in memory
            peaks[name] = np.maximum(peaks.get(name, 0), np.abs(rows).max(axis=0))
            token_counts[name] += len(rows)
    for name, rows_of_input in rows_by_input.items():
        if expert_of(name) is not None and token_counts[name] < LEAST_TOKENS:
            continue
        matrices = input_matrices[name]
        # The router reads this input too, but in floats: smoothing costs it no error.
        w = np.concatenate([layer[part] for part in matrices if part != ROUTER])
        options: dict[str, Any] = {"quantize_input": numerics.input, "quantize_weight": round_weight}
        _, factor = search_factor(np.concatenate(rows_of_input), w, peaks[name], recipe.smooth_search, **options)
        layer = smooth_input(layer, matrices, factor)
    return layer


def statistics(batches: Iterable[Any], numerics: FakeQuantized) -> tuple[Any, Any]:
    """Compute H = Xᵀ X, float64 [K, K], and max|x| of every channel, [K], of a matrix's input in every batch, [.., K].

    8-bit inputs are rounded first, as the product reads them. 4-bit ones are not: their groups follow an order of
    channels that may be chosen by these statistics. Both are None without a batch.
    """
    hessian: Any = None
    peaks: Any = None
    for batch in batches:
        x = (numerics.input(batch) if numerics.acts == 8 else batch).reshape(-1, batch.shape[-1])
        if hessian is None:
            hessian, peaks = np.zeros((x.shape[1], x.shape[1]), like=x), np.zeros_like(x[0])
        hessian += x.T @ x
        np.maximum(peaks, np.abs(x).max(axis=0), out=peaks)
    return hessian, peaks


def capture_inputs(
    name: str, run: Callable[..., Any], streams: Sequence[Any], layer: Layer, numerics: Numerics
) -> Iterator[Any]:
    """Yield the input that a matrix reads in every batch, when `run` is given these streams [B, T, H].

    `run` is a layer or its second half. Batches in which no token takes the matrix's expert are left out.
    """

    def capture_input(stream: Any) -> Any:
        inputs: dict[str, Any] = {}
        with contextlib.suppress(_ReachedError):
            run(stream, layer, _Tap(numerics, inputs.__setitem__, until=name))
        return inputs.get(name)

    return (x for x in map_streams(capture_input, streams) if x is not None)


class _ReachedError(Exception):
    """The tap has seen the input it was made for; the rest of the layer need not run."""


class _Tap(Numerics):
    """Pass the inputs of matrices and router, the `keys` and the `values`, each with its name, to `callback`.

    The layer stops before the product of the matrix `until`; with "values", before the cache rounds them.
    """

    def __init__(self, inner: Numerics, callback: Callable[[str, Any], None], until: str = "") -> None:
        self.inner, self.callback, self.until = inner, callback, until

    def product(self, name: str, x: Any, layer: Layer) -> Any:
        self.callback(name, x)
        if name == self.until:
            raise _ReachedError
        return self.inner.product(name, x, layer)

    def router_logits(self, y: Any, layer: Layer) -> Any:
        self.callback(ROUTER, y)
        return self.inner.router_logits(y, layer)

    def round_to_cache(self, keys: Any, values: Any, layer: Layer) -> tuple[Any, Any]:
        self.callback("keys", keys)
        self.callback("values", values)
        if self.until == "values":
            raise _ReachedError
        return self.inner.round_to_cache(keys, values, layer)


def _relative_error(w: Any, values: Any, H: Any) -> float:
    """Return the squared error of a product's output with these values of w, relative to the squared output."""
    total = float(objective(w, np.zeros_like(values), H).sum())
    return float(objective(w, values, H).sum()) / total if total else 0.0
