"""Calibration by hand: what each step is given, on which inputs a matrix is rounded, and what the next layer sees."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ptxlab.llm import recipe as steps
from ptxlab.llm.model import Config, FloatModel, decoder
from ptxlab.llm.model.decoder import EXACT, Layer, Numerics
from ptxlab.llm.model.quantized import FUSED
from ptxlab.llm.recipe import Recipe, calibrate

MODEL = FloatModel.random(
    Config(hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, layers=2, vocabulary=60, qkv_bias=True)
)
LAYER = MODEL.layers[0]
TEXT = np.random.default_rng(0).integers(0, 60, (3, 20))
STATES = [MODEL.embed(sample[None]) for sample in TEXT]


class Recorded(Numerics):
    """Keeps the input of every matrix by its name, and the keys, a row per token."""

    def __init__(self, inner: Numerics) -> None:
        self.inner, self.seen = inner, defaultdict(list)

    def product(self, name: str, x: Any, layer: Layer) -> Any:
        self.seen[name].append(x.reshape(-1, x.shape[-1]))
        return self.inner.product(name, x, layer)

    def round_to_cache(self, keys: Any, values: Any, layer: Any) -> tuple[Any, Any]:
        self.seen["keys"].append(keys.reshape(-1, 32))
        return self.inner.round_to_cache(keys, values, layer)


def record_inputs(layer: Layer, numerics: Numerics = EXACT) -> dict[str, list[Any]]:
    """Run the layer on each of `STATES`; return the inputs of its matrices and `keys` by name, one array per sample."""
    recorded = Recorded(numerics)
    for x in STATES:
        MODEL.run_layer(x, layer, recorded)
    return recorded.seen


def assert_same(layer: Layer, expected: Layer) -> None:
    assert layer.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(layer[name], array, err_msg=name)


def test_steps_get_the_largest_magnitudes_of_all_samples() -> None:
    largest = {name: np.abs(np.concatenate(inputs)).max(axis=0) for name, inputs in record_inputs(LAYER).items()}
    right = steps.smooth_keys(LAYER, largest["keys"].reshape(2, 16), 0.4)
    right, factor = steps.smooth_down(right, largest["down"], 0.3, 0.8)
    right = steps.reorder_heads(steps.reorder_down(right, largest["down"] / factor), largest["o"].reshape(4, 16))
    assert_same(
        calibrate.smooth_and_reorder(MODEL, LAYER, STATES, Recipe(smooth_keys=0.4, smooth=(0.3, 0.8), reorder=True)),
        right,
    )


def test_heads_are_smoothed_before_they_are_reordered() -> None:
    largest = np.abs(np.concatenate(record_inputs(LAYER)["o"])).max(axis=0).reshape(4, 16)
    right, factor = steps.smooth_heads(LAYER, largest, 0.1, 0.9)
    right = steps.reorder_heads(
        steps.reorder_down(right, np.abs(np.concatenate(record_inputs(LAYER)["down"])).max(axis=0)),
        largest / np.repeat(factor, 2, axis=0),
    )
    assert_same(
        calibrate.smooth_and_reorder(MODEL, LAYER, STATES, Recipe(smooth_heads=(0.1, 0.9), reorder=True)), right
    )


def test_smoothed_heads_lose_less_where_the_input_of_o_has_outliers() -> None:
    """Compare squared errors of the block's output, with 8-bit activations and o rounded per row."""
    rows = np.where(np.arange(32) % 11 == 5, 50, 1).astype(np.float32)  # channels of values far larger than the others
    layer = {**LAYER, "v": LAYER["v"] * rows[:, None], "v_bias": LAYER["v_bias"] * rows}
    errors = []
    for exponents in (None, (0.5, 0.5)):
        recipe = Recipe(smooth_heads=exponents, scheme="qoq_channel", kv=None)
        smoothed = {**calibrate.smooth_and_reorder(MODEL, layer, STATES, recipe)}
        weight = smoothed["o"]
        smoothed["o"] = steps.round_to_nearest(weight, None, recipe.grid(weight)).values
        inputs = record_inputs(layer)["o"], record_inputs(smoothed)["o"]
        outputs = [recipe.numerics().input(x) @ smoothed["o"].T for x in inputs[1]]
        pairs = zip(inputs[0], outputs, strict=True)
        errors.append(sum(float(np.square(y - x @ layer["o"].T).sum()) for x, y in pairs))
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(clip="output", group=32),
        Recipe(clip="output", gptq=True, scheme="qoq_channel", protective_range=100),
        Recipe(clip="output", scheme="qoq", group=32, protective_range=100, acts=4),
        Recipe(clip="output", scheme="int4", acts=4, group=16, kept=16, kept_bits=16, act_clip=0.9),
    ],
    ids=["lqq", "channel", "qoq", "int4"],
)
def test_matrices_are_rounded_on_inputs_with_the_errors_of_those_before(recipe: Recipe) -> None:
    """INT8 activations as the GEMM sees them; the kept channels are those of the largest squares."""
    quantized, floats, grids = calibrate.quantize_layer(MODEL, LAYER, STATES, recipe), dict(LAYER), {
        "lqq": lambda w: steps.LQQGrid(w, 32, clip=True),
        "qoq": lambda w: steps.QoQGrid(w, 32, clip=True, protective_range=100),
        "qoq_channel": lambda w: steps.ChannelGrid(w, clip=True),
        "int4": lambda w: steps.SymmetricGrid(w, 16, kept=16, kept_bits=16, clip=True),
    }  # fmt: skip
    for fused, names in FUSED.items():
        numerics, w = recipe.numerics(), np.concatenate([LAYER[name] for name in names])
        inputs = [numerics.input(x) if recipe.acts == 8 else x for x in record_inputs(floats, numerics)[names[0]]]
        hessian = np.sum([(x.T @ x).astype(np.float64) for x in inputs], axis=0)
        order = np.argsort(np.diagonal(hessian), kind="stable") if recipe.kept else np.arange(w.shape[1])
        w, hessian = w[:, order], hessian[order][:, order]
        expected = (steps.gptq if recipe.gptq else steps.rounded)(w, hessian, grids[recipe.scheme](w))
        values = np.concatenate([quantized.floats[name] for name in names])
        np.testing.assert_array_equal(values[:, order], expected.values, err_msg=fused)
        error = steps.objective(w, expected.values, hessian).sum() / steps.objective(w, 0 * w, hessian).sum()
        assert quantized.errors[fused] == pytest.approx(error)
        floats |= {name: quantized.floats[name] for name in names}
        if recipe.kept:
            floats |= {f"{name}_order": order for name in names}
    assert_same(quantized.floats, floats)


def test_attention_runs_twice_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs for smoothing, and for o's inputs.

    The matrices behind it take the stream that the second run gives.
    """
    ran: list[int] = []
    attention = decoder.causal_attention
    monkeypatch.setattr(decoder, "causal_attention", lambda *of: ran.append(1) or attention(*of))
    calibrate.quantize_layer(MODEL, LAYER, STATES, Recipe(smooth=(0.3, 0.8), clip="output", group=32, gptq=True))
    assert len(ran) == 2 * len(STATES)


def test_the_next_layer_sees_what_the_quantised_ones_make() -> None:
    recipe = Recipe(clip="output", group=32)
    first, second = calibrate.quantize_layers(MODEL, TEXT, recipe)
    assert first is not None and second is not None
    states = [MODEL.run_layer(x, first.floats, recipe.numerics()) for x in STATES]
    assert_same(second.floats, calibrate.quantize_layer(MODEL, MODEL.layers[1], states, recipe).floats)


@pytest.mark.parametrize(("stream", "heads"), [("hadamard", False), ("random", True), (None, True)])
def test_a_recipe_rotates_what_it_says(stream: str | None, heads: bool) -> None:
    rotation = {"hadamard": steps.hadamard(64), "random": steps.random_orthogonal(64), None: None}[stream]
    expected = calibrate.rotate_model(MODEL, rotation, steps.hadamard(16) if heads else None)
    rotated = calibrate.prepare_model(MODEL, Recipe(rotate=stream, rotate_heads=heads))
    assert_same(rotated.layers[1], expected.layers[1])
    np.testing.assert_array_equal(rotated.embedding, expected.embedding)


def test_samples_are_from_all_over_the_text() -> None:
    samples = calibrate.draw_samples(np.arange(1000), 100, 10, seed=1)
    assert samples.shape == (100, 10) and (np.diff(samples) == 1).all()
    assert samples.min() < 50 and samples.max() > 950 and len(set(samples[:, 0])) > 80
    assert (samples == calibrate.draw_samples(np.arange(1000), 100, 10, seed=1)).all()
    assert (samples != calibrate.draw_samples(np.arange(1000), 100, 10, seed=2)).any()
    assert calibrate.draw_samples(np.arange(10), 2, 10).tolist() == [list(range(10))] * 2


def test_each_layer_is_calibrated_with_its_own_window() -> None:
    recipe = Recipe(smooth=(0.3, 0.8), clip="output", group=32, gptq=True)
    plain, windowed, always_windowed = (
        replace(MODEL, config=replace(MODEL.config, window=window, window_layers=layers))
        for window, layers in ((None, None), (3, (1,)), (3, None))
    )
    first, second = calibrate.quantize_layers(windowed, TEXT, recipe)
    assert first is not None and second is not None
    assert_same(first.floats, calibrate.quantize_layer(plain, LAYER, STATES, recipe).floats)
    states = [plain.run_layer(x, first.floats, recipe.numerics()) for x in STATES]
    expected, without_window = (
        calibrate.quantize_layer(model, MODEL.layers[1], states, recipe).floats for model in (always_windowed, plain)
    )
    assert_same(second.floats, expected)
    assert not np.array_equal(expected["o"], without_window["o"])
