"""Small models and prompts for runners, and how far two runners' logits are from each other."""

from dataclasses import replace
from typing import Any

import numpy as np

from ptxlab.llm.model import Config, FloatModel, QuantizedModel
from tests.support.layers import TINY_MODEL

# SmolLM2-135M's layer, four of them, and a vocabulary of a few.
SMALL = Config(
    hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64, layers=4, vocabulary=1000, rope_base=1e5, tied_head=True
)


def quantized_model(**changes: Any) -> QuantizedModel:
    """Quantise a tiny model with these fields of its config, scheme or dtype changed."""
    options = {name: changes.pop(name) for name in ("scheme", "dtype") if name in changes}
    return QuantizedModel.rounded(FloatModel.random(replace(TINY_MODEL, **changes)), group=32, **options)


def random_prompts(lengths: tuple[int, ...], vocabulary: int = SMALL.vocabulary) -> list[list[int]]:
    """Make random prompts of these lengths, the same for the same lengths."""
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(0, vocabulary, length).tolist() for length in lengths]


def relative_error(logits: Any, expected: Any) -> float:
    """Return the difference of logits [R, V], relative to their spread.

    Both are root mean squares, each row less its mean.
    """
    logits, expected = (
        x.astype(np.float64) - x.astype(np.float64).mean(axis=1, keepdims=True) for x in (logits, expected)
    )
    return float(np.sqrt(((logits - expected) ** 2).mean() / (expected**2).mean()))
