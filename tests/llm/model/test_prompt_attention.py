"""Prompts attended by PyTorch, in the emulator: exact attention of what the launch left, and whole models beside it."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.llm.model import KernelRunner, LayerWeights, NumpyRunner, QuantizedModel
from ptxlab.llm.model.kernel_runner import require_torch
from ptxlab.llm.model.layer import LayerCall
from ptxlab.llm.model.runner import Rows
from ptxlab.llm.server import Server
from ptxlab.lowbit import reference
from ptxlab.lowbit.layout import gather
from ptxlab.spec.dtypes import as_stored, floats
from tests.support.float_prompts import FloatPromptsRunner
from tests.support.layers import TINY
from tests.support.small_prompts import quantized, relative

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.torch

by_torch = pytest.importorskip("ptxlab.llm.model.prompt_attention")

CONFIGS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "bf16": {"dtype": "bfloat16", "scheme": "qoq_channel", "qkv_bias": True, "kv_heads": 2},
}
# Root mean square of what logits differ by, by that of the logits. Attention is rounded otherwise: 0.009 to 0.021 here.
# Against keys and values of 4 bits: 0.08 to 0.09.
OF_ATTENTION, OF_CACHE = 0.04, 0.15
PROMPTS = [[1, 2, 3, 4, 5], [8, 9, 1, 7, 4], [6, 6, 2], [9]]


@pytest.fixture(scope="module")
def model() -> QuantizedModel:
    return quantized()


def runner_of(model: QuantizedModel, batch: int, **how: Any) -> KernelRunner:
    return KernelRunner(model, batch, 70, **{"backend": "emulator", "prompt_attention": "torch", **how})


def rows_of(*parts: tuple[int, int, int]) -> Rows:
    """Of sequences, each with its first position and number of rows."""
    sequence = np.concatenate([np.full(n, b, np.int32) for b, _, n in parts])
    position = np.concatenate([np.arange(first, first + n, dtype=np.int32) for _, first, n in parts])
    return Rows(np.zeros_like(sequence), sequence, position)


def test_neighbours_of_one_length_are_attended_together() -> None:
    rows = rows_of((3, 4, 2), (0, 0, 5), (2, 0, 5), (1, 0, 7), (5, 9, 1), (4, 0, 7), (6, 0, 1))
    found = by_torch.begun(rows, None)
    assert found == [(2, 2, 5), (12, 1, 7), (20, 1, 7), (27, 1, 1)]
    left = by_torch.lengths_left(rows.position, found)
    assert left[:2].tolist() == [5, 6] and left[19] == 10 and left.sum() == 21
    assert by_torch.begun(rows, 6) == [(2, 2, 5), (27, 1, 1)], "a prompt beyond the window is the decode attention's"
    assert by_torch.begun(rows_of((0, 3, 9)), None) == []


@pytest.mark.full
@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_every_row_is_exact_attention_of_what_the_launch_has(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch with two prompts of a length, a shorter one, a sequence that goes on, and padding: in every layer,
    prompts over their own keys and values, the rest over the cache. And nothing else of the layer changes."""
    runner, seen = runner_of(quantized(**changes), 4, chunk=15), []
    config, dtype = runner.config, runner.model.layers[0].dtype
    attend = by_torch.PromptAttention.__call__

    def noted(attention: Any, call: LayerCall) -> None:
        attend(attention, call)
        b = runner._steps[16 if 16 in runner._steps else 15].buffers
        given = (floats(array).copy() for array in (b.q, b.qkv, b.attention))
        seen.append((*given, gather(call.args[1])))

    runner.extend({3: [4, 4]})
    monkeypatch.setattr(by_torch.PromptAttention, "__call__", noted)
    runner.extend({0: PROMPTS[0], 3: [7], 1: PROMPTS[1], 2: PROMPTS[2]})
    assert len(seen) == config.layers
    cos, sin = config.rope_tables(5)
    ulp = 2.0**-11 if dtype == "float16" else 2.0**-8
    for q, qkv, attention, (keys, values) in seen:
        _, k, v = np.split(
            qkv.reshape(len(q), -1, config.head_dim), [config.heads, config.heads + config.kv_heads], axis=1
        )
        for start, n in ((0, 5), (6, 5), (11, 3)):
            at = slice(start, start + n)
            rotated = as_stored(reference.rope(k[at], cos[:n], sin[:n]), dtype)
            right, _ = reference.attention(q[at], rotated, v[at], scale=config.head_dim**-0.5)
            assert np.abs(attention[at] - right).max() <= 3 * ulp * np.abs(v[at]).max()
        of_cache = (each[5].dequantize() for each in (keys, values))
        right, _ = reference.attention(q[5:6], *of_cache, scale=config.head_dim**-0.5)
        assert np.abs(attention[5:6] - right).max() <= 1e-2 * np.abs(right).max()
        assert not attention[14:].any(), "padding"


@pytest.mark.full
@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_a_whole_model_is_its_twin_in_numpy(changes: dict[str, Any]) -> None:
    """Prompts in chunks that cut two of them, and a step behind them. Against the cache's attention the logits differ
    by what 4 bits of keys and values make of them."""
    model = quantized(**changes)
    kernels, twin = runner_of(model, 4, chunk=8), FloatPromptsRunner(model, 4, 70, chunk=8)
    found, right = ([run.prefill(PROMPTS), run.decode([1, 2, 3, 4])] for run in (kernels, twin))
    assert kernels.lengths.tolist() == [6, 6, 4, 2] and np.array_equal(kernels.caches[0].lengths, kernels.lengths)
    assert np.array_equal(kernels.caches[0].pool, twin.caches[0].pool), "nothing of attention comes before it"
    for ours, exact in zip(found, right, strict=True):
        assert relative(ours, exact) < OF_ATTENTION
    of_cache = NumpyRunner(model, 4, 70, chunk=8).prefill(PROMPTS)
    assert OF_ATTENTION < relative(found[0], of_cache) < OF_CACHE


@pytest.mark.full
def test_experts_and_what_padding_held() -> None:
    """Three rows in a launch of four, whose buffers were full of NaN."""
    config, rng = replace(TINY, experts=2, chosen_experts=1), np.random.default_rng(0)
    model = QuantizedModel(
        config=config,
        embedding=rng.standard_normal((100, 128), np.float32).astype(np.float16),
        layers=[LayerWeights.random(config)],
        final_norm=np.ones(128, np.float16),
    )
    found = []
    for poison in (0, np.nan):
        runner = runner_of(model, 1, chunk=4)
        runner._step(4).buffers.attention.fill(poison)
        found.append(runner.prefill([PROMPTS[2]]))
    assert np.isfinite(found[0]).all() and np.array_equal(*found)
    of_cache = runner_of(model, 1, chunk=4, prompt_attention="cache").prefill([PROMPTS[2]])
    assert 0 < relative(found[0], of_cache) < OF_CACHE


@pytest.mark.full
def test_a_server_takes_whole_prompts_and_first_chunks(model: QuantizedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, and a token that begins a sequence by `decode`, are the kernel's."""
    begun, seen = by_torch.begun, []
    monkeypatch.setattr(by_torch, "begun", lambda rows, window: seen.append(begun(rows, window)) or seen[-1])
    runner = runner_of(model, 2, chunk=8)
    server = Server(runner)
    requests = [server.submit(prompt, tokens=2) for prompt in ([1, 2, 3, 4, 5], [*range(9)])]
    server.run()
    assert all(request.error is None and len(request.tokens) == 2 for request in requests)
    assert seen == [[(0, 1, 5), (5, 1, 3)], []], "five, and three of nine; the other six go on"
    assert sorted(runner.free) == list(range(runner.pages))
    runner.decode([1, 2])
    assert len(seen) == 2


def test_what_is_refused(model: QuantizedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"^prompt_attention: must be one of cache, torch \(got flash\)$"):
        runner_of(model, 1, prompt_attention="flash")
    rule = r"^prompt_attention: must be cache where batch_invariant is True \(got torch\)$"
    with pytest.raises(ArgumentError, match=rule):
        runner_of(model, 1, batch_invariant=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnavailableError, match=r"^torch: [^\n]+ sees no GPU; install a build with CUDA$"):
        require_torch(on_gpu=True)


@pytest.mark.full
def test_without_pytorch_a_line_says_so() -> None:
    code = """
import sys
sys.modules["torch"] = None
from ptxlab.errors import UnavailableError
from ptxlab.llm.model.kernel_runner import require_torch
try:
    require_torch(on_gpu=False)
except UnavailableError as error:
    print(error)
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout == "torch: not installed; python -m pip install 'ptxlab[torch]'\n"
