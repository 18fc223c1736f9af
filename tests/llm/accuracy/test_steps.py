"""The table of `ptxlab accuracy`: COMET's rows, and the bytes beside each perplexity."""

from typing import Any

import numpy as np
import pytest

from ptxlab.llm.accuracy import steps as accuracy
from ptxlab.llm.model import Config, FloatModel
from ptxlab.llm.recipe import RECIPES, Recipe, calibrate
from ptxlab.llm.recipe.systems import SYSTEMS
from ptxlab.lowbit import layout, quant

CONFIG = Config(hidden=128, ffn=192, heads=2, kv_heads=1, head_dim=64, layers=1, vocabulary=40)
MODEL = FloatModel.random(CONFIG)
TEXT = np.random.default_rng(0).integers(0, 40, (2, 12))
TOKENS = 10


def gemm_bytes_read(recipe: Recipe) -> int:
    """Count the bytes that the products of a layer read under a recipe."""
    quantized = next(calibrate.quantize_layers(MODEL, TEXT, recipe))
    assert quantized is not None
    return accuracy.gemm_bytes(CONFIG, recipe, quantized, TOKENS)


def total_nbytes(arrays: list[Any]) -> int:
    """Sum the bytes of arrays."""
    return sum(int(array.nbytes) for array in arrays)


def operand_bytes(quantise: Any) -> int:
    """Count the bytes of every matrix and of its input, as `quantise` stores them."""
    total = 0
    for N, K in CONFIG.matrices.values():
        total += total_nbytes(quantise(np.ones((N, K), np.float32), "w")) + total_nbytes(
            quantise(np.ones((TOKENS, K), np.float32), "x")
        )
    return total


def lqq_arrays(values: np.ndarray, which: str) -> list[Any]:
    """Quantise a matrix to LQQ (`w`) or activations to INT8 (`x`), and list the stored arrays."""
    if which == "x":
        activations = quant.quantize_activations(values)
        return [activations.q, activations.scale]
    packed = layout.pack(quant.quantize_lqq(values, 64), "row_major")
    return list(packed.buffers.values())


def atom_arrays(values: np.ndarray, which: str) -> list[Any]:
    rows = quant.quantize_atom_weight(values, 64, 64)
    return [layout.pack_pairs(rows.q4), rows.q8, rows.scales]


def fmpq_arrays(values: np.ndarray, which: str) -> list[Any]:
    blocks = quant.quantize_blocks(values, values.shape[1] // 128 if which == "x" else 0, 64)
    four = blocks.q[:, : blocks.channels4]
    return [layout.pack_pairs(four), blocks.q[:, blocks.channels4 :], blocks.scale]


@pytest.mark.parametrize(
    ("recipe", "quantise"),
    [
        (RECIPES["rtn"], lqq_arrays),
        (RECIPES["atom"].but(clip=None, gptq=False), atom_arrays),
        (RECIPES["fmpq"].but(clip=None, gptq=False, int8=0.5, outlier=0.0), fmpq_arrays),
        (Recipe(scheme=None, acts=None, kv=None), lambda values, _: [values.astype(np.float16)]),
    ],
    ids=["lqq", "atom", "fmpq", "float"],
)
def test_bytes_are_those_of_the_operands(recipe: Recipe, quantise: Any) -> None:
    assert gemm_bytes_read(recipe) == operand_bytes(quantise)


def test_other_rows_by_hand() -> None:
    weights = sum(N * K for N, K in CONFIG.matrices.values())
    rows, channels = (sum(size[axis] for size in CONFIG.matrices.values()) for axis in (0, 1))
    int8 = Recipe(scheme="int8", acts=8, kv=None)
    assert gemm_bytes_read(int8) == weights + 4 * rows + TOKENS * (channels + 4 * 4)
    per_token = Recipe(scheme="int4", acts=4, group=None, kv=None)
    assert gemm_bytes_read(per_token) == weights // 2 + 2 * rows + TOKENS * (channels // 2 + 2 * 4)
    halves = per_token.but(kept=64, kept_bits=16)
    kept_bytes = 64 * (sum(N for N, _ in CONFIG.matrices.values()) + 4 * TOKENS)
    assert gemm_bytes_read(halves) == gemm_bytes_read(per_token) + kept_bytes * 3 // 2 + 2 * rows + TOKENS * 2 * 4


@pytest.mark.full
def test_comets_rows_go_from_no_int8_block_to_all() -> None:
    rows = [row for row in accuracy.rows() if row.ladder == "FMPQ"]
    assert [row.step for row in rows[:2]] == ["0% of the blocks in INT8", "10% of the blocks in INT8"]
    assert [row.recipe.int8 for row in rows] == [0, 0.1, 0.2, 0.4, 1, 0.2]
    assert [row.recipe.outlier for row in rows] == [0] * 5 + [6]
    assert [row.repeats for row in rows] == [False, False, True, False, False, False]
    fewer = [gemm_bytes_read(row.recipe.but(clip=None, gptq=False)) for row in rows[:5]]
    assert fewer == sorted(fewer) and fewer[0] < fewer[-1]


def test_rows_of_qoq_add_a_step_each() -> None:
    """Check both settings: Eq. 10 alone differs first, then the heads. Older rows stay without it."""
    rows = {row.name: row.recipe for row in accuracy.rows()}
    for ladder, name in (("QoQ in groups of 64", "qoq"), ("QoQ per channel", "qoq_channel")):
        matrix, block, smoothed = (recipe for place, recipe in rows.items() if place.startswith(f"{ladder}/"))
        assert matrix.but(clip_block=True) == block == RECIPES[name]
        assert smoothed.but(rotate_heads=True, smooth_heads=None) == block and smoothed.smooth_heads == (0.1, 0.9)
    assert rows["channel/GPTQ"] == rows["QoQ per channel/every matrix clipped by its own output"]
    assert rows["schemes, GPTQ/QoQ"] == rows["QoQ in groups of 64/every matrix clipped by its own output"]


def test_a_record_of_before_a_setting_is_not_measured_again() -> None:
    (row,) = (row for row in accuracy.rows() if row.name == "alone/A8")
    recorded = row.recipe.to_json()
    del recorded["clip_block"], recorded["smooth_heads"]
    done = [{"ladder": "other", "step": "A8", "seed": 0, "recipe": recorded, "perplexity": {"text": 3.0}}]
    (copied,) = accuracy.measure(MODEL, lambda seed: TEXT, {}, [row], done=done)
    assert copied == {**done[0], "ladder": "alone"}


def test_every_system_has_a_row_of_its_options() -> None:
    rows = {row.step: row for row in accuracy.rows() if row.ladder == "systems"}
    assert list(rows) == [system.name for system in SYSTEMS]
    assert {name: row.recipe.kv for name, row in rows.items() if row.recipe.calibrates_cache} == {
        "LiquidServe": "kv8_channel",
        "COMET": "kv4_channel",
    }
