"""Whole layers and decoders as an A100 (sm_80) or an L40S (sm_89) would run them.

In the emulator kernels are chosen and compiled for those; on a GPU, which may be newer, its driver compiles the PTX.
"""

from dataclasses import replace

import numpy as np
import pytest

import ptxlab
from ptxlab import emulator, gpu
from ptxlab.errors import UnavailableError
from ptxlab.llm.model import Config, KernelRunner, LayerBuffers, LayerWeights, NumpyRunner
from ptxlab.llm.model.reference import compare
from ptxlab.llm.server import Server
from ptxlab.lowbit import quant
from ptxlab.lowbit.kernels import operation
from ptxlab.lowbit.layout import unpack
from tests.support.fake_gpu import FakeGpu, on_device
from tests.support.layers import TINY, LayerProblem, layer_problem
from tests.support.small_prompts import quantized_model

ARCHITECTURES = ("sm_80", "sm_89")
DTYPES = {"lqq": "float16", "qoq": "bfloat16", "qoq_channel": "float16"}
CHAIN = (
    "rmsnorm_quantize", "gemm_w4a8_lqq_sm80", "rope_append_kv4", "attention_kv4_mma_sm80", "quantize_activations_s8",
    "gemm_w4a8_lqq_sm80", "rmsnorm_quantize", "gemm_w4a8_lqq_sm80", "silu_mul_quantize", "gemm_w4a8_lqq_sm80",
)  # fmt: skip
# Root mean square of what logits differ by, by that of the logits (test_generate): attention rounds otherwise.
OF_ATTENTION = 0.03


def chain_of(scheme: str) -> tuple[str, ...]:
    return tuple(name.replace("gemm_w4a8_lqq", f"gemm_w4a8_{scheme}") for name in CHAIN)


@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("scheme", ["lqq", "qoq", "qoq_channel"])
def test_a_layer_is_its_twin(scheme: str, arch: str) -> None:
    """Every bit is equal but those of attention and the gate, which lie within their bounds.

    The checks find nothing.
    """
    problem = layer_problem(lengths=(3, 70), scheme=scheme, layout="qserve", dtype=DTYPES[scheme])
    assert not problem.buffers.programmatic
    inputs = problem.inputs
    with gpu.compiling_for(arch), emulator.chain(emulator.CHECKS, given=[problem.cache.pool]) as chain:
        problem.run()
    assert chain.findings == [] and tuple(chain.launches) == chain_of(scheme)
    summary = compare(inputs, problem.weights, problem.buffers, problem.residual, problem.cache)
    assert summary == "12 steps: attention, down_in within bounds, all others equal in every bit"


@pytest.mark.full
def test_a_decoder_decodes_on_ada() -> None:
    """Two layers of weights in strips decode a step after a prompt.

    In NumPy the first cache has the same bytes.
    """
    model, options = quantized_model(layers=2), {"batch": 2, "context": 70, "chunk": 4, "head": "int8"}
    assert {weights.qkv.layout for weights in model.layers} == {"strips"}
    with gpu.compiling_for("sm_89"):
        kernels = KernelRunner(model, **options, backend="emulator")
        logits = [kernels.extend({0: [1, 2, 3], 1: [4]}), kernels.decode([5, 6])]
    numpy_runner = NumpyRunner(model, **options)
    right = [numpy_runner.extend({0: [1, 2, 3], 1: [4]}), numpy_runner.decode([5, 6])]
    assert np.array_equal(kernels.caches[0].pool, numpy_runner.caches[0].pool) and numpy_runner.caches[0].pool.any()
    difference = np.sqrt(np.square(np.subtract(logits, right), dtype=np.float64).mean())
    assert difference < OF_ATTENTION * np.sqrt(np.square(right, dtype=np.float64).mean())


@pytest.mark.full
def test_a_server_serves() -> None:
    """The requests have different lengths, and are decoded as NumPy decodes them."""
    model, prompts = quantized_model(layers=2), [[1, 2, 3], [7]]
    with gpu.compiling_for("sm_80"):
        served = Server(KernelRunner(model, 2, 20, chunk=4, head="int8", backend="emulator"))
        requests = [served.submit(prompt, 2) for prompt in prompts]
        while served.step():
            pass
    numpy_runner = NumpyRunner(model, 2, 20, head="int8")
    first = numpy_runner.prefill(prompts).argmax(axis=1)
    assert [request.tokens[0] for request in requests] == first.tolist()
    assert [len(request.tokens) for request in requests] == [2, 2]


@pytest.mark.parametrize("scheme", ["lqq", "qoq", "qoq_channel"])
def test_another_layout_is_the_same_weight(scheme: str) -> None:
    for interleaved in (False, True):
        strips, rows = (
            LayerWeights.random(TINY, scheme=scheme, **options)
            for options in ({"interleaved": interleaved}, {"layout": "qserve"})
        )
        repacked_weights = strips.in_layout("qserve")
        for name, weight in rows.parts.items():
            for buffer, array in getattr(weight, "buffers", {"": weight}).items():
                repacked = getattr(repacked_weights.parts[name], "buffers", {"": repacked_weights.parts[name]})[buffer]
                assert np.array_equal(repacked, array), (name, buffer)
        assert (
            repacked_weights.qkv.layout == "qserve" and repacked_weights.in_layout("qserve").qkv is repacked_weights.qkv
        )


@pytest.mark.full
def test_the_ends_of_a_layer_run_there() -> None:
    """A wide row, which only one block has, goes through the gate and back.

    The FFN of LLaMA-2-7B has such rows.
    """
    rng = np.random.default_rng(0)
    gate_up = rng.standard_normal((2, 2 * 8320), dtype=np.float32).astype(np.float16)
    right = ptxlab.silu_mul_quantize(gate_up, backend="emulator")
    weight = ptxlab.pack(quant.quantize_lqq(rng.standard_normal((8, 8320), dtype=np.float32)), "qserve")
    with gpu.compiling_for("sm_80"):
        x = ptxlab.silu_mul_quantize(gate_up, backend="emulator")
        y = ptxlab.gemm_w4a8(x, weight=weight, out_dtype="int32", backend="emulator")
    assert np.array_equal(x.x_q, right.x_q) and np.array_equal(x.scale, right.scale)
    assert np.array_equal(y, x.x_q.astype(np.int32) @ unpack(weight).exact_level1().T)


def on_the_device(problem: LayerProblem) -> LayerProblem:
    weights = replace(problem.weights, **{name: on_device(part) for name, part in problem.weights.parts.items()})
    arrays = {name: on_device(getattr(problem.cache, name)) for name in ("pool", "block_table", "lengths")}
    moved = {name: on_device(getattr(problem, name)) for name in ("x", "residual", "slots")}
    cache = replace(problem.cache, **arrays)
    buffers = LayerBuffers.empty(weights, cache)
    return replace(
        problem, weights=weights, cache=cache, rope=tuple(map(on_device, problem.rope)), buffers=buffers, **moved
    )


@pytest.mark.default_cases("89")
@pytest.mark.parametrize("arch", [80, 89])
def test_on_such_a_gpu_a_layer_takes_kernels_that_run_there(
    fake: FakeGpu, arch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_prepared", "_ready", "_memory"):
        monkeypatch.setattr(operation, name, {})
    fake.arch, fake.runs = arch, False
    on_the_device(layer_problem(layout="qserve")).run(backend=None)
    assert tuple(name for name, _ in fake.launched) == CHAIN
    assert not any(geometry.programmatic for geometry in fake.geometries)
    assert {geometry.cluster for geometry in fake.geometries} == {(1, 1, 1)}


@pytest.mark.parametrize("arch", [80, 89])
@pytest.mark.parametrize("config", [TINY, replace(TINY, experts=4, chosen_experts=2)], ids=["dense", "experts"])
def test_what_does_not_run_there_is_refused_in_a_line(fake: FakeGpu, arch: int, config: Config) -> None:
    fake.arch, fake.runs = arch, False
    problem = (
        rf"gemm_w4a8: lqq in strips takes gemm_w4a8_sm90, .*: it runs on sm_90a, and this is sm_{arch}; here a weight "
        r"can be lqq in qserve \(gemm_w4a8_lqq_sm80\)"
    )
    with pytest.raises(UnavailableError, match=problem) as raised:
        on_the_device(layer_problem(config))
    assert "\n" not in str(raised.value)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["lqq", "qoq", "qoq_channel"])
def test_the_driver_compiles_a_decoder_for_sm_80(scheme: str) -> None:
    """Compare caches and logits with the emulator's, on a GPU that may be newer; attention's last bits may differ."""
    model, options = quantized_model(scheme=scheme, layers=2), {"batch": 2, "context": 70, "chunk": 4, "head": "int8"}
    runs = []
    with gpu.compiling_for("sm_80"):
        for backend in ("gpu", "emulator"):
            runner = KernelRunner(model, **options, backend=backend)
            logits = [runner.extend({0: [1, 2, 3], 1: [4]}), runner.decode([5, 6])]
            runs.append((gpu.to_host(runner.caches[0].pool), *map(gpu.to_host, logits)))
    (pool, *gpu_logits), (same_pool, *right) = runs
    assert np.array_equal(pool, same_pool) and pool.any()
    difference = np.sqrt(np.square(np.subtract(gpu_logits, right), dtype=np.float64).mean())
    assert difference < OF_ATTENTION * np.sqrt(np.square(right, dtype=np.float64).mean())
