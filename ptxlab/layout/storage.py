"""Packed weights in safetensors files: any number of them beside ordinary tensors, each loaded alone.

Buffer `blocks` of weight `layers.0.up.weight` is the tensor `layers.0.up.weight.blocks`. The metadata key `ptxlab`
holds, as JSON, the format's name and version and for every packed weight its layout, arch, scheme, N, K, group and
protective range, and `interleaved` where it is.
"""

import json
import os
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np

from ptxlab.errors import ArgumentError, FileError
from ptxlab.io.checkpoint import Checkpoint, TensorInfo, write_checkpoint
from ptxlab.layout.packed_weight import VERSION, PackedWeight, buffer_shapes
from ptxlab.layout.packings import PACKINGS, Buffers

FORMAT = "ptxlab.packed_weight"
METADATA_KEY = "ptxlab"
_DTYPES = {"uint8": "U8", "uint32": "U32", "float32": "F32"}
_FIELDS = {"layout": str, "arch": str, "scheme": str, "N": int, "K": int, "group": int, "protective_range": int}


def save(packed: PackedWeight, path: str | os.PathLike[str], name: str = "weight") -> None:
    """Write a packed weight as a safetensors file, whole or not at all. Raises FileError if it cannot be written."""
    fields = header_fields(packed.layout, packed.scheme, packed.N, packed.K, packed.group, packed.protective_range)
    kept = {**fields, "interleaved": True} if packed.interleaved else fields
    write_checkpoint(path, announce(name, fields), contents(name, packed), metadata({name: kept}))


def load(path: str | os.PathLike[str], name: str | None = None) -> PackedWeight:
    """The packed weight `name` of a file, in NumPy arrays; without a name, the only one there is.

    Raises FileError for a file that is missing, truncated, foreign, of another version, or whose header and buffers do
    not fit together; ArgumentError for a name that the file has not got, with some that it has.
    """
    checkpoint = Checkpoint(path)
    weights = _weights(checkpoint)
    if name is None and len(weights) == 1:
        name = next(iter(weights))
    if name not in weights:
        some = ", ".join(list(weights)[:8]) + (", ..." if len(weights) > 8 else "")
        raise ArgumentError("name", f"must be one of the {len(weights)} packed weights of {path}: {some}", name)
    return _load(checkpoint, name, weights[name])


def packed_names(path: str | os.PathLike[str]) -> list[str]:
    """Names of the packed weights of a file. Raises FileError as `load` does."""
    return list(_weights(Checkpoint(path)))


def header_fields(layout: str, scheme: str, N: int, K: int, group: int, protective_range: int) -> dict[str, Any]:
    """What the header says of one packed weight."""
    values = (layout, PACKINGS[layout].arch, scheme, N, K, group, protective_range)
    return dict(zip(_FIELDS, values, strict=True))


def announce(name: str, fields: Mapping[str, Any]) -> list[TensorInfo]:
    """The tensors that the packed weight with these header fields will be in a file."""
    shapes = buffer_shapes(*(fields[key] for key in ("layout", "scheme", "N", "K", "group")))
    return [
        TensorInfo(f"{name}.{buffer}", shape, _DTYPES[dtype], prod(shape) * np.dtype(dtype).itemsize)
        for buffer, (dtype, shape) in shapes.items()
    ]


def contents(name: str, packed: PackedWeight) -> Iterable[tuple[str, Any]]:
    """Those tensors as NumPy arrays."""
    for buffer, array in packed.buffers.items():
        yield f"{name}.{buffer}", array.get() if hasattr(array, "get") else array


def metadata(weights: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The file's metadata for packed weights: name -> header fields."""
    return {METADATA_KEY: json.dumps({"format": FORMAT, "version": VERSION, "weights": weights})}


def _weights(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """Name -> header fields, of fields that have the right types."""
    try:
        header = json.loads(checkpoint.metadata.get(METADATA_KEY, "null"))
    except (ValueError, RecursionError):  # not JSON, an integer of thousands of digits, or nested too deeply
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise FileError(f"{checkpoint.path}: holds no packed weights (its metadata says nothing of {FORMAT})")
    if header.get("version") != VERSION:
        raise FileError(f"{checkpoint.path}: format version must be {VERSION} (got {header.get('version')})")
    weights = header.get("weights")
    if not isinstance(weights, dict) or not all(_well_typed(fields) for fields in weights.values()):
        raise FileError(f"{checkpoint.path}: damaged header: each weight needs {', '.join(_FIELDS)}")
    return weights


def _well_typed(fields: Any) -> bool:
    return isinstance(fields, dict) and all(type(fields.get(key)) is kind for key, kind in _FIELDS.items())


def _load(checkpoint: Checkpoint, name: str, fields: dict[str, Any]) -> PackedWeight:
    try:
        announced = announce(name, fields)
    except ArgumentError as error:
        raise FileError(f"{checkpoint.path}: {name}: {error}") from None
    if fields["arch"] != PACKINGS[fields["layout"]].arch:
        rule = f"{fields['layout']} is for {PACKINGS[fields['layout']].arch}"
        raise FileError(f"{checkpoint.path}: {name}: {rule} (got {fields['arch']})")
    buffers: Buffers = {}
    for expected in announced:
        found = checkpoint.tensors.get(expected.name)
        if found != expected:
            rule = f"{expected.name} must be {expected.dtype} {list(expected.shape)}"
            got = f"{found.dtype} {list(found.shape)}" if found else "no such tensor"
            raise FileError(f"{checkpoint.path}: {rule} (got {got})")
        dtype = next(dtype for dtype, spelling in _DTYPES.items() if spelling == expected.dtype)
        buffers[expected.name.removeprefix(f"{name}.")] = (
            checkpoint.read_bytes(expected.name).view(dtype).reshape(expected.shape)
        )
    try:
        known = {key: fields[key] for key in (*_FIELDS, "interleaved") if key != "arch" and key in fields}
        return PackedWeight(**known, buffers=buffers)
    except ArgumentError as error:
        raise FileError(f"{checkpoint.path}: {name}: {error}") from None
