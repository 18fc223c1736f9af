"""Mixtral: its floats are those of transformers, and a quantised model computes with the experts that a token takes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.errors import ArgumentError, FileError
from ptxlab.llm.checkpoints import folder, open_model
from ptxlab.llm.checkpoints.open import dequantize_model
from ptxlab.llm.checkpoints.rewrite import rewrite_folder
from ptxlab.llm.model import FloatModel, KernelRunner, LayerInputs, NumpyRunner, QuantizedModel, perplexity
from ptxlab.llm.model.decoder import route
from ptxlab.llm.model.reference import exact
from ptxlab.lowbit import reference
from ptxlab.lowbit.kernels.quantize.rmsnorm import normalize_rows
from ptxlab.spec.dtypes import convert_to_dtype, floats
from tests.golden.record_decoders import by_transformers
from tests.support.layers import TINY_MODEL
from tests.support.small_models import random_tokens, write_folder, write_gguf
from tests.support.small_prompts import SMALL, random_prompts, relative_error

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 1]]
MIXTRAL = replace(TINY_MODEL, experts=4, chosen_experts=2, tied_head=False)


def test_perplexity_is_that_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    model, _ = open_model(write_folder(tmp_path, "mixtral", sliding_window=7))
    tokens = random_tokens(2, 40)
    _, right = by_transformers(tmp_path, tokens)
    assert perplexity(model, tokens) == pytest.approx(right, rel=2e-5)


def test_a_layer_is_the_formula_of_every_token() -> None:
    """Compute each token alone, through the experts of its two largest logits; one expert may have no token at all."""
    model = FloatModel.random(MIXTRAL, dtype=np.float64)
    layer = {**model.layers[0]}
    layer["router"][3] = 0
    x = np.random.default_rng(0).standard_normal((1, 5, 64))
    outputs = model.run_feed_forward(x, layer) - x
    y = reference.rms_norm(x, layer["post_norm"], MIXTRAL.eps)[0]
    for token in range(5):
        logits = layer["router"] @ y[token]
        best = np.argsort(-logits)[:2]
        share = np.exp(logits[best]) / np.exp(logits[best]).sum()
        gates = [layer[f"gate.{e}"] @ y[token] for e in best]
        ups = [layer[f"up.{e}"] @ y[token] for e in best]
        parts = [layer[f"down.{e}"] @ (g / (1 + np.exp(-g)) * u) for e, g, u in zip(best, gates, ups, strict=True)]
        np.testing.assert_allclose(outputs[0, token], share @ parts, rtol=1e-9, atol=1e-9)


def test_rows_go_to_their_experts() -> None:
    logits = np.array([[3.0, 1.0, 0.0], [0.0, 2.0, 2.0]], np.float32)
    routed = [(taker.expert, taker.row.tolist()) for taker in route(logits, 2)]
    assert routed == [(0, [0]), (1, [0, 1]), (2, [1])]


def test_a_gguf_file_whose_experts_lie_apart_is_refused(tmp_path: Path) -> None:
    """Files of llama.cpp before April 2024 have a tensor for each, others no tensor of the right name at all."""
    path = write_gguf(tmp_path / "m.gguf", "llama3", expert_count=4, expert_used_count=2)
    with pytest.raises(FileError, match=rf"^{path}: blk\.0\.ffn_gate_exps\.weight: missing$"):
        open_model(path)


@pytest.fixture(scope="module")
def model() -> FloatModel:
    return FloatModel.random(MIXTRAL)


@pytest.fixture(scope="module")
def packed_model(model: FloatModel) -> QuantizedModel:
    return QuantizedModel.rounded(model, group=32)


@pytest.mark.default_cases("float16")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_step_is_that_of_the_layers_twin(dtype: str, model: FloatModel) -> None:
    """Every bit of both layers' caches and of the end is equal.

    The second cache follows from the first layer's experts.
    """
    small = QuantizedModel.rounded(model, "qoq", group=32, dtype=dtype)
    runner, tokens = NumpyRunner(small, 3, 80), np.array([3, 17, 40])
    runner.prefill([*PROMPTS, [200, 5]])
    caches = [replace(cache, pool=cache.pool.copy()) for cache in runner.caches]
    with runner._append_tokens("decode", {b: tokens[b : b + 1] for b in range(3)}) as rows:
        normed = runner._run(rows)
    x = convert_to_dtype(floats(small.embedding)[tokens], dtype)
    residual, rope = np.zeros_like(x), (*small.config.rope_tables(80), runner.lengths - 1)
    for i, weights in enumerate(small.layers):
        slots = np.array([caches[i].slots(b)[-1] for b in range(3)], np.int32)
        steps = exact(LayerInputs.of(x, residual, caches[i], slots, rope), weights)
        x, residual = steps["hidden"].right, steps["residual"].right
        assert np.array_equal(runner.caches[i].pool, steps["pool"].right)
        assert len(np.unique(steps["chosen"].right)) > 2
    stream = floats(convert_to_dtype(floats(x) + floats(residual), dtype))
    assert np.array_equal(
        normed, convert_to_dtype(normalize_rows(stream, floats(small.final_norm), MIXTRAL.eps), dtype)
    )


def test_a_runner_computes_what_the_dequantised_model_does(packed_model: QuantizedModel) -> None:
    """The two differ by INT8 activations and the cache."""
    of_floats = dequantize_model(packed_model)
    right = [of_floats.logits(of_floats.states([np.array([prompt])])[0])[0, -1] for prompt in PROMPTS]
    assert relative_error(NumpyRunner(packed_model, 2, 20, cache="kv8").prefill(PROMPTS), np.stack(right)) < 0.05


def test_chunks_and_batches_do_not_matter(packed_model: QuantizedModel) -> None:
    whole, chunked = (
        NumpyRunner(packed_model, 2, 20, head="int8"),
        NumpyRunner(packed_model, 2, 20, chunk=3, head="int8"),
    )
    right = whole.prefill(PROMPTS)
    assert np.array_equal(chunked.prefill(PROMPTS), right)
    single_runner = NumpyRunner(packed_model, 1, 20, head="int8")
    assert np.array_equal(single_runner.prefill(PROMPTS[1:])[0], right[1])


@pytest.mark.full
def test_kernels_give_the_same(packed_model: QuantizedModel) -> None:
    """Run steps and chunks of prompts in the emulator; attention in floats moves an INT8 step once in a while."""
    options: dict[str, Any] = {"batch": 2, "context": 20, "chunk": 4, "head": "int8"}
    kernels, numpy = KernelRunner(packed_model, **options, backend="emulator"), NumpyRunner(packed_model, **options)
    for run in (lambda runner: runner.prefill([[1, 2, 3], [4, 5]]), lambda runner: runner.decode([5, 6])):
        logits, right = run(kernels), run(numpy)
        assert relative_error(logits, right) < 0.03
    assert np.array_equal(kernels.caches[0].pool, numpy.caches[0].pool) and numpy.caches[0].pool.any()


def test_a_folder_has_every_expert(packed_model: QuantizedModel, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    folder.save(packed_model, tmp_path / "a")
    rewrite_folder(tmp_path / "a", tmp_path / "b", layout="row_major")
    loaded_model, repacked = folder.load(tmp_path / "a"), folder.load(tmp_path / "b")
    assert loaded_model.config == packed_model.config and repacked.layers[0].down.layout == "row_major"
    right = NumpyRunner(packed_model, 2, 20).prefill(PROMPTS)
    for again in (loaded_model, repacked):
        assert np.array_equal(NumpyRunner(again, 2, 20).prefill(PROMPTS), right)
    for name, array in packed_model.layers[1].down.buffers.items():
        np.testing.assert_array_equal(loaded_model.layers[1].down.buffers[name], array, strict=True)


def test_more_experts_than_any_model_has_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^experts: must be at most 4096 \(got 4097\)$"):
        replace(MIXTRAL, experts=4097)


@pytest.mark.gpu
def test_floats_on_a_gpu_are_those_of_numpy(cupy: Any, model: FloatModel) -> None:
    tokens = np.random.default_rng(0).integers(0, MIXTRAL.vocabulary, (3, 40))
    assert perplexity(model.to_device(), tokens) == pytest.approx(perplexity(model, tokens), rel=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(gpu.why_not("sm_90a", exact=True) is not None, reason="the products need sm_90a")
@pytest.mark.parametrize("batch", [1, 5])
def test_a_runner_on_a_gpu_is_that_of_numpy(batch: int) -> None:
    """The runner takes prompts in chunks and steps of the graph.

    A token near a tie of the router may take another expert.
    """
    config = replace(SMALL, layers=2, experts=8, chosen_experts=2, ffn=512)
    model = QuantizedModel.rounded(FloatModel.random(config))
    prompts = random_prompts(tuple(range(3, 3 + 20 * batch, 20)))
    kernels, numpy = (kind(model, batch, 120, chunk=32, head="int8") for kind in (KernelRunner, NumpyRunner))
    logits, right = gpu.to_host(kernels.prefill(prompts)), numpy.prefill(prompts)
    for step in range(5):
        errors = [relative_error(logits[b : b + 1], right[b : b + 1]) for b in range(batch)]
        assert np.median(errors) < 0.15, (step, errors)
        tokens = right.argmax(axis=1)
        logits, right = gpu.to_host(kernels.decode(tokens)), numpy.decode(tokens)
    assert np.array_equal(gpu.to_host(kernels.caches[0].pool), numpy.caches[0].pool)


def test_a_sequence_that_is_not_finite_leaves_the_others_alone(
    packed_model: QuantizedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate and up overflow for the last token of one sequence, in each expert that it takes."""
    runner, prompts = NumpyRunner(packed_model, 3, 20, head="int8"), [[1, 2], [3, 7], [8, 9, 1]]
    right, run, overflows = runner.prefill(prompts), runner._ffn, list[int]()

    def run_with_overflow(gate_up: Any, down: Any, x: Any, rows: Any) -> Any:
        lost = (rows.sequence == 1) & (rows.position == 1)
        overflows.append(int(lost.sum()))
        return run(lambda *of: np.where(lost[:, None], np.float32(np.inf), gate_up(*of)), down, x, rows)

    monkeypatch.setattr(runner, "_ffn", run_with_overflow)
    logits = runner.prefill(prompts)
    assert sum(overflows) == 2 * MIXTRAL.layers
    assert np.isnan(logits[1]).all() and np.array_equal(logits[[0, 2]], right[[0, 2]])
