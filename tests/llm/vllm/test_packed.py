"""Folders of packed weights, as `ptxlab quantize` writes them, in vLLM's classes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ptxlab.errors import ArgumentError
from ptxlab.llm.checkpoints import folder

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_process")]
Configured = Callable[..., Any]
PackedFolder = Callable[..., Path]
PROMPT = np.random.default_rng(2).integers(3, 290, 40).tolist()


def change_packing(path: Path, **changes: Any) -> None:
    """Change the quantization_config of a folder."""
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("scheme", ["lqq", "qoq", "qoq_channel"])
def test_a_folder_is_loaded_as_it_is(configured: Configured, packed_folder: PackedFolder, scheme: str) -> None:
    """It is loaded without a flag, bit for bit: merged matrices, biases, norms, embedding."""
    from tests.support.served_model import ServedModel, packed_weight

    path = packed_folder("qwen2", scheme)
    small_model = ServedModel(configured(model=path, quantization=None, dtype="auto"))
    config = small_model.config
    assert (config.model_config.quantization, config.model_config.dtype) == ("ptxlab", torch.float16)
    assert config.cache_config.cache_dtype == "int4_per_token_head"
    expected = folder.load(path)
    for ours, theirs in zip(expected.layers, small_model.model.model.layers, strict=True):
        modules = {"qkv": theirs.self_attn.qkv_proj, "o": theirs.self_attn.o_proj}
        modules |= {"gate_up": theirs.mlp.gate_up_proj, "down": theirs.mlp.down_proj}
        for name, module in modules.items():
            weight, loaded = getattr(ours, name), packed_weight(module)
            assert (loaded.scheme, loaded.group) == (weight.scheme, weight.group)
            assert all(np.array_equal(loaded.buffers[key], weight.buffers[key]) for key in weight.buffers)
        assert np.array_equal(modules["qkv"].bias.detach().numpy(), ours.qkv_bias.astype(np.float16).astype(np.float32))
        assert np.array_equal(theirs.input_layernorm.weight.detach().numpy(), ours.input_norm)
    assert np.array_equal(small_model.model.model.embed_tokens.weight.detach().numpy()[:300], expected.embedding)


def test_logits_are_near_those_of_the_float_model(configured: Configured, packed_folder: PackedFolder) -> None:
    from transformers import AutoModelForCausalLM

    from tests.support.served_model import ServedModel

    small_model = ServedModel(configured(model=packed_folder("smollm"), quantization=None))
    floats = AutoModelForCausalLM.from_pretrained(
        Path(small_model.config.model_config.model).parent / "floats", dtype=torch.float32
    )
    with torch.inference_mode():
        expected = floats(torch.tensor([PROMPT])).logits[0]
    got = small_model.logits([(0, 0, PROMPT)])
    assert torch.nn.functional.cosine_similarity(got, expected, dim=1).mean() > 0.97


def test_matrices_of_other_formats_are_loaded_by_name(configured: Configured, packed_folder: PackedFolder) -> None:
    from dataclasses import replace

    from tests.support.served_model import load_model

    path = packed_folder("smollm")
    model = folder.load(path)
    folder.save_layer(path, 1, replace(model.layers[1], down=_by_channel(model.layers[1].down)))
    folder.save_ends(
        path, model.config, model.recipe, embedding=model.embedding, final_norm=model.final_norm, head=model.head
    )
    layers = load_model(configured(model=path)).model.layers
    matrices = [layer.mlp.down_proj.quant_method.matrix for layer in layers]
    assert [(matrix.scheme, matrix.group) for matrix in matrices] == [("lqq", 64), ("qoq_channel", 192)]


def _by_channel(weight: Any) -> Any:
    from ptxlab.llm.model.weights import quantiser
    from ptxlab.lowbit.layout import pack, unpack

    return pack(quantiser("qoq_channel")(unpack(weight).dequantize(), 0), "strips")


def test_the_log_names_what_is_served(
    configured: Configured, packed_folder: PackedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ptxlab.llm.vllm import serving

    lines: list[str] = []
    monkeypatch.setattr(serving.log, "info", lambda line, *values: lines.append(line % values))
    path = packed_folder()
    configured(model=path, quantization=None)
    change_packing(path, rotated_values=True)
    configured(model=path, quantization=None)
    assert all("weights W4A8 (packed, lqq, groups of 64)" in line for line in lines)
    assert "cache kv4, keys rotated" in lines[0] and "cache kv4, keys and values rotated" in lines[-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    {
        "version": ({"version": 2}, r"version: must be 1 \(got 2"),
        "W4A4": ({"scheme": "atom"}, "scheme: must be one of lqq, qoq, qoq_channel in vLLM"),
        "layout": (
            {"layout": "qserve"},
            "layout: must be strips.*`ptxlab import FOLDER --out NEW` rewrites the folder",
        ),
        "turns": ({"interleaved": True}, r"rows in their own order.* \(got strips, interleaved"),
        "group": ({"group": "64"}, "group: must be an integer"),
        "a cache by channel": ({"kv_cache": "kv8_channel"}, r"kv_cache: must be absent.* \(got kv8_channel"),
        "exceptions": ({"exceptions": ["o_proj"]}, "exceptions: must be settings by layer"),
        "an exception": ({"exceptions": {"a": {"scheme": "int4"}}}, "exceptions: a: scheme: must be one of"),
    }.values(),
)
def test_other_packings_are_refused(
    configured: Configured, packed_folder: PackedFolder, changes: dict[str, Any], message: str
) -> None:
    path = packed_folder()
    change_packing(path, **changes)
    with pytest.raises(ValueError, match=message):
        configured(model=path, quantization=None)


def test_several_gpus_are_refused(configured: Configured, packed_folder: PackedFolder) -> None:
    from ptxlab.llm.vllm.serving import configure

    config = configured(model=packed_folder(), quantization=None)
    config.parallel_config.tensor_parallel_size = 2  # which vLLM itself refuses on a machine without GPUs
    with pytest.raises(ArgumentError, match=r"--tensor-parallel-size: .*must be 1 for packed weights.* \(got 2"):
        configure(config)


def test_options_are_refused_beside_it(configured: Configured, packed_folder: PackedFolder) -> None:
    with pytest.raises(ValueError, match="scheme and group must be left out for a quantised checkpoint"):
        configured(model=packed_folder(), quantization=None, additional_config={"ptxlab": {"scheme": "qoq"}})


def test_an_older_folder_gets_the_command_that_rewrites_it(configured: Configured, packed_folder: PackedFolder) -> None:
    path = packed_folder()
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"must be rewritten.*: ptxlab import {path} --out NEW"):
        configured(model=path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda buffers: buffers.pop("channel_scale"), "the checkpoint must have all of the layer's weights"),
        (
            lambda buffers: buffers.update(channel_scale=buffers["channel_scale"][:-8]),
            r"packed weights must be torch.float32 \[128\] \(got torch.float32 \[120\]",
        ),
    ],
)
def test_a_damaged_matrix_is_named(
    configured: Configured, packed_folder: PackedFolder, change: Callable[[Any], None], message: str
) -> None:
    from tests.support.served_model import load_model

    path = packed_folder("smollm")
    file, name = path / "layer_001.safetensors", "model.layers.1.mlp.down_proj"
    tensors = load_file(file)
    buffers = {key.removeprefix(f"{name}."): tensors.pop(key) for key in [*tensors] if key.startswith(f"{name}.")}
    change(buffers)
    save_file(tensors | {f"{name}.{key}": array for key, array in buffers.items()}, file, metadata={"format": "pt"})
    with pytest.raises(ArgumentError, match=f"--quantization ptxlab: {name}: {message}"):
        load_model(configured(model=path))


def test_a_matrix_that_a_float_checkpoint_has_not_is_named(configured: Configured) -> None:
    from tests.support.served_model import load_model

    config = configured()
    file = Path(config.model_config.model) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ArgumentError, match=r"layers.0.self_attn.qkv_proj: the checkpoint must have all .* of"):
        load_model(config)
