"""Sampling of CuPy's logits: the scores, draws and texts are NumPy's; and models of floats on a GPU."""

from typing import Any

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.llm.model import FloatModel, FloatRunner, Sampling, generate
from ptxlab.llm.model.sampling import adjust, tokens_mask
from ptxlab.llm.server import Server
from tests.support.small_prompts import SMALL, random_prompts

pytestmark = pytest.mark.gpu
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.6, "repetition_penalty": 1.5},
    {"repetition_penalty": 2.0},
    {"temperature": 2.0, "min_p": 0.3, "top_k": 40, "top_p": 0.9},
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("alike", [True, False])
def test_scores_are_numpys(cupy: Any, dtype: Any, alike: bool) -> None:
    """Compare them, of equal logits too; one setting for all rows, or one for each."""
    rng = np.random.default_rng(0)
    logits = np.round(4 * rng.standard_normal((len(SETTINGS), 1000))).astype(dtype)
    seen = [rng.integers(0, 1000, 50).tolist() for _ in SETTINGS]
    for options in SETTINGS if alike else [None]:
        samplings = [Sampling(**settings) for settings in (SETTINGS if options is None else [options])]
        on_gpu = cupy.asarray(logits)
        scores = adjust(on_gpu, samplings, tokens_mask(seen, on_gpu))
        right = adjust(logits, samplings, tokens_mask(seen, logits))
        assert scores.dtype == dtype and np.array_equal(np.isneginf(cupy.asnumpy(scores)), np.isneginf(right))
        finite = np.isfinite(right)
        assert np.allclose(cupy.asnumpy(scores)[finite], right[finite], rtol=1e-6)


def test_a_float_model_on_a_gpu_has_the_tokens_of_numpy() -> None:
    model, prompts = FloatModel.random(SMALL, dtype=np.float64), random_prompts((5, 9))
    on_cpu, on_gpu = (FloatRunner(placed, 2, 60, chunk=4) for placed in (model, model.to_device()))
    assert np.allclose(gpu.to_host(on_gpu.prefill(prompts)), on_cpu.prefill(prompts), atol=1e-9)
    for options in ({}, {"repetition_penalty": 2.0}):
        scores, right = (list(generate(runner, prompts, 10, **options)) for runner in (on_gpu, on_cpu))
        assert np.array_equal(scores, right)
    answers = []
    for runner in (on_gpu, on_cpu):
        server = Server(runner)
        requests = [server.submit(prompts[i % 2], 8, seed=i, **options) for i, options in enumerate(SETTINGS)]
        server.run()
        answers.append([request.tokens for request in requests])
    assert answers[0] == answers[1]
