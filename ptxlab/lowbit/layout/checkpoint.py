"""Read and write safetensors files, one tensor at a time, as NumPy arrays; base classes for other formats' files."""

import json
import os
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from ptxlab.errors import ArgumentError, FileError
from ptxlab.io.files import read_json, write_whole

FLOATS = ("F16", "BF16", "F32", "F64")  # safetensors' names of the dtypes that can be read here
# Files beside a model: adapters, copies in the layout of Mistral's own code or in another dtype, states of training.
_SIDE_FILES = ("adapter_*", "consolidated*", "*.fp16*", "*.fp32*", "*.bf16*", "optimizer*", "scheduler*", "training_*")
_TRANSFORMER_LAYER = re.compile(r"(^|\.)layers?\.\d+\.")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file: its name, shape, dtype as safetensors spells it, and size in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class TensorFile(ABC):
    """An open file, or folder, of tensors.

    Attributes:
        path: the file or folder.
        metadata: entries that a file has beside its tensors; none of a folder.
        tensors: every tensor by its name.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> npt.NDArray[Any]:
        """Read the tensor `name` as float16, float32 or float64; bfloat16 becomes float32, exactly.

        Raises ArgumentError for a name that is not in the file, FileError for a dtype that is not in `FLOATS`.
        """
        tensor = self._info(name)
        if tensor.dtype not in FLOATS:
            raise FileError(f"{self.path}: {name} has dtype {tensor.dtype}, not one of {', '.join(FLOATS)}")
        content = self.read_bytes(name)
        if tensor.dtype != "BF16":
            return content.view(f"<f{int(tensor.dtype[1:]) // 8}").reshape(tensor.shape)
        bits = content.view("<u2").astype(np.uint32)  # NumPy has no bfloat16: the upper half of a float32
        bits <<= np.uint32(16)
        return bits.view(np.float32).reshape(tensor.shape)

    @abstractmethod
    def read_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """Read the bytes u8 [nbytes] of the tensor `name`, of any dtype; the name must be in `tensors`."""

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise ArgumentError("tensor", f"must be one of the {len(self.tensors)} tensors of {self.path}", name)
        return self.tensors[name]


def bytes_at(path: Path, tensor: TensorInfo, offset: int) -> npt.NDArray[np.uint8]:
    """Read a tensor's bytes from a file; raise FileError if the file, changed meanwhile, no longer has them."""
    try:
        content = np.fromfile(path, dtype=np.uint8, count=tensor.nbytes, offset=offset)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from None
    if content.nbytes != tensor.nbytes:
        raise FileError(f"{path}: {tensor.name}: {tensor.nbytes} bytes expected (got {content.nbytes})")
    return content


class Checkpoint(TensorFile):
    """An open safetensors file.

    The safetensors library checks the header (its length against the file and against 100 MB, every shape and offset)
    before anything is allocated. Raises FileError if the file is missing, truncated or of another format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileError(f"{self.path}: no such file")
        try:
            file = cast(Any, safe_open(self.path, framework="np"))  # its methods are not annotated
            names = list(file.keys())
            self.metadata = file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise FileError(f"{self.path}: not a readable safetensors file ({error})") from error
        self.tensors = {name: self._tensor_info(name) for name in names}

    def read_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """See `TensorFile.read_bytes`."""
        data_start, header = self._header
        return bytes_at(self.path, self.tensors[name], data_start + header[name]["data_offsets"][0])

    def _tensor_info(self, name: str) -> TensorInfo:
        entry = self._header[1][name]
        begin, end = entry["data_offsets"]
        return TensorInfo(name, tuple(entry["shape"]), entry["dtype"], end - begin)

    @cached_property
    def _header(self) -> tuple[int, dict[str, Any]]:
        """Offset of the tensors' bytes, and the header, which the library has already found valid.

        The library does not tell where a tensor lies, and cannot read bfloat16 into NumPy. So the header is parsed
        here once more, and tensors are read by their offsets.
        """
        with self.path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            return 8 + length, json.loads(file.read(length))


class CheckpointFolder(TensorFile):
    """The safetensors files of a folder as one.

    They are `model.safetensors`; without it, the files that the index names; without an index, every safetensors file
    except side files: adapters, copies in other layouts or dtypes, optimizer states. A folder that has nothing else is
    read from its side files. transformers looks for the first two, in this order, and reads no other files.

    Raises FileError for a folder without such files, a broken file or index, a tensor that lies in two files, and an
    index that names a tensor or a file that is not there.
    """

    # A subclass for another format replaces these four.
    _WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
    _PATTERNS: tuple[str, ...] = ("*.safetensors",)
    _OPEN: Callable[[Path], TensorFile] = Checkpoint

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.metadata = {}
        index = self.path / self._INDEX
        is_whole = (self.path / self._WHOLE).is_file()
        file_of_tensor = _read_index(index) if index.is_file() and not is_whole else {}
        files = [self.path / name for name in ([self._WHOLE] if is_whole else sorted({*file_of_tensor.values()}))]
        files = files or self.other_files(self.path)
        if not files:
            raise FileError(f"{self.path}: no {' or '.join(self._PATTERNS).replace('*', '')} file")
        self._files: dict[str, TensorFile] = {}
        self.tensors = {}
        for checkpoint in map(type(self)._OPEN, files):
            for name, tensor in checkpoint.tensors.items():
                if name in self.tensors:
                    raise FileError(f"{checkpoint.path}: {name} is in {self._files[name].path.name} too")
                self._files[name], self.tensors[name] = checkpoint, tensor
        for name, file_name in file_of_tensor.items():
            if name not in self._files or self._files[name].path.name != file_name:
                raise FileError(f"{index}: {name} is not in {file_name}")

    @classmethod
    def is_named(cls, folder: Path) -> bool:
        """Tell whether a folder has the file, or the index, that transformers looks for."""
        return any((folder / name).is_file() for name in (cls._WHOLE, cls._INDEX))

    @classmethod
    def other_files(cls, folder: Path, *, side_files: bool = True) -> list[Path]:
        """List the folder's files of this format, but side files (adapters, copies, optimizer states) only if alone.

        Without `side_files` they are left out even then.
        """
        files = sorted({file for pattern in cls._PATTERNS for file in folder.glob(pattern)})
        models = [file for file in files if not any(fnmatchcase(file.name, pattern) for pattern in _SIDE_FILES)]
        return models or (files if side_files else [])

    def read(self, name: str) -> npt.NDArray[Any]:
        """See `TensorFile.read`."""
        self._info(name)  # raises for a name that is in no file
        return self._files[name].read(name)

    def read_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """See `TensorFile.read_bytes`."""
        return self._files[name].read_bytes(name)


def _read_index(index: Path) -> dict[str, str]:
    """Read the file name of each tensor from an index."""
    try:
        weight_map = read_json(index)["weight_map"]
        file_of_tensor = {str(tensor): Path(file).name for tensor, file in weight_map.items()}
    except (KeyError, TypeError, AttributeError):
        raise FileError(f"{index}: not an index with a weight_map of file names") from None
    if outside_file := next((file for file in weight_map.values() if file != Path(file).name), None):
        raise FileError(f"{index}: must name files of its own folder (got {outside_file})")
    return file_of_tensor


def write_checkpoint(
    path: str | os.PathLike[str],
    tensors: Iterable[TensorInfo],
    contents: Iterable[tuple[str, npt.NDArray[Any]]],
    metadata: Mapping[str, str],
) -> None:
    """Write a safetensors file whose `tensors` are known before their `contents`, which may come in any order.

    The header is written first, then each array (C order, of the size announced) at its place, so that one
    array at a time need be in memory. The file appears under its name only when it is complete: whatever `contents`
    raises leaves nothing behind.

    Raises FileError if it cannot be written, ArgumentError for two tensors of one name, and KeyError or ValueError for
    contents that are not those announced.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin, places = 0, {}
    # The widest elements first, as the format's own writer has it, so that every tensor is aligned to its elements.
    for tensor in sorted(tensors, key=_width, reverse=True):
        if tensor.name in header:
            raise ArgumentError("tensors", "must have different names", tensor.name)
        end = begin + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        places[tensor.name] = range(begin, end)
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the first tensor is aligned too

    def write(file: BinaryIO) -> None:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, array in contents:
            place = places.pop(name)
            if array.nbytes != len(place):
                raise ValueError(f"{name}: {len(place)} bytes announced, {array.nbytes} given")
            file.seek(8 + len(text) + place.start)
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        if places:
            raise ValueError(f"announced and not given: {', '.join(places)}")

    write_whole(Path(path), write)


def _width(tensor: TensorInfo) -> int:
    """Return the bytes per element; 0 for an empty tensor, which may lie anywhere."""
    return tensor.nbytes // max(1, prod(tensor.shape))


def encoder_matrices(path: str | os.PathLike[str]) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield name and array of every weight matrix in a file's transformer layers (`layer.3.`, `layers.3.`).

    The layers may be a decoder's as well. Embeddings, heads, vectors and tensors whose dtype is not one of `FLOATS` are
    left out. Raises FileError as `Checkpoint` does.
    """
    checkpoint = Checkpoint(path)
    for tensor in checkpoint.tensors.values():
        if _TRANSFORMER_LAYER.search(tensor.name) and len(tensor.shape) == 2 and tensor.dtype in FLOATS:
            yield tensor.name, checkpoint.read(tensor.name)
