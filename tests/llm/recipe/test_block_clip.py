"""Clip ratios of q and k by the error of the attention block's output (QServe Eq. 10)."""

from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError
from ptxlab.llm.model import Config, FloatModel
from ptxlab.llm.model.decoder import EXACT
from ptxlab.llm.recipe import RECIPES, ChannelGrid, LQQGrid, QoQGrid, Recipe, calibrate, objective
from ptxlab.llm.recipe.grids import SHRINKS
from ptxlab.lowbit import quant
from ptxlab.lowbit.reference.attention import attention, rope

CONFIG = Config(hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, layers=1, vocabulary=60, qkv_bias=True)
TEXT = np.random.default_rng(0).integers(0, 60, (3, 20))
RECIPE = Recipe(scheme="qoq_channel", clip="output", clip_block=True, acts=None, kv=None)


def model_with_large_channels() -> FloatModel:
    """Make a model whose queries and keys each have one channel far larger than the others, which softmax saturates."""
    model = FloatModel.random(CONFIG, seed=3, dtype=np.float64)
    layer = dict(model.layers[0])
    for name, row in (("q", 5), ("k", 21)):
        layer[name] = layer[name].copy()
        layer[name][row] *= 12
    return FloatModel(**{**vars(model), "layers": [layer]})


def quantize_clipped(w: Any, ratio: float) -> Any:
    """Quantise w per channel with both ends of every row's range times the ratio, by `quantize_qoq_channel`."""
    low, high = (ratio * end(w, axis=1, keepdims=True) for end in (np.min, np.max))
    weight = quant.quantize_qoq_channel(np.clip(w, low, high).astype(np.float32))
    scale, zero = (constant.astype(np.float64)[:, None] for constant in (weight.scale, weight.zero))
    return (np.rint(w / scale + zero).clip(0, 15) - zero) * scale


def attention_block(model: FloatModel, layer: Any, x: Any) -> Any:
    """Compute the attention and the product o of one sequence [T, H] by the reference for one sequence."""
    y = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + CONFIG.eps) * layer["input_norm"]
    q, k, v = ((y @ layer[name].T + layer[f"{name}_bias"]).reshape(len(x), -1, 16) for name in ("q", "k", "v"))
    q, k = (rope(rows, *model.config.rope_tables(len(x))) for rows in (q, k))
    return attention(q, k, v, scale=16**-0.5)[0].reshape(len(x), -1) @ layer["o"].T


def errors_of(model: FloatModel, name: str, chosen: dict[str, float] | None = None) -> tuple[list[float], list[float]]:
    """Compute the errors of every ratio of a matrix: of the block's output, and of the matrix' own."""
    layer = dict(model.layers[0])
    states = [model.embedding[sample] for sample in TEXT]
    exact = [attention_block(model, layer, x) for x in states]
    trial = layer | {matrix: quantize_clipped(layer[matrix], ratio) for matrix, ratio in (chosen or {}).items()}
    of_block, of_matrix = [], []
    for ratio in SHRINKS:
        trial[name] = quantize_clipped(layer[name], ratio)
        outputs = [attention_block(model, trial, x) for x in states]
        of_block.append(sum(float(np.square(y - right).sum()) for y, right in zip(outputs, exact, strict=True)))
        of_matrix.append(float(objective(layer[name], trial[name], gram(model)).sum()))
    return of_block, of_matrix


def gram(model: FloatModel) -> Any:
    reads = calibrate.capture_inputs("q", model.run_layer, [model.embed(TEXT)], model.layers[0], EXACT)
    return calibrate.statistics(reads, RECIPE.numerics())[0]


def search(model: FloatModel, **changes: Any) -> dict[str, float | None]:
    states = [model.embed(sample[None]) for sample in TEXT]
    return calibrate.search_block(model, model.layers[0], states, RECIPE.but(**changes), gram(model))


def test_the_ratio_has_the_least_error_of_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search q with k in floats, then k; every error is computed here. The matrix' own errors choose other ratios."""
    monkeypatch.setattr(calibrate, "CLIP_RATIOS", SHRINKS)
    model = model_with_large_channels()
    ratios = search(model)
    of_q, q_alone = errors_of(model, "q")
    of_k, k_alone = errors_of(model, "k", {"q": SHRINKS[int(np.argmin(of_q))]})
    by_block, by_matrix = (
        {"q": SHRINKS[int(np.argmin(q))], "k": SHRINKS[int(np.argmin(k))]}
        for q, k in ((of_q, of_k), (q_alone, k_alone))
    )
    assert ratios == by_block == {"q": 1.0, "k": 0.85}
    assert by_matrix == {"q": 0.9, "k": 0.95}


def test_a_ratio_is_taken_where_the_block_loses_less_by_it_than_by_searched_levels() -> None:
    """The layer's q and k become what the ratio gives, and v keeps the levels of its own output."""
    model = model_with_large_channels()
    layer = model.layers[0]
    assert search(model) == {"q": None, "k": 0.85}
    states = [model.embed(sample[None]) for sample in TEXT]
    block = calibrate.quantize_layer(model, layer, states, RECIPE)
    without = calibrate.quantize_layer(model, layer, states, RECIPE.but(clip_block=False))
    np.testing.assert_allclose(block.floats["k"], quantize_clipped(layer["k"], 0.85), rtol=1e-6, atol=1e-9)
    assert not np.array_equal(block.floats["k"], without.floats["k"])
    for name in ("q", "v"):
        np.testing.assert_array_equal(block.floats[name], without.floats[name])
    right, errors = [attention_block(model, layer, x[0]) for x in states], []
    for floats in (block.floats, without.floats):
        half = {**layer, **{name: floats[name] for name in ("q", "k")}}
        outputs = [attention_block(model, half, x[0]) for x in states]
        errors.append(sum(float(np.square(y - exact).sum()) for y, exact in zip(outputs, right, strict=True)))
    assert errors[0] < errors[1]


@pytest.mark.parametrize(
    ("kind", "group"), [(ChannelGrid, None), (LQQGrid, 32), (QoQGrid, 32)], ids=["channel", "lqq", "qoq"]
)
def test_a_grid_gives_fixed_rows_the_levels_of_the_clipped_range(kind: Any, group: int | None) -> None:
    """Plain rounding of the clipped weights gives them; other rows are searched as without a ratio."""
    w = np.random.default_rng(2).standard_normal((6, 64))
    make = lambda w, clip: kind(w, clip=clip) if group is None else kind(w, group, clip=clip)  # noqa: E731
    ratio = np.array([1, 0.8, np.nan, 0.6, np.nan, 0.95])
    grid, searched, plain = make(w, True), make(w, True), make(w, False)
    grid.ratio = ratio
    for index, (start, stop) in enumerate(grid.bounds):
        columns = w[:, start:stop].T
        ones = np.ones(len(columns))
        _, mixed = grid.choose(index, columns, ones)
        _, free = searched.choose(index, columns, ones)
        low, high = ratio * columns.min(axis=0), ratio * columns.max(axis=0)
        _, fixed = plain.choose(index, np.where(np.isnan(ratio), columns, columns.clip(low, high)), ones)
        for constants, of_search, of_range in zip(mixed, free, fixed, strict=True):
            np.testing.assert_array_equal(constants, np.where(np.isnan(ratio), of_search, of_range))


def test_a_search_takes_the_first_sequences_of_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_with_large_channels()
    read: list[tuple[int, ...]] = []
    run = calibrate.capture_inputs
    monkeypatch.setattr(calibrate, "capture_inputs", lambda *of: read.extend(x.shape for x in of[2]) or run(*of))
    monkeypatch.setattr(calibrate, "CLIP_TOKENS", 60)
    monkeypatch.setattr(calibrate, "CLIP_RATIOS", (1.0,))
    batches = [model.embed(np.concatenate([TEXT, TEXT])[i : i + 2]) for i in (0, 2, 4)]
    calibrate.search_block(model, model.layers[0], batches, RECIPE, gram(model))
    assert read == [(3, 20, 64)] + 3 * [(2, 20, 64), (1, 20, 64)]  # what `gram` read, then the block three times


def test_recipes_that_have_it() -> None:
    """QServe's recipe as in the paper has it; the released one does not clip."""
    assert [name for name, recipe in RECIPES.items() if recipe.clip_block] == ["qoq", "qoq_channel"]
    assert Recipe.to_json(RECIPES["qoq"])["clip_block"] is True


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"clip": "weights"}, "clip weights, scheme lqq"),
        ({"clip": None}, "clip None, scheme lqq"),
        ({"clip": "output", "scheme": "int4", "acts": 4}, "clip output, scheme int4"),
    ],
)
def test_recipes_without_it_are_refused(changes: dict[str, Any], got: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^clip_block: needs clip output and scheme lqq, .* \(got {got}\)"):
        Recipe(**{"clip_block": True, **changes})
