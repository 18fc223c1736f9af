"""What each step of the recipes does to a model's perplexity: the rows of the table and their measurement."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.llm.model.cache_formats import CACHE_FORMATS
from ptxlab.llm.model.config import Config
from ptxlab.llm.model.floats import FloatModel, Tokens, perplexity
from ptxlab.llm.recipe import RECIPES, Recipe, random_orthogonal
from ptxlab.llm.recipe.calibrate import QuantizedLayer, prepare_model, quantize_layers, rotate_model
from ptxlab.llm.recipe.systems import SYSTEMS

SCHEMA = 1
STARTS = ("mixed", "uniform", "file")
TOKENS = 1024  # of `gemm_bytes`
SHARES = (0.0, 0.1, 0.2, 0.4, 1.0)  # of COMET's blocks in INT8
SMOOTHED_HEADS = (0.1, 0.9)  # exponents for o's input: QServe §4.3.2 has a migration strength near 0
_FLOAT = Recipe(scheme=None, acts=None, kv=None)


@dataclass(frozen=True)
class AccuracyRow:
    """A row of the table: a step of a ladder, on top of the steps before it; `repeats`: measured with several seeds."""

    ladder: str
    step: str
    recipe: Recipe
    repeats: bool = False

    @property
    def name(self) -> str:
        """`g64/GPTQ`."""
        return f"{self.ladder}/{self.step}"


def rows() -> list[AccuracyRow]:
    """Return every row of the table in order. The first, in floats, is the baseline of the others."""
    return [
        AccuracyRow("float", "float32", _FLOAT),
        *_alone(),
        *_caches(),
        *_w4a8kv4(),
        *_schemes(),
        *_qoq(),
        *_atom(),
        *_fmpq(),
        *(AccuracyRow("systems", system.name, system.settings, repeats=True) for system in SYSTEMS),
    ]


def _alone() -> Iterator[AccuracyRow]:
    yield AccuracyRow("alone", "W8A8", _FLOAT.but(scheme="int8", acts=8))
    yield AccuracyRow("alone", "A8", _FLOAT.but(acts=8))
    yield AccuracyRow("alone", "KV8", _FLOAT.but(kv="kv8"))
    yield AccuracyRow("alone", "KV4", _FLOAT.but(kv="kv4"))


def _caches() -> Iterator[AccuracyRow]:
    """Yield a row for each format of the KV cache, everything else in floats."""
    for step, cache_scheme, smooth_keys in (
        ("KV4", "kv4", None),
        ("KV4, keys rotated", "kv4_keys_rotated", None),
        ("KV4, rotation", "kv4_rotated", None),
        ("KV4, SmoothAttention", "kv4", 0.5),
        ("KV4, keys rotated, SmoothAttention", "kv4_keys_rotated", 0.5),
        ("KV4, rotation and centred keys", "kv4_rotated_centred", None),
        ("KIVI: keys by channel of 64 tokens", "kivi4", None),
        ("K8V4", "k8v4", None),
        ("FP8 e4m3, scale 1", "fp8", None),
        ("K8V4, values rotated", "k8v4_rotated", None),
        ("KV8", "kv8", None),
    ):
        yield AccuracyRow("cache", step, _FLOAT.but(kv=cache_scheme, smooth_keys=smooth_keys))


def _w4a8kv4() -> Iterator[AccuracyRow]:
    """Yield the steps of W4A8KV4, each on top of those before it.

    They are rotation, smoothing, SmoothAttention, groups, reordering, clipping and GPTQ. QServe §6.4 (Fig. 16) has
    another order: 4-bit weights, rotation, clipping, KV4, SmoothAttention, groups, reordering. Here clipping is late,
    because its levels are chosen for the final groups, and the cache has 4 bits from the start.
    """
    full_recipe, rounding_recipe = RECIPES["qoq_channel"].but(clip_block=False), Recipe(scheme="qoq_channel")
    recipe = rounding_recipe
    yield AccuracyRow("channel", "round to nearest", rounding_recipe)
    for step, names in (
        ("rotation", ("rotate",)),
        ("rotation of heads", ("rotate_heads",)),
        ("smoothing", ("smooth",)),
        ("SmoothAttention", ("smooth_keys",)),
    ):
        recipe = _copy_settings(recipe, full_recipe, names)
        yield AccuracyRow("channel", step, recipe)
    yield AccuracyRow("channel", "clipping", _copy_settings(recipe, full_recipe, ("clip",)))
    yield AccuracyRow("channel", "GPTQ", full_recipe, repeats=True)
    for group in (64, 32):
        full_recipe, ladder = RECIPES["lqq"].but(group=group), f"g{group}"
        yield AccuracyRow(ladder, "round to nearest", RECIPES["rtn"].but(group=group))
        recipe = full_recipe.but(reorder=False, clip=None, gptq=False)  # rotated and smoothed already
        yield AccuracyRow(ladder, "groups", recipe)
        yield AccuracyRow(ladder, "reordering", recipe := _copy_settings(recipe, full_recipe, ("reorder",)))
        yield AccuracyRow(ladder, "clipping", _copy_settings(recipe, full_recipe, ("clip",)))
        yield AccuracyRow(ladder, "GPTQ", full_recipe, repeats=True)


def _schemes() -> Iterator[AccuracyRow]:
    """Yield rows that compare LQQ with QoQ in groups of 64, and ways to choose their constants."""
    full_recipe = RECIPES["lqq"]
    rounding_recipe = full_recipe.but(clip=None, gptq=False)
    for ladder, recipe in (("schemes, rounded", rounding_recipe), ("schemes, GPTQ", full_recipe)):
        yield AccuracyRow(ladder, "LQQ", recipe)
        yield AccuracyRow(ladder, "QoQ", recipe.but(scheme="qoq"))
        yield AccuracyRow(ladder, "LQQ, range 120", recipe.but(protective_range=120))
    yield AccuracyRow("schemes, rounded", "LQQ, constants by squared error", rounding_recipe.but(clip="weights"))
    yield AccuracyRow(
        "schemes, rounded", "QoQ, constants by squared error", rounding_recipe.but(scheme="qoq", clip="weights")
    )


def _qoq() -> Iterator[AccuracyRow]:
    """Yield rows for QServe's two settings, groups of 64 and per channel.

    First every matrix is clipped by its own output; then q and k by the block's (Eq. 10); then o is smoothed in place
    of rotated heads.
    """
    for ladder, name in (("QoQ in groups of 64", "qoq"), ("QoQ per channel", "qoq_channel")):
        recipe = RECIPES[name]
        yield AccuracyRow(ladder, "every matrix clipped by its own output", recipe.but(clip_block=False))
        yield AccuracyRow(ladder, "q and k clipped by the block's output", recipe)
        smoothed_recipe = recipe.but(rotate_heads=False, smooth_heads=SMOOTHED_HEADS)
        yield AccuracyRow(ladder, "o smoothed, heads not rotated", smoothed_recipe)


def _atom() -> Iterator[AccuracyRow]:
    """Yield the steps of W4A4 in the order of Atom's Table 3."""
    recipe = Recipe(scheme="int4", acts=4, group=None, kv=None)
    yield AccuracyRow("Atom", "round to nearest", recipe)
    for step, changes in (
        ("64 outlier channels in 16 bits", {"kept": 64, "kept_bits": 16}),
        ("outliers in INT8", {"kept_bits": 8}),
        ("groups of 64", {"group": 64}),
        ("clipping", {"clip": "output", "act_clip": 0.9}),
        ("GPTQ", {"gptq": True}),
        ("KV4", {"kv": "kv4"}),
    ):
        recipe = recipe.but(**changes)
        yield AccuracyRow("Atom", step, recipe, repeats=step == "KV4")


def _fmpq() -> Iterator[AccuracyRow]:
    """Yield rows for COMET's W4Ax: by the share of INT8 blocks, and with only the blocks of outliers in INT8.

    A share is filled with the blocks of the largest channels. The cache is per token and head, weights are GPTQ's;
    COMET §6.1 has a cache per channel, and OmniQuant's weights.
    """
    recipe = RECIPES["fmpq"]
    for share in SHARES:
        full_recipe = recipe.but(int8=share, outlier=0.0)
        yield AccuracyRow("FMPQ", f"{share:.0%} of the blocks in INT8", full_recipe, repeats=share == recipe.int8)
    yield AccuracyRow("FMPQ", f"blocks with outliers in INT8, at most {recipe.int8:.0%}", recipe)


def _copy_settings(recipe: Recipe, full: Recipe, names: Sequence[str]) -> Recipe:
    return recipe.but(**{name: getattr(full, name) for name in names})


def sort_rows(measurements: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort measurements by the order of the table, then by seed."""
    places = {(table_row.ladder, table_row.step): place for place, table_row in enumerate(rows())}
    return sorted(measurements, key=lambda row: (places[row["ladder"], row["step"]], row["seed"]))


def off_grid(model: FloatModel, start: str = "mixed", seed: int = 1) -> FloatModel:
    """Rotate a model's residual stream by a fixed random rotation, which moves its weights off the file's 4-bit grid.

    The function does not change. Weights of a 4-bit file lie on 16 levels per group, so rounding them to 16 levels
    again costs too little. `mixed` mixes every channel with three others, which keeps large channels large; `uniform`
    is a uniformly distributed rotation, which does part of the recipe's own work; `file` leaves the model unchanged.
    """
    if start not in STARTS:
        raise ArgumentError("start", f"must be one of {', '.join(STARTS)}", start)
    if start == "file":
        return model
    H = model.config.hidden
    rotated_model = rotate_model(model, random_orthogonal(H, seed) if start == "uniform" else mixing(H, seed))
    return replace(rotated_model, layers=list(rotated_model.layers))


def mixing(n: int, seed: int) -> npt.NDArray[np.float64]:
    """Build an orthogonal matrix [n, n] that rotates random pairs of channels twice, so each becomes a mix of four."""
    rng = np.random.default_rng(seed)
    mixing_matrix = np.eye(n)
    for _ in range(2):
        order = rng.permutation(n)[: n // 2 * 2].reshape(2, -1)
        first, second = order
        angle = rng.uniform(np.pi / 10, np.pi / 2 - np.pi / 10, n // 2)
        rotation = np.eye(n)
        rotation[first, first] = rotation[second, second] = np.cos(angle)
        rotation[first, second], rotation[second, first] = (
            -np.sin(angle),
            np.sin(angle),
        )
        mixing_matrix = mixing_matrix @ rotation
    return mixing_matrix


def measure(
    model: FloatModel,
    calibration: Callable[[int], Tokens],
    texts: Mapping[str, Tokens],
    chosen: Sequence[AccuracyRow],
    seeds: int = 3,
    progress: Callable[[str], None] = lambda label: None,
    done: Sequence[Mapping[str, Any]] = (),
) -> Iterator[dict[str, Any]]:
    """Quantise by each row's recipe and measure the perplexity.

    Args:
        model: rotated off its file's grid (`off_grid`); computed with on the GPU if its arrays are there.
        calibration: tokens [S, T] of a seed.
        texts: windows [W, T] by name.
        chosen: of `rows()`.
        seeds: number of calibration seeds of rows that repeat.
        progress: called with a row's name before each of its seeds.
        done: earlier measurements, which are not repeated, nor are those of other rows of the same recipe.

    Yields:
        Per row and seed that is not in `done`: ladder, step, recipe, seed, perplexity by text, errors by matrix (means
        over the layers of the relative error of the output), seconds to quantise and to measure, bytes that the GEMMs
        of 1,024 tokens read (`gemm_bytes`), bytes of a token in the KV cache of all layers (`cache_bytes`).
    """

    if model.config.experts:
        raise ArgumentError("model", "must be dense: some rows are W4A4's", f"{model.config.experts} experts")
    measurements = list(done)
    for row in chosen:
        recipe = row.recipe.to_json()
        for seed in range(seeds if row.repeats else 1):
            progress(row.name)
            row_keys = {"ladder": row.ladder, "step": row.step, "seed": seed}
            same_recipe = [
                earlier
                for earlier in measurements
                if earlier["seed"] == seed and Recipe.settings_of(earlier["recipe"]) == recipe
            ]
            if not any(row_keys.items() <= earlier.items() for earlier in same_recipe):
                measurement = (
                    same_recipe[0] if same_recipe else _measure_recipe(model, calibration, texts, row.recipe, seed)
                )
                measurements.append({**measurement, **row_keys})
                yield {**measurement, **row_keys}


def _measure_recipe(
    model: FloatModel, calibration: Callable[[int], Tokens], texts: Mapping[str, Tokens], recipe: Recipe, seed: int
) -> dict[str, Any]:
    start = perf_counter()
    base = prepare_model(model, recipe)
    tokens = calibration(seed)
    layers = list(quantize_layers(base, tokens if recipe.is_calibrated else tokens[:0], recipe))
    quantized_model = replace(base, layers=[layer.floats for layer in layers if layer])
    end_seconds = perf_counter()
    perplexities = {name: perplexity(quantized_model, windows, recipe.numerics()) for name, windows in texts.items()}
    return {
        "recipe": recipe.to_json(),
        "perplexity": perplexities,
        "errors": _mean_errors([layer.errors for layer in layers if layer]),
        "cache_bytes": cache_bytes(model.config, recipe),
        "bytes": sum(gemm_bytes(model.config, recipe, layer) for layer in layers if layer),
        "seconds": {"quantize": end_seconds - start, "measure": perf_counter() - end_seconds},
    }


def cache_bytes(config: Config, recipe: Recipe) -> float:
    """Return the bytes of a token in the KV cache of all layers; floats as FP16."""
    if recipe.kv is None:
        return 2.0 * 2 * config.layers * config.kv_heads * config.head_dim
    return CACHE_FORMATS[recipe.kv].token_bytes(config.head_dim, config.kv_heads, config.layers)


def gemm_bytes(config: Config, recipe: Recipe, layer: QuantizedLayer, tokens: int = TOKENS) -> int:
    """Count the bytes that a layer's GEMMs of `tokens` tokens read: weights, activations and scales, floats as FP16."""
    total = 0.0
    for name, (N, K) in config.matrices.items():
        per_row, per_token = _weight_bytes(recipe, K), 2.0 * K
        if recipe.acts == 8:
            per_token = K + 4
        elif recipe.acts == 4:
            group, layer_input = recipe.group or K - recipe.kept, layer.inputs.get(name)
            wide_channels = layer_input.int8 * group if layer_input and layer_input.int8 is not None else recipe.kept
            wide_bytes = 1 if recipe.int8 is not None else recipe.kept_bits / 8
            per_token = (
                (K - wide_channels) / 2
                + wide_channels * wide_bytes
                + 2 * ((K - recipe.kept) / group + bool(recipe.kept))
            )
        total += N * per_row + tokens * per_token
    return round(total)


def _weight_bytes(recipe: Recipe, K: int) -> float:
    """Count the bytes of one row of K weights with its scales."""
    if recipe.scheme is None:
        return 2.0 * K
    if recipe.scheme == "int8":
        return K + 4
    if recipe.scheme == "qoq_channel":
        return K / 2 + 4 + 1
    if recipe.scheme == "int4":
        four_bit_channels = K - recipe.kept
        return (
            four_bit_channels / 2
            + recipe.kept * recipe.kept_bits / 8
            + 2 * (four_bit_channels / (recipe.group or four_bit_channels) + bool(recipe.kept))
        )
    assert recipe.group is not None
    return K / 2 + 2 * K / recipe.group + 4


def _mean_errors(errors: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    names = errors[0] if errors else {}
    errors_by_matrix = {name: [error for layer in errors if (error := layer[name]) is not None] for name in names}
    return {name: float(np.mean(errors_of_name)) for name, errors_of_name in errors_by_matrix.items() if errors_of_name}
