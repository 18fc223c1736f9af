"""Whole models in floats: against PyTorch's own implementation, and their parts against plain formulas."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.llm.accuracy.text import open_text, tokens_of, windows
from ptxlab.llm.checkpoints import open_model
from ptxlab.llm.model import Config, FloatModel, decoder, floats, perplexity
from ptxlab.llm.model.decoder import Numerics
from ptxlab.llm.model.floats import negative_log_likelihood
from ptxlab.lowbit import reference
from tests.golden.record_decoders import PATH, by_transformers
from tests.support.dispatching_array import DispatchingArray
from tests.support.small_models import CONFIGS, random_tokens, write_folder

TINY = Config(hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, layers=2, vocabulary=50, qkv_bias=True, window=7)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_computes_what_transformers_recorded(family: str, tmp_path: Path) -> None:
    model, _ = open_model(write_folder(tmp_path, family))
    tokens = random_tokens()
    (states,) = model.states([tokens])
    with np.load(PATH) as recorded:
        assert np.abs(model.logits(states)[0, :, ::10] - recorded[f"{family}.logits"]).max() < 1e-4
        assert perplexity(model, tokens) == pytest.approx(float(recorded[f"{family}.perplexity"]), rel=1e-4)


@pytest.mark.default_cases("qwen2", "mistral")
@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_computes_what_transformers_does(family: str, tmp_path: Path) -> None:
    """The second text has another length, beyond Mistral's window and LLaMA-3's trained context."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    model, _ = open_model(write_folder(tmp_path, family))
    tokens = random_tokens(3, 70)
    logits, right = by_transformers(tmp_path, tokens)
    assert np.abs(model.logits(model.states([tokens])[0]) - logits).max() < 1e-4
    assert perplexity(model, tokens) == pytest.approx(right, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.usefixtures("smollm2", "wikipedia")
def test_smollm2_computes_what_transformers_does(cupy: Any) -> None:
    """The test runs one window of 2,048 tokens of a real text on the GPU.

    PyTorch's own modules have the same weights.
    """
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model, tokenizer = open_model("smollm2")
    window = windows(tokens_of(open_text("lee").evaluation, tokenizer))[:1]
    theirs = in_torch(torch, transformers, model).cuda()
    with torch.no_grad():
        tokens = torch.from_numpy(window).cuda()
        loss = theirs(tokens, labels=tokens).loss
    assert perplexity(model.to_device(), window) == pytest.approx(float(loss.exp()), rel=1e-3)


def in_torch(torch: Any, transformers: Any, model: FloatModel) -> Any:
    """Convert the model to transformers' LlamaForCausalLM."""
    c = model.config
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=c.hidden, intermediate_size=c.ffn, num_hidden_layers=c.layers, num_attention_heads=c.heads,
            num_key_value_heads=c.kv_heads, vocab_size=c.vocabulary, rms_norm_eps=c.eps, tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_base}, max_position_embeddings=8192,
        )
    )  # fmt: skip
    names = {name: f"self_attn.{name}_proj" for name in "qkvo"} | {n: f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    names |= {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
    ends = {"model.embed_tokens": model.embedding, "model.norm": model.final_norm, "lm_head": model.embedding}
    state = {f"{name}.weight": torch.from_numpy(array) for name, array in ends.items()}
    for i, layer in enumerate(model.layers):
        state |= {f"model.layers.{i}.{names[name]}.weight": torch.from_numpy(w) for name, w in layer.items()}
    llama.load_state_dict(state)
    return llama.float().eval()


@pytest.mark.gpu
@pytest.mark.usefixtures("smollm2", "wikipedia")
def test_smollm2_has_its_known_perplexity(cupy: Any) -> None:
    """The perplexity is that of the first three windows of the second text, as NumPy computes it."""
    model, tokenizer = open_model("smollm2")
    first = windows(tokens_of(open_text("lee").evaluation, tokenizer))[:3]
    assert perplexity(model.to_device(), first) == pytest.approx(27.5408, rel=1e-4)


@pytest.mark.parametrize("window", [None, 1, 150])
def test_attention_by_blocks_is_attention(window: int | None) -> None:
    """The sequence has more tokens than two blocks of queries."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 300, heads, 8)) for heads in (4, 2, 2))
    blocked = decoder.causal_attention(q, k, v, window)
    for b in range(2):
        expected, _ = reference.attention(q[b], k[b], v[b], scale=8**-0.5, window=window)
        assert np.abs(blocked[b] - expected).max() < 1e-12


def test_perplexity_is_that_of_the_probabilities() -> None:
    model = FloatModel.random(TINY, dtype=np.float64)
    tokens = np.random.default_rng(0).integers(0, 50, (3, 300))
    probabilities = []
    for window in tokens:
        exponentials = np.exp(model.logits(model.states([window[None]])[0])[0])
        shares = exponentials / exponentials.sum(axis=1, keepdims=True)
        probabilities += [shares[t, window[t + 1]] for t in range(299)]
    calls: list[None] = []
    measured = perplexity(model, tokens, progress=lambda: calls.append(None))
    assert measured == pytest.approx(np.exp(-np.log(probabilities).mean()), rel=1e-12)
    assert len(calls) == 3 * (TINY.layers + 1)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.full((1, 4), 50), r"tokens: must be integers in 0..49 \(got 50..50 of int64\)"),
        (np.full((1, 4), -1), r"tokens: must be integers in 0..49 \(got -1..-1 of int64\)"),
        (np.zeros((1, 4)), r"tokens: must be integers in 0..49"),
        (np.zeros((0, 4), np.int64), r"windows: must be \[W, T\]"),
        (np.zeros((2, 1), np.int64), r"windows: must be \[W, T\]"),
        (np.zeros(9, np.int64), r"windows: must be \[W, T\]"),
    ],
)
def test_windows_without_a_perplexity_are_refused(tokens: np.ndarray, message: str) -> None:
    with pytest.raises(ArgumentError, match=rf"^{message}"):
        perplexity(FloatModel.random(TINY), tokens)


def test_likely_tokens_of_large_logits() -> None:
    logits = np.array([[1000.0, 0, -1000], [0, 0, 0]], np.float32)
    assert negative_log_likelihood(logits, np.array([0, 2])) == pytest.approx(np.log(3) / 2)


def test_a_sequence_does_not_depend_on_its_batch() -> None:
    model = FloatModel.random(TINY, seed=1)
    tokens = np.random.default_rng(1).integers(0, 50, (2, 20))
    both, (first, second) = model.states([tokens])[0], model.states([tokens[:1], tokens[1:]])
    assert np.allclose(both, np.concatenate([first, second]), atol=1e-5)


def test_sequences_go_together_on_a_gpu_as_far_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Perplexities do not depend on it, and progress counts sequences wherever they are computed."""
    monkeypatch.setattr(gpu, "to_device", DispatchingArray)
    monkeypatch.setattr(floats, "_ELEMENTS", 2 * 10 * TINY.ffn)
    model, tokens = FloatModel.random(TINY, dtype=np.float64), np.arange(50).reshape(5, 10)
    device_model, calls = model.to_device(), []
    assert [len(batch) for batch in device_model.batches(tokens)] == [2, 2, 1]
    assert [len(batch) for batch in model.batches(tokens)] == [1] * 5
    assert [len(batch) for batch in device_model.batches(np.zeros((2, 30), np.int64))] == [1, 1]  # longer than fits
    assert model.batches(tokens[:0]) == []
    on_device = perplexity(device_model, tokens, progress=lambda: calls.append(None))
    assert on_device == pytest.approx(perplexity(model, tokens), rel=1e-12)
    assert len(calls) == 5 * (TINY.layers + 1)


def test_numerics_see_every_product_and_the_cache() -> None:
    seen: list[str] = []

    class Watching(Numerics):
        def product(self, name: str, x: Any, layer: Any) -> Any:
            seen.append(name)
            return super().product(name, x, layer)

        def round_to_cache(self, keys: Any, values: Any, layer: Any) -> Any:
            seen.append("cache")
            return keys, values * 0

    model = FloatModel.random(TINY)
    tokens = np.zeros((1, 4), np.int64)
    (states,) = model.states([tokens], Watching())
    assert seen == ["q", "k", "v", "cache", "o", "gate", "up", "down"] * 2
    assert not np.allclose(states, model.states([tokens])[0])


def test_device_arrays_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "to_device", DispatchingArray)
    model, tokens = FloatModel.random(TINY, dtype=np.float64), np.arange(20).reshape(2, 10)
    device_model = model.to_device()
    (states,) = device_model.states([tokens])
    assert isinstance(states, DispatchingArray)
    assert np.allclose(states.array, model.states([tokens])[0], rtol=1e-12)
    assert perplexity(device_model, tokens) == pytest.approx(perplexity(model, tokens), rel=1e-12)
    assert len(device_model.layers[1:]) == 1 and (device_model.layers[-1]["q"].array == model.layers[1]["q"]).all()
