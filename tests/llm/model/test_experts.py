"""Mixtral: its floats are those of transformers, and a quantised model computes with the experts that a token takes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ptxlab.errors import FileError
from ptxlab.llm.checkpoints import open_model
from ptxlab.llm.model import FloatModel, perplexity
from ptxlab.llm.model.decoder import route
from ptxlab.lowbit import reference
from tests.golden.record_decoders import by_transformers
from tests.support.layers import TINY_MODEL
from tests.support.small_models import some_tokens, write_folder, write_gguf

MIXTRAL = replace(TINY_MODEL, experts=4, chosen_experts=2, tied_head=False)


def test_perplexity_is_that_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    model, _ = open_model(write_folder(tmp_path, "mixtral", sliding_window=7))
    tokens = some_tokens(2, 40)
    _, right = by_transformers(tmp_path, tokens)
    assert perplexity(model, tokens) == pytest.approx(right, rel=2e-5)


def test_a_layer_is_the_formula_of_every_token() -> None:
    """Each token alone, through the experts of its two largest logits; one expert may have no token at all."""
    model = FloatModel.random(MIXTRAL, dtype=np.float64)
    layer = {**model.layers[0]}
    layer["router"][3] = 0
    x = np.random.default_rng(0).standard_normal((1, 5, 64))
    found = model.run_feed_forward(x, layer) - x
    y = reference.rms_norm(x, layer["post_norm"], MIXTRAL.eps)[0]
    for token in range(5):
        logits = layer["router"] @ y[token]
        best = np.argsort(-logits)[:2]
        share = np.exp(logits[best]) / np.exp(logits[best]).sum()
        gates = [layer[f"gate.{e}"] @ y[token] for e in best]
        ups = [layer[f"up.{e}"] @ y[token] for e in best]
        parts = [layer[f"down.{e}"] @ (g / (1 + np.exp(-g)) * u) for e, g, u in zip(best, gates, ups, strict=True)]
        np.testing.assert_allclose(found[0, token], share @ parts, rtol=1e-9, atol=1e-9)


def test_rows_go_to_their_experts() -> None:
    y = np.array([[3.0, 1.0, 0.0], [0.0, 2.0, 2.0]], np.float32)
    routed = [(each.expert, each.row.tolist()) for each in route(y, np.eye(3, dtype=np.float32), 2)]
    assert routed == [(0, [0]), (1, [0, 1]), (2, [1])]


def test_a_gguf_file_of_experts_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama3", expert_count=4, expert_used_count=2)
    rule = "a GGUF file of a model without experts is expected; its Hugging Face folder can be opened"
    with pytest.raises(FileError, match=rf"^{path}: {rule} \(got 4 experts\)$"):
        open_model(path)
