"""Read weights and metadata from GGUF files, one tensor at a time, as NumPy arrays."""

import functools
import os
import struct
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ptxlab.errors import FileError, UnavailableError
from ptxlab.lowbit.layout.checkpoint import TensorFile, TensorInfo, bytes_at

VERSIONS = (2, 3)
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8",
            12: "<f8"}  # fmt: skip
_TEXT, _ARRAY = 8, 9
_MOST_AXES = 4


class GgufFile(TensorFile):
    """An open GGUF file, of quantised tensors too.

    Dtypes have GGUF's names ("F16", "Q4_1"); shapes have K last, as in NumPy. Metadata are numbers, texts, lists of
    texts and NumPy arrays. The library `gguf` dequantises; its reader is not used, because it does not check the
    header's counts, lengths and offsets against the size of the file before it allocates memory for them.

    Raises FileError if the file is missing, truncated, of another format, or holds a type that `gguf` does not
    dequantise; UnavailableError without `gguf`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileError(f"{self.path}: no such file")
        library()
        self.metadata, self.tensors = {}, {}
        self._places: dict[str, int] = {}
        try:
            with self.path.open("rb") as file:
                self._read_header(_Header(file))
        except OSError as error:
            raise FileError(f"{self.path}: cannot be read: {error.strerror or error}") from None
        except ValueError as error:  # of UnicodeDecodeError too
            raise FileError(f"{self.path}: not a readable GGUF file ({error})") from None

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Read the tensor `name`, dequantised to float32. Raises ArgumentError for a name that is not in the file."""
        tensor = self._info(name)
        return _dequantize(self.read_bytes(name), tensor.dtype).reshape(tensor.shape)

    def read_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """See `TensorFile.read_bytes`."""
        return bytes_at(self.path, self.tensors[name], self._places[name])

    def _read_header(self, header: "_Header") -> None:
        if header.take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = header.number("<u4")
        if version not in VERSIONS:
            raise ValueError(f"version must be one of {', '.join(map(str, VERSIONS))}, little-endian; it is {version}")
        tensors, entries = header.number("<u8"), header.number("<u8")
        for _ in range(entries):
            key = header.text()
            if key in self.metadata:
                raise ValueError(f"{key} occurs twice")
            self.metadata[key] = header.value(header.number("<u4"))
        offsets = {}
        for _ in range(tensors):
            tensor, offsets[tensor.name] = header.tensor()
            if tensor.name in self.tensors:
                raise ValueError(f"{tensor.name} occurs twice")
            self.tensors[tensor.name] = tensor
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment must be an integer, 1 or more; it is {alignment!r}")
        start = header.position + -header.position % alignment
        for name, offset in offsets.items():
            if offset % alignment or start + offset + self.tensors[name].nbytes > header.size:
                raise ValueError(f"{name} does not lie within the file's {header.size} bytes, aligned to {alignment}")
            self._places[name] = start + offset


class _Header:
    """Reads a header from the start of the file on; ValueError for anything beyond the file's end."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.position, self.size = 0, os.fstat(file.fileno()).st_size

    def take(self, nbytes: int) -> bytes:
        """Read the next `nbytes` bytes. Raises ValueError if the file has fewer."""
        if nbytes > self.size - self.position:
            raise ValueError(f"{nbytes} bytes at byte {self.position}, but it has {self.size}")
        self.position += nbytes
        return self._file.read(nbytes)

    def number(self, dtype: str) -> Any:
        """Read one number."""
        return self.array(dtype, 1)[0].item()

    def array(self, dtype: str, count: int) -> npt.NDArray[Any]:
        """Read `count` numbers."""
        return np.frombuffer(self.take(count * np.dtype(dtype).itemsize), dtype)

    def text(self) -> str:
        """Read a text: its length in bytes, then UTF-8."""
        (length,) = struct.unpack("<Q", self.take(8))
        return self.take(length).decode()

    def value(self, kind: int) -> Any:
        """Read a metadata value of the type `kind`: a number, a text, or an array of either."""
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.number(self._scalar(kind))
        kind, count = self.number("<u4"), self.number("<u8")
        if kind != _TEXT:
            return self.array(self._scalar(kind), count)
        return [self.text() for _ in range(count)]

    def tensor(self) -> tuple[TensorInfo, int]:
        """Read a tensor's entry; return it and the offset of its bytes."""
        name, axes = self.text(), self.number("<u4")
        if not 1 <= axes <= _MOST_AXES:
            raise ValueError(f"{name} has {axes} axes")
        shape = tuple(reversed(self.array("<u8", axes).tolist()))
        kind = self.number("<u4")
        try:
            dtype, per_block, nbytes = _type(kind)
        except (ValueError, KeyError, NotImplementedError):
            raise ValueError(f"{name} has type {kind}, which cannot be dequantised") from None
        if shape[-1] % per_block:
            raise ValueError(f"{name}: {dtype} has blocks of {per_block}, its rows have {shape[-1]}")
        return TensorInfo(name, shape, dtype, prod(shape) // per_block * nbytes), self.number("<u8")

    def _scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"a metadata type {kind} at byte {self.position}, which is not known here")
        return _SCALARS[kind]


def library() -> Any:
    """Import the library `gguf`. Raises UnavailableError if it is not installed."""
    try:
        import gguf
    except ImportError:
        raise UnavailableError("gguf: needed to read GGUF files; python -m pip install 'ptxlab[model]'") from None
    return gguf


@functools.cache
def _type(number: int) -> tuple[str, int, int]:
    """Name, weights per block and bytes per block of a type that can be dequantised."""
    gguf = library()
    kind = gguf.GGMLQuantizationType(number)
    per_block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    _dequantize(np.zeros(nbytes, np.uint8), kind.name)
    return kind.name, per_block, nbytes


def _dequantize(raw: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.float32]:
    gguf = library()
    values: npt.NDArray[np.float32] = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[dtype])
    return values
