"""Small models in vLLM's own classes: steps of batches as the engine makes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_process")]
Configured = Callable[..., Any]
PROMPT = np.random.default_rng(2).integers(3, 290, 90).tolist()


@pytest.fixture(params=["smollm", "mistral", "qwen2"])
def small_model(request: pytest.FixtureRequest, configured: Configured) -> Any:
    from tests.support.served_model import ServedModel

    return ServedModel(configured(request.param))


def test_chunks_and_prefixes_give_the_logits_of_the_whole(small_model: Any) -> None:
    """Own keys come from the cache in both, so they are the same to the bit."""
    whole = small_model.logits([(0, 0, PROMPT)])
    chunks = [small_model.logits([(1, done, PROMPT[done : done + 30])]) for done in (0, 30, 60)]
    assert torch.equal(torch.cat(chunks), whole)
    behind_a_prefix = small_model.logits([(0, 89, PROMPT[89:]), (2, 0, PROMPT[:20])])
    assert torch.equal(behind_a_prefix[0], whole[89]) and torch.equal(behind_a_prefix[1:], whole[:20])


def test_a_window_is_the_kernels_affair(configured: Configured) -> None:
    """vLLM 0.26 sizes pages of a window as those of 8 bits: the cache keeps all tokens."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from tests.support.served_model import ServedModel

    small_model = ServedModel(configured("mistral"))
    layers = small_model.config.compilation_config.static_forward_context
    assert all(type(spec) is FullAttentionSpec for spec in small_model.specs.values())
    assert {layer.impl.window for layer in layers.values()} == {5}


def test_logits_are_near_those_of_the_float_model(small_model: Any) -> None:
    from transformers import AutoModelForCausalLM

    folder = Path(small_model.config.model_config.model)
    floats = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = floats(torch.tensor([PROMPT])).logits[0]
    got = small_model.logits([(0, 0, PROMPT)])
    assert torch.nn.functional.cosine_similarity(got, expected, dim=1).mean() > 0.97
