"""`lm_head` in INT8, an option."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError
from ptxlab.llm.model.runner import quantize_head
from ptxlab.lowbit import quant, reference
from ptxlab.lowbit.kernels.gemm.common import DTYPES

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_process")]
Configured = Callable[..., Any]
INT8 = {"ptxlab": {"head": "int8"}}


def small_model(configured: Configured, family: str, tied: bool) -> Any:
    from tests.support.served_model import ServedModel

    changes = {"tie_word_embeddings": tied}
    return ServedModel(configured(family, changes, additional_config=INT8))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["smollm", "qwen2"])
def test_logits_are_exact_sums(configured: Configured, family: str, tied: bool) -> None:
    """The sums are the integers of `KernelRunner`'s head.

    A tied head keeps the floats of the embedding.
    """
    model = small_model(configured, family, tied).model
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0)).half()
    logits = model.compute_logits(x).numpy()
    assert logits.shape == (3, 300)
    from safetensors.numpy import load_file

    folder = model.config._name_or_path
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    head = quantize_head(load_file(f"{folder}/model.safetensors")[name].astype(np.float16))
    tokens = quant.quantize_activations(x.float().numpy())
    sums = tokens.q.astype(np.int32) @ head.q8.astype(np.int32).T
    expected = reference.gemm_epilogue(sums, tokens.scale, head.scale, None, "float16")
    assert np.array_equal(logits, expected[:, :300])
    assert model.model.embed_tokens.weight.dtype == torch.float16
    assert hasattr(model.lm_head, "weight") == (tied and family == "qwen2")


def test_the_whole_model_runs(configured: Configured) -> None:
    logits = small_model(configured, "qwen2", tied=True).logits([(0, 0, [5, 6, 7])])
    assert logits.isfinite().all()


def test_its_kernels_are_compiled_with_the_others(configured: Configured) -> None:
    from ptxlab.llm.vllm.kernels import head_variants

    kernels = small_model(configured, "smollm", tied=False).config.quant_config.kernels
    assert kernels.heads == {(320, 128)}  # padded by vLLM
    variants = [*head_variants(kernels.heads, (1, 64, 512), "bfloat16")]
    assert {source.name for source, _ in variants} == {"gemm_w8a8_sm90"} and len(variants) == 3
    assert {DTYPES[constants["OUT"]] for _, constants in variants} == {"bfloat16"}


def test_it_is_said_and_allowed_beside_a_quantised_checkpoint(
    configured: Configured, packed_folder: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ptxlab.llm.vllm import serving

    lines: list[str] = []
    monkeypatch.setattr(serving.log, "info", lambda line, *values: lines.append(line % values))
    configured(model=packed_folder(), quantization=None, additional_config=INT8)
    assert "groups of 64), lm_head in INT8; cache" in lines[0]


def test_a_reload_is_refused(configured: Configured) -> None:
    model = small_model(configured, "smollm", tied=False).model
    with pytest.raises(ArgumentError, match=r"--quantization ptxlab: lm_head: weights are loaded once"):
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def test_a_head_that_is_not_finite_is_named(configured: Configured) -> None:
    from ptxlab.llm.vllm.head import Int8HeadMethod
    from ptxlab.llm.vllm.kernels import ProductKernels

    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.full((64, 128), torch.nan), requires_grad=False)
    with pytest.raises(ArgumentError, match=r"--quantization ptxlab: lm_head: must be finite"):
        Int8HeadMethod(ProductKernels(), "lm_head").process_weights_after_loading(layer)


@pytest.mark.parametrize("head", ["fp8", 8, None])
def test_other_heads_are_refused(configured: Configured, head: Any) -> None:
    with pytest.raises(ValueError, match="head: must be one of float, int8"):
        configured(additional_config={"ptxlab": {"head": head}})
