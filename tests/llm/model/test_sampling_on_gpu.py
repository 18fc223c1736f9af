"""Sampling of CuPy's logits: the scores, draws and texts are NumPy's; and models of floats on a GPU."""

from typing import Any

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.llm.model import FloatModel, FloatRunner, Sampling, generate
from ptxlab.llm.model.sampling import adjust, tokens_mask
from ptxlab.llm.server import Server
from tests.support.small_prompts import SMALL, some_prompts

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
    """Of equal logits too; one setting for all rows, or one for each."""
    rng = np.random.default_rng(0)
    logits = np.round(4 * rng.standard_normal((len(SETTINGS), 1000))).astype(dtype)
    seen = [rng.integers(0, 1000, 50).tolist() for _ in SETTINGS]
    for how in SETTINGS if alike else [None]:
        samplings = [Sampling(**each) for each in (SETTINGS if how is None else [how])]
        there = cupy.asarray(logits)
        found = adjust(there, samplings, tokens_mask(seen, there))
        right = adjust(logits, samplings, tokens_mask(seen, logits))
        assert found.dtype == dtype and np.array_equal(np.isneginf(cupy.asnumpy(found)), np.isneginf(right))
        kept = np.isfinite(right)
        assert np.allclose(cupy.asnumpy(found)[kept], right[kept], rtol=1e-6)


def test_a_float_model_on_a_gpu_has_the_tokens_of_numpy() -> None:
    model, prompts = FloatModel.random(SMALL, dtype=np.float64), some_prompts((5, 9))
    here, there = (FloatRunner(each, 2, 60, chunk=4) for each in (model, model.to_device()))
    assert np.allclose(gpu.to_host(there.prefill(prompts)), here.prefill(prompts), atol=1e-9)
    for how in ({}, {"repetition_penalty": 2.0}):
        found, right = (list(generate(runner, prompts, 10, **how)) for runner in (there, here))
        assert np.array_equal(found, right)
    made = []
    for runner in (there, here):
        server = Server(runner)
        requests = [server.submit(prompts[i % 2], 8, seed=i, **how) for i, how in enumerate(SETTINGS)]
        server.run()
        made.append([request.tokens for request in requests])
    assert made[0] == made[1]
