"""`ptxlab.llm.torch` on a GPU: operators against those of the CPU, in compiled graphs, captured, on streams; models."""

from typing import Any

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.llm.model import KernelRunner, QuantizedModel
from tests.support.torch_calls import OPERATORS, every_call
from tests.support.torch_models import FAMILIES, small_model

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
HOPPER = pytest.mark.skipif(gpu.why_not("sm_90a", exact=True) is not None, reason="the products need sm_90a")
pytestmark = [pytest.mark.torch, pytest.mark.gpu, HOPPER]

PROMPTS, TOKENS, CONTEXT = [[5, 7, 11, 13, 17, 19], [23, 29, 31]], 16, 64


def on_gpu(part: Any) -> Any:
    """Copy every tensor in a call's arguments to the GPU."""
    if isinstance(part, torch.Tensor):
        if part.is_contiguous():
            return part.cuda()
        return part._base.cuda().as_strided(part.shape, part.stride(), part.storage_offset())
    if isinstance(part, tuple | list):
        return type(part)(map(on_gpu, part))
    return {name: on_gpu(element) for name, element in part.items()} if isinstance(part, dict) else part


def calls(seed: int = 0) -> tuple[Any, Any]:
    """Make a call of each operator on the CPU, and the same on the GPU, attention with a workspace."""
    from ptxlab.llm.torch import attention_workspace

    host, device = (every_call(np.random.default_rng(seed)) for _ in range(2))
    device = on_gpu(device)
    for name in ("attention_kv4", "attention_kv4_out"):
        device[name][1]["workspace"] = attention_workspace(64)
    return host, device


def call_operator(call: Any, name: str) -> list[Any]:
    """Call an operator; return its results and its tensor arguments after the call."""
    args, options = call[name]
    outputs = getattr(torch.ops.ptxlab, name)(*args, **options)
    outputs = [*outputs] if isinstance(outputs, tuple | list) else [outputs]
    return [tensor for tensor in [*outputs, *args] if isinstance(tensor, torch.Tensor)]


def assert_same(name: str, tensors: list[Any], expected_tensors: list[Any]) -> None:
    """Assert that tensors are equal to the bit, but for exponentials."""
    loose = {"rtol": 2**-19 * (name == "silu_mul_quantize"), "atol": 2e-3 * name.startswith("attention_kv4")}
    for ours, theirs in zip(tensors, expected_tensors, strict=True):
        assert torch.allclose(ours.cpu(), theirs.cpu(), **loose), name


@pytest.mark.parametrize("name", OPERATORS)
def test_opcheck_and_the_results_of_the_cpu(name: str) -> None:
    import ptxlab.llm.torch  # noqa: F401  (defines the operators)

    host, device = calls()
    args, options = device[name]
    torch.library.opcheck(getattr(torch.ops.ptxlab, name).default, args, options)
    host, device = calls(1)
    assert_same(name, call_operator(device, name), call_operator(host, name))


def test_compiled_without_a_break() -> None:
    """Inductor compiles all operators into one graph with CUDA graphs, which runs three times."""
    _, device = calls()
    _, again = calls()

    def layer(call: Any) -> list[Any]:
        return [tensor for name in OPERATORS for tensor in call_operator(call, name)]

    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        expected, outputs = layer(device), [tensor.clone() for tensor in compiled(again)]
        assert all(torch.equal(a, b) for a, b in zip(expected, outputs, strict=True))


def test_captured_and_replayed() -> None:
    """A CUDA graph of all operators is replayed on other numbers."""
    _, device = calls()
    _, changed_call = calls(1)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for name in OPERATORS:
            call_operator(device, name)  # loads the kernels
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        captured = {name: call_operator(device, name) for name in OPERATORS}
    expected = {name: call_operator(changed_call, name) for name in OPERATORS}
    _, fresh = calls(1)
    for name in OPERATORS:
        for target, source in zip(device[name][0], fresh[name][0], strict=True):
            if isinstance(target, torch.Tensor):
                target.copy_(source)
            elif isinstance(target, list):
                [a.copy_(b) for a, b in zip(target, source, strict=True)]
    graph.replay()
    torch.cuda.synchronize()
    for name in OPERATORS:
        assert_same(name, captured[name], expected[name])


def test_streams_at_the_same_time() -> None:
    """The tensors of a stream are its own; their bits are those of streams one after the other."""
    calls_by_stream = [calls(seed)[1] for seed in range(3)]
    expected = [[call_operator(calls(seed)[1], name) for name in OPERATORS] for seed in range(3)]
    torch.cuda.synchronize()
    streams, outputs = [torch.cuda.Stream() for _ in calls_by_stream], [[] for _ in calls_by_stream]
    for name in OPERATORS:
        for stream, call, into in zip(streams, calls_by_stream, outputs, strict=True):
            with torch.cuda.stream(stream):
                into.append(call_operator(call, name))
    torch.cuda.synchronize()
    for ours, theirs in zip(outputs, expected, strict=True):
        assert all(torch.equal(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True))


def test_linear_moves_and_gives_the_same() -> None:
    from ptxlab.llm.torch import W4A8Linear

    linear = W4A8Linear.from_linear(torch.nn.Linear(256, 128, dtype=torch.float16))
    x = torch.randn(5, 256).half()
    on_cpu = linear(x)
    assert torch.equal(linear.cuda()(x.cuda()).cpu(), on_cpu)
    compiled = torch.compile(linear, fullgraph=True)
    assert torch.equal(compiled(x.cuda()).cpu(), on_cpu)


def decode_tokens(runner: KernelRunner) -> list[list[int]]:
    """Return the likeliest tokens behind `PROMPTS`, each token appended by the decode kernel."""
    logits_behind = [
        [runner.decode([token], sequences=[b]) for token in prompt][-1] for b, prompt in enumerate(PROMPTS)
    ]
    steps = [[int(logits[0].argmax()) for logits in logits_behind]]
    while len(steps) < TOKENS:
        steps.append(runner.decode(steps[-1]).argmax(axis=1).tolist())
    return [[*tokens] for tokens in zip(*steps, strict=True)]


@pytest.mark.long(20)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generates_the_tokens_of_our_runner(family: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    require_tokens_of_our_runner(family, monkeypatch, compiled=compiled)


@pytest.mark.long(20)
def test_kernels_for_ampere_generate_the_tokens_of_our_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu.compiling_for("sm_80"):
        require_tokens_of_our_runner("llama", monkeypatch, compiled=False)


def require_tokens_of_our_runner(family: str, monkeypatch: pytest.MonkeyPatch, *, compiled: bool) -> None:
    """Compare tokens with those of `KernelRunner`, eager, or as `generate` compiles a static cache by itself.

    Prompts go token by token, as the rows of a torch model all go through the decode kernel. Inductor adds to the
    residual stream in float32 and rounds once for several layers unless it is told otherwise.
    """
    monkeypatch.setattr("torch._inductor.config.emulate_precision_casts", True)
    from ptxlab.llm.torch import KV4Cache, quantize_model
    from ptxlab.llm.torch.models import float_model

    model = small_model(family)
    ready = QuantizedModel.rounded(float_model(model), group=64, rounding="nearest")
    runner = KernelRunner(ready, len(PROMPTS), CONTEXT)
    expected = decode_tokens(runner)
    model = quantize_model(model.cuda(), ready)
    cache, longest = KV4Cache(model, len(PROMPTS), CONTEXT), max(map(len, PROMPTS))
    padded = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS]).cuda()
    real = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS]).cuda()
    generated = model.generate(
        padded,
        attention_mask=real,
        past_key_values=cache,
        max_new_tokens=TOKENS,
        do_sample=False,
        disable_compile=not compiled,
    )
    assert generated[:, longest:].tolist() == expected


@pytest.mark.timing
def test_host_time_of_an_operator() -> None:
    """Beyond an operator that only allocates its results: of each the least of many, as the other workers take the
    processor now and then. On an idle host 12 to 19 µs are recorded."""
    from benchmarks import pytorch as bench

    operator, allocating = (bench._host_us(call)[1] for call in bench.operator_calls()["quantize_activations"])
    assert 0 < operator - allocating < 25, (operator, allocating)


@pytest.mark.long(60)
def test_the_suite_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite measures a model of two layers."""
    from transformers import LlamaConfig

    from benchmarks import pytorch as bench
    from ptxlab.bench.ceilings import Ceilings
    from ptxlab.llm.model import Config

    small_one = Config(
        hidden=512, ffn=1024, heads=4, kv_heads=4, head_dim=128, layers=2, vocabulary=32000, context=2048
    )
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_hidden_layers": 2}
    monkeypatch.setattr(bench, "LlamaConfig", lambda: LlamaConfig(**sizes))
    monkeypatch.setattr(bench.Config, "named", lambda name: small_one)
    monkeypatch.setattr(bench, "BATCHES", (1, 2))
    long_run = 520  # so long that other workers' share of the host does not hide the difference of two runs
    monkeypatch.setattr(bench, "LONG_RUN", long_run)
    monkeypatch.setattr(bench, "LONGEST", bench.PROMPT + long_run)
    rows = list(bench.rows((), Ceilings(4.0, 4.0), lambda label: None))
    assert [row.measure for row in rows] == ["host time"] * len(OPERATORS) + ["generate"] * 6
    steps = rows[-6:]
    assert [sorted(row.peers) for row in steps] == [[]] * 2 + [["fp16"]] * 2 + [["fp16", "fp8"]] * 2
    assert all(0 < row.fraction < 1 for row in steps)
    monkeypatch.setattr(bench, "step_us", lambda *_: pytest.fail("measured again"))
    assert list(bench.rows((), Ceilings(4.0, 4.0), lambda label: None, done=rows))[-6:] == steps
