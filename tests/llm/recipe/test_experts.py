"""Recipes of a model with experts: each is calibrated on the tokens that take it, or rounded where these are few."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.llm import recipe as steps
from ptxlab.llm.accuracy.audit_inputs import audit_model
from ptxlab.llm.accuracy.steps import measure, rows
from ptxlab.llm.checkpoints import folder
from ptxlab.llm.checkpoints.open import dequantize_model
from ptxlab.llm.model import Config, FloatModel, floats
from ptxlab.llm.model.decoder import Layer, route
from ptxlab.llm.recipe import RECIPES, Recipe, calibrate, quantize
from ptxlab.lowbit import reference
from tests.support.dispatching_array import DispatchingArray

CONFIG = Config(
    hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, layers=2, vocabulary=60, experts=4, chosen_experts=2
)
MODEL = FloatModel.random(CONFIG)
TEXT = np.random.default_rng(0).integers(0, 60, (6, 40))
STATES = [MODEL.embed(sample[None]) for sample in TEXT]
LQQ = RECIPES["lqq"].but(group=32)


@pytest.fixture
def few_tokens_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "LEAST_TOKENS", 20)


def taken_by(model: FloatModel, stream: list[Any], layer: Layer, expert: int) -> Any:
    """Collect an expert's inputs, [rows, H]: the tokens behind attention that take it, of each state."""
    rows = []
    for x in stream:
        y = reference.rms_norm(x, layer["post_norm"], CONFIG.eps).astype(np.float32)[0]
        rows.append(y[[*route(y @ layer["router"].T, 2)][expert].row])
    return np.concatenate(rows)


@pytest.mark.usefixtures("few_tokens_suffice")
def test_rotation_smoothing_and_reordering_do_not_change_the_function() -> None:
    model = FloatModel.random(CONFIG, dtype=np.float64)
    prepared_model = calibrate.prepare_model(model, LQQ)
    states = [prepared_model.embed(sample[None]) for sample in TEXT]
    layers = []
    for layer in prepared_model.layers:
        layers.append(calibrate.smooth_and_reorder(prepared_model, layer, states, LQQ))
        assert not np.allclose(layers[-1]["up.1"], layer["up.1"])
        states = [prepared_model.run_layer(x, layer) for x in states]
    shaped = replace(prepared_model, layers=layers)
    logits, right = (of.logits(of.states([TEXT])[0]) for of in (shaped, model))
    np.testing.assert_allclose(logits, right, atol=1e-9 * np.abs(right).max())


@pytest.mark.usefixtures("few_tokens_suffice")
def test_an_expert_is_rounded_on_the_tokens_that_take_it() -> None:
    """The last expert follows the order of the layer.

    q, k, v and o are quantised before, and its own gate and up before down.
    """
    recipe = Recipe(clip="output", gptq=True, group=32)
    quantised = calibrate.quantize_layer(MODEL, MODEL.layers[0], STATES, recipe)
    numerics = recipe.numerics()
    without_ffn = {**quantised.floats, **{f"down.{e}": 0 * quantised.floats[f"down.{e}"] for e in range(4)}}
    stream = [MODEL.run_layer(x, without_ffn, numerics) for x in STATES]
    x = taken_by(MODEL, stream, quantised.floats, 3)
    for name, parts, inputs in (
        ("gate_up.3", ("gate.3", "up.3"), x),
        ("down.3", ("down.3",), reference.apply_gate(
            numerics.input(x) @ np.concatenate([quantised.floats["gate.3"], quantised.floats["up.3"]]).T, "silu"
        ).astype(np.float32)),
    ):  # fmt: skip
        w, seen = np.concatenate([MODEL.layers[0][part] for part in parts]), numerics.input(inputs)
        hessian = (seen.T @ seen).astype(np.float64)
        right = steps.gptq(w, hessian, steps.LQQGrid(w, 32, clip=True))
        values = np.concatenate([quantised.floats[part] for part in parts])
        assert np.mean(values == right.values) > 0.99  # sums of batches differ from one sum by a rounding
        error = steps.objective(w, right.values, hessian).sum() / steps.objective(w, 0 * w, hessian).sum()
        assert quantised.errors[name] == pytest.approx(error, rel=0.01)
    assert quantised.floats.keys() == MODEL.layers[0].keys()


def test_a_searched_strength_is_that_of_all_experts_for_their_common_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function stays; gates, ups and the router take one λ, a down its own, or none with few tokens."""
    monkeypatch.setattr(calibrate, "LEAST_TOKENS", 105)
    model = FloatModel.random(CONFIG, dtype=np.float64)
    layer, states = {**model.layers[0]}, [model.embed(sample[None]) for sample in TEXT]
    layer["post_norm"] = np.where(np.arange(64) % 20 == 3, 60, 1) * layer["post_norm"]
    smoothed = calibrate.smooth_layer(model, layer, states, RECIPES["liquid"].but(group=32), 0)
    factor = layer["post_norm"] / smoothed["post_norm"]
    assert factor.max() > 2 * factor.min()
    for name in ("router", "gate.0", "gate.3"):
        np.testing.assert_allclose(smoothed[name], layer[name] * factor, rtol=1e-9)
    right = model.run_layer(states[0], layer)
    np.testing.assert_allclose(model.run_layer(states[0], smoothed), right, atol=1e-9 * np.abs(right).max())
    ups = [np.allclose(smoothed[f"up.{e}"], layer[f"up.{e}"] * factor) for e in range(4)]
    assert any(ups) and not all(ups)


def test_an_expert_with_few_tokens_is_rounded_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is expert 0 of four; it is not smoothed, nor do its channels change places."""
    monkeypatch.setattr(calibrate, "LEAST_TOKENS", 105)
    layer = MODEL.layers[0]
    quantised = calibrate.quantize_layer(MODEL, layer, STATES, LQQ.but(rotate=None))
    stream = [MODEL.run_layer(x, {**layer, **{f"down.{e}": 0 * layer["down.0"] for e in range(4)}}) for x in STATES]
    counts = [len(taken_by(MODEL, stream, layer, expert)) for expert in range(4)]
    rounded = [expert for expert, count in enumerate(counts) if count < 105]
    assert rounded == [0], counts
    assert [e for e in range(4) if quantised.errors[f"down.{e}"] is None] == rounded
    assert [e for e in range(4) if quantised.errors[f"gate_up.{e}"] is None] == rounded
    for expert in rounded:
        w = np.concatenate([layer[f"gate.{expert}"], layer[f"up.{expert}"]])
        right = steps.rounded(w, None, steps.LQQGrid(w, 32, clip=True))
        np.testing.assert_array_equal(
            np.concatenate([quantised.floats[f"{part}.{expert}"] for part in ("gate", "up")]), right.values
        )


def test_an_expert_that_no_token_takes_is_rounded(tmp_path: Path) -> None:
    """The text has one token."""
    errors = quantize.quantize_model(MODEL, TEXT[:1, :1], LQQ, tmp_path / "out")
    assert [name for name, error in errors[0].items() if error is not None] == ["qkv", "o"]
    assert folder.load(tmp_path / "out").layers[0].gate_up.E == 4


@pytest.mark.usefixtures("few_tokens_suffice")
@pytest.mark.default_cases("rtn")
@pytest.mark.parametrize("name", ["rtn", "lqq", "qoq", "qoq_channel", "liquid"])
def test_a_model_becomes_a_folder_that_computes_as_it_was_calibrated(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name].but(group=32)
    errors = quantize.quantize_model(MODEL, TEXT, recipe, tmp_path / "out")
    assert list(errors[1])[:4] == ["qkv", "o", "gate_up.0", "down.0"] and len(errors[1]) == 10
    assert all((error is None) == (name in ("rtn", "liquid")) for error in errors[1].values())
    loaded_model = dequantize_model(folder.load(tmp_path / "out"))
    first = next(calibrate.quantize_layers(calibrate.prepare_model(MODEL, recipe), TEXT, recipe))
    assert first is not None
    for part in ("q", "o", "gate.2", "up.0", "down.3"):
        np.testing.assert_array_equal(first.floats[part], loaded_model.layers[0][part])
    np.testing.assert_allclose(first.floats["router"], loaded_model.layers[0]["router"], atol=1e-3)


@pytest.mark.full
@pytest.mark.usefixtures("few_tokens_suffice")
def test_the_whole_recipe_beats_rounding() -> None:
    """Compare squared errors of the logits; residual channels have very different sizes, as in trained models."""
    scale = np.where(np.arange(64) % 31 == 7, 12, 0.3).astype(np.float32)
    assert MODEL.head is not None
    model, errors = replace(MODEL, embedding=MODEL.embedding * scale, head=MODEL.head / 4), {}
    exact_logits = model.logits(model.states([TEXT])[0])
    for name in ("rtn", "lqq"):
        recipe = RECIPES[name].but(group=32)
        prepared_model = calibrate.prepare_model(model, recipe)
        layers = [layer.floats for layer in calibrate.quantize_layers(prepared_model, TEXT, recipe) if layer]
        calibrated = replace(prepared_model, layers=layers)
        logits = calibrated.logits(calibrated.states([TEXT], recipe.numerics())[0])
        errors[name] = float(np.square(logits - exact_logits).mean())
    assert errors["lqq"] < 0.6 * errors["rtn"]


@pytest.mark.full
@pytest.mark.usefixtures("few_tokens_suffice")
def test_a_run_that_was_killed_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    def kill(label: str) -> None:
        raise KeyboardInterrupt

    recipe = LQQ.but(rotate=None)
    quantize.quantize_model(MODEL, TEXT, recipe, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        quantize.quantize_model(MODEL, TEXT, recipe, tmp_path / "out", progress=kill)
    quantize.quantize_model(MODEL, TEXT, recipe, tmp_path / "out")
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes(), path.name


@pytest.mark.usefixtures("few_tokens_suffice")
@pytest.mark.default_cases("lqq")
@pytest.mark.parametrize("name", ["lqq", "liquid"])
def test_a_model_of_device_arrays_becomes_the_same_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "is_device_array", lambda array: isinstance(array, DispatchingArray))
    monkeypatch.setattr(gpu, "device_info", lambda: None)
    monkeypatch.setattr(gpu, "to_device", DispatchingArray)
    monkeypatch.setattr(gpu, "to_host", DispatchingArray.get)
    monkeypatch.setattr(floats, "_ELEMENTS", 1)  # batches of one sequence on the device too, as on the host
    for place, model in (("host", MODEL), ("device", MODEL.to_device())):
        quantize.quantize_model(model, TEXT, RECIPES[name].but(group=32), tmp_path / place)
    for path in (tmp_path / "host").iterdir():
        assert path.read_bytes() == (tmp_path / "device" / path.name).read_bytes(), path.name


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("atom", "W4A4 is for dense models: grouped GEMMs are W4A8's"),
        ("fmpq", "W4A4 is for dense models: grouped GEMMs are W4A8's"),
    ],
)
def test_recipes_for_dense_models_are_refused(name: str, rule: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=rf"^recipe: {rule} \(got 4 experts\)$"):
        quantize.quantize_model(MODEL, TEXT, RECIPES[name], tmp_path / "out")


def test_measurements_of_w4a4_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^model: must be dense: W4A4 has no experts \(got 4 experts\)$"):
        audit_model(MODEL, TEXT)
    with pytest.raises(ArgumentError, match=r"^model: must be dense: some rows are W4A4's \(got 4 experts\)$"):
        next(measure(MODEL, lambda seed: TEXT, {"text": TEXT}, rows()))
