"""GGUF files: what the library `gguf` writes is read as it reads it; what is broken is refused in one line, at once."""

import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ptxlab.errors import ArgumentError, FileError, UnavailableError
from ptxlab.llm.checkpoints.gguf import GgufFile
from tests.support.small_models import write_gguf

TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


@pytest.fixture
def small_gguf(tmp_path: Path) -> Path:
    """Write a small GGUF file."""
    return write_gguf(tmp_path / "small.gguf", "llama3", "Q4_1")


@pytest.mark.parametrize("kind", TYPES)
def test_tensors_are_those_of_the_library(kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "qwen2", kind)
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    assert ours.tensors.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        tensor_info, array = ours.tensors[tensor.name], ours.read(tensor.name)
        right = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert (tensor_info.dtype, tensor_info.nbytes) == (tensor.tensor_type.name, tensor.n_bytes)
        assert tensor_info.shape == tuple(reversed(tensor.shape.tolist()))
        np.testing.assert_array_equal(array, right.reshape(tensor_info.shape), strict=True)
    assert ours.tensors["blk.0.attn_q.weight"].dtype == kind


def test_metadata_are_those_of_the_library(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    numbers = {"uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 2**32 - 1, "int32": -(2**31),
               "uint64": 2**63, "int64": -(2**62), "float32": 0.5, "float64": 1e300, "bool": True}  # fmt: skip
    for name, number in numbers.items():
        getattr(writer, f"add_{name}")(f"of.{name}", number)
    writer.add_string("of.text", "Zwölf\n")
    writer.add_array("of.texts", ["a", "", "ü"])
    writer.add_array("of.numbers", [1, 2, 3])
    writer.add_tensor("t", np.arange(3, dtype=np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    metadata = GgufFile(tmp_path / "model.gguf").metadata
    assert {name: metadata[f"of.{name}"] for name in numbers} == numbers
    assert (metadata["of.text"], metadata["of.texts"], metadata["of.numbers"].tolist()) == (
        "Zwölf\n",
        ["a", "", "ü"],
        [1, 2, 3],
    )
    assert metadata["general.architecture"] == "llama"


def test_an_alignment_of_its_own(tmp_path: Path) -> None:
    file = GgufFile(write_gguf(tmp_path / "model.gguf", "smollm", custom_alignment=128))
    assert file.metadata["general.alignment"] == 128
    plain_file = GgufFile(write_gguf(tmp_path / "plain.gguf", "smollm"))
    assert all((file.read(name) == plain_file.read(name)).all() for name in plain_file.tensors)


def test_no_part_of_a_file_is_a_file(small_gguf: Path) -> None:
    content, cut = small_gguf.read_bytes(), small_gguf.with_name("cut.gguf")
    for size in [*range(0, 2000, 37), *range(2000, len(content), 1499), len(content) - 40]:
        cut.write_bytes(content[:size])
        with pytest.raises(FileError, match=r"^.*cut\.gguf: not a readable GGUF file \(.+\)$"):
            GgufFile(cut)


def header(
    entries: bytes = b"", tensors: bytes = b"", counts: tuple[int, int] | None = None, version: int = 3
) -> bytes:
    """Write a file of one entry and one tensor at most; `counts` of tensors and entries."""
    counts = counts or (bool(tensors), bool(entries))
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + entries + tensors + bytes(256)


def text(string: str) -> bytes:
    return struct.pack("<Q", len(string.encode())) + string.encode()


def tensor(*shape: int, kind: int = 0, offset: int = 0) -> bytes:
    axes = len(shape)
    return text("t") + struct.pack(f"<I{axes}QIQ", axes, *shape, kind, offset)


@pytest.mark.parametrize("length", range(32))
def test_data_begin_at_the_next_multiple_of_the_alignment(length: int, tmp_path: Path) -> None:
    """Right behind a header that ends at one."""
    path = tmp_path / "k.gguf"
    content = header(text("key") + struct.pack("<I", 8) + text("x" * length), tensor(4)).removesuffix(bytes(256))
    values = np.arange(1, 5, dtype=np.float32)
    path.write_bytes(content + bytes(-len(content) % 32) + values.tobytes())
    assert GgufFile(path).read("t").tolist() == values.tolist()


BROKEN = {
    "no GGUF": (b"PK\x03\x04" + bytes(100), "it does not begin with GGUF"),
    "version": (header(version=1), "version must be one of 2, 3, little-endian; it is 1"),
    "big-endian": (header(version=3 << 24), "version must be one of 2, 3, little-endian; it is 50331648"),
    "2^60 entries": (header(counts=(0, 2**60)), "occurs twice"),
    "2^60 tensors": (header(counts=(2**60, 0)), "has 0 axes"),
    "text of an exabyte": (header(struct.pack("<Q", 2**60) + b"key"), f"{2**60} bytes at byte 32, but it has 291"),
    "array of an exabyte": (
        header(text("key") + struct.pack("<IIQ", 9, 0, 2**60)),
        f"{2**60} bytes at byte 51, but it has 307",
    ),
    "2^60 texts": (header(text("key") + struct.pack("<IIQ", 9, 8, 2**60)), "8 bytes at byte 307, but it has 307"),
    "an array of arrays": (header(text("key") + struct.pack("<IIQ", 9, 9, 1)), "a metadata type 9 at byte 51"),
    "metadata of no type": (header(text("key") + struct.pack("<I", 13)), "a metadata type 13 at byte 39"),
    "a key twice": (header(2 * (text("key") + struct.pack("<IB", 0, 1)), counts=(0, 2)), "key occurs twice"),
    "no text": (header(struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<IB", 0, 1)), "codec can't decode"),
    "a tensor twice": (header(tensors=2 * tensor(4), counts=(2, 0)), "t occurs twice"),
    "no such type": (header(tensors=tensor(32, kind=99)), "t has type 99, which cannot be dequantised"),
    "a type without dequantiser": (header(tensors=tensor(32, kind=9)), "t has type 9, which cannot be dequantised"),
    "half a block": (header(tensors=tensor(40, kind=3)), "t: Q4_1 has blocks of 32, its rows have 40"),
    "five axes": (header(tensors=tensor(1, 1, 1, 1, 1)), "t has 5 axes"),
    "larger than the file": (header(tensors=tensor(32, 2**40)), r"t does not lie within the file's \d+ bytes"),
    "a size that overflows": (header(tensors=tensor(2**32, 2**32)), r"t does not lie within the file's \d+ bytes"),
    "beyond the end": (header(tensors=tensor(32, offset=2**62)), r"t does not lie within the file's \d+ bytes"),
    "not aligned": (header(tensors=tensor(4, offset=4)), r"t does not lie .*, aligned to 32"),
    "alignment": (
        header(text("general.alignment") + struct.pack("<II", 4, 0)),
        "general.alignment must be an integer, 1 or more; it is 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_refused(case: str, tmp_path: Path) -> None:
    content, message = BROKEN[case]
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(FileError, match=rf"broken\.gguf: not a readable GGUF file \(.*{message}") as error:
        GgufFile(path)
    assert "\n" not in str(error.value)


def test_other_errors_are_one_line_too(small_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = GgufFile(small_gguf)
    with pytest.raises(ArgumentError, match=r"tensor: must be one of the 22 tensors of .*small\.gguf \(got nosuch\)"):
        file.read("nosuch")
    with pytest.raises(FileError, match=r"nosuch\.gguf: no such file"):
        GgufFile(small_gguf.with_name("nosuch.gguf"))
    small_gguf.write_bytes(small_gguf.read_bytes()[:-1000])
    with pytest.raises(FileError, match=r"blk\.1\.\w+\.weight: \d+ bytes expected \(got \d+\)"):
        for name in file.tensors:
            file.read(name)
    modules: dict[str, Any] = sys.modules  # type: ignore[assignment]
    monkeypatch.setitem(modules, "gguf", None)
    with pytest.raises(UnavailableError, match=r"^gguf: needed .*; python -m pip install 'ptxlab\[model\]'$"):
        GgufFile(small_gguf)
