"""Kernels that are compiled before vLLM captures."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ptxlab.lowbit.kernels import operation
from ptxlab.lowbit.kernels.gemm import api
from ptxlab.lowbit.quant.tiled import with_arrays
from tests.support.fake_gpu import DeviceArray, FakeGpu

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_process")]
Configured = Callable[..., Any]


def test_numbers_of_tokens_include_the_captured_ones(configured: Configured) -> None:
    from ptxlab.llm.vllm.kernels import token_counts

    config = configured(enforce_eager=False, max_num_batched_tokens=1000)
    captured = config.compilation_config.cudagraph_capture_sizes
    counts = token_counts(config)
    assert captured and {1, *captured, 1000} <= {*counts} and max(counts) == 1000


@pytest.mark.parametrize("scheme", ["lqq", "qoq_channel"])
def test_every_product_finds_its_kernel(configured: Configured, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of every number of tokens ask for variants that were compiled, and for all of them."""
    from ptxlab.llm.vllm import kernels
    from tests.support.served_model import ServedModel

    monkeypatch.setattr(kernels, "compile_all", lambda variants: pytest.fail("there is no GPU"))
    options = {"ptxlab": {"scheme": scheme}}
    config = ServedModel(configured(additional_config=options, max_num_batched_tokens=128)).config.quant_config.kernels
    groups = {128: 128, 192: 192 if scheme == "qoq_channel" else 64}
    shapes = {(matrix.N, matrix.K, matrix.group) for matrix in config.matrices}
    assert shapes == {(N, K, groups[K]) for N, K in ((256, 128), (128, 128), (384, 128), (128, 192))}

    FakeGpu(monkeypatch)
    monkeypatch.setattr(operation, "_prepared", {})
    requested: set[Any] = set()

    def plan(spec: Any, constants: dict[str, int], sizes: Any, **how: Any) -> Callable[..., None]:
        requested.add((spec.name, *constants.items()))
        return lambda stream, arrays: None

    monkeypatch.setattr(api, "Plan", plan)
    for matrix in config.matrices:
        weight = with_arrays(matrix.weight(), DeviceArray)
        for M in config.tokens:
            x, scale, sums = np.zeros((M, matrix.K), np.int8), np.ones(M, np.float32), np.zeros(M, np.int32)
            out = DeviceArray(np.empty((M, matrix.N), np.float16))
            api.gemm_w4a8(DeviceArray(x), DeviceArray(scale), weight, x_sum=DeviceArray(sums), out=out)
    compiled = kernels.product_variants(config.matrices, config.tokens, "float16")
    assert {(source.name, *constants.items()) for source, constants in compiled} == requested
