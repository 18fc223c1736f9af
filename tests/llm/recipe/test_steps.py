"""Steps that leave a decoder's function as it is: rotation, smoothing, reordering; and Hadamard matrices."""

from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError
from ptxlab.llm import recipe
from ptxlab.llm.accuracy.steps import mixing, off_grid
from ptxlab.llm.model import Config, FloatModel
from ptxlab.llm.model.decoder import EXACT, Numerics
from ptxlab.llm.model.numerics import FakeQuantized
from ptxlab.llm.recipe.calibrate import rotate_model

CONFIG = Config(hidden=96, ffn=72, heads=4, kv_heads=2, head_dim=24, layers=2, vocabulary=50, tied_head=True)
BIASED = Config(hidden=40, ffn=24, heads=6, kv_heads=2, head_dim=8, layers=1, vocabulary=30, qkv_bias=True)
TOKENS = np.random.default_rng(0).integers(0, 30, (2, 17))


def logits(model: FloatModel, numerics: Numerics = EXACT) -> Any:
    return model.logits(model.states([TOKENS], numerics)[0])


def map_layers(model: FloatModel, function: Any) -> FloatModel:
    return FloatModel(**{**vars(model), "layers": [function(layer) for layer in model.layers]})


def assert_same_function(model: FloatModel, changed: FloatModel) -> None:
    expected = logits(model)
    np.testing.assert_allclose(logits(changed), expected, rtol=0, atol=1e-9 * np.abs(expected).max())


@pytest.fixture(params=[CONFIG, BIASED], ids=["tied", "biased"])
def model(request: Any) -> FloatModel:
    return FloatModel.random(request.param, dtype=np.float64)


@pytest.mark.parametrize("n", [1, 2, 12, 20, 28, 36, 60, 64, 96, 104, 576, 1536])
def test_hadamard_matrices_are_orthogonal_and_of_one_magnitude(n: int) -> None:
    h = recipe.hadamard(n)
    np.testing.assert_allclose(h @ h.T, np.eye(n), atol=1e-12)
    np.testing.assert_allclose(np.abs(h), n**-0.5)


@pytest.mark.parametrize("n", [0, 3, 6, 172, 1.5, True])
def test_an_order_without_a_hadamard_matrix_is_refused(n: Any) -> None:
    with pytest.raises(ArgumentError, match=r"n: must be a product of known orders"):
        recipe.hadamard(n)


def test_rotation_changes_no_logits(model: FloatModel) -> None:
    H, D = model.config.hidden, model.config.head_dim
    hadamard = recipe.hadamard(D), recipe.hadamard(H)
    rotated = rotate_model(model, hadamard[1], hadamard[0])
    assert_same_function(model, rotated)
    assert rotated.head is not None and not rotated.config.tied_head
    spread = np.abs(rotated.layers[0]["q"]).max() / np.abs(model.layers[0]["q"] * model.layers[0]["input_norm"]).max()
    assert spread < 1  # and it does something


@pytest.mark.parametrize(("start", "rotation"), [("mixed", mixing), ("uniform", recipe.random_orthogonal)])
def test_the_rotation_off_the_grid_changes_no_logits(model: FloatModel, start: str, rotation: Any) -> None:
    rotated = off_grid(model, start)
    assert_same_function(model, rotated)
    np.testing.assert_allclose(rotated.embedding, model.embedding @ rotation(model.config.hidden, 1))
    assert off_grid(model, "file") is model


def test_mixing_makes_every_channel_of_four() -> None:
    q = mixing(96, 1)
    np.testing.assert_allclose(q @ q.T, np.eye(96), atol=1e-12)
    assert set((q != 0).sum(axis=1)) <= {2, 3, 4} and (q != 0).sum() > 3 * 96


def test_a_norm_that_is_not_folded_stops_the_rotation(model: FloatModel) -> None:
    with pytest.raises(ArgumentError, match=r"input_norm: must be folded before"):
        recipe.rotate_stream(model.layers[0], np.eye(model.config.hidden))


def test_smoothing_changes_no_logits_and_levels_the_input_of_down(model: FloatModel) -> None:
    peaks = np.random.default_rng(1).uniform(0, 9, model.config.ffn)
    peaks[3] = 0  # a channel that never spoke
    assert_same_function(model, map_layers(model, lambda layer: recipe.smooth_down(layer, peaks, 0.3, 0.7)[0]))
    _, factor = recipe.smooth_down(model.layers[0], peaks, 1.0, 0.0)
    smooth = peaks / factor
    np.testing.assert_allclose(smooth[peaks > 0], smooth[0])
    assert abs(np.log(factor).mean()) < 1e-12  # the mean scale of up and down stays


def test_smoothing_heads_changes_no_logits_and_levels_the_input_of_o(model: FloatModel) -> None:
    """Query heads that share a KV head have one λ: that of their largest span."""
    config = model.config
    peaks = np.random.default_rng(1).uniform(0.1, 9, (config.heads, config.head_dim))
    peaks[:, 3] = 0  # a channel that never spoke
    assert_same_function(model, map_layers(model, lambda layer: recipe.smooth_heads(layer, peaks, 0.1, 0.9)[0]))
    layer, factor = recipe.smooth_heads(model.layers[0], peaks, 1.0, 0.0)
    assert factor.shape == (config.kv_heads, config.head_dim) and abs(np.log(factor).mean()) < 1e-12
    spans = peaks.reshape(config.kv_heads, -1, config.head_dim).max(axis=1) / factor
    np.testing.assert_allclose(np.delete(spans, 3, axis=1), spans[0, 0])
    np.testing.assert_allclose(layer["v"] * factor.reshape(-1, 1), model.layers[0]["v"])
    by_weight = recipe.smooth_heads(model.layers[0], peaks, 0.0, 1.0)[0]["o"]
    columns = np.abs(by_weight).max(axis=0).reshape(config.kv_heads, -1, config.head_dim).max(axis=1)
    np.testing.assert_allclose(np.delete(columns, 3, axis=1), columns[0, 0])


def test_smooth_keys_changes_no_logits(model: FloatModel) -> None:
    peaks = np.random.default_rng(1).uniform(0.5, 9, (model.config.kv_heads, model.config.head_dim))
    assert_same_function(model, map_layers(model, lambda layer: recipe.smooth_keys(layer, peaks)))


def test_reordering_changes_no_logits_and_sorts(model: FloatModel) -> None:
    rng, config = np.random.default_rng(1), model.config
    of_down, of_o = rng.uniform(size=config.ffn), rng.uniform(size=(config.heads, config.head_dim))

    def reorder(layer: Any) -> Any:
        return recipe.reorder_heads(recipe.reorder_down(layer, of_down), of_o)

    assert_same_function(model, map_layers(model, reorder))
    marked_axes = {**model.layers[0], "down": np.broadcast_to(of_down, model.layers[0]["down"].shape)}
    np.testing.assert_array_equal(recipe.reorder_down(marked_axes, of_down)["down"][0], np.sort(of_down)[::-1])
    of_v = of_o.reshape(config.kv_heads, -1, config.head_dim).max(axis=1)  # of the query heads that share it
    marked_axes = {**model.layers[0], "v": of_v.reshape(-1, 1)}
    order_of_heads = recipe.reorder_heads(marked_axes, of_o)["v"].reshape(of_v.shape)
    np.testing.assert_array_equal(order_of_heads, np.sort(of_v)[:, ::-1])


@pytest.mark.parametrize(
    ("step", "wrong"),
    [
        (lambda layer: recipe.smooth_down(layer, np.ones(5), 0.3, 0.7), "peaks"),
        (lambda layer: recipe.smooth_heads(layer, np.ones((4, 5)), 0.1, 0.9), "peaks"),
        (lambda layer: recipe.smooth_heads(layer, np.ones(96), 0.1, 0.9), "peaks"),
        (lambda layer: recipe.reorder_down(layer, np.ones(5)), "salience"),
        (lambda layer: recipe.smooth_keys(layer, np.ones((1, 24))), "keys_max"),
    ],
)
def test_measurements_of_another_shape_are_refused(step: Any, wrong: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{wrong}: must be "):
        step(FloatModel.random(CONFIG).layers[0])


@pytest.mark.parametrize(
    "setting",
    [
        {"smooth": 0.5},
        {"smooth": (0.5,)},
        {"smooth": (0.3, float("nan"))},
        {"smooth_heads": (0.1, 2)},
        {"smooth_heads": (0.1, 0.9), "rotate_heads": True},
        {"smooth_keys": "much"},
        {"damping": -1},
        {"act_clip": 0},
        {"kept": -1},
        {"kept_bits": 3},
        {"rotate": "left"},
        {"clip": "all"},
        {"acts": 5},
        {"kv": "kv3"},
        {"group": 0, "scheme": "int4"},
    ],
)
def test_settings_that_no_recipe_has(setting: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=f"^{next(iter(setting))}"):
        recipe.Recipe(**setting)


def test_a_recipe_computes_with_its_settings() -> None:
    numerics = recipe.Recipe(acts=4, group=32, kept=16, kept_bits=16, act_clip=0.9, kv="kv8").numerics()
    assert numerics == FakeQuantized(acts=4, kv="kv8", group=32, kept=16, kept_bits=16, clip=0.9)
