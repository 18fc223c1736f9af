"""Other projects' checkpoints as packed weights: which are exact, which are not by how much, which overflow."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ptxlab.errors import ArgumentError, FileError
from ptxlab.llm.checkpoints import open_model
from ptxlab.llm.checkpoints.folder import load
from ptxlab.llm.checkpoints.foreign import ForeignCheckpoint
from ptxlab.llm.checkpoints.imports import import_checkpoint
from ptxlab.lowbit import layout, reference
from ptxlab.lowbit.audit import audit_file
from ptxlab.lowbit.layout.checkpoint import Checkpoint
from ptxlab.lowbit.quant import LQQWeight, QoQChannelWeight, quantize_lqq
from tests.support import foreign_files, small_models
from tests.support.foreign_files import FORMATS, add_tensors, quantize_as, write_model

RNG = np.random.default_rng(0)
W = (RNG.standard_normal((64, 128)) / 10).astype(np.float32)
EXACT = {"qserve": "lqq", "qserve_channel": "qoq_channel", "w4a8": "qoq_channel"}
QWEN2 = {key: small_models.CONFIGS["qwen2"][key] for key in ("architectures", "model_type")}
OTHERS = {"bias": np.ones(64, np.float16), "ids": np.arange(3)}


def write_tensors(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    save_file({f"a.q.{part}": array for part, array in arrays.items()} | OTHERS, path)
    return path


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("packing", ["strips", "qserve"])
def test_a_file_is_imported(format: str, packing: str, tmp_path: Path) -> None:
    source, out = write_tensors(tmp_path / "in.safetensors", quantize_as(format, W)), tmp_path / "out.safetensors"
    (row,) = import_checkpoint(source, out, layout=packing)
    theirs = ForeignCheckpoint(source).weight("a.q.weight")
    ours = layout.unpack(layout.load(out))
    assert row.name == "a.q.weight" and row.shape == (64, 128) and row.overflows == 0 and row.overflow == ""
    if format in EXACT:
        assert row.scheme == EXACT[format] and row.relative_error is None
        np.testing.assert_array_equal(ours.dequantize(), theirs.dequantize())
    else:
        assert row.scheme == "lqq" and row.group == 64
        np.testing.assert_array_equal(ours.dequantize(), theirs.nearest_lqq(64)[0].dequantize())
        error = np.linalg.norm(ours.dequantize() - theirs.dequantize()) / np.linalg.norm(theirs.dequantize())
        assert row.relative_error == pytest.approx(error, rel=1e-5) and 0.002 < error < 0.03
    converted = Checkpoint(out)
    assert converted.read("bias").tolist() == [1] * 64
    assert converted.read_bytes("ids").view(np.int64).tolist() == [0, 1, 2]
    (audited,) = [row for row in audit_file(out, pattern="a.*") if hasattr(row, "overflows")]
    assert (audited.scheme, audited.group, audited.overflows) == (row.scheme, row.group, 0)


@pytest.mark.parametrize(("group", "ours"), [(16, 32), (32, 32), (128, 128), (256, 128)])
def test_groups_of_what_is_not_exact(group: int, ours: int, tmp_path: Path) -> None:
    """The groups are the file's where kernels take them, otherwise the largest that divide them."""
    wide = np.concatenate([W, W[::-1], W, W], axis=1)
    source = write_tensors(tmp_path / "in.safetensors", quantize_as("w4a16_asymmetric", wide, group))
    (row,) = import_checkpoint(source, tmp_path / "out.safetensors")
    assert row.group == ours and 0.002 < row.relative_error < 0.1
    assert row.requantised == (row.groups if group == 16 else 0)


def test_groups_in_order_of_activation_are_quantised_again(tmp_path: Path) -> None:
    q4, scale, zero = foreign_files.quantize_affine(W, 64)
    arrays = foreign_files.gptq(q4, scale, zero, RNG.permutation(np.arange(128) // 64))
    source, out = write_tensors(tmp_path / "in.safetensors", arrays), tmp_path / "out.safetensors"
    (row,) = import_checkpoint(source, out)
    again = quantize_lqq(ForeignCheckpoint(source).read("a.q.weight"), 32, rounding="search")
    np.testing.assert_array_equal(layout.unpack(layout.load(out)).dequantize(), again.dequantize())
    assert row.group == 32 and 0.01 < row.relative_error < 0.1 and row.requantised == row.groups


def test_zeros_between_integers_are_quantised_again(tmp_path: Path) -> None:
    q4 = RNG.integers(0, 16, W.shape).astype(np.uint8)
    source = write_tensors(
        tmp_path / "in.safetensors", foreign_files.qserve_channel(q4, np.full(64, 0.5), np.full(64, 7.25))
    )
    (row,) = import_checkpoint(source, tmp_path / "out.safetensors")
    assert row.scheme == "lqq" and 0 < row.relative_error < 0.1


@pytest.mark.smoke
@pytest.mark.parametrize("format", ["qserve", "w4a8", "gptq"])
def test_a_model(format: str, tmp_path: Path) -> None:
    """The quantised model stands for the numbers of theirs, whose parts it has in one matrix."""
    source = write_model(tmp_path / "in", format, container="torch" if format == "qserve" else "safetensors")
    theirs, _ = open_model(source)
    rows = import_checkpoint(source, tmp_path / "out")
    assert [row.name for row in rows[:4]] == [f"layer 0 {name}" for name in ("qkv", "o", "gate_up", "down")]
    ours, tokenizer = open_model(tmp_path / "out")
    assert [row.shape for row in rows[4:]] == [(256, 128), (128, 128), (512, 128), (128, 256)]
    assert tokenizer.vocabulary == 261 and {*tmp_path.iterdir()} == {source, tmp_path / "out"}
    np.testing.assert_array_equal(ours.embedding, theirs.embedding)
    for index, layer in enumerate(theirs.layers):
        for name, w in layer.items():
            if format in EXACT or name.endswith("norm"):
                np.testing.assert_array_equal(ours.layers[index][name], w)
            else:
                assert 0 < np.linalg.norm(ours.layers[index][name] - w) / np.linalg.norm(w) < 0.1
    kind = QoQChannelWeight if format == "w4a8" else LQQWeight
    assert isinstance(layout.unpack(load(tmp_path / "out").layers[1].down), kind)


@pytest.mark.default_cases("gptq")
@pytest.mark.parametrize("format", ["qserve", "gptq"])
def test_a_model_with_experts(format: str, tmp_path: Path) -> None:
    """Mixtral's experts are imported one by one, and its router stays as it is."""
    mixtral = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    source = write_model(tmp_path / "in", format, **mixtral)
    rows = import_checkpoint(source, tmp_path / "out")
    assert [row.name for row in rows[1:4]] == ["layer 0 o", "layer 0 gate_up.0", "layer 0 down.0"] and len(rows) == 20
    theirs, ours = (open_model(path)[0].layers[1] for path in (source, tmp_path / "out"))
    assert theirs.keys() == ours.keys() and np.array_equal(ours["router"], theirs["router"])
    for name in ("q", "gate.0", "up.3", "down.2"):
        error = np.linalg.norm(ours[name] - theirs[name]) / np.linalg.norm(theirs[name])
        assert error == 0 if format in EXACT else 0 < error < 0.1


MATRICES = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in ("gate", "up", "down")]


def biases(folder: Path, **values: float) -> dict[str, np.ndarray]:
    """Make a bias for every matrix of a model's layers, 0 but for the last element that `values` gives."""
    rows = ForeignCheckpoint(folder).matrices
    arrays = {}
    for layer in (0, 1):
        for matrix in MATRICES:
            bias = np.zeros(rows[f"model.layers.{layer}.{matrix}.weight"].N, np.float16)
            bias[-1] = values.get(matrix.rpartition(".")[2], 0)
            arrays[f"model.layers.{layer}.{matrix}.bias"] = bias
    return arrays


@pytest.mark.default_cases("w4a16")
@pytest.mark.parametrize("format", ["gptq", "awq", "w4a16"])
def test_biases_of_zero_are_none(format: str, tmp_path: Path) -> None:
    """AutoGPTQ's writer gives one to every matrix, whether the model has biases or not."""
    source = write_model(tmp_path / "in", format)
    layers = [*open_model(source)[0].layers]
    add_tensors(source, biases(source))
    for layer, same in zip(layers, open_model(source)[0].layers, strict=True):
        assert layer.keys() == same.keys() and all((layer[name] == same[name]).all() for name in layer)
    assert import_checkpoint(source, tmp_path / "out")


@pytest.mark.default_cases("1e-07-q_proj")
@pytest.mark.parametrize("matrix", ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("element", [1e-7, np.nan])
def test_biases_that_the_model_has_not(matrix: str, element: float, tmp_path: Path) -> None:
    source = write_model(tmp_path / "in", "gptq")
    add_tensors(source, biases(source, **{matrix: element}))
    with pytest.raises(FileError, match=rf"layers\.0\..*{matrix}\.bias: not known in a model of this family"):
        import_checkpoint(source, tmp_path / "out")
    assert {*tmp_path.iterdir()} == {source}


def test_biases_that_the_model_has(tmp_path: Path) -> None:
    """Qwen2's biases of queries, keys and values are kept, 0 or not; zeros of the others are not."""
    source = write_model(tmp_path / "in", "gptq", **QWEN2)
    add_tensors(source, biases(source, k_proj=0.5))
    layer = open_model(source)[0].layers[1]
    assert layer["k_bias"].tolist() == [0] * 63 + [0.5] and not layer["q_bias"].any()
    import_checkpoint(source, tmp_path / "out")
    assert load(tmp_path / "out").layers[1].qkv_bias.tolist() == [0] * 191 + [0.5] + [0] * 64


def test_negative_scales_are_rounded_as_positive_ones(tmp_path: Path) -> None:
    rows = import_checkpoint(write_model(tmp_path / "in", "auto_round", group=32), tmp_path / "out")
    assert all(row.requantised == 0 and row.relative_error < 0.025 for row in rows)  # type: ignore[operator]


def test_a_width_that_is_no_multiple_of_the_group(tmp_path: Path) -> None:
    """Our groups of 32 lie within the file's groups of 128 and 32, of 160 columns."""
    q4 = RNG.integers(0, 16, (64, 160)).astype(np.uint8)
    scale = RNG.uniform(0.01, 0.02, (64, 2)).astype(np.float16)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    arrays = foreign_files.gptq(q4, scale, np.full(scale.shape, 8), np.arange(160) // 128)
    (row,) = import_checkpoint(write_tensors(tmp_path / "in.safetensors", arrays), tmp_path / "out.safetensors")
    assert (row.group, row.requantised) == (32, 0) and row.relative_error < 0.02


def write_overflowing_weight(path: Path) -> Path:
    """Write 128 rows of 2 groups, two of which leave s8: 16·15 - 100 = 140 in row 9, 3·40 + 10 = 130 in row 70."""
    q4, s1, s2, zeros = foreign_files.quantize_two_levels(np.concatenate([W, W]), 64)
    q4[9, 64], s2[9, 1], zeros[9, 1] = 15, 16, -100
    q4[70, :64], s2[70, 0], zeros[70, 0] = 3, 40, 10
    q4[70, 1:64] = 0
    return write_tensors(path, foreign_files.qserve(q4, s1, s2, zeros))


def test_groups_that_overflow_are_refused_with_their_place(tmp_path: Path) -> None:
    source, out = write_overflowing_weight(tmp_path / "in.safetensors"), tmp_path / "out.safetensors"
    place = r"\.\.140 in row 9, group 1, scale 16; 2 of 256 groups"
    with pytest.raises(ArgumentError, match=rf"a\.q\.weight: must restore to -128\.\.127, unless .*{place}"):
        import_checkpoint(source, out)
    assert not out.exists()
    (row,) = import_checkpoint(source, out, unchecked=True)
    assert (row.overflows, row.groups) == (2, 256) and re.search(f"{place}$", row.overflow)
    (audited,) = audit_file(out, pattern="a.*")
    assert audited.unsafe_groups == 2
    with pytest.raises(FileError, match="must restore"):
        layout.load(out)
    wrong = layout.unpack(layout.load(out, unchecked=True)).overflows()
    assert np.argwhere(wrong).tolist() == [[9, 1], [70, 0]]


def test_a_model_that_overflows_names_the_matrix_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "in", "qserve")
    weight = ForeignCheckpoint.weight

    def weight_with_overflow(self: ForeignCheckpoint, name: str) -> Any:
        foreign_weight = weight(self, name)
        if name == "model.layers.1.mlp.up_proj.weight":
            foreign_weight.q4[3, 64:], foreign_weight.group_scale[3, 1], foreign_weight.minimum[3, 1] = 15, 17, 0
        return foreign_weight

    monkeypatch.setattr(ForeignCheckpoint, "weight", weight_with_overflow)
    with pytest.raises(ArgumentError, match=r"layers\.1\.mlp\.up_proj\.weight: .*got 255\.\.255 in row 3, group 1"):
        import_checkpoint(source, tmp_path / "out")
    assert {*tmp_path.iterdir()} == {source}
    rows = import_checkpoint(source, tmp_path / "out", unchecked=True)
    assert [row.name for row in rows if row.overflows] == ["layer 1 gate_up"]


def test_files_and_layouts_that_cannot_be_imported_are_refused(tmp_path: Path) -> None:
    source, out = write_tensors(tmp_path / "in.safetensors", quantize_as("gptq", W)), tmp_path / "out.safetensors"
    with pytest.raises(ArgumentError, match=r"layout: must be one of .*got tiles"):
        import_checkpoint(source, out, layout="tiles")
    save_file(OTHERS, tmp_path / "plain.safetensors")
    with pytest.raises(FileError, match=r"no quantised matrix of QServe, compressed-tensors, GPTQ or AWQ"):
        import_checkpoint(tmp_path / "plain.safetensors", out)
    import_checkpoint(source, tmp_path / "packed.safetensors")
    with pytest.raises(FileError, match=r"packed\.safetensors: holds packed weights already"):
        import_checkpoint(tmp_path / "packed.safetensors", out)
    with pytest.raises(FileError, match="is there already"):
        import_checkpoint(source, source)
    with pytest.raises(FileError, match="is no folder"):
        import_checkpoint(source, tmp_path / "none" / "out")
    wide = write_tensors(tmp_path / "wide.safetensors", quantize_as("qserve", W.repeat(2, axis=1), 256))
    with pytest.raises(ArgumentError, match=r"a\.q\.weight: group: must be one of 32, 64, 128 \(got 256\)"):
        import_checkpoint(wide, out)
    arrays = quantize_as("gptq", W)
    arrays["scales"][1, 3] = np.inf
    with pytest.raises(FileError, match=r"a\.q\.weight: scales: must be finite .*scales\[1, 3\] is inf"):
        import_checkpoint(write_tensors(source, arrays), out)
    assert not out.exists() and not [*tmp_path.glob(".*")]


def test_a_model_with_a_matrix_that_is_not_quantised(tmp_path: Path) -> None:
    source = write_model(tmp_path / "in", "gptq")
    file = ForeignCheckpoint(source)
    name = "model.layers.1.self_attn.o_proj"
    contents = {
        tensor_name: file.file.read_bytes(tensor_name)
        for tensor_name in file.file.tensors
        if not tensor_name.startswith(name)
    }
    arrays = {
        tensor_name: array.view({"F16": "f2", "I32": "i4"}[tensor_info.dtype]).reshape(tensor_info.shape)
        for tensor_name, array in contents.items()
        if (tensor_info := file.file.tensors[tensor_name])
    }
    save_file(arrays | {f"{name}.weight": np.ones((128, 128), np.float16)}, source / "model.safetensors")
    with pytest.raises(FileError, match=r"layers\.1\.self_attn\.o_proj\.weight: must be quantised"):
        import_checkpoint(source, tmp_path / "out")
    assert {*tmp_path.iterdir()} == {source}


def test_exactness_is_of_the_integers_that_their_kernel_computes(tmp_path: Path) -> None:
    """The packed weight gives (q4·s2 + zero)·s1 as NumPy's wide integers do."""
    q4, s1, s2, zeros = foreign_files.quantize_two_levels(W, 64)
    source = write_tensors(tmp_path / "in.safetensors", foreign_files.qserve(q4, s1, s2, zeros))
    import_checkpoint(source, tmp_path / "out.safetensors")
    integers = q4.astype(np.int32) * np.repeat(s2, 64, axis=1) + np.repeat(zeros, 64, axis=1)
    ours = layout.unpack(layout.load(tmp_path / "out.safetensors"))
    assert (ours.level1() == integers).all()
    np.testing.assert_array_equal(ours.dequantize(), reference.scale_rows(integers, s1.astype(np.float32)))


def test_the_folder_says_what_it_was_made_of(tmp_path: Path) -> None:
    import_checkpoint(write_model(tmp_path / "in", "awq"), tmp_path / "out")
    recipe = json.loads((tmp_path / "out" / "recipe.json").read_text())["recipe"]
    assert recipe["steps"] == ["imported"] and recipe["formats"] == ["AWQ"]
