"""Linear layers in vLLM's classes: loaded, quantised, packed, applied."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError
from ptxlab.llm.model.weights import quantiser
from ptxlab.llm.recipe.rotation import hadamard, rotate_heads
from ptxlab.lowbit.layout import pack, unpack

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_process")]
Configured = Callable[..., Any]


def matrices(folder: str) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return {name: array.astype(np.float16).astype(np.float32) for name, array in load_file(folder).items()}


@pytest.mark.parametrize("scheme", ["lqq", "qoq", "qoq_channel"])
@pytest.mark.parametrize("layout", ["strips", "qserve"])
@pytest.mark.parametrize("elements", [1, 64 * 48, 1 << 26])
def test_quantising_in_chunks_of_rows_gives_the_same_packed_weight(scheme: str, layout: str, elements: int) -> None:
    from ptxlab.llm.vllm.packing import quantise_and_pack

    weight = torch.randn(120, 192, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    whole = pack(quantiser(scheme)(weight.float().numpy(), 64), layout)
    got = quantise_and_pack(weight, scheme, 64, layout, elements)
    assert {*got} == {*whole.buffers}
    assert all(np.array_equal(got[name].numpy(), whole.buffers[name]) for name in got)


@pytest.mark.parametrize("cache", ["auto", "float16"])
@pytest.mark.parametrize("scheme", ["lqq", "qoq", "qoq_channel"])
def test_a_checkpoint_is_quantised_while_it_is_loaded(configured: Configured, scheme: str, cache: str) -> None:
    """Merged matrices have the rows of each, and biases of Qwen2 are f32.

    Embeddings, norms and head stay as they were.
    """
    from tests.support.served_model import load_model, packed_weight

    config = configured("qwen2", additional_config={"ptxlab": {"scheme": scheme}}, kv_cache_dtype=cache)
    model = load_model(config)
    floats = matrices(f"{config.model_config.model}/model.safetensors")
    layer, of_layer = model.model.layers[1], "model.layers.1.self_attn."
    if cache == "auto":
        parts = {"v": "v_proj.weight", "o": "o_proj.weight", "v_bias": "v_proj.bias"}
        turned = rotate_heads({part: floats[of_layer + name] for part, name in parts.items()}, hadamard(64))
        floats |= {of_layer + name: turned[part] for part, name in parts.items()}
    for merged, parts, group in (
        (layer.self_attn.qkv_proj, [f"self_attn.{x}_proj" for x in "qkv"], 128),
        (layer.self_attn.o_proj, ["self_attn.o_proj"], 128),
        (layer.mlp.gate_up_proj, ["mlp.gate_proj", "mlp.up_proj"], 128),
        (layer.mlp.down_proj, ["mlp.down_proj"], 64),
    ):
        weight = np.concatenate([floats[f"model.layers.1.{part}.weight"] for part in parts])
        expected = quantiser(scheme)(weight, group).dequantize()
        assert np.array_equal(unpack(packed_weight(merged)).dequantize(), expected)
        assert "weight" not in dict(merged.named_parameters())
    bias = np.concatenate([floats[f"model.layers.1.self_attn.{x}_proj.bias"] for x in "qkv"])
    got = layer.self_attn.qkv_proj.bias
    assert got.dtype == torch.float32 and np.array_equal(got.numpy(), bias)
    embedding = model.model.embed_tokens.weight.float().numpy()[:300]  # padded by vLLM
    assert np.array_equal(embedding, floats["model.embed_tokens.weight"])


def test_a_layer_is_packed_when_it_is_loaded(configured: Configured, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule holds even if a layer's bias comes first in the file.

    Layers that are left for the end need the memory of a whole model.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    from ptxlab.llm.vllm.linear import FloatLinearMethod
    from tests.support.served_model import load_model

    left: list[int] = []
    pack = FloatLinearMethod.pack

    def count(method: Any, layer: Any, loaded: Any) -> Any:
        progress = get_layerwise_info(layer)
        left.append(progress.load_numel_total - progress.load_numel)
        return pack(method, layer, loaded)

    monkeypatch.setattr(FloatLinearMethod, "pack", count)
    load_model(configured("qwen2"))
    assert left == 8 * [0]


def test_dummy_weights_are_quantised(configured: Configured) -> None:
    from tests.support.served_model import ServedModel, packed_weight

    layer = ServedModel(configured(load_format="dummy")).model.model.layers[0].mlp.down_proj
    weight = unpack(packed_weight(layer)).dequantize()
    assert 4e-4 < weight.std() < 8e-4  # uniform within 0.001


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_apply_is_the_product_of_the_kernels(configured: Configured, dtype: str) -> None:
    """Compare with integers of rows quantised to INT8, with the bias, in any number of axes."""
    from ptxlab.lowbit import quant, reference
    from tests.support.served_model import ServedModel, packed_weight

    layer = ServedModel(configured("qwen2", dtype=dtype)).model.model.layers[0].self_attn.qkv_proj
    x = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    quantised = quant.quantize_activations(x.float().numpy().reshape(6, 128))
    weight = unpack(packed_weight(layer))
    integers = quantised.q.astype(np.int32) @ weight.level1().astype(np.int32).T
    expected = reference.gemm_epilogue(integers, quantised.scale, weight.channel_scale, layer.bias.numpy(), dtype)
    y = layer.quant_method.apply(layer, x, layer.bias)
    bits = y.view(torch.uint16).numpy() if dtype == "bfloat16" else y.numpy()
    assert y.shape == (2, 3, 256) and np.array_equal(bits.reshape(6, 256), expected)


def test_apply_is_traced(configured: Configured) -> None:
    """Trace one graph for any number of tokens."""
    from tests.support.served_model import ServedModel

    layer = ServedModel(configured()).model.model.layers[0].mlp.down_proj

    def apply(x: Any) -> Any:
        return layer.quant_method.apply(layer, x)

    compiled = torch.compile(apply, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 7):
        x = torch.randn(tokens, 192, generator=torch.Generator().manual_seed(tokens)).half()
        assert torch.equal(compiled(x), apply(x))


@pytest.mark.parametrize(
    ("options", "K", "group"),
    [({}, 4096, 128), ({}, 576, 64), ({"group": 64}, 4096, 64), ({"group": 32}, 96, 32), ({"scheme": "qoq"}, 192, 64)],
)
def test_groups(options: dict[str, Any], K: int, group: int) -> None:
    from ptxlab.llm.vllm.options import ServingOptions

    assert ServingOptions(**options).group_of(K) == group


def test_a_matrix_that_no_group_divides_is_named(configured: Configured) -> None:
    from tests.support.served_model import ServedModel

    rule = r"layers.0.mlp.down_proj: K must be a multiple of the group, 128 or 64 \(got K=96\)"
    with pytest.raises(ArgumentError, match=rule):
        ServedModel(configured(changes={"intermediate_size": 96}))


def test_a_weight_that_is_not_finite_is_named(configured: Configured) -> None:
    from tests.support.served_model import ServedModel

    layer = ServedModel(configured()).model.model.layers[0].mlp.down_proj
    del layer.strips
    layer.quant_method.is_packed = False
    layer.weight = torch.nn.Parameter(torch.full((128, 192), torch.nan), requires_grad=False)
    with pytest.raises(ArgumentError, match=r"layers.0.mlp.down_proj: must be finite"):
        layer.quant_method.process_weights_after_loading(layer)


def test_a_reload_is_refused(configured: Configured) -> None:
    from tests.support.served_model import ServedModel

    layer = ServedModel(configured()).model.model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(torch.zeros(128, 192), requires_grad=False)
    with pytest.raises(ArgumentError, match=r"layers.0.mlp.down_proj: weights are loaded once"):
        layer.quant_method.process_weights_after_loading(layer)
