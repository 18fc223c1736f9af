"""Public calls inside `torch.compile`: each ends the graph before it, and computes what it computes without."""

import inspect
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab.io.dynamo import REASON
from ptxlab.lowbit import quant
from tests.support.public_calls import CALLS, N, arguments

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.torch

ADD = """
extern "C" __global__ void doubled(const float* x, float* y) { y[threadIdx.x] = 2 * x[threadIdx.x]; }
"""


def other_calls() -> dict[str, tuple[Any, ...]]:
    """Return the arguments of public functions that launch nothing and need no GPU."""
    packed = ptxlab.pack(quant.quantize_lqq(np.ones((N, 128), np.float32), 64))
    heads = np.ones((4, 2, 64), np.float32)
    return {
        "pack": (quant.quantize_lqq(np.ones((N, 128), np.float32), 64),),
        "pack_atom": (quant.quantize_atom_weight(np.ones((N, 512), np.float32), 64, 64),),
        "pack_block_weight": (quant.quantize_block_weight(np.ones((N, 256), np.float32)), 1),
        "stack_experts": ([packed, packed],),
        "quantize_kv": (heads,),
        "calibrate_kv": (heads, "kv4_channel"),
        "find": ("dequant_lqq",),
        "load": (ADD,),
        "release_memory": (),
    }


def host_array(array: np.ndarray) -> Any:
    """Copy an array into a tensor on the CPU."""
    return torch.from_numpy(array.copy())


def numbers(output: Any) -> list[np.ndarray]:
    """Return all arrays of what a call makes, in order."""
    if is_dataclass(output):
        return [array for field in fields(output) for array in numbers(getattr(output, field.name))]
    if isinstance(output, tuple | list):
        return [array for element in output for array in numbers(element)]
    return [np.asarray(output)] if hasattr(output, "__array__") else []


def trace(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Trace the function as `torch.compile` does, without compiling anything."""
    torch.compiler.reset()
    traced: Callable[..., Any] = torch.compile(function, backend="eager", **options)
    return traced


@pytest.mark.default_cases("quantize_activations", "gemm_w4a8", "attention_kv4", "append_kv4")
@pytest.mark.parametrize("name", CALLS)
def test_breaks_the_graph_before_a_call(name: str) -> None:
    eager, traced = (arguments(host_array, lambda operand: operand)[name] for _ in range(2))

    def step(operands: dict[str, Any], x: Any) -> tuple[Any, Any]:
        return CALLS[name].call(**operands, backend="emulator"), x + 1

    x = torch.ones(3)
    expected, returned = step(eager, x), trace(step)(traced, x)
    ours, theirs = numbers([*expected, list(eager.values())]), numbers([*returned, list(traced.values())])
    assert len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs))


@pytest.mark.parametrize("name", other_calls())
def test_breaks_the_graph_before_a_function(name: str) -> None:
    function, operands = getattr(ptxlab, name), other_calls()[name]

    def step(x: Any) -> tuple[Any, Any]:
        y = x * 2
        return function(*operands), y

    returned, y = trace(step)(torch.ones(3))
    expected = function(*operands)
    assert torch.equal(y, torch.full((3,), 2.0)) and type(returned) is type(expected)
    assert all(map(np.array_equal, numbers(returned), numbers(expected)))


@pytest.mark.parametrize("name", [name for name in ptxlab.__all__ if inspect.isfunction(getattr(ptxlab, name))])
def test_is_not_traced(name: str) -> None:
    """Functions that need a GPU are marked too."""
    assert inspect.getattr_static(getattr(ptxlab, name), "_torchdynamo_disable")


def test_breaks_the_graph_before_a_kernel_of_ones_own() -> None:
    kernel = ptxlab.load(ADD)

    def step(x: Any) -> Any:
        y = torch.zeros(32)
        kernel(x + 1, y, grid=1, block=32, backend="emulator")
        kernel[1, 32](y, y)
        return y * 2

    assert torch.equal(trace(step)(torch.ones(32)), torch.full((32,), 16.0))


def test_says_which_operator_a_whole_graph_takes() -> None:
    step = trace(lambda x: ptxlab.quantize_activations(x).x_q, fullgraph=True)
    with pytest.raises(Exception, match=re.escape(REASON)):
        step(torch.ones(2, 64))


def test_traces_no_call_again_for_another_shape() -> None:
    step = trace(lambda x: ptxlab.quantize_activations(x).x_q - 1)
    counters = torch._dynamo.utils.counters
    step(torch.ones(1, 64))
    counters.clear()
    for rows in range(2, 6):
        assert torch.equal(step(torch.ones(rows, 64)), torch.full((rows, 64), 126, dtype=torch.int8))
    # Another number of rows: the frame before the call and the one behind it, for any number from then on.
    assert counters["frames"]["total"] <= 4
