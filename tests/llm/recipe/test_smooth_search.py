"""SmoothQuant with a searched strength, as LiquidServe has it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError
from ptxlab.llm.checkpoints import folder
from ptxlab.llm.model import Config, FloatModel
from ptxlab.llm.model.numerics import FakeQuantized, per_token
from ptxlab.llm.recipe import RECIPES, Recipe, search_factor
from ptxlab.llm.recipe.calibrate import quantize_layers, smooth_layer
from ptxlab.llm.recipe.quantize import quantize_model
from ptxlab.lowbit.quant import quantize_lqq

CONFIG = Config(hidden=128, ffn=192, heads=2, kv_heads=1, head_dim=64, layers=2, vocabulary=60, qkv_bias=True)
TEXT = np.random.default_rng(0).integers(0, 60, (3, 40))
STRENGTHS = tuple(i / 10 for i in range(11))


def model_with_outliers() -> FloatModel:
    """Make a model some of whose channels are far larger than others behind the norms and ahead of down."""
    model = FloatModel.random(CONFIG)
    layers = []
    for layer in model.layers:
        far = {
            name: np.where(np.arange(128) % 40 == 3, 60, 1).astype(np.float32) for name in ("input_norm", "post_norm")
        }
        rows = np.where(np.arange(192) % 50 == 7, 40, 1).astype(np.float32)
        layers.append({**layer, **far, "up": layer["up"] * rows[:, None]})
    return FloatModel(**{**vars(model), "layers": layers})


def test_the_strength_with_the_least_error_is_taken() -> None:
    """The test computes every strength's error with the weights of `quantize_lqq`."""
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((50, 128)).astype(np.float32), rng.standard_normal((64, 128)).astype(np.float32)
    x[:, ::30] *= 50
    peaks = np.abs(x).max(axis=0)

    def round_weight(w: Any) -> Any:
        return quantize_lqq(w, 64).dequantize()

    errors = []
    for alpha in STRENGTHS:
        factor = peaks**alpha / np.abs(w).max(axis=0) ** (1 - alpha)
        factor = (factor / np.exp(np.log(factor).mean())).astype(np.float32)
        errors.append(np.square(per_token(x / factor) @ round_weight(w * factor).T - x @ w.T).sum())
    alpha, factor = search_factor(x, w, peaks, STRENGTHS, per_token, round_weight)
    assert alpha == STRENGTHS[int(np.argmin(errors))] and 0 < alpha < 1 and min(errors) < errors[0] / 2
    assert factor.shape == (128,) and np.isclose(np.log(factor).mean(), 0)


def test_the_search_keeps_the_layers_function() -> None:
    model, recipe = model_with_outliers(), RECIPES["liquid"]
    states = [model.embed(TEXT)]
    layer = model.layers[0]
    changed = smooth_layer(model, layer, states, recipe, 0)
    right = model.run_layer(states[0], layer, index=0)
    error = np.abs(model.run_layer(states[0], changed, index=0) - right).max()
    assert error < 1e-4 * np.abs(right).max()
    assert {name for name in layer if not np.array_equal(layer[name], changed[name])} == {
        *("input_norm", "post_norm", "q", "k", "v", "gate", "up", "down")
    }


def test_it_loses_less_than_rounding_alone() -> None:
    """The model has outliers that rounding to nearest pays for; the error is that of a layer's output."""
    model, errors = model_with_outliers(), {}
    x = model.embed(TEXT)
    right = model.run_layer(x, model.layers[0], index=0)
    for name in ("rtn", "liquid"):
        quantized = next(iter(quantize_layers(model, TEXT, RECIPES[name].but(kv=None))))
        assert quantized is not None
        output = model.run_layer(x, quantized.floats, FakeQuantized(kv=None), index=0)
        errors[name] = float(np.square(output - right).sum())
    assert errors["liquid"] < 0.75 * errors["rtn"]  # half was seen


def test_a_folder_of_the_recipe(tmp_path: Path) -> None:
    """The folder has groups of 64 and a static cache of 8 bits, and was made without GPTQ."""
    quantize_model(FloatModel.random(CONFIG), TEXT, RECIPES["liquid"], tmp_path / "out")
    model = folder.load(tmp_path / "out")
    assert (model.layers[0].qkv.scheme, model.layers[0].qkv.group, model.cache) == ("lqq", 64, "kv8_channel")
    assert model.recipe["smooth_search"] == list(STRENGTHS) and not model.recipe["gptq"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"smooth": (0.3, 0.7)}, r"smooth: must be None where smooth_search is given"),
        ({"smooth_search": ()}, r"smooth_search: must be a tuple of strengths, or None \(got \(\)\)"),
        ({"smooth_search": [0.5]}, r"smooth_search: must be a tuple of strengths, or None \(got \[0.5\]\)"),
        (
            {"scheme": "int4"},
            r"smooth_search: needs scheme lqq, qoq, qoq_channel and 8-bit .* \(got scheme int4, acts 8\)",
        ),
        ({"acts": None}, r"smooth_search: needs scheme .* \(got scheme lqq, acts None\)"),
        ({"smooth_search": (0.5, 1.5)}, r"smooth_search: must be a number in 0..1 \(got 1.5\)"),
    ],
)
def test_bad_strengths_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Recipe(**{"smooth_search": (0.5,), **changes})
