"""Packed weights in safetensors files: any number of them beside ordinary tensors, each loaded alone.

Buffer `blocks` of weight `layers.0.up.weight` is the tensor `layers.0.up.weight.blocks`. The metadata key `ptxlab`
holds, as JSON, the format's name and version and for every packed weight its layout, arch, scheme, N, K, group and
protective range, and `interleaved` where it is. Weights of W4A4 and W4Ax have formats of their own: Atom's (layout,
arch, N, K, outliers, group), COMET's (layout, arch, N, K4, K8), and those of whole layers, with the order of their
input (scheme, INT8 blocks and clip as well). A file has weights of one format.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, TypeVar

import numpy as np

from ptxlab.errors import ArgumentError, FileError, in_file, naming
from ptxlab.lowbit.layout.atom_operands import ATOM_LAYOUTS, AtomWeight, atom_shapes
from ptxlab.lowbit.layout.atom_operands import VERSION as ATOM_VERSION
from ptxlab.lowbit.layout.checkpoint import Checkpoint, TensorInfo, write_checkpoint
from ptxlab.lowbit.layout.comet_operands import BlockWeight, block_shapes
from ptxlab.lowbit.layout.packed_weight import VERSION, PackedWeight, buffer_shapes, require_no_overflow, unpack
from ptxlab.lowbit.layout.packings import PACKINGS, Buffers, Shapes
from ptxlab.lowbit.layout.reordered import READ as REORDERED_READ
from ptxlab.lowbit.layout.reordered import VERSION as REORDERED_VERSION
from ptxlab.lowbit.layout.reordered import ReorderedWeight, renew_buffers, reordered_shapes
from ptxlab.validate import is_one_of

METADATA_KEY = "ptxlab"
_DTYPES = {"int8": "I8", "int16": "I16", "uint8": "U8", "uint32": "U32", "float16": "F16", "float32": "F32"}

_Packed = PackedWeight | AtomWeight | BlockWeight | ReorderedWeight
AnyWeight = TypeVar("AnyWeight", PackedWeight, AtomWeight, BlockWeight, ReorderedWeight)


@dataclass(frozen=True)
class _Format(Generic[AnyWeight]):
    """File format of a class of weights, besides its buffers: `fields` maps the header's fields to their types.

    Files of the versions `older` are read too. `shapes` finds the file's version under the key `version`. `renew`
    converts buffers of an older version to this one, by header fields.
    """

    name: str
    version: int
    weight: type[AnyWeight]
    fields: Mapping[str, type]
    arch: Callable[[str], str]  # of a layout
    shapes: Callable[[Mapping[str, Any]], Shapes]  # of the buffers, by header fields
    flags: tuple[str, ...] = ()  # said where they are true
    older: tuple[int, ...] = ()
    renew: Callable[[Buffers, Mapping[str, Any]], Buffers] = lambda buffers, fields: buffers

    def header(self, packed: AnyWeight) -> dict[str, Any]:
        """Return the header fields of a weight."""
        header = {key: kind(getattr(packed, key)) for key, kind in self.fields.items()}
        return header | {flag: True for flag in self.flags if getattr(packed, flag)}

    def announce(self, name: str, fields: Mapping[str, Any]) -> list[TensorInfo]:
        """List the tensors that a weight of that name will be in a file."""
        return [
            TensorInfo(f"{name}.{buffer}", shape, _DTYPES[dtype], prod(shape) * np.dtype(dtype).itemsize)
            for buffer, (dtype, shape) in self.shapes({"version": self.version, **fields}).items()
        ]

    def metadata(self, weights: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """Build a file's metadata for weights: name -> header fields."""
        return {METADATA_KEY: json.dumps({"format": self.name, "version": self.version, "weights": weights})}


_PACKED = _Format(
    "ptxlab.packed_weight",
    VERSION,
    PackedWeight,
    {"layout": str, "arch": str, "scheme": str, "N": int, "K": int, "group": int, "protective_range": int},
    lambda layout: PACKINGS[layout].arch,
    lambda fields: buffer_shapes(*(fields[key] for key in ("layout", "scheme", "N", "K", "group"))),
    ("interleaved",),
)
_ATOM = _Format(
    "ptxlab.atom_weight",
    ATOM_VERSION,
    AtomWeight,
    {"layout": str, "arch": str, "N": int, "K": int, "outliers": int, "group": int},
    lambda layout: ATOM_LAYOUTS[layout],
    lambda fields: atom_shapes(*(fields[key] for key in ("layout", "N", "K", "outliers", "group"))),
)
_BLOCKS = _Format(
    "ptxlab.block_weight",
    ATOM_VERSION,
    BlockWeight,
    {"layout": str, "arch": str, "N": int, "K4": int, "K8": int},
    lambda layout: ATOM_LAYOUTS[layout],
    lambda fields: block_shapes(*(fields[key] for key in ("layout", "N", "K4", "K8"))),
)
_REORDERED_SIZES = ("scheme", "layout", "N", "K", "outliers", "group", "int8")
_REORDERED = _Format(
    "ptxlab.reordered_weight",
    REORDERED_VERSION,
    ReorderedWeight,
    {"scheme": str, "layout": str, "arch": str, "N": int, "K": int, "outliers": int, "group": int, "int8": int,
     "clip": float},
    lambda layout: ATOM_LAYOUTS[layout],
    lambda fields: reordered_shapes(*(fields[key] for key in _REORDERED_SIZES), version=fields["version"]),
    older=REORDERED_READ[:-1],
    renew=lambda buffers, fields: renew_buffers(buffers, *(fields[key] for key in _REORDERED_SIZES)),
)  # fmt: skip
_FORMATS: tuple[_Format[Any], ...] = (_PACKED, _ATOM, _BLOCKS, _REORDERED)


def save(packed: _Packed, path: str | os.PathLike[str], name: str = "weight") -> None:
    """Write a packed weight as a safetensors file, whole or not at all.

    Raises FileError if it cannot be written, ArgumentError for anything that is no packed weight of one matrix.
    """
    if not isinstance(packed, _Packed):
        kinds = ", ".join(form.weight.__name__ for form in _FORMATS)
        raise ArgumentError("packed", f"must be one of {kinds}", type(packed).__name__)
    write_checkpoint(path, *collect_file_contents({name: packed}))


def collect_file_contents(
    weights: Mapping[str, _Packed],
) -> tuple[list[TensorInfo], list[tuple[str, Any]], dict[str, str]]:
    """Collect the contents of a file of weights, all of one class: its tensors, their arrays, its metadata."""
    form = next(form for form in _FORMATS if isinstance(next(iter(weights.values())), form.weight))
    fields = {name: form.header(weight) for name, weight in weights.items()}
    announced = [tensor for name, header in fields.items() for tensor in form.announce(name, header)]
    return (
        announced,
        [pair for name, weight in weights.items() for pair in contents(name, weight)],
        form.metadata(fields),
    )


def load(path: str | os.PathLike[str], name: str | None = None, *, unchecked: bool = False) -> PackedWeight:
    """Load the packed weight `name` of a file, in NumPy arrays; without a name, the only weight of the file.

    A weight with a group that the kernels would restore wrong is refused as by `pack`, unless `unchecked`.

    Raises FileError for a file that is missing, truncated, foreign, of another version, whose header and buffers do not
    fit together, or with such a group; ArgumentError for a name that the file has not got, with some that it has.
    """
    packed_weight, name = _load(_PACKED, path, name)
    if not unchecked:
        with in_file(path):
            require_no_overflow(name, unpack(packed_weight))
    return packed_weight


def load_atom(path: str | os.PathLike[str], name: str | None = None) -> AtomWeight:
    """Load Atom's packed weight `name` of a file; errors are those of `load`."""
    return _load(_ATOM, path, name)[0]


def load_blocks(path: str | os.PathLike[str], name: str | None = None) -> BlockWeight:
    """Load COMET's packed weight `name` of a file; errors are those of `load`."""
    return _load(_BLOCKS, path, name)[0]


def load_reordered(path: str | os.PathLike[str], name: str | None = None) -> ReorderedWeight:
    """Load the weight `name` of a layer in W4A4 from a file; errors are those of `load`."""
    return _load(_REORDERED, path, name)[0]


def holds_reordered(checkpoint: Checkpoint) -> bool:
    """Tell if the file's metadata says that it has weights of layers in W4A4."""
    return _REORDERED.name in checkpoint.metadata.get(METADATA_KEY, "")


def packed_names(path: str | os.PathLike[str]) -> list[str]:
    """List the names of the packed weights of a file; raise FileError as `load` does."""
    return list(_weights(_PACKED, Checkpoint(path)))


def packed_headers(path: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Read the header fields of a file's packed weights, by name: of W4A8, or of whole layers in W4A4.

    Raises FileError as `load` does.
    """
    checkpoint = Checkpoint(path)
    return _weights(_REORDERED if holds_reordered(checkpoint) else _PACKED, checkpoint)


def header_fields(layout: str, scheme: str, N: int, K: int, group: int, protective_range: int) -> dict[str, Any]:
    """Build the header fields of one packed weight."""
    values = (layout, PACKINGS[layout].arch, scheme, N, K, group, protective_range)
    return dict(zip(_PACKED.fields, values, strict=True))


def announce(name: str, fields: Mapping[str, Any]) -> list[TensorInfo]:
    """List the tensors that the packed weight with these header fields will be in a file."""
    return _PACKED.announce(name, fields)


def contents(name: str, packed: _Packed) -> Iterable[tuple[str, Any]]:
    """Yield name and NumPy array of each tensor that a packed weight is in a file."""
    for buffer, array in packed.buffers.items():
        yield f"{name}.{buffer}", array.get() if hasattr(array, "get") else array


def metadata(weights: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Build a file's metadata for packed weights: name -> header fields."""
    return _PACKED.metadata(weights)


def _weights(form: _Format[Any], checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Read the header fields of each weight: name -> fields of the right types, and `version`, the file's version."""
    try:
        header = json.loads(checkpoint.metadata.get(METADATA_KEY, "null"))
    except (ValueError, RecursionError):  # not JSON, an integer of thousands of digits, or nested too deeply
        header = None
    if not isinstance(header, dict) or header.get("format") != form.name:
        raise FileError(f"{checkpoint.path}: holds no packed weights (its metadata says nothing of {form.name})")
    version, versions = header.get("version"), (*form.older, form.version)
    if not is_one_of(version, versions):
        rule = f"format version must be {' or '.join(map(str, versions))}"
        raise FileError(f"{checkpoint.path}: {rule} (got {version})")
    weights = header.get("weights")
    if not isinstance(weights, dict) or not all(_well_typed(form, fields) for fields in weights.values()):
        raise FileError(f"{checkpoint.path}: damaged header: each weight needs {', '.join(form.fields)}")
    return {name: {**fields, "version": version} for name, fields in weights.items()}


def _well_typed(form: _Format[Any], fields: Any) -> bool:
    return isinstance(fields, dict) and all(type(fields.get(key)) is kind for key, kind in form.fields.items())


def _load(form: _Format[AnyWeight], path: str | os.PathLike[str], name: str | None) -> tuple[AnyWeight, str]:
    """Load a weight and its name, after checking that its buffers are those that the header announces."""
    checkpoint = Checkpoint(path)
    weights = _weights(form, checkpoint)
    if name is None and len(weights) == 1:
        name = next(iter(weights))
    if name not in weights:
        first_names = ", ".join(list(weights)[:8]) + (", ..." if len(weights) > 8 else "")
        raise ArgumentError("name", f"must be one of the {len(weights)} packed weights of {path}: {first_names}", name)
    fields = weights[name]
    with in_file(checkpoint.path), naming(name):
        announced = form.announce(name, fields)
    if fields["arch"] != form.arch(fields["layout"]):
        rule = f"{fields['layout']} is for {form.arch(fields['layout'])}"
        raise FileError(f"{checkpoint.path}: {name}: {rule} (got {fields['arch']})")
    buffers: Buffers = {}
    for expected_tensor in announced:
        stored_tensor = checkpoint.tensors.get(expected_tensor.name)
        if stored_tensor != expected_tensor:
            rule = f"{expected_tensor.name} must be {expected_tensor.dtype} {list(expected_tensor.shape)}"
            got = f"{stored_tensor.dtype} {list(stored_tensor.shape)}" if stored_tensor else "no such tensor"
            raise FileError(f"{checkpoint.path}: {rule} (got {got})")
        dtype = next(dtype for dtype, spelling in _DTYPES.items() if spelling == expected_tensor.dtype)
        buffers[expected_tensor.name.removeprefix(f"{name}.")] = (
            checkpoint.read_bytes(expected_tensor.name).view(dtype).reshape(expected_tensor.shape)
        )
    with in_file(checkpoint.path), naming(name):
        if fields["version"] != form.version:
            buffers = form.renew(buffers, fields)
        weight_fields = {key: fields[key] for key in (*form.fields, *form.flags) if key != "arch" and key in fields}
        return form.weight(**weight_fields, buffers=buffers), name
