"""Small models in vLLM's classes as an A100 (sm_80) or an L40S (sm_89) would serve them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.gpu.architecture import capability
from ptxlab.llm.checkpoints import folder
from ptxlab.lowbit.layout import unpack

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_process", "target")]
Configured = Callable[..., Any]
PROMPT = np.random.default_rng(2).integers(3, 290, 40).tolist()
SCHEMES = ("lqq", "qoq", "qoq_channel")


@pytest.fixture(params=["sm_80", "sm_89"])
def target(request: pytest.FixtureRequest, vllm: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Choose kernels for an architecture, and have vLLM see a GPU of it."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    arch = request.param
    monkeypatch.setattr(type(current_platform), "capability", DeviceCapability(*capability(arch)))
    with gpu.compiling_for(arch):
        yield arch


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_float_checkpoint_gives_the_logits_of_hopper(configured: Configured, scheme: str) -> None:
    """Weights have QServe's layout there: integers, and so the logits, are the same."""
    from tests.support.served_model import ServedModel

    arguments = {"additional_config": {"ptxlab": {"scheme": scheme}}}
    with gpu.compiling_for("sm_90a"):
        on_hopper = ServedModel(configured("qwen2", **arguments))
    small_model = ServedModel(configured("qwen2", **arguments))
    assert [_layouts(model) for model in (on_hopper, small_model)] == [{"strips"}, {"qserve"}]
    rows = [(0, 0, PROMPT), (1, 0, PROMPT[:7])]
    assert torch.equal(small_model.logits(rows), on_hopper.logits(rows))
    assert torch.equal(small_model.logits([(0, 40, [5])]), on_hopper.logits([(0, 40, [5])]))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_packed_folder_is_repacked(configured: Configured, packed_folder: Callable[..., Path], scheme: str) -> None:
    from tests.support.served_model import load_model, packed_weight

    path = packed_folder("qwen2", scheme)
    layers = load_model(configured(model=path, quantization=None, dtype="auto")).model.layers
    for stored, layer in zip(folder.load(path).layers, layers, strict=True):
        for weight, module in ((stored.qkv, layer.self_attn.qkv_proj), (stored.down, layer.mlp.down_proj)):
            repacked = packed_weight(module)
            assert repacked.layout == "qserve"
            assert np.array_equal(unpack(repacked).dequantize(), unpack(weight).dequantize())


def test_kernels_are_those_for_the_architecture(configured: Configured) -> None:
    from ptxlab.llm.vllm.kernels import head_variants, product_variants
    from tests.support.served_model import ServedModel

    matrices = ServedModel(configured(max_num_batched_tokens=128)).config.quant_config.kernels.matrices
    products = {source.name for source, _ in product_variants(matrices, [1, 16, 128], "float16")}
    heads = {source.name for source, _ in head_variants([(320, 128)], [1, 16, 128], "float16")}
    assert products == {"gemm_w4a8_lqq_sm80"} and heads == {"gemm_w8a8_sm80"}


def _layouts(model: Any) -> set[str]:
    return {matrix.layout for matrix in model.config.quant_config.kernels.matrices}
