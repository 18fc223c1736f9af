"""`FloatRunner`: its logits, token by token and in chunks, are those of `FloatModel` over whole sequences."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError
from ptxlab.llm.model import FloatModel, FloatRunner, NumpyRunner, generate
from ptxlab.llm.server import Server
from tests.support.layers import TINY_MODEL
from tests.support.small_prompts import quantized_model

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 1], list(range(70, 140))]
CHANGES: list[dict[str, Any]] = [
    {},
    {"qkv_bias": True, "tied_head": False, "window": 5, "activation": "gelu_tanh", "kv_heads": 2},
    {"qkv_bias": True, "window": 5, "window_layers": (1,)},
    {"experts": 4, "chosen_experts": 2},
]


def right_logits(model: FloatModel, tokens: list[int]) -> Any:
    (state,) = model.states([np.array([tokens])])
    return model.logits(state[0, -1])


@pytest.mark.parametrize("changes", CHANGES, ids=["plain", "others", "window of a layer", "experts"])
@pytest.mark.parametrize("chunk", [5, 256])
def test_logits_are_those_of_whole_sequences(changes: dict[str, Any], chunk: int) -> None:
    model = FloatModel.random(replace(TINY_MODEL, **changes), dtype=np.float64)
    runner = FloatRunner(model, 3, 80, chunk=chunk)
    assert np.allclose(runner.prefill(PROMPTS), [right_logits(model, prompt) for prompt in PROMPTS], atol=1e-9)
    logits = runner.decode([5, 6], [2, 0])
    assert np.allclose(logits, [right_logits(model, [*PROMPTS[b], 5 + i]) for i, b in enumerate((2, 0))], atol=1e-9)
    logits = runner.extend({1: [7, 7, 2]})
    assert np.allclose(logits, [right_logits(model, [*PROMPTS[1], 7, 7, 2])], atol=1e-9)


def test_generate_and_a_server_take_it() -> None:
    model = FloatModel.random(replace(TINY_MODEL, tied_head=False))
    tokens_made = [int(step[0]) for step in generate(FloatRunner(model, 1, 20), [PROMPTS[0]], 5)]
    tokens = list(PROMPTS[0])
    for _ in range(5):
        tokens.append(int(right_logits(model, tokens).argmax()))
    server = Server(FloatRunner(model, 2, 20))
    requests = [server.submit(PROMPTS[i], 5) for i in (0, 1)]
    server.run()
    assert tokens_made == tokens[7:] == requests[0].tokens


def test_what_is_not_finite_is_an_error() -> None:
    model = FloatModel.random(replace(TINY_MODEL, tied_head=False))
    model.embedding[7] = np.inf
    with pytest.raises(ArgumentError, match=r"NaN or infinity for token 0 behind prompts\[1\]"):
        next(generate(FloatRunner(model, 2, 20), [[1, 2], [1, 7]], 3))


def test_models_go_to_the_runners_of_their_kind() -> None:
    with pytest.raises(ArgumentError, match=r"^model: must be a FloatModel \(got QuantizedModel\)$"):
        FloatRunner(quantized_model())  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^model: must be a QuantizedModel \(got FloatModel\)$"):
        NumpyRunner(FloatModel.random(TINY_MODEL))  # type: ignore[arg-type]
