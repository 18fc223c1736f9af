import json
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ptxlab.errors import ArgumentError, FileError
from ptxlab.lowbit.layout.checkpoint import Checkpoint, TensorInfo, encoder_matrices, write_checkpoint
from tests.support.safetensors_file import write


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.safetensors"
    rng = np.random.default_rng(0)
    tensors = {
        "single": rng.standard_normal((3, 4)).astype(np.float32),
        "half": rng.standard_normal((2, 5)).astype(np.float16),
        "double": rng.standard_normal(7),
        "ids": np.arange(4),
    }
    save_file(tensors, path)
    return path, tensors


def test_names_shapes_and_dtypes(small):
    path, _ = small
    assert Checkpoint(path).tensors == {
        "single": TensorInfo("single", (3, 4), "F32", 48),
        "half": TensorInfo("half", (2, 5), "F16", 20),
        "double": TensorInfo("double", (7,), "F64", 56),
        "ids": TensorInfo("ids", (4,), "I64", 32),
    }


@pytest.mark.parametrize("name", ["single", "half", "double"])
def test_read(small, name):
    path, tensors = small
    np.testing.assert_array_equal(Checkpoint(str(path)).read(name), tensors[name], strict=True)


def test_read_bfloat16(tmp_path):
    patterns = np.array([0x3F80, 0xC000, 0x0001, 0x7F7F, 0x8000, 0x7F80], np.uint16)
    path = write(
        tmp_path / "brain.safetensors",
        {"first": ("F32", [1], bytes(4)), "brain": ("BF16", [2, 3], patterns.tobytes()), "none": ("BF16", [0, 3], b"")},
    )
    checkpoint = Checkpoint(path)
    expected = np.array([[1, -2, 2.0**-133], [(2 - 2.0**-7) * 2.0**127, -0.0, np.inf]], np.float32)
    brain = checkpoint.read("brain")
    np.testing.assert_array_equal(brain, expected, strict=True)
    assert np.signbit(brain[1, 1])
    assert checkpoint.read("none").shape == (0, 3)


def test_a_file_that_has_changed_since_it_was_opened(small):
    path, _ = small
    checkpoint, content = Checkpoint(path), path.read_bytes()
    path.write_bytes(content[:-100])
    with pytest.raises(FileError, match=r"small\.safetensors: \w+: \d+ bytes expected \(got \d+\)"):
        for name in checkpoint.tensors:
            checkpoint.read_bytes(name)
    path.unlink()
    with pytest.raises(FileError, match=r"small\.safetensors: cannot be read: No such file or directory"):
        checkpoint.read("half")


def test_refuses_unknown_names_and_dtypes(small, tmp_path):
    checkpoint = Checkpoint(small[0])
    with pytest.raises(ArgumentError, match=r"tensor: must be one of the 4 tensors of .* \(got bias\)"):
        checkpoint.read("bias")
    with pytest.raises(FileError, match="ids has dtype I64, not one of F16, BF16, F32, F64"):
        checkpoint.read("ids")
    eight_bits = write(tmp_path / "f8.safetensors", {"w": ("F8_E4M3", [4], b"1234")})
    with pytest.raises(FileError, match="w has dtype F8_E4M3"):
        Checkpoint(eight_bits).read("w")


def test_bytes_of_any_dtype_and_metadata(tmp_path):
    path = write(tmp_path / "f8.safetensors", {"w": ("F8_E4M3", [2, 2], b"1234"), "v": ("I64", [1], bytes(range(8)))})
    checkpoint = Checkpoint(path)
    assert checkpoint.read_bytes("w").tobytes() == b"1234" and checkpoint.read_bytes("v").tobytes() == bytes(range(8))
    assert checkpoint.tensors["w"].nbytes == 4 and checkpoint.metadata == {}


WRITTEN = {
    "bytes": np.arange(3, dtype=np.uint8),
    "doubles": np.arange(6.0).reshape(2, 3),
    "halves": np.ones((3, 1), np.float16),
    "scalar": np.array(7, np.int32),
    "empty": np.zeros((0, 4), np.float32),
}
SPELLING = {"uint8": "U8", "float64": "F64", "float16": "F16", "int32": "I32", "float32": "F32"}
ANNOUNCED = [TensorInfo(name, a.shape, SPELLING[str(a.dtype)], a.nbytes) for name, a in WRITTEN.items()]


def test_write_in_any_order_and_aligned(tmp_path):
    path = tmp_path / "new.safetensors"
    write_checkpoint(path, ANNOUNCED, reversed(WRITTEN.items()), {"format": "pt"})
    read = load_file(path)
    assert read.keys() == WRITTEN.keys()
    for name, array in WRITTEN.items():
        np.testing.assert_array_equal(read[name], array, strict=True)
    assert Checkpoint(path).metadata == {"format": "pt"}
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    starts = {name: 8 + length + header[name]["data_offsets"][0] for name, array in WRITTEN.items() if array.size}
    assert all(start % WRITTEN[name].dtype.itemsize == 0 for name, start in starts.items())


def test_write_takes_strided_arrays(tmp_path):
    array = np.arange(12, dtype=np.int32).reshape(3, 4).T
    write_checkpoint(tmp_path / "t", [TensorInfo("t", (4, 3), "I32", 48)], [("t", array)], {})
    np.testing.assert_array_equal(load_file(tmp_path / "t")["t"], array, strict=True)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ([("bytes", np.zeros(4, np.uint8))], "bytes: 3 bytes announced, 4 given"),
        ([("bytes", WRITTEN["bytes"])], "announced and not given: doubles, scalar, halves, empty"),
    ],
)
def test_contents_unlike_their_description_leave_no_file(tmp_path, contents, message):
    with pytest.raises(ValueError, match=message):
        write_checkpoint(tmp_path / "new", ANNOUNCED, contents, {})
    assert list(tmp_path.iterdir()) == []


def test_names_differ_and_folders_exist(tmp_path):
    with pytest.raises(ArgumentError, match=r"tensors: must have different names \(got bytes\)"):
        write_checkpoint(tmp_path / "new", [ANNOUNCED[0], ANNOUNCED[0]], [], {})
    with pytest.raises(FileError, match="cannot be written: No such file or directory"):
        write_checkpoint(tmp_path / "no" / "new", [], [], {})


def broken_files(folder):
    whole = {"w": ("F32", [2, 2], bytes(16))}
    yield "empty", folder / "empty", b""
    yield "shorter than a header", folder / "short", b"abc"
    yield "foreign", folder / "foreign", b"PK\x03\x04" + bytes(200)
    good = write(folder / "good", whole).read_bytes()
    yield "truncated data", folder / "cut", good[:-1]
    yield "truncated header", folder / "headless", good[:30]
    yield "trailing bytes", folder / "long", good + b"!"
    for name, length in (("header longer than the file", 10_000), ("header of an exabyte", 2**60)):
        path = folder / "length"
        yield name, path, write(path, whole, header_length=length).read_bytes()
    for name, dtype, shape in (
        ("shape beyond the data", "F32", [2, 3]),
        ("size that overflows", "F32", [2**62, 2**62]),
        ("negative shape", "F32", [-2, -2]),
        ("unknown dtype", "F77", [2, 2]),
    ):
        path = folder / "header"
        yield name, path, write(path, {"w": (dtype, shape, bytes(16))}).read_bytes()


def test_refuses_broken_files(tmp_path):
    for name, path, content in broken_files(tmp_path):
        path.write_bytes(content)
        with pytest.raises(FileError) as error:
            Checkpoint(path)
        message = str(error.value)
        assert message.startswith(f"{path}: not a readable safetensors file (") and "\n" not in message, name


@pytest.mark.parametrize("name", ["missing.safetensors", "."])
def test_refuses_what_is_not_a_file(tmp_path, name):
    with pytest.raises(FileError, match="no such file"):
        Checkpoint(tmp_path / name)


def test_encoder_matrices_are_the_matrices_inside_layers(tmp_path):
    matrix, path = np.ones((2, 3), np.float32), tmp_path / "model.safetensors"
    matrices = {"encoder.layer.0.dense.weight": matrix, "model.layers.11.mlp.up_proj.weight": matrix.astype(np.float16)}
    left_out = {
        "embeddings.weight": matrix,
        "encoder.layer.0.dense.bias": matrix[0].copy(),
        "encoder.layer.0.ids": matrix.astype(np.int64),
        "player.0.weight": matrix,
        "lm_head.weight": matrix,
    }
    save_file(matrices | left_out, path)
    assert {name: w.dtype for name, w in encoder_matrices(path)} == {name: w.dtype for name, w in matrices.items()}


@pytest.mark.full
def test_matrices_of_the_trained_encoder(minilm):
    shapes = [w.shape for _, w in encoder_matrices(minilm)]
    assert len(shapes) == 36
    assert {shape: shapes.count(shape) for shape in shapes} == {(384, 384): 24, (1536, 384): 6, (384, 1536): 6}
