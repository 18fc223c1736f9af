"""Folders of quantised models written anew: of schema 1, and in another packing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError, FileError
from ptxlab.llm.checkpoints import folder, open_model
from ptxlab.llm.checkpoints.rewrite import rewrite_folder
from ptxlab.llm.model.quantized import QuantizedModel
from ptxlab.lowbit.layout import unpack
from ptxlab.lowbit.layout.checkpoint import Checkpoint, write_checkpoint
from ptxlab.lowbit.layout.storage import METADATA_KEY
from tests.support.small_models import write_folder


@pytest.fixture
def quantized_folder(tmp_path: Path) -> Path:
    """Write the folder of a quantised model in the format of this version."""
    model, tokenizer = open_model(write_folder(tmp_path / "floats", "qwen2"))
    out = tmp_path / "made"
    out.mkdir()
    folder.save(QuantizedModel.rounded(model, "lqq", 32), out)
    tokenizer.save(out)
    return out


def make_old(path: Path) -> None:
    """Give the tensors of a folder the names of schema 1, and its config.json what that schema said."""
    old = {folder.part_name(name, i): name for i in range(2) for name in (*folder._MODULES, *folder._PLAIN)}
    old |= {name: part for part, name in folder._END_NAMES.items()}

    def old_name(name: str) -> str:
        stem, _, buffer = name.rpartition(".")
        return old.get(name) or f"{old[stem]}.{buffer}"

    for file in path.glob("*.safetensors"):
        checkpoint = Checkpoint(file)
        infos = [replace(tensor, name=old_name(name)) for name, tensor in checkpoint.tensors.items()]
        arrays = [(old_name(name), checkpoint.read_bytes(name)) for name in checkpoint.tensors]
        about = dict(checkpoint.metadata)
        if METADATA_KEY in about:
            header = json.loads(about[METADATA_KEY])
            header["weights"] = {old[name]: fields for name, fields in header["weights"].items()}
            about[METADATA_KEY] = json.dumps(header)
        write_checkpoint(file, infos, arrays, about)
    config = json.loads((path / "config.json").read_text())
    for key in ("architectures", "dtype", "quantization_config"):
        del config[key]
    (path / "config.json").write_text(json.dumps(config))
    recipe = json.loads((path / "recipe.json").read_text())
    (path / "recipe.json").write_text(json.dumps({**recipe, "schema": 1}))
    (path / "tokenizer_config.json").unlink()


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_an_old_folder_becomes_a_new_one_bit_for_bit(cli: Any, quantized_folder: Path, tmp_path: Path) -> None:
    expected = contents(quantized_folder)
    make_old(quantized_folder)
    assert contents(quantized_folder) != expected and folder.load(quantized_folder).config.qkv_bias
    code, output, _ = cli("import", quantized_folder, "--out", tmp_path / "out")
    assert code == 0 and "written: " in output
    assert contents(tmp_path / "out") == expected
    code, output, _ = cli("import", quantized_folder, "--out", tmp_path / "again", "--json")
    assert (code, json.loads(output)) == (0, {"out": str(tmp_path / "again")})


def test_another_packing_has_the_same_weights(quantized_folder: Path, tmp_path: Path) -> None:
    labels: list[tuple[str, int]] = []
    rewrite_folder(quantized_folder, tmp_path / "out", layout="row_major", progress=lambda *label: labels.append(label))
    assert labels == [("layer 0", 2), ("layer 1", 2)]
    source, rewritten = folder.load(quantized_folder), folder.load(tmp_path / "out")
    for strips, row_major in zip(source.layers, rewritten.layers, strict=True):
        assert (strips.down.layout, row_major.down.layout) == ("strips", "row_major")
        assert np.array_equal(unpack(strips.down).dequantize(), unpack(row_major.down).dequantize())
    assert folder.packing_config(tmp_path / "out", 2)["layout"] == "row_major"


def test_what_cannot_be_rewritten_is_refused_and_leaves_nothing(quantized_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"layout: must be one of .*strips"):
        rewrite_folder(quantized_folder, tmp_path / "out", layout="rows")
    with pytest.raises(FileError, match="is there already"):
        rewrite_folder(quantized_folder, tmp_path / "floats")
    (quantized_folder / "layer_001.safetensors").unlink()
    with pytest.raises(FileError, match=r"layer_001.safetensors: no such file"):
        rewrite_folder(quantized_folder, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"floats", "made"}


def test_transformers_takes_the_same_tokenizer(quantized_folder: Path) -> None:
    """Without tokenizer_config.json it would take one of the model's family, which splits text otherwise."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    text = "the cat\n  THE  12 \u00e9"
    ours = folder_tokenizer(quantized_folder)
    theirs = transformers.AutoTokenizer.from_pretrained(quantized_folder)
    assert theirs(text)["input_ids"] == ours.encode_prompt(text)
    assert theirs.eos_token_id == ours.ends[0]


def folder_tokenizer(path: Path) -> Any:
    from ptxlab.llm.checkpoints.tokenizer import Tokenizer

    return Tokenizer.from_folder(path)
