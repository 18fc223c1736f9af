"""A decoder layer on a GPU: its twin's bits, the same from a graph, the same 20,000 times beside a busy stream."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import gpu
from ptxlab.llm.model import Config, LayerBuffers, LayerInputs, LayerWeights
from ptxlab.llm.model.reference import compare
from ptxlab.spec.dtypes import convert_to_dtype, numbers
from tests.support import soak
from tests.support.layers import LayerProblem, layer_problem

HOPPER = pytest.mark.skipif(gpu.why_not("sm_90a", exact=True) is not None, reason="the products need sm_90a")
pytestmark = [pytest.mark.gpu, HOPPER]

WIDE = Config(hidden=1024, ffn=2816, heads=8, kv_heads=2, head_dim=128, layers=1, vocabulary=100)
CONFIGS = {
    "grouped heads": WIDE,
    "64 dims, a bias, a window": replace(WIDE, heads=16, kv_heads=16, head_dim=64, qkv_bias=True, window=50),
    "experts": replace(WIDE, ffn=512, experts=8, chosen_experts=2),
}
BATCHES = (1, 3, 16, 33, 128)


def on_gpu(problem: LayerProblem, **buffers: Any) -> LayerProblem:
    """Copy a problem to the device."""
    weights, cache = problem.weights.to_device(), ptxlab.to_device(problem.cache)
    x, residual, slots, *rope = map(gpu.to_device, (problem.x, problem.residual, problem.slots, *problem.rope))
    layer_buffers = LayerBuffers.empty(weights, cache, **buffers)
    return LayerProblem(weights, cache, x, residual, slots, tuple(rope), layer_buffers)


def lengths_of(batch: int) -> tuple[int, ...]:
    return tuple(int(length) for length in np.random.default_rng(batch).integers(1, 129, batch))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("scheme", "dtype"), [("lqq", "float16"), ("qoq_channel", "bfloat16")])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_layer_is_its_twin(config: Config, scheme: str, dtype: str, batch: int) -> None:
    problem = on_gpu(layer_problem(config, lengths=lengths_of(batch), scheme=scheme, dtype=dtype))
    inputs = problem.inputs
    problem.run(backend=None)
    summary = compare(inputs, problem.weights, problem.buffers, problem.residual, problem.cache)
    assert summary.endswith("within bounds, all others equal in every bit")


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["silu_mul_quantize", "silu_mul"])
def test_a_residual_epilogue_has_the_bits_of_the_chain_without(interleaved: bool, dtype: str, batch: int) -> None:
    """The L2 adds as `rmsnorm_quantize` does; and every launch of both is what its twin says."""
    options: dict[str, Any] = {"lengths": lengths_of(batch), "dtype": dtype, "interleaved": interleaved}
    plain_problem, fused = (on_gpu(layer_problem(WIDE, **options), residual_epilogue=added) for added in (False, True))
    hidden_states = []
    for problem in (plain_problem, fused):
        inputs = problem.inputs
        hidden_states.append(problem.run(backend=None))
        compare(inputs, problem.weights, problem.buffers, problem.residual, problem.cache)
    hidden, returned = hidden_states
    assert returned is fused.residual
    stream, added = (numbers(gpu.to_host(array), dtype) for array in (plain_problem.residual, hidden))
    right = convert_to_dtype((stream + added).astype(np.float32), dtype)
    assert (gpu.to_host(returned).view(np.uint16) == right.view(np.uint16)).all()


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("config", [WIDE, CONFIGS["experts"]], ids=["dense", "experts"])
def test_layers_in_a_graph_are_plain_launches_one_after_the_other(config: Config, batch: int) -> None:
    """The graph has four layers, whose launches but the first are programmatic."""
    import cupy

    first = on_gpu(layer_problem(config, lengths=lengths_of(batch)))
    weights = [first.weights, *(LayerWeights.random(config, seed, on_device=True) for seed in (1, 2, 3))]
    inputs = first.inputs

    def layers(buffers: LayerBuffers, *, overlapping: bool) -> None:
        first.residual[...] = inputs.residual
        x = inputs.x
        for i, of_layer in enumerate(weights):
            step = replace(first, weights=of_layer, x=x, buffers=buffers)
            x = step.run(backend=None, programmatic=overlapping and i > 0)

    layers(replace(first.buffers, programmatic=False), overlapping=False)
    cupy.cuda.Device().synchronize()
    left = first.buffers.output(first.residual), first.residual, first.cache.pool
    right = [array.copy() for array in left]
    graph = gpu.capture([lambda: layers(first.buffers, overlapping=True)])
    for _ in range(20):
        first.buffers.hidden[...] = 0
        first.residual[...] = 0
        cupy.cuda.Device().synchronize()
        graph.replay()
        graph.synchronize()
        for graph_array, plain_array in zip(left, right, strict=True):
            assert bool((graph_array.view(np.uint8) == plain_array.view(np.uint8)).all())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tensors_give_the_same_bits(dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    ours = on_gpu(layer_problem(WIDE, dtype=dtype))
    right = ours.run(backend=None)

    def tensor(array: Any) -> Any:
        converted = torch.from_dlpack(array)
        return converted.view(torch.bfloat16) if str(array.dtype) == "uint16" else converted

    again = on_gpu(layer_problem(WIDE, dtype=dtype))
    arrays = {name: tensor(getattr(again.cache, name)) for name in ("pool", "block_table", "lengths")}
    cache = replace(again.cache, **arrays)
    x, residual, slots, *rope = map(tensor, (again.x, again.residual, again.slots, *again.rope))
    theirs = LayerProblem(
        again.weights, cache, x, residual, slots, tuple(rope), LayerBuffers.empty(again.weights, cache)
    )
    output = theirs.run(backend=None)
    assert type(output).__module__.partition(".")[0] == "torch" and str(output.dtype) == f"torch.{dtype}"
    assert bool((gpu.as_array("found", output).view(np.uint16) == right.view(np.uint16)).all())


@dataclass(eq=False)
class Case:
    """A layer on one batch; on every stream with buffers, stream and cache of its own."""

    batch: int
    inputs: LayerInputs
    weights: LayerWeights
    adds: bool
    expected: Any = None
    wrong: Any = None
    problems: dict[int, LayerProblem] = field(default_factory=dict)

    def call(self) -> Any:
        """Run the layer, and return its result as int32."""
        handle = gpu.stream_handle()
        if handle not in self.problems:
            inputs = self.inputs
            cache, residual = replace(inputs.cache, pool=inputs.cache.pool.copy()), inputs.residual.copy()
            buffers = LayerBuffers.empty(self.weights, cache, residual_epilogue=self.adds)
            problem_on_stream = LayerProblem(
                self.weights, cache, inputs.x, residual, inputs.slots, inputs.rope, buffers
            )
            self.problems[handle] = problem_on_stream
        problem = self.problems[handle]
        gpu.copy_bytes(problem.residual, self.inputs.residual)
        return problem.run(backend=None).view(np.int32)

    def __str__(self) -> str:
        return f"{self.weights.config.experts} experts, batch {self.batch}"


@pytest.mark.long(70)
def test_twenty_thousand_layers_beside_a_busy_stream() -> None:
    """The `soak.CALLS` layers have random batch sizes.

    A quarter of them has experts, a quarter epilogues.
    """
    cases = []
    for config, batches, ends in (
        (WIDE, (1, 2, 7, 16, 33, 64, 128, 256), False),
        (WIDE, (1, 16, 64, 256), True),
        (CONFIGS["experts"], (1, 16, 128), False),
    ):
        weights = LayerWeights.random(config, 0, interleaved=ends, on_device=True)
        for batch in batches:
            problem = layer_problem(config, lengths=lengths_of(batch), interleaved=ends)
            problem = replace(on_gpu(problem, residual_epilogue=ends), weights=weights)
            inputs = problem.inputs
            right = problem.run(backend=None)
            compare(inputs, weights, problem.buffers, problem.residual, problem.cache)
            cases.append(Case(batch, inputs, weights, ends, right.view(np.int32).copy()))
            cases[-1].wrong = gpu.to_device(np.zeros(1, np.uint64))
    soak.endure(cases, np.random.default_rng(0))
