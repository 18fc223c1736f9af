"""Folders of QServe in vLLM's classes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError, FileError
from ptxlab.llm.checkpoints.foreign import ForeignCheckpoint
from ptxlab.lowbit.layout import unpack
from tests.support import foreign_files

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("one_process")]
Configured = Callable[..., Any]
PARTS = {
    "self_attn.qkv_proj": [f"self_attn.{x}_proj" for x in "qkv"], "self_attn.o_proj": ["self_attn.o_proj"],
    "mlp.gate_up_proj": ["mlp.gate_proj", "mlp.up_proj"], "mlp.down_proj": ["mlp.down_proj"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("format", "container", "group", "scheme"),
    [("qserve", "safetensors", 64, "lqq"), ("qserve_channel", "torch", 0, "qoq_channel")],
)
def test_a_folder_is_loaded_exactly(
    configured: Configured, tmp_path: Path, format: str, container: str, group: int, scheme: str
) -> None:
    from tests.support.served_model import ServedModel, packed_weight

    folder = foreign_files.write_model(tmp_path / "theirs", format, container=container)
    small_model = ServedModel(configured(model=folder))
    theirs = ForeignCheckpoint(folder)
    layer = small_model.model.model.layers[1]
    for merged, parts in PARTS.items():
        weight = packed_weight(layer.get_submodule(merged))
        assert (weight.scheme, weight.group) == (scheme, group or weight.K)
        expected = np.concatenate([theirs.read(f"model.layers.1.{part}.weight") for part in parts])
        assert np.array_equal(unpack(weight).dequantize(), expected)
    assert small_model.logits([(0, 0, [5, 6, 7])]).isfinite().all()


def test_the_log_names_what_is_served(configured: Configured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ptxlab.llm.vllm import serving

    lines: list[str] = []
    monkeypatch.setattr(serving.log, "info", lambda line, *values: lines.append(line % values))
    configured(model=foreign_files.write_model(tmp_path / "theirs", "qserve"))
    assert "weights W4A8 (QServe's integers, groups of 64); cache kv4, keys rotated" in lines[0]


def test_a_folder_without_the_flag_is_vllms(configured: Configured, tmp_path: Path) -> None:
    """QServe's folders say nothing of a method."""
    config = configured(model=foreign_files.write_model(tmp_path / "theirs", "qserve"), quantization=None)
    assert config.quant_config is None


def test_several_gpus_are_refused(configured: Configured, tmp_path: Path) -> None:
    from ptxlab.llm.vllm.serving import configure

    config = configured(model=foreign_files.write_model(tmp_path / "theirs", "qserve"))
    config.parallel_config.tensor_parallel_size = 2
    with pytest.raises(ArgumentError, match=r"must be 1 for packed weights.* \(got 2"):
        configure(config)


def test_options_are_refused_beside_it(configured: Configured, tmp_path: Path) -> None:
    folder = foreign_files.write_model(tmp_path / "theirs", "qserve")
    with pytest.raises(ValueError, match="scheme and group must be left out for a quantised checkpoint"):
        configured(model=folder, additional_config={"ptxlab": {"scheme": "qoq"}})


def test_a_folder_with_groups_that_no_kernel_has_is_refused(configured: Configured, tmp_path: Path) -> None:
    from tests.support.served_model import load_model

    folder = foreign_files.write_model(tmp_path / "theirs", "qserve", group=16)
    with pytest.raises(ArgumentError, match=r"qkv_proj: must be one of 32, 64, 128 .*got 16"):
        load_model(configured(model=folder))


def test_zeros_that_are_no_integers_are_refused(configured: Configured, tmp_path: Path) -> None:
    from tests.support.served_model import load_model

    folder = foreign_files.write_model(tmp_path / "theirs", "qserve_channel")
    name = "model.layers.0.self_attn.o_proj.s1_szeros"
    foreign_files.add_tensors(folder, {name: ForeignCheckpoint(folder).file.read(name).astype(np.float16) * 1.03})
    with pytest.raises(ArgumentError, match=r"layers.0.self_attn.o_proj: must be integers 0..15 times s1_scales"):
        load_model(configured(model=folder))


def test_matrices_of_different_formats_are_refused(configured: Configured, tmp_path: Path) -> None:
    folder = foreign_files.write_model(tmp_path / "theirs", "qserve")
    weight = np.random.default_rng(0).standard_normal((128, 128)).astype(np.float32)
    parts = foreign_files.quantize_as("qserve", weight, 32)
    foreign_files.add_tensors(
        folder, {f"model.layers.0.self_attn.o_proj.{part}": array for part, array in parts.items()}
    )
    with pytest.raises(FileError, match=r"all matrices must be of QServe and of one group"):
        configured(model=folder)


def test_a_folder_of_another_method_is_refused(configured: Configured, tmp_path: Path) -> None:
    folder = foreign_files.write_model(tmp_path / "theirs", "gptq")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quantization"):
        configured(model=folder)
