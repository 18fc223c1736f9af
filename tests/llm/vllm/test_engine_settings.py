"""What the tests on a GPU ask of vLLM's engine is what it takes, and what their process does with its answers."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support import vllm_engine
from tests.support.vllm_engine import COMMON, SETTINGS

Configured = Callable[..., Any]


@pytest.mark.parametrize("name", SETTINGS)
def test_an_engine_takes_the_settings(configured: Configured, packed_folder: Callable[..., Path], name: str) -> None:
    settings = {**COMMON, **SETTINGS[name], "max_model_len": 128}
    settings.pop("arch", None)  # of its process
    config = configured(model=packed_folder("smollm"), quantization=None, **settings)
    assert config.attention_config.backend.name == "CUSTOM"
    dtype = SETTINGS[name].get("kv_cache_dtype", "int4_per_token_head")
    assert config.cache_config.cache_dtype == dtype and config.cache_config.block_size in (None, 16, 64)


def test_a_job_comes_back_as_tokens_and_logprobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def __init__(self, **arguments: Any) -> None:
            assert arguments == {"model": "folder", **COMMON}

        def generate(self, prompts: Any, sampling: Any, use_tqdm: bool) -> list[Any]:
            ids = [prompt["prompt_token_ids"] for prompt in prompts]
            likely = {token: SimpleNamespace(logprob=-float(token)) for token in range(9)}
            return [
                SimpleNamespace(
                    prompt_token_ids=tokens,
                    prompt_logprobs=[None, *[likely] * (len(tokens) - 1)] if sampling.prompt_logprobs == 0 else None,
                    outputs=[SimpleNamespace(token_ids=[5] * sampling.max_tokens)],
                )
                for tokens in ids
            ]

    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = Engine, lambda **of: SimpleNamespace(**of)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    job = {"engine": {"model": "folder", **COMMON}, "prompts": [[1, 2, 3], [4, 5]], "new": 2, "of_prompts": True}
    texts = vllm_engine.serve(json.loads(json.dumps(job)))
    assert texts == {"tokens": [[5, 5], [5, 5]], "logprobs": [[-2.0, -3.0], [-5.0]]}
    assert vllm_engine.serve({**job, "of_prompts": False})["logprobs"] == [[], []]
