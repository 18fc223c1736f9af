"""Checkpoints of compressed-tensors in W4A8, which the plugin claims without a flag."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError
from ptxlab.lowbit.layout import unpack

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_process")]
Configured = Callable[..., Any]
ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def declaration(group: int | None, **changes: Any) -> dict[str, Any]:
    """Make the quantization_config of a checkpoint in groups, or with one scale per row.

    `changes` are those of its weights.
    """
    strategy = {"strategy": "channel" if group is None else "group", "group_size": group}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False, "actorder": None, **strategy}
    layers = {"targets": ["Linear"], "weights": {**weights, **changes}, "input_activations": ACTIVATIONS}
    return {
        "quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": layers},
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


def quantise_folder(folder: Path, group: int | None) -> dict[str, np.ndarray]:
    """Replace a folder's matrices by 4-bit integers and scales; return the floats that these stand for."""
    from safetensors.numpy import load_file, save_file

    tensors, floats = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name]
        groups = weight.reshape(len(weight), -1, group or weight.shape[1])
        scale = (np.abs(groups).max(axis=2) / 7).astype(np.float16)
        integers = np.rint(groups / scale[:, :, None].astype(np.float32)).clip(-8, 7).astype(np.int8)
        tensors |= {name: integers.reshape(weight.shape), f"{name}_scale": scale}
        floats[name] = (integers * scale[:, :, None].astype(np.float32)).reshape(weight.shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return floats


@pytest.mark.parametrize(("group", "largest_error"), [(None, 0.0), (64, 0.05), (32, 0.05)])
def test_a_checkpoint_is_claimed_and_loaded(
    configured: Configured, group: int | None, largest_error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Load the file's numbers where a row has one scale; else near ones, and the log says how near."""
    from ptxlab.llm.vllm import compressed_tensors
    from tests.support.served_model import ServedModel, packed_weight

    lines: list[str] = []
    monkeypatch.setattr(compressed_tensors.log, "info", lambda line, *values: lines.append(line % values))
    changes = {"quantization_config": declaration(group)}
    config = configured("qwen2", changes, quantization=None)
    assert config.model_config.quantization == "ptxlab" and config.cache_config.cache_dtype == "int4_per_token_head"
    floats = quantise_folder(Path(config.model_config.model), group)
    small_model = ServedModel(config)
    layer = small_model.model.model.layers[0]
    expected = np.concatenate([floats[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"])
    got = unpack(packed_weight(layer.self_attn.qkv_proj)).dequantize()
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    assert error <= largest_error and layer.mlp.down_proj.quant_method.matrix.group == (group or 192)
    logged = [line for line in lines if "layers.0.self_attn.qkv_proj" in line]
    assert logged == ([] if group is None else [
        "ptxlab: model.layers.0.self_attn.qkv_proj: packed with a relative error of"
        f" {error:.4f}, as scales of groups are rounded"])  # fmt: skip
    assert small_model.logits([(0, 0, [5, 6, 7])]).isfinite().all()


def test_scales_that_are_multiples_of_one_are_exact(vllm: None) -> None:
    """Weights that were quantised in two levels have such scales; the error is then 0, and nothing is logged."""
    from ptxlab.llm.vllm.packing import pack_integers

    rng = np.random.default_rng(0)
    q = rng.integers(-8, 8, (32, 256)).astype(np.int8)
    multiples = rng.integers(1, 16, (32, 4)).astype(np.float32)
    scale = multiples * rng.uniform(0.5, 2, (32, 1)).astype(np.float16).astype(np.float32)
    buffers, error = pack_integers(torch.from_numpy(q), torch.from_numpy(scale), 64, "strips")
    assert error == 0.0 and {*buffers} >= {"strips", "channel_scale"}
    scale[3, 1] *= 1.01
    assert 0 < pack_integers(torch.from_numpy(q), torch.from_numpy(scale), 64, "strips")[1] < 0.02


@pytest.mark.parametrize(
    "changes",
    [{"num_bits": 8}, {"symmetric": False}, {"type": "float"}, {"actorder": "group"}],
    ids=lambda changes: "-".join(changes),
)
def test_others_are_left_to_vllm(vllm: None, changes: dict[str, Any]) -> None:
    from ptxlab.llm.vllm.quantization import PtxlabConfig

    assert PtxlabConfig.override_quantization_method(declaration(64), None) == "ptxlab"
    assert PtxlabConfig.override_quantization_method(declaration(64, **changes), None) is None


def test_another_method_may_be_asked_for(vllm: None) -> None:
    from ptxlab.llm.vllm.quantization import PtxlabConfig

    assert PtxlabConfig.override_quantization_method(declaration(64), "compressed-tensors") is None


def test_floating_activations_are_left_to_vllm(vllm: None) -> None:
    from ptxlab.llm.vllm.quantization import PtxlabConfig

    of_fp8 = declaration(64)
    of_fp8["config_groups"]["group_0"]["input_activations"] = {**ACTIVATIONS, "type": "float"}
    assert PtxlabConfig.override_quantization_method(of_fp8, None) is None
    of_fp8["config_groups"]["group_0"]["input_activations"] = None
    assert PtxlabConfig.override_quantization_method(of_fp8, None) is None


def test_options_are_refused_beside_it(configured: Configured) -> None:
    options = {"ptxlab": {"scheme": "qoq"}}
    with pytest.raises(ValueError, match="scheme and group must be left out for a quantised checkpoint"):
        configured("qwen2", {"quantization_config": declaration(64)}, quantization=None, additional_config=options)


def test_integers_of_more_bits_are_refused(vllm: None) -> None:
    from ptxlab.llm.vllm.packing import pack_integers

    with pytest.raises(ArgumentError, match=r"must be of 4 bits, -8..7 \(got -9..0\)"):
        pack_integers(torch.tensor([[0] * 63 + [-9]] * 8, dtype=torch.int8), torch.ones(8, 1), None, "strips")
