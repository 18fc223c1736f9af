"""Tensors out of files of `torch.save`, without PyTorch and without unpickling.

Such a file is a zip: `data.pkl` says by a pickle which tensor lies where, `data/0`, `data/1`, .. are their bytes. The
pickle is read as a list of opcodes. Those that build dictionaries, tuples and numbers are followed here; names of
functions stay names, and only those of PyTorch's tensors mean something. So nothing of a file can be executed.
"""

import os
import pickletools
import struct
import zipfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from ptxlab.errors import FileError
from ptxlab.io.files import DAMAGE
from ptxlab.lowbit.layout.checkpoint import Checkpoint, CheckpointFolder, TensorFile, TensorInfo

MAX_PICKLE = 1 << 24  # bytes of data.pkl; that of a model of 8 billion weights has some 300,000
_DTYPES = {
    "HalfStorage": ("F16", 2), "BFloat16Storage": ("BF16", 2), "FloatStorage": ("F32", 4), "DoubleStorage": ("F64", 8),
    "CharStorage": ("I8", 1), "ByteStorage": ("U8", 1), "BoolStorage": ("BOOL", 1), "ShortStorage": ("I16", 2),
    "IntStorage": ("I32", 4), "LongStorage": ("I64", 8),
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_PUSHED = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"}  # their argument is the value
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()
_LONGEST = 300  # characters of what a message says of a file


class _Name(str):
    """Name of a function or class in the pickle: `torch._utils _rebuild_tensor_v2`."""


class _Storage(NamedTuple):
    """A member of the zip: its name, the dtype by safetensors' name, bytes of an element, number of elements."""

    member: str
    dtype: str
    itemsize: int
    elements: int


class _Tensor(NamedTuple):
    """A storage, the first element in it, and the shape."""

    storage: _Storage
    first: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.storage.itemsize


class TorchFile(TensorFile):
    """An open file of `torch.save`, a dictionary of tensors.

    Sizes in the file are checked against each other before anything is allocated. Raises FileError for a file that is
    missing, truncated, of another format (of PyTorch before 1.6 too) or big-endian, that holds anything but contiguous
    tensors by names, or whose bytes are compressed, which PyTorch does not do.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileError(f"{self.path}: no such file")
        self.metadata = {}
        try:
            with zipfile.ZipFile(self.path) as archive:
                self._members = {member.filename: member for member in archive.infolist()}
                tensors = self._read_tensors(archive)
        except OSError as error:
            raise FileError(f"{self.path}: cannot be read: {error.strerror or error}") from None
        except DAMAGE as error:
            raise FileError(f"{self.path}: not a readable file of torch.save ({error})") from None
        for name, tensor in tensors.items():
            self._check(name, tensor)
        self._tensors = tensors
        self.tensors = {name: TensorInfo(name, t.shape, t.storage.dtype, t.nbytes) for name, t in tensors.items()}

    def read_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """See `TensorFile.read_bytes`."""
        tensor = self._tensors[name]
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(tensor.storage.member) as file:
                file.seek(tensor.first * tensor.storage.itemsize)
                content = file.read(tensor.nbytes)
        except OSError as error:
            raise FileError(f"{self.path}: cannot be read: {error.strerror or error}") from None
        except DAMAGE as error:
            raise FileError(f"{self.path}: {name}: {error}") from None
        if len(content) != tensor.nbytes:
            raise FileError(f"{self.path}: {name}: {tensor.nbytes} bytes expected (got {len(content)})")
        return np.frombuffer(content, np.uint8).copy()

    def _read_tensors(self, archive: zipfile.ZipFile) -> dict[str, _Tensor]:
        """Return the tensors that the pickle lists. Raises FileError for any other value."""
        pickles = [name for name in self._members if name.split("/")[1:] == ["data.pkl"]]
        if len(pickles) != 1:
            self._refuse(f"one data.pkl expected (got {len(pickles)})")
        folder = pickles[0].split("/")[0]
        file_bytes = self.path.stat().st_size
        for member in self._members.values():
            if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
                self._refuse(f"{member.filename}: must be stored, not compressed")
            if member.header_offset + member.file_size > file_bytes:
                self._refuse(f"{member.filename}: {member.file_size} bytes must lie within the file's {file_bytes}")
        if self._members[pickles[0]].file_size > MAX_PICKLE:
            self._refuse(f"data.pkl: at most {MAX_PICKLE} bytes (got {self._members[pickles[0]].file_size})")
        if f"{folder}/byteorder" in self._members and archive.read(f"{folder}/byteorder") != b"little":
            self._refuse("byteorder must be little")
        tensors = _Program(folder, self._refuse).run(archive.read(pickles[0]))
        if not isinstance(tensors, dict):
            self._refuse(f"a dictionary of tensors expected (got {type(tensors).__name__})")
        for name, tensor in tensors.items():
            if not isinstance(tensor, _Tensor):
                description = str(tensor) if isinstance(tensor, _Name) else type(tensor).__name__
                self._refuse(f"{name}: must be a tensor (got {description})")
        return tensors

    def _check(self, name: str, tensor: _Tensor) -> None:
        """Refuse a tensor that does not lie within its storage, or a storage that the zip does not hold."""
        (member, _, itemsize, count), first_element, shape = tensor
        zip_info = self._members.get(member)
        if zip_info is None or zip_info.file_size != count * itemsize:
            actual_size = "no such member" if zip_info is None else f"{zip_info.file_size} bytes"
            self._refuse(f"{name}: {member} must hold {count * itemsize} bytes (got {actual_size})")
        if first_element + prod(shape) > count:
            self._refuse(f"{name}: {[*shape]} from element {first_element} on must lie within {count} elements")

    def _refuse(self, problem: str) -> NoReturn:
        raise FileError(f"{self.path}: {' '.join(problem.split())[:_LONGEST]}")


class _Program:
    """A pickle's opcodes over a stack of plain values, `_Name`s, storages and tensors."""

    def __init__(self, folder: str, refuse: Callable[[str], NoReturn]) -> None:
        self.folder, self.refuse = folder, refuse
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, pickle: bytes) -> Any:
        """Run the pickle's program and return the value that it leaves.

        Raises what `DAMAGE` has for one that is broken, FileError for anything else.
        """
        try:
            for opcode, argument, _ in pickletools.genops(pickle):
                if opcode.name == "STOP":
                    return self.stack.pop()
                self.step(opcode.name, argument)
        except (IndexError, struct.error) as error:
            raise ValueError(str(error)) from None
        raise ValueError("the pickle has no end")

    def step(self, opcode: str, argument: Any) -> None:
        """Execute one opcode. Known opcodes are those that `torch.save` writes."""
        push, pop = self.stack.append, self.stack.pop
        match opcode:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                push(_MARK)
            case "EMPTY_DICT":
                push({})
            case "EMPTY_LIST":
                push([])
            case "TUPLE":
                push(tuple(self.to_mark()))
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = self.stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.stack[-1]
            case "BINGET" | "LONG_BINGET":
                push(self.memo[argument])
            case "GLOBAL":
                push(_Name(argument))
            case "STACK_GLOBAL":
                name, module = pop(), pop()
                push(_Name(f"{text(module)} {text(name)}"))
            case "BINPERSID":
                push(self.storage(pop()))
            case "REDUCE":
                arguments, name = pop(), pop()
                push(self.call(name, arguments))
            case "BUILD":  # of attributes: an OrderedDict's _metadata
                pop()
            case "SETITEM":
                element, key = pop(), pop()
                self.set_items([key, element])
            case "SETITEMS":
                self.set_items(self.to_mark())
            case _ if opcode in _CONSTANTS:
                push(_CONSTANTS[opcode])
            case _ if opcode in _PUSHED:
                push(argument)
            case _ if opcode in _TUPLES:
                count = _TUPLES[opcode]
                push(tuple([pop() for _ in range(count)][::-1]))
            case _:
                self.refuse(f"pickle opcode {opcode}, which no dictionary of tensors needs; nothing was executed")

    def to_mark(self) -> list[Any]:
        """Pop the values above the last mark and return them in order."""
        elements = []
        while (element := self.stack.pop()) is not _MARK:
            elements.append(element)
        return elements[::-1]

    def set_items(self, keys_and_values: list[Any]) -> None:
        """Put keys and values, which alternate in `keys_and_values`, into the dictionary on top of the stack."""
        target = self.stack[-1]
        if not isinstance(target, dict) or len(keys_and_values) % 2:
            raise ValueError("items for no dictionary")
        for key, element in zip(keys_and_values[::2], keys_and_values[1::2], strict=True):
            target[text(key)] = element

    def storage(self, persistent_id: Any) -> _Storage:
        """Build a storage from the persistent id ('storage', type, key, device, elements)."""
        _, kind, key, _, count = persistent_id
        dtype = _DTYPES.get(kind.removeprefix("torch ")) if isinstance(kind, _Name) else None
        if dtype is None:
            got = kind if isinstance(kind, str) else type(kind).__name__
            self.refuse(f"a storage of {', '.join(_DTYPES)} expected (got {got})")
        return _Storage(f"{self.folder}/data/{text(key)}", *dtype, size(count))

    def call(self, name: Any, arguments: Any) -> Any:
        """Evaluate a call of PyTorch's functions that rebuild tensors. No code of the file is executed."""
        if not isinstance(name, _Name) or not isinstance(arguments, tuple):
            raise ValueError("a call of no function")
        match name:
            case "collections OrderedDict" if not arguments:
                return {}
            case "torch._utils _rebuild_tensor_v2":
                return self.tensor(*arguments[:4])
            case "torch._utils _rebuild_parameter" if arguments and isinstance(arguments[0], _Tensor):
                return arguments[0]
        self.refuse(f"holds {name.replace(' ', '.')[:80]}, not only tensors; nothing was executed")

    def tensor(self, storage: Any, first: Any, shape: Any, strides: Any) -> _Tensor:
        """Build a tensor from a storage; its elements must be contiguous."""
        if not isinstance(storage, _Storage):
            raise ValueError("a tensor of no storage")
        sizes, step = tuple(map(size, shape)), 1
        for length, stride in zip(reversed(sizes), reversed(strides), strict=True):
            if length != 1 and stride != step and 0 not in sizes:
                self.refuse(f"a tensor {[*sizes]} must be contiguous")
            step *= length
        return _Tensor(storage, size(first), sizes)


def text(name: Any) -> str:
    """Check that a value is a string and return it.

    Raises ValueError for anything else, of which a hash or a message might never end.
    """
    if not isinstance(name, str):
        raise ValueError(f"a name expected (got {type(name).__name__})")
    return name


def size(elements: Any) -> int:
    """Check that a value is a number of elements, 0 to 2^48 - 1, and return it. Raises ValueError otherwise."""
    if type(elements) is not int or not 0 <= elements < 1 << 48:
        raise ValueError(f"a size below 2^48 expected (got {type(elements).__name__})")
    return elements


class TorchFolder(CheckpointFolder):
    """The files of `torch.save` of a folder as one.

    They are `pytorch_model.bin`; else those of the index; else all of `*model*.bin` and `*model*.pt`.
    """

    _WHOLE, _INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
    _PATTERNS = ("*model*.bin", "*model*.pt")
    _OPEN = TorchFile


def open_checkpoint(path: str | os.PathLike[str]) -> TensorFile:
    """Open a checkpoint: a file or a folder of safetensors, otherwise of `torch.save` (.pt, .pth, .bin).

    In a folder the names that transformers knows come before others.
    """
    source = Path(path)
    if source.is_dir():
        kinds = CheckpointFolder, TorchFolder
        named_kinds = [kind for kind in kinds if kind.is_named(source)]
        fitting_kinds = [kind for kind in kinds if kind.other_files(source, side_files=False)]
        return [*named_kinds, *fitting_kinds, CheckpointFolder][0](source)
    return TorchFile(source) if source.suffix in (".pt", ".pth", ".bin") else Checkpoint(source)
