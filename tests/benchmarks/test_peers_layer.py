"""Mixes of public parts: PyTorch's calls run on the CPU, uncompiled, at a tiny size; what times them is a stand-in."""

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import layer_shapes as shapes
from benchmarks import peers, peers_layer
from ptxlab.errors import BenchmarkError
from ptxlab.llm.model import Config
from ptxlab.lowbit import reference
from ptxlab.runtime.timing import Measured

# Not imported here: that takes seconds of every worker.
pytestmark = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed: it comes with the extra `torch`"
)

_WIDTHS: dict[str, Any] = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 128, "layers": 1, "vocabulary": 32}
TINY = Config(ffn=384, name="tiny", **_WIDTHS)
EXPERTS = Config(ffn=256, name="experts", experts=4, chosen_experts=2, **_WIDTHS)
LENGTH = 64
PLAIN = ("fp16", "fp8_row", "fp8_tensor")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Run every call of two layers once, and report 7 µs each."""

    def measure(calls: Sequence[Callable[[], Any]], **_: Any) -> Measured:
        assert len(calls) in (1, 2)
        for call in calls:
            call()
        return Measured(7.0, 7.0, 7.0, 1900.0)

    for module in (shapes, peers_layer):
        monkeypatch.setattr(module, "LENGTH", LENGTH)
    peers_layer._tables.cache_clear()
    monkeypatch.setattr(peers, "DEVICE", "cpu")
    monkeypatch.setattr(peers, "importable", lambda: True)
    monkeypatch.setattr(peers_layer, "copies_beyond_l2", lambda nbytes: 2)
    monkeypatch.setattr(peers_layer, "measure", measure)
    monkeypatch.setattr(peers_layer, "compile_function", lambda function, *_, **__: function)
    return monkeypatch


@pytest.mark.full
def test_every_mix_at_every_batch(on_cpu: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    times = dict(peers_layer.mixes(TINY, (1, 3), PLAIN, messages.append))
    us = peers_layer.MixTime(7.0, 7.0, 7.0)
    assert times == {B: {f"{name}/sdpa": us for name in PLAIN} for B in (1, 3)} and messages[0] == "tiny: fp16"
    extra_batches = {"fp16/sdpa": [2], "fp16/xqa_fp8": [4]}  # FP16 has no paged attention
    times = dict(peers_layer.mixes(TINY, (1,), ("fp16", "fp8_tensor"), messages.append, extra_batches=extra_batches))
    assert {B: [*of] for B, of in times.items() if of} == {1: ["fp16/sdpa", "fp8_tensor/sdpa"], 2: ["fp16/sdpa"]}


@pytest.mark.full
def test_mixes_batch_by_batch_the_largest_first_with_weights_made_once(on_cpu: pytest.MonkeyPatch) -> None:
    weight_calls: list[tuple[str, tuple[int, ...]]] = []
    weights = peers_layer._weights
    on_cpu.setattr(peers_layer, "_weights", lambda *of: weight_calls.append((of[0], of[3])) or weights(*of))
    extra_batches = {"fp8_tensor/sdpa": [2]}
    rows = peers_layer.mixes(TINY, (1, 3), ("fp16", "fp8_tensor"), lambda _: None, extra_batches=extra_batches)
    assert [*next(rows)[1]] == ["fp16/sdpa", "fp8_tensor/sdpa"]
    assert weight_calls == [("fp16", (3, 1)), ("fp8_tensor", (3, 2, 1))]
    assert [(B, len(times)) for B, times in rows] == [(2, 1), (1, 2)] and len(weight_calls) == 2


def test_mixes_with_equal_caches_share_the_choice_of_attention(on_cpu: pytest.MonkeyPatch) -> None:
    """FP16's and tensor-wise FP8's have the same floats; row-wise FP8 has bfloat16. Each is checked all the same."""
    measured: list[str] = []
    checked: list[str] = []
    check = peers_layer._Attention.check

    def measure(calls: Sequence[Callable[[], Any]], **_: Any) -> Measured:
        backend = [argument for argument in getattr(calls[0], "args", ()) if isinstance(argument, str)]
        measured.extend(backend)
        us = 5.0 if backend == ["FLASH_ATTENTION"] else 7.0
        return Measured(us, us, us, 1900.0)

    def record_check(self: Any, name: str, *of: Any) -> None:
        checked.append(name)
        check(self, name, *of)

    on_cpu.setattr(peers_layer, "measure", measure)
    on_cpu.setattr(peers_layer._Attention, "check", record_check)
    dict(peers_layer.mixes(TINY, (3,), PLAIN, lambda _: None))
    both = ["CUDNN_ATTENTION", "FLASH_ATTENTION"]
    assert measured == 2 * both and checked == [*both, *both, "FLASH_ATTENTION"]


def test_prompts_are_attended_causally_each_for_itself(on_cpu: pytest.MonkeyPatch) -> None:
    """The cache of two prompts has the rotated keys, and the values."""
    import torch

    qkv = torch.randn((2 * LENGTH, TINY.qkv_width), dtype=torch.float16, generator=torch.Generator().manual_seed(0))
    prompts = peers_layer._Prompts(TINY, 2 * LENGTH, 1, torch.float16, LENGTH)
    outputs = prompts.attend(prompts.append(qkv, 0), 0).view(2, LENGTH, 4, 128).float().numpy()
    tables = reference.rope_tables(np.arange(LENGTH), 128)
    for heads, output, keys, values in zip(
        qkv.view(2, LENGTH, 8, 128).float().numpy(), outputs, *prompts.caches[0], strict=True
    ):
        q, k = (reference.rope(x, *tables).astype(np.float16).astype(np.float32) for x in (heads[:, :4], heads[:, 4:6]))
        expected, _ = reference.attention(q, k, heads[:, 6:], scale=128**-0.5)
        assert np.abs(output - expected).max() < 2e-3
        assert np.abs(keys.transpose(0, 1).float().numpy() - k).max() < 1e-2
        assert np.array_equal(values.transpose(0, 1).float().numpy(), heads[:, 6:])


@pytest.mark.full
def test_a_prompt_costs_a_quarter_of_a_layer_of_four(on_cpu: pytest.MonkeyPatch) -> None:
    timed_prompts: list[Any] = []
    time_mix = peers_layer._time_mix
    on_cpu.setattr(peers_layer, "_time_mix", lambda *of: timed_prompts.append((of[2], of[4], of[6])) or time_mix(*of))
    prompts = peers_layer.prefills(TINY, ("fp16", "fp8_row"), LENGTH, lambda _: None)
    quarter = peers_layer.MixTime(7.0 / 4, 7.0 / 4, 7.0 / 4)
    assert prompts == {"fp16": quarter, "fp8_row": quarter}
    assert timed_prompts == [(4 * LENGTH, peers_layer._Prompts, LENGTH)] * 2
    assert peers_layer.prefills(EXPERTS, ("fp16", "humming_g128"), LENGTH, lambda _: None) == {"fp16": quarter}
    on_cpu.setattr(peers, "importable", lambda: False)
    assert peers_layer.prefills(TINY, ("fp16",), LENGTH, lambda _: None) == {}


def run_first_layer(config: Config, B: int) -> tuple[Any, Any]:
    """Run the first layer of the FP16 mix; return the decoder and its inputs."""
    layers = peers_layer._weights("fp16", config, 1, ())
    decoder = peers_layer._decoder("fp16", config, B, layers, peers_layer._Attention)
    inputs = [part.double().clone() for part in (decoder.x, decoder.residual, *decoder.attention.caches[0])]
    decoder.layer(0)
    return decoder, inputs


def matrices(config: Config) -> dict[str, Any]:
    """Make the weights of every mix, as `_weights` does."""
    import torch

    weights = {}
    for number, (name, (N, K)) in enumerate(config.matrices.items()):
        size = (config.experts, N, K) if config.experts and name in ("gate_up", "down") else (N, K)
        random_matrix = torch.randn(
            size, dtype=torch.float16, generator=torch.Generator("cpu").manual_seed(peers_layer._WEIGHTS + number)
        )
        weights[name] = (random_matrix * K**-0.5 * (0.1 if name in ("o", "down") else 1)).double()
    return weights


def rms_norm(x: Any) -> Any:
    return x / (x.square().mean(1, keepdim=True) + peers_layer.EPS).sqrt()


def attend(config: Config, qkv: Any, keys: Any, values: Any) -> Any:
    """Compute attention in f64, one sequence and head after another.

    The new keys are rotated, and appended as the last token.
    """
    import torch

    pairs = torch.arange(64).double()
    angles = (LENGTH - 1) * 1e4 ** -(pairs / 64)

    def rotate(x: Any) -> Any:
        low, high = x[:64], x[64:]
        return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()])

    heads = qkv.view(len(qkv), -1, 128)
    out = torch.zeros(len(qkv), config.heads, 128, dtype=torch.float64)
    for b in range(len(qkv)):
        for h in range(config.heads):
            kv = h * config.kv_heads // config.heads
            k, v = keys[b, kv].clone(), values[b, kv].clone()
            k[-1], v[-1] = rotate(heads[b, config.heads + kv]), heads[b, config.heads + config.kv_heads + kv]
            out[b, h] = torch.softmax(k @ rotate(heads[b, h]) * 128**-0.5, 0) @ v
    return out.view(len(qkv), -1)


@pytest.mark.parametrize("config", [TINY, EXPERTS], ids=lambda config: config.name)
def test_a_mix_is_a_decoder_layer(config: Config, on_cpu: pytest.MonkeyPatch) -> None:
    import torch

    decoder, (x, residual, keys, values) = run_first_layer(config, 3)
    weights = matrices(config)
    stream = x + residual
    stream = stream + attend(config, rms_norm(stream) @ weights["qkv"].t(), keys, values) @ weights["o"].t()
    y = rms_norm(stream)
    if config.experts:
        router = (
            torch.randn((4, 256), generator=torch.Generator("cpu").manual_seed(peers_layer._WEIGHTS + 9))
            .to(torch.bfloat16)
            .double()
        )
        best = (y @ router.t()).topk(2, 1)
        layer_output = torch.zeros_like(x)
        for b in range(3):
            for share, expert in zip(torch.softmax(best.values[b], 0), best.indices[b], strict=True):
                gate, up = (weights["gate_up"][expert] @ y[b]).chunk(2)
                layer_output[b] += share * (weights["down"][expert] @ (torch.nn.functional.silu(gate) * up))
    else:
        gate, up = (y @ weights["gate_up"].t()).chunk(2, 1)
        layer_output = (torch.nn.functional.silu(gate) * up) @ weights["down"].t()
    bound = 0.03 if config.experts else 0.005  # rounding to bfloat16, to float16
    for output, expected in ((decoder.output, layer_output), (decoder.residual, stream)):
        assert float((output.double() - expected).abs().max() / expected.abs().max()) < bound


@pytest.mark.full
def test_a_mix_that_is_wired_wrongly_is_found(on_cpu: pytest.MonkeyPatch) -> None:
    silu_mul = peers_layer.silu_mul

    def swap_halves(gate_up: Any, scheme: str) -> Any:
        return silu_mul(gate_up.roll(gate_up.shape[1] // 2, 1) if scheme == "fp8" else gate_up, scheme)

    on_cpu.setattr(peers_layer, "silu_mul", swap_halves)
    with pytest.raises(BenchmarkError, match=r"fp8_row/sdpa, tiny: .* off the FP16 mix"):
        dict(peers_layer.mixes(TINY, (3,), PLAIN, lambda _: None))


@pytest.mark.parametrize("scheme", ["none", "fp8", "fp8_static", "int8"])
def test_what_a_gemm_is_given(scheme: str, on_cpu: pytest.MonkeyPatch) -> None:
    import torch

    y = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[0.01], [1.0], [3.0], [0.5], [2.0]]
    )
    q, scale = peers_layer.quantize(y, scheme, torch.float16)
    static_scale = peers_layer.STATIC if scheme == "fp8_static" else 1.0
    back = q.float() * (static_scale if scale is None else scale)
    assert (
        float((back - y).abs().max(1).values.div(y.abs().max(1).values).max()) < 1 / 16
    )  # FP8 has three bits behind the first
    if scheme == "int8":
        assert q.dtype == torch.int8 and (q.abs().amax(1) == 127).all()


def test_paged_caches_hold_what_contiguous_ones_do(on_cpu: pytest.MonkeyPatch) -> None:
    """FlashInfer itself needs a GPU: its pages are read back here."""
    import torch

    on_cpu.setattr(peers_layer._Paged, "xqa", lambda self, q, layer: torch.zeros(len(q), 512))
    on_cpu.setattr(peers_layer._Paged, "check", lambda self, name, q, output: None)
    on_cpu.setattr(peers_layer, "PAGE", 16)
    plain, paged = (kind(TINY, 3, 1, torch.float16) for kind in (peers_layer._Attention, peers_layer._Paged))
    qkv = torch.randn((3, TINY.qkv_width), dtype=torch.float16)
    assert bool((plain.append(qkv, 0) == paged.append(qkv, 0)).all()), "queries"
    for flat, pages in zip(plain.caches[0], paged.caches[0], strict=True):
        back = pages.view(3, LENGTH, 2, 128).transpose(1, 2)
        assert bool((back.float() == flat.to(torch.float8_e4m3fn).float()).all())
    keys, _ = paged.first_keys_values()
    assert keys.shape == (1, 2, LENGTH, 128)


def test_humming_multiplies_what_lies_between(on_cpu: pytest.MonkeyPatch) -> None:
    """The package needs a GPU: a layer that multiplies by the weight it was given stands in for it."""

    def humming_layers(N: int, K: int, group: int, tokens: Any, weight: Any, copies: int) -> Any:
        assert weight.shape == (N, K) and group in (0, 128) and tokens == (3,)

        def layer(x: Any, input_scale: Any, tuning_config: str) -> Any:
            assert str(x.dtype) == "torch.int8" and tuning_config == "tiles"
            return (x.float() * input_scale @ weight.float().t()).half()

        return [layer] * copies, None, "tiles"

    on_cpu.setattr(peers, "humming_layers", humming_layers)
    names = ("fp16", *peers_layer.HUMMING)
    assert list(dict(peers_layer.mixes(TINY, (3,), names, lambda _: None))[3]) == [f"{name}/sdpa" for name in names]
    share = Config(ffn=384, name="tiny 1/2", **_WIDTHS)
    assert list(dict(peers_layer.mixes(share, (3,), names, lambda _: None))[3]) == ["fp16/sdpa"]


@pytest.mark.parametrize("kernel", ["rmsnorm_quantize", "silu_mul_quantize", "quantize_activations"])
def test_fused_kernels_have_a_peer(kernel: str, on_cpu: pytest.MonkeyPatch) -> None:
    on_cpu.setattr(peers_layer, "has_liger", lambda: False)
    assert peers_layer.time_public_versions(kernel, 3, 64, 2) == {"torch_compile": 7.0}


@pytest.fixture
def liger(on_cpu: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Replace the timed calls of Liger, whose kernels need a GPU, by PyTorch."""
    import torch

    def add_rms_norm(
        x: Any, residual: Any, gamma: Any, eps: float, offset: float, casting_mode: str
    ) -> tuple[Any, ...]:
        assert (offset, casting_mode) == (0.0, "llama")
        total = x + residual
        floats = total.float()
        return (floats * torch.rsqrt(floats.square().mean(1, keepdim=True) + eps)).half() * gamma, total, "rstd"

    def silu_mul(gate: Any, up: Any) -> tuple[Any, ...]:
        assert gate.is_contiguous() and up.is_contiguous(), "it has one stride for both and for the result"
        return gate, up, torch.nn.functional.silu(gate.float()).half() * up

    for name, functions in (
        ("fused_add_rms_norm", {"fused_add_rms_norm_forward": add_rms_norm}),
        ("swiglu", {"swiglu_forward": silu_mul}),
    ):
        module = ModuleType(f"liger_kernel.ops.{name}")
        vars(module).update(functions)
        on_cpu.setitem(sys.modules, module.__name__, module)
    for package in ("liger_kernel", "liger_kernel.ops"):
        on_cpu.setitem(sys.modules, package, ModuleType(package))
    on_cpu.setattr(peers_layer, "has_liger", lambda: True)
    return on_cpu


@pytest.mark.parametrize("kernel", ["rmsnorm_quantize", "silu_mul_quantize", "quantize_activations"])
def test_liger_stands_beside_what_it_has(kernel: str, liger: pytest.MonkeyPatch) -> None:
    both = {"torch_compile": 7.0, "liger_f16": 7.0}
    quantiser = kernel == "quantize_activations"
    assert peers_layer.time_public_versions(kernel, 3, 64, 2) == ({"torch_compile": 7.0} if quantiser else both)


@pytest.mark.parametrize(
    ("kernel", "module"), [("rmsnorm_quantize", "fused_add_rms_norm"), ("silu_mul_quantize", "swiglu")]
)
def test_wrong_results_of_liger_are_found(kernel: str, module: str, liger: pytest.MonkeyPatch) -> None:
    functions = sys.modules[f"liger_kernel.ops.{module}"]
    forward, index = getattr(functions, f"{module}_forward"), 0 if kernel == "rmsnorm_quantize" else 2

    def wrong(*arguments: Any) -> tuple[Any, ...]:
        outputs = [*forward(*arguments)]
        outputs[index] = outputs[index].flip(1)
        return (*outputs,)

    liger.setattr(functions, f"{module}_forward", wrong)
    with pytest.raises(BenchmarkError, match=f"liger_f16, {kernel}: wrong results"):
        peers_layer.time_public_versions(kernel, 3, 64, 2)


def test_what_liger_cannot_do_is_left_out(liger: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("Cannot launch Triton kernel")

    liger.setattr(sys.modules["liger_kernel.ops.swiglu"], "swiglu_forward", refuse)
    with pytest.warns(UserWarning, match="liger_f16, silu_mul_quantize, 3 x 64: left out, RuntimeError: Cannot launch"):
        assert peers_layer.time_public_versions("silu_mul_quantize", 3, 64, 2) == {"torch_compile": 7.0}


def test_functions_are_compiled_for_a_width_and_any_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions get names of their own, with the axis of tokens marked.

    PyTorch's compiler itself is not run: it takes seconds to import alone.
    """
    import torch

    names, marked_axes, options = [], [], []
    dynamo = SimpleNamespace(maybe_mark_dynamic=lambda tensor, axis: marked_axes.append((len(tensor), axis)))
    monkeypatch.setitem(vars(torch), "_dynamo", dynamo)

    def compiler(function: Any, **keywords: Any) -> Any:
        names.append(function.__code__.co_name)
        options.append(keywords["options"])
        return function

    monkeypatch.setattr(torch, "compile", compiler)
    peers_layer.compile_function.cache_clear()
    for M in (8, 1):
        x = torch.randn((2, M, 64), dtype=torch.float16)
        q, scale, y = peers_layer.compile_function(peers_layer.norm, "int8", "torch.float16", 64)(
            *x, torch.ones(64), "int8"
        )
        assert q.shape == (M, 64) and scale.shape == (M, 1) and y is None
    peers_layer.compile_function(peers_layer.norm, "int8", "torch.float16", 96)
    peers_layer.compile_function(peers_layer.norm, "int8", "torch.float16", 96, fresh=True)
    assert names == ["norm_int8_torch_float16_64", *["norm_int8_torch_float16_96"] * 2]
    assert options == [None, None, peers_layer._WITHOUT_CACHES]
    assert marked_axes == [(8, 0), (8, 0), (1, 0), (1, 0)]
    peers_layer.compile_function.cache_clear()


@pytest.mark.full
def test_what_is_compiled_anew_is_taken_from_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PyTorch's caches on disk give a function that was tuned to 8 tokens for one of 512; compilers take seconds."""
    import torch
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def hits(M: int, **options: bool) -> int:
        counters.clear()
        peers_layer.compile_function.cache_clear()
        x, residual = (torch.randn((M, 64), dtype=torch.float16) for _ in range(2))
        peers_layer.compile_function(peers_layer.norm, "int8", "torch.float16", 64, **options)(
            x, residual, torch.ones(64), "int8"
        )
        return counters["inductor"]["fxgraph_cache_hit"]

    assert (hits(8), hits(512), hits(512, fresh=True)) == (0, 1, 0)
    peers_layer.compile_function.cache_clear()


def test_without_a_gpu_there_are_no_mixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "importable", lambda: False)
    assert dict(peers_layer.mixes(TINY, (1, 4), PLAIN, lambda _: None)) == {1: {}, 4: {}}
    assert (
        peers_layer.time_public_versions("rmsnorm_quantize", 4, 64, 2) == {}
        and peers_layer.trace_kernels(lambda: None) == []
    )
    assert peers_layer.compile_jobs([TINY], (1,), PLAIN) == []


def test_what_is_compiled_side_by_side(on_cpu: pytest.MonkeyPatch) -> None:
    """Every job runs what it names; mixes of one format are one, and humming is asked for whole dense models."""
    on_cpu.setattr(peers_layer, "find_spec", lambda name: True)
    share = Config(ffn=384, name="tiny 1/2", **_WIDTHS)
    jobs = peers_layer.compile_jobs([TINY, share, EXPERTS], (1, 4), [*peers_layer.MIXES], prompts=(64,))
    humming = [args for function, args in jobs if function is peers_layer._warm_humming]
    assert len(humming) == 2 * len(TINY.matrices) and (768, 256, 128, (1, 4, 64)) in humming
    between = [args for function, args in jobs if function is peers_layer._warm_between]
    assert len(between) == 4 * 3 and {largest for _, _, largest in between} == {4}
    import torch

    on_cpu.setattr(torch.cuda, "synchronize", lambda: None)
    for function, args in jobs:
        if function is not peers_layer._warm_humming:
            function(*args)


def test_what_a_mix_cannot_do_is_left_out(on_cpu: pytest.MonkeyPatch) -> None:
    """PyTorch has no scaled grouped GEMM on a CPU."""
    with pytest.warns(UserWarning, match="fp8_row/sdpa, experts, batch 3: left out, NotImplementedError"):
        times = dict(peers_layer.mixes(EXPERTS, (3,), PLAIN, lambda _: None))
    assert list(times[3]) == ["fp16/sdpa"]
