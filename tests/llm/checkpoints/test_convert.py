"""A checkpoint through quantising, packing, saving and loading: what is in the new file, and what stops it."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ptxlab.errors import ArgumentError, FileError, VerificationError
from ptxlab.llm.checkpoints import convert
from ptxlab.lowbit import quant
from ptxlab.lowbit.layout import LAYOUTS, SCHEMES, load, packed_names, unpack
from ptxlab.lowbit.layout.checkpoint import Checkpoint
from tests.support.random_weights import assert_equal
from tests.support.safetensors_file import write

RNG = np.random.default_rng(0)
TENSORS = {
    "layers.0.up": RNG.standard_normal((24, 192)).astype(np.float32),
    "layers.0.down": RNG.standard_normal((64, 128)).astype(np.float16),
    "layers.0.norm": RNG.standard_normal(192).astype(np.float32),
    "layers.0.odd": RNG.standard_normal((9, 128)).astype(np.float32),
    "layers.0.narrow": RNG.standard_normal((8, 24)).astype(np.float16),
    "ids": np.arange(8 * 64).reshape(8, 64),
}
QUANTISERS = {
    "lqq": lambda w: quant.quantize_lqq(w, 64),
    "qoq": lambda w: quant.quantize_qoq(w, 64),
    "qoq_channel": quant.quantize_qoq_channel,
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "in.safetensors", {"format": "pt"})
    return tmp_path / "in.safetensors"


def convert_and_verify(source: Path, **arguments) -> Path:
    out = source.with_name("out.safetensors")
    conversion = convert.plan(source, **arguments)
    steps: list[str] = []
    conversion.write(out, steps.append)
    conversion.verify(out, steps.append)
    assert len(steps) == conversion.steps and set(steps) == set(Checkpoint(source).tensors)
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_matrices_are_packed_and_the_rest_is_copied(source: Path, scheme: str, layout: str) -> None:
    out = convert_and_verify(source, scheme=scheme, layout=layout)
    assert packed_names(out) == ["layers.0.down", "layers.0.up"]
    for name in packed_names(out):
        packed = load(out, name)
        assert (packed.scheme, packed.layout) == (scheme, layout)
        assert_equal(unpack(packed), QUANTISERS[scheme](TENSORS[name]))
    for name in set(TENSORS) - set(packed_names(out)):
        np.testing.assert_array_equal(load_file(out)[name], TENSORS[name], strict=True)
    assert Checkpoint(out).metadata["format"] == "pt"


def test_what_loads_dequantises_to_what_was_quantised(source: Path) -> None:
    out = convert_and_verify(source)
    w = TENSORS["layers.0.up"]
    dequantised = unpack(load(out, "layers.0.up")).dequantize()
    np.testing.assert_array_equal(dequantised, quant.quantize_lqq(w, 64).dequantize(), strict=True)
    assert np.linalg.norm(dequantised - w) < 0.15 * np.linalg.norm(w)


def test_bfloat16_and_foreign_dtypes(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    brain = TENSORS["layers.0.up"].astype(ml_dtypes.bfloat16)
    tensors = {"w": ("BF16", [24, 192], brain.tobytes()), "v": ("F8_E4M3", [8, 64], bytes(range(256)) * 2)}
    out = convert_and_verify(write(tmp_path / "in.safetensors", tensors))
    assert_equal(unpack(load(out, "w")), quant.quantize_lqq(brain.astype(np.float32), 64))
    assert Checkpoint(out).read_bytes("v").tobytes() == bytes(range(256)) * 2
    assert Checkpoint(out).tensors["v"].dtype == "F8_E4M3"


def test_reasons_for_copies_and_sizes(source: Path) -> None:
    planned = {tensor.source.name: tensor for tensor in convert.plan(source, pattern="layers.*").tensors}
    reasons = {name: tensor.reason for name, tensor in planned.items() if not tensor.fields}
    assert reasons == {
        "layers.0.norm": "not a matrix",
        "layers.0.odd": "N must be a positive multiple of 8 (N=9)",
        "layers.0.narrow": "K must be a positive multiple of 32 (K=24)",
        "ids": "not selected",
    }
    assert planned["layers.0.down"].nbytes == 64 * 128 // 2 + 2 * 64 * 2 + 4 * 64
    assert planned["layers.0.down"].bits == 4 + 0.25 + 0.25
    assert planned["ids"].nbytes == planned["ids"].source.nbytes == 8 * 8 * 64


def test_a_pattern_selects(source: Path) -> None:
    out = convert_and_verify(source, pattern="*.up")
    assert packed_names(out) == ["layers.0.up"]
    np.testing.assert_array_equal(load_file(out)["layers.0.down"], TENSORS["layers.0.down"], strict=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layout": "zigzag"}, r"layout: must be one of row_major, qserve, dual_mma, comet, strips \(got zigzag\)"),
        ({"scheme": "awq"}, r"scheme: must be one of lqq, qoq, qoq_channel \(got awq\)"),
        ({"group": 48}, r"group: must be one of 32, 64, 128 \(got 48\)"),
        ({"pattern": "*.Up"}, r"pattern: must match a tensor of .*in.safetensors \(got \*.Up\)"),
    ],
)
def test_refuses_arguments(source: Path, arguments: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        convert.plan(source, **arguments)


def test_says_of_every_tensor_why_nothing_can_be_packed(tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    odd = {"odd": np.ones((9, 64), np.float32), "bias": np.ones(8, np.float16), "ids": np.ones((8, 64), np.int64)}
    save_file(odd, path)
    with pytest.raises(FileError) as error:
        convert.plan(path)
    assert str(error.value).startswith(f"{path}: no tensor can be packed: ")
    assert set(str(error.value).partition("packed: ")[2].split("; ")) == {
        "odd F32 [9, 64]: N must be a positive multiple of 8 (N=9)",
        "bias F16 [8]: not a matrix",
        "ids I64 [8, 64]: not of F16, BF16, F32, F64",
    }
    save_file({f"bias.{i}": np.ones(8, np.float32) for i in range(9)} | odd, path)
    with pytest.raises(FileError, match=r"bias\.\d F32 \[8\]: not a matrix; and 4 more$") as error:
        convert.plan(path)
    assert "odd F32 [9, 64]" in str(error.value), "matrices first"


EMBEDDINGS = ("model.embed_tokens.weight", "bert.embeddings.position_embeddings.weight", "h.wte.weight", "wpe.weight")


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_embeddings_are_packed_only_by_name(tmp_path: Path, name: str) -> None:
    path, w = tmp_path / "in.safetensors", TENSORS["layers.0.down"]
    save_file({name: w, "layers.0.up": w, "lm_head.weight": w, "followed.weight": w}, path)

    def names_packed(**pattern: str) -> set[str]:
        return {tensor.source.name for tensor in convert.plan(path, **pattern).tensors if tensor.fields}

    assert names_packed() == names_packed(pattern="*") == {"layers.0.up", "lm_head.weight", "followed.weight"}
    assert names_packed(pattern=name) == {name}


def test_refuses_what_is_packed_already(source: Path) -> None:
    with pytest.raises(ArgumentError, match="must not hold packed weights already"):
        convert.plan(convert_and_verify(source))
    with pytest.raises(FileError, match="no such file"):
        convert.plan(source.with_name("gone"))


def test_values_that_cannot_be_quantised_stop_it_by_name_and_leave_nothing(source: Path) -> None:
    bad = {name: tensor.copy() for name, tensor in TENSORS.items()}
    bad["layers.0.up"][3, 5] = np.nan
    save_file(bad, source)
    with pytest.raises(ArgumentError, match=r"layers.0.up: must be finite in float32 \(got w\[3, 5\] is nan\)"):
        convert_and_verify(source)
    assert list(source.parent.iterdir()) == [source]


def test_the_checkpoint_is_not_overwritten(source: Path) -> None:
    original, alias = source.read_bytes(), source.with_name("alias.safetensors")
    alias.symlink_to(source)
    for out in (source, alias):
        with pytest.raises(ArgumentError, match="out: must be another file than the checkpoint"):
            convert.plan(source).write(out)
    assert source.read_bytes() == original and alias.is_symlink()


def test_two_tensors_of_one_name(source: Path) -> None:
    save_file(TENSORS | {"layers.0.up.strips": np.zeros(3, np.uint8)}, source)
    with pytest.raises(ArgumentError, match=r"must have different names \(got layers.0.up.strips\)"):
        convert_and_verify(source)


def test_a_damaged_result_is_found(source: Path) -> None:
    out = source.with_name("out.safetensors")
    conversion = convert.plan(source)
    conversion.write(out)
    content = bytearray(out.read_bytes())
    length = int.from_bytes(content[:8], "little")
    begin, _ = json.loads(content[8 : 8 + length])["layers.0.up.strips"]["data_offsets"]
    content[8 + length + begin] ^= 1
    out.write_bytes(content)
    with pytest.raises(VerificationError, match=r"layers.0.up does not load as it was written"):
        conversion.verify(out)


@pytest.mark.full
def test_a_trained_checkpoint(tmp_path: Path, minilm: Path) -> None:
    """The default packs all linear layers, in the layout of the fastest kernels, and none of the three embeddings."""
    conversion = convert.plan(minilm)
    conversion.write(tmp_path / "out")
    conversion.verify(tmp_path / "out")
    names = packed_names(tmp_path / "out")
    assert len(names) == 37 and not [name for name in names if "embedding" in name]
    assert {load(tmp_path / "out", name).layout for name in names} == {"strips"}
    assert not any(unpack(load(tmp_path / "out", name)).overflows().any() for name in names), "audits clean"
    weight = unpack(load(tmp_path / "out", names[0]))
    w = Checkpoint(minilm).read(names[0])
    assert np.linalg.norm(weight.dequantize() - w) < 0.15 * np.linalg.norm(w)
