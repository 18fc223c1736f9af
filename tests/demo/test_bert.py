"""The NumPy encoder is the trained model: it reads words, and knows which sentences mean the same."""

import numpy as np
import pytest

from ptxlab.bert import Bert, attend
from ptxlab.errors import FileError
from ptxlab.io.checkpoint import demo_checkpoint


@pytest.fixture(scope="module")
def model() -> Bert:
    path = demo_checkpoint()
    assert path is not None, "the `demo` extra is part of `test`"
    return Bert(path)


def test_words_and_pieces(model: Bert) -> None:
    """As Hugging Face's tokeniser has it, to whose tokens those of the whole card are equal."""
    assert model.tokens("Hello, WORLD! Café_x") == [7592, 1010, 2088, 999, 7668, 1035, 1060]
    assert model.tokens("embeddings") == [7861, 8270, 4667, 2015]  # em ##bed ##ding ##s
    assert model.tokens("\N{SNOWMAN} a") == [100, 1037]
    assert model.tokens("  \n") == []


def sentence(model: Bert, text: str) -> np.ndarray:
    *_, last = model.hidden_states(model.tokens(text))
    mean = last.mean(axis=0)
    return mean / np.linalg.norm(mean)


def test_sentences_that_mean_the_same_are_close(model: Bert) -> None:
    """The similarities that the model itself gives, by sentence-transformers."""
    eats, food, violin = (
        sentence(model, text)
        for text in ("A man is eating food.", "A man is eating a piece of bread.", "A woman is playing violin.")
    )
    assert eats @ food == pytest.approx(0.75534, abs=1e-5)
    assert eats @ violin == pytest.approx(-0.07039, abs=1e-5)


def test_what_a_layer_is_given(model: Bert) -> None:
    tokens = model.tokens("Four bits per key.")
    inputs = list(model.attention_inputs(tokens))
    assert len(inputs) == model.layers == 6
    for layer, x in zip(inputs, model.hidden_states(tokens), strict=False):
        np.testing.assert_array_equal(layer.x, x, strict=True)
        for projected in (layer.queries(), layer.keys(), layer.values()):
            assert projected.shape == (len(tokens) + 2, 12, 32) and projected.dtype == np.float32
    last = inputs[5]
    np.testing.assert_allclose(last.keys()[1, 3, 7], last.w_k[3 * 32 + 7] @ last.x[1] + last.b_k[3 * 32 + 7], rtol=1e-5)


def test_all_tokens_of_an_encoder_see_each_other() -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 5, 2, 8)).astype(np.float32)
    scores = np.einsum("thd,lhd->htl", q, k).astype(np.float64) * 8**-0.5
    weights = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(attend(q, k, v), np.einsum("htl,lhd->thd", weights, v), rtol=1e-5, atol=1e-7)


def test_a_model_without_its_vocabulary(tmp_path) -> None:
    path = demo_checkpoint()
    (tmp_path / "model.safetensors").symlink_to(path)
    with pytest.raises(FileError, match=r"config.json: cannot be read: No such file"):
        Bert(tmp_path / "model.safetensors")
    (tmp_path / "config.json").symlink_to(path.parent / "config.json")
    (tmp_path / "vocab.txt").write_bytes(b"\xff")
    with pytest.raises(FileError, match=r"vocab.txt: cannot be read: .*decode"):
        Bert(tmp_path / "model.safetensors")
