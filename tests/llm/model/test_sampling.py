"""`Sampling`: tokens left out, and the probabilities of the others, are those of transformers' processors."""

from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError
from ptxlab.llm.model.sampling import Sampling, adjust, tokens_mask

VOCABULARY = 50
SETTINGS = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_k": VOCABULARY},
    {"temperature": 3.0, "top_k": VOCABULARY + 7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 0.0},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 2.0, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "repetition_penalty": 0.8, "top_p": 0.5},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1},
    {"temperature": 30.0, "top_k": 40, "top_p": 0.5, "min_p": 0.9},
]
PROMPTS = [[1, 2, 3, 2], [49, 0, 7, 7], [5], [*range(VOCABULARY)]]


def some_logits(kind: str) -> Any:
    rng = np.random.default_rng(0)
    logits = (4 * rng.standard_normal((len(PROMPTS), VOCABULARY))).astype(np.float32)
    if kind == "ties":
        return np.round(logits)
    if kind == "infinite":  # as where a mask was added: but for a few, or for one
        logits[:2, 3:40] = -np.inf
        logits[2, np.arange(VOCABULARY) != 17] = -np.inf
    return np.zeros_like(logits) if kind == "equal" else logits


def process(logits: Any, prompts: list[list[int]], how: dict[str, Any]) -> Any:
    """Compute the scores of each row behind transformers' processors, in the order of its `generate`."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    settings = transformers.GenerationConfig(do_sample=True, **{"top_k": 0} | how)
    of_model = transformers.GenerationMixin()
    of_model.config = transformers.PretrainedConfig()
    settings._eos_token_tensor = None
    processors = of_model._get_logits_processor(settings, input_ids_seq_length=1)
    rows = [
        processors(torch.tensor([prompt]), torch.tensor(row[None])) for row, prompt in zip(logits, prompts, strict=True)
    ]
    return torch.cat(rows).numpy()


def shares(scores: Any) -> Any:
    shares = np.exp(scores.astype(float) - scores.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)


def assert_same(scores: Any, right: Any, *, ties: bool = False) -> None:
    """Compare them. Of equal scores, which are kept depends on the sort, in transformers on the machine."""
    if ties:
        scores, right = np.sort(scores), np.sort(right)
    assert np.array_equal(np.isneginf(scores), np.isneginf(right))
    assert np.abs(shares(scores) - shares(right)).max() < 1e-6


@pytest.mark.full
@pytest.mark.torch
@pytest.mark.parametrize("kind", ["drawn", "ties", "equal", "infinite"])
@pytest.mark.parametrize("how", SETTINGS, ids=str)
def test_scores_are_those_of_transformers(how: dict[str, Any], kind: str) -> None:
    logits = some_logits(kind)
    scores = adjust(logits, [Sampling(**how)], tokens_mask(PROMPTS, logits))
    assert scores.dtype == logits.dtype
    assert_same(scores, process(logits, PROMPTS, how), ties=kind in ("ties", "equal"))


@pytest.mark.full
@pytest.mark.torch
@pytest.mark.parametrize("first", range(0, len(SETTINGS), len(PROMPTS)))
def test_each_row_of_a_batch_has_its_own_settings(first: int) -> None:
    logits = some_logits("drawn")
    these = [SETTINGS[(first + row) % len(SETTINGS)] for row in range(len(logits))]
    samplings = [Sampling(**options) for options in these]
    scores = adjust(logits.astype(np.float64), samplings, tokens_mask(PROMPTS, logits))
    right = [process(logits[row : row + 1], PROMPTS[row : row + 1], options) for row, options in enumerate(these)]
    assert_same(scores, np.concatenate(right))


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 3}, [0, 1, 2, 3]),  # the last two are equal
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.74}, [0, 1]),
        ({"top_p": 0.8}, [0, 1, 2]),
        ({"top_p": 0.0}, [0]),
        ({"min_p": 0.3}, [0, 1]),
        ({"min_p": 0.2}, [0, 1, 2, 3]),
        ({"min_p": 1.0}, [0]),
        ({"temperature": 0.5, "min_p": 0.2}, [0, 1]),  # of 16 : 4 : 1 : 1
        ({"temperature": 0.5, "top_p": 0.7}, [0]),
        ({"top_k": 2, "top_p": 0.6}, [0]),  # of 2 : 1
        ({"repetition_penalty": 100.0}, [0, 1, 2, 3]),
        ({"repetition_penalty": 100.0, "top_k": 1}, [1]),
    ],
)
def test_of_known_shares_the_right_ones_are_left(how: dict[str, Any], left: list[int]) -> None:
    """The shares are 4 : 2 : 1 : 1, and the first token came before.

    A token that is left keeps its logit over the temperature.
    """
    logits = np.log(np.array([[4, 2, 1, 1]], np.float32)) - 3
    scores = adjust(logits, [Sampling(**{"temperature": 1.0, **how})], tokens_mask([[0]], logits))
    assert np.flatnonzero(np.isfinite(scores[0])).tolist() == left
    right = (
        logits[0, left] / how.get("temperature", 1) * np.where(np.array(left) == 0, how.get("repetition_penalty", 1), 1)
    )
    assert np.allclose(scores[0, left], right, rtol=1e-6)


def test_of_equal_tokens_the_first_is_kept() -> None:
    """Keep what `argmax` takes, so that a top-p of 0 is the likeliest token."""
    scores = adjust(some_logits("ties"), [Sampling(temperature=1.0, top_p=0.0)])
    assert np.array_equal(np.isfinite(scores).argmax(axis=1), some_logits("ties").argmax(axis=1))
    assert np.isfinite(scores).sum() == len(scores)


def test_a_row_whose_likeliest_is_taken_is_only_penalised() -> None:
    """Another row of the batch is drawn."""
    logits = some_logits("drawn")[:2]
    samplings = [Sampling(repetition_penalty=2.0), Sampling(temperature=2.0)]
    scores = adjust(logits, samplings, tokens_mask(PROMPTS[:2], logits))
    right = logits[0].copy()
    right[[1, 2, 3]] = [score / 2 if score > 0 else score * 2 for score in right[[1, 2, 3]]]
    assert np.array_equal(scores, [right, logits[1] / 2])


@pytest.mark.filterwarnings("error")
def test_a_row_without_a_finite_logit_raises_no_warning() -> None:
    """Its token is refused later (`finite_only`); the other rows are right."""
    logits = some_logits("drawn")
    options = [Sampling(temperature=1.0, top_k=5, top_p=0.9, min_p=0.1)]
    right = adjust(logits, options)
    for wrong in (-np.inf, np.nan):
        broken_logits = logits.copy()
        broken_logits[1] = wrong
        assert np.array_equal(adjust(broken_logits, options)[[0, 2, 3]], right[[0, 2, 3]])


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"temperature": -0.1}, r"temperature: must be 0, or a number in 1e-06..1e\+06 \(got -0.1\)"),
        ({"seed": 2**32}, r"seed: must be an integer in 0..2\^32-1 \(got 4294967296\)"),
        ({"top_k": -1}, r"top_k: must be an integer, 0 or more \(got -1\)"),
        ({"top_k": 2.0}, r"top_k: must be an integer, 0 or more \(got 2.0\)"),
        ({"top_p": 1.5}, r"top_p: must be a number in 0..1 \(got 1.5\)"),
        ({"top_p": float("nan")}, r"top_p: must be a number in 0..1 \(got nan\)"),
        ({"min_p": -1}, r"min_p: must be a number in 0..1 \(got -1\)"),
        ({"repetition_penalty": 0}, r"repetition_penalty: must be a number in 1e-06..1e\+06 \(got 0\)"),
    ],
)
def test_settings_out_of_range(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{message}$"):
        Sampling(**how)
