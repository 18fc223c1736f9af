"""Files of `torch.save`: what they hold, and that nothing else is done with them."""

import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ptxlab.errors import ArgumentError, FileError
from ptxlab.llm.checkpoints.torch_file import MAX_PICKLE, TorchFile, TorchFolder, open_checkpoint
from ptxlab.lowbit.layout.checkpoint import TensorInfo
from tests.support.foreign_files import (
    ORDERED_DICT,
    push_number,
    push_tensor,
    push_text,
    refused_mutants,
    write_archive,
    write_torch,
)

GOLDEN = Path(__file__).parents[2] / "golden"
ARRAYS = {
    "a.weight": np.arange(12, dtype=np.int8).reshape(3, 4),
    "b": np.linspace(-2, 2, 5).astype(np.float16),
    "c": np.arange(6, dtype=np.float32).reshape(2, 3),
    "d": np.arange(3),
    "e": np.zeros((0, 4), np.float32),
}
ONE = np.ones((2, 3), np.float32)
DATA = {"data/0": ONE.tobytes()}


def test_tensors_by_name(tmp_path: Path) -> None:
    file = TorchFile(write_torch(tmp_path / "model.pt", ARRAYS))
    assert file.tensors["a.weight"] == TensorInfo("a.weight", (3, 4), "I8", 12)
    assert file.tensors["b"] == TensorInfo("b", (5,), "F16", 10) and list(file.tensors) == list(ARRAYS)
    for name in "bce":
        np.testing.assert_array_equal(file.read(name), ARRAYS[name], strict=True)
    assert file.read_bytes("a.weight").tolist() == list(range(12))
    with pytest.raises(FileError, match=r"d has dtype I64, not one of F16"):
        file.read("d")
    with pytest.raises(ArgumentError, match=r"tensor: must be one of the 5 tensors .*got z"):
        file.read("z")


def test_a_file_that_pytorch_wrote() -> None:
    """A module's state dictionary (with its _metadata) and a parameter, a part of a storage, bfloat16; PyTorch 2.15."""
    file = TorchFile(GOLDEN / "torch_save.pt")
    assert file.read("weight").tolist() == [[0, 1, 2], [3, 4, 5]] and file.read("bias").tolist() == [-1, 1]
    assert file.read("parameter").tolist() == [1, 1] and file.tensors["parameter"].dtype == "F16"
    assert file.read_bytes("part").tolist() == [4, 5, 6, 7, 8, 9] and file.tensors["part"].shape == (2, 3)
    assert file.read("bf16").tolist() == [1, -2]


def test_parts_of_a_storage_and_bfloat16(tmp_path: Path) -> None:
    program = (
        b"}("
        + push_text("part")
        + push_tensor(ONE[:1], 0, offset=1).replace(push_number(3) + b"tQ", push_number(6) + b"tQ")
    )
    bits = np.array([0x3F80, 0xC000], np.uint16)
    program += push_text("bf16") + push_tensor(bits, 1, kind="BFloat16") + b"u"
    contents = {"data/0": np.arange(6, dtype=np.float32).tobytes(), "data/1": bits.tobytes()}
    file = TorchFile(write_archive(tmp_path / "model.pt", program, contents))
    assert file.read("part").tolist() == [[1, 2, 3]] and file.read("bf16").tolist() == [1, -2]


def test_a_folder_of_files_is_one(tmp_path: Path) -> None:
    write_torch(tmp_path / "pytorch_model-1.bin", {"a": ONE})
    write_torch(tmp_path / "pytorch_model-2.bin", {"b": ONE})
    (tmp_path / "training_args.bin").write_bytes(b"a pickle of classes")
    folder = open_checkpoint(tmp_path)
    assert isinstance(folder, TorchFolder) and set(folder.tensors) == {"a", "b"} and folder.read("b").shape == (2, 3)
    assert isinstance(open_checkpoint(tmp_path / "pytorch_model-1.bin"), TorchFile)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match=r"empty: no \.safetensors file"):
        open_checkpoint(tmp_path / "empty")


CALL = b"cos\nsystem\n" + b"(" + push_text("touch executed") + b"tR"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
BAD = {
    "a call": (b"}(" + push_text("a") + CALL + b"u", r"holds os\.system, not only tensors; nothing was executed"),
    "a call of nothing": (b"}(" + push_text("a") + push_text("f") + b")Ru", "a call of no function"),
    "a class": (b"}(" + push_text("a") + b"cos\nPathLike\n)\x81u", "opcode NEWOBJ, .* nothing was executed"),
    "an instance": (b"(ios\nsystem\n", "opcode INST"),
    "an extension": (b"\x82\x01", "opcode EXT1"),
    "a name": (b"}(" + push_text("a") + b"cos\nsystem\nu", r"a: must be a tensor \(got os system\)"),
    "a number": (b"}(" + push_text("a") + push_number(3) + b"u", r"a: must be a tensor \(got int\)"),
    "a list": (b"]", r"a dictionary of tensors expected \(got list\)"),
    "no name": (b"}(" + b")" * 2 + b"u", "a name expected"),
    "half an item": (b"}(" + push_text("a") + b"u", "items for no dictionary"),
    "items for a list": (b"](" + push_text("a") * 2 + b"u", "items for no dictionary"),
    "nothing on the stack": (b"0", "opcode POP"),
    "an empty stack": (b"R", "pop from empty list"),
    "no mark": (b"}u", "pop from empty list"),
    "a far memo": (b"}r\xff\xff\xff\xffh\x07", "7"),
    "a long text": (b"X\xff\xff\xff\xff", "expected 4294967295 bytes"),
    "a long number": (b"\x8b\xff\xff\xff\x7f", "not enough data"),
    "an unknown opcode": (b"\xff", "unknown"),
    "no tensor": (b"}(" + push_text("a") + REBUILD + b"(NNNNtRu", "a tensor of no storage"),
    "few arguments": (b"}(" + push_text("a") + REBUILD + b")Ru", "argument"),
    "a transposed tensor": (
        b"}(" + push_text("a") + push_tensor(ONE, 0, strides=(1, 2)) + b"u",
        r"\[2, 3\] must be contiguous",
    ),
    "a repeated tensor": (b"}(" + push_text("a") + push_tensor(ONE, 0, strides=(0, 1)) + b"u", "must be contiguous"),
    "a tensor beyond its storage": (
        b"}(" + push_text("a") + push_tensor(ONE, 0, offset=1) + b"u",
        r"a: \[2, 3\] from element 1 on must lie within 6",
    ),
    "a negative offset": (b"}(" + push_text("a") + push_tensor(ONE, 0, offset=-1) + b"u", "a size below 2.48 expected"),
    "a large tensor": (
        b"}(" + push_text("a") + push_tensor(ONE, 0).replace(push_number(2), push_number(1 << 30)) + b"u",
        r"a: \[1073741824, 3\] from element 0 on must lie within 6",
    ),
    "a large storage": (
        b"}(" + push_text("a") + push_tensor(ONE, 0).replace(push_number(6), push_number(1 << 30)) + b"u",
        r"data/0 must hold 4294967296 bytes \(got 24 bytes\)",
    ),
    "a missing storage": (
        b"}(" + push_text("a") + push_tensor(ONE, 7) + b"u",
        r"data/7 must hold 24 bytes \(got no such",
    ),
    "a storage of no known type": (
        b"}(" + push_text("a") + push_tensor(ONE, 0, kind="ComplexDouble") + b"u",
        "a storage of HalfStorage, .*got torch ComplexDoubleStorage",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_pickles_that_are_no_tensors_are_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program, message = BAD[case]
    with pytest.raises(FileError, match=message) as error:
        TorchFile(write_archive(tmp_path / "model.pt", program, DATA))
    assert "\n" not in str(error.value) and not (tmp_path / "executed").exists()


def test_nested_pairs_end_at_once(tmp_path: Path) -> None:
    """A tuple of pairs of pairs has 2^200 of them by 200 opcodes.

    It stands for the name of a tensor, and for its shape.
    """
    pairs = b")" + b"q\x00h\x00\x86" * 200
    for program in (b"}(" + pairs + ORDERED_DICT + b"u", b"}(" + push_text("a") + pairs + b"u"):
        with pytest.raises(FileError, match=r"expected|must be a tensor"):
            TorchFile(write_archive(tmp_path / "model.pt", program, DATA))


def test_containers_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    with pytest.raises(FileError, match="no such file"):
        TorchFile(path)
    path.write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")  # of PyTorch before 1.6
    with pytest.raises(FileError, match=r"not a readable file of torch\.save \(File is not a zip file\)"):
        TorchFile(path)
    with pytest.raises(FileError, match=r"archive/data\.pkl: must be stored, not compressed"):
        TorchFile(write_torch(path, {"a": np.zeros((4000, 1000), np.float32)}, zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/version", "3")
    with pytest.raises(FileError, match=r"one data\.pkl expected \(got 0\)"):
        TorchFile(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"")
        archive.writestr("archive/byteorder", "big")
    with pytest.raises(FileError, match="byteorder must be little"):
        TorchFile(path)


def test_sizes_of_the_zip_are_those_of_the_file(tmp_path: Path) -> None:
    """A directory that claims more than there is is refused before a byte of it is allocated."""
    path = write_torch(tmp_path / "model.pt", {"a": ONE})
    content = bytearray(path.read_bytes())
    for claimed, message in ((1 << 31, "bytes must lie within the file's"), (MAX_PICKLE + 1, "must lie within")):
        entry = content.index(b"PK\x01\x02")
        content[entry + 20 : entry + 28] = struct.pack("<II", claimed, claimed)
        path.write_bytes(content)
        with pytest.raises(FileError, match=message):
            TorchFile(path)


def test_mutated_files_are_read_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.pt"

    def read() -> None:
        file = TorchFile(path)
        for name in file.tensors:
            file.read_bytes(name)

    assert 100 < refused_mutants(write_torch(path, ARRAYS), read) < 500 and {*tmp_path.iterdir()} == {path}
