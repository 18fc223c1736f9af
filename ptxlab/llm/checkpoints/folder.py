"""A quantised model as a folder: config.json, recipe.json, a safetensors file per layer and one for the two ends.

A layer's file has packed weights as `layout.save` writes them, norms and biases. Layers are written one by one, so the
model need not fit into memory.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ptxlab.errors import FileError, in_file
from ptxlab.io.files import read_json, write_text
from ptxlab.llm.model.config import Config
from ptxlab.llm.model.decoder import NORMS
from ptxlab.llm.model.quantized import FUSED, QuantizedModel
from ptxlab.llm.model.weights import LayerWeights
from ptxlab.lowbit import layout
from ptxlab.lowbit.layout.checkpoint import Checkpoint, TensorInfo, write_checkpoint
from ptxlab.lowbit.layout.storage import described, holds_reordered

RECIPE = "recipe.json"
SCHEMA = 1
_ENDS = "ends.safetensors"
_STORED = {"float16": "F16", "uint16": "BF16", "float32": "F32"}  # uint16: bits of bfloat16


def save(model: QuantizedModel, folder: Path) -> None:
    """Write a whole model into an existing folder."""
    for index, layer in enumerate(model.layers):
        save_layer(folder, index, layer)
    save_ends(
        folder, model.config, model.recipe, embedding=model.embedding, final_norm=model.final_norm, head=model.head
    )


def save_layer(folder: Path, index: int, layer: LayerWeights) -> None:
    """Write one layer, whole or not at all."""
    announced, arrays, metadata = described({name: getattr(layer, name) for name in FUSED})
    plain = {name: part for name, part in layer.parts.items() if name not in FUSED}
    write_checkpoint(layer_path(folder, index), announced + _infos(plain), arrays + _on_host(plain), metadata)


def save_ends(folder: Path, config: Config, recipe: Mapping[str, Any], **ends: Any) -> None:
    """Write what lies outside the layers: embedding, final_norm, head (or None); then config.json and recipe.json."""
    plain = {name: array for name, array in ends.items() if array is not None}
    write_checkpoint(folder / _ENDS, _infos(plain), _on_host(plain), {})
    write_text(folder / "config.json", json.dumps(config.to_json(), indent=1) + "\n")
    save_recipe(folder, recipe)


def save_recipe(folder: Path, recipe: Mapping[str, Any]) -> None:
    """Write recipe.json: the recipe (JSON values) and its digest."""
    found = {"schema": SCHEMA, "digest": digest(recipe), "recipe": dict(recipe)}
    write_text(folder / RECIPE, json.dumps(found, indent=1) + "\n")


def load(folder: Path | str) -> QuantizedModel:
    """The model of a folder, in NumPy arrays.

    Raises FileError for a file that is missing, damaged or does not fit the config, or a recipe with a wrong digest.
    """
    folder = Path(folder)
    if not (folder / RECIPE).is_file():
        raise FileError(f"{folder}: no quantised model: no {RECIPE}")
    with in_file(folder):
        config = Config.from_json(folder / "config.json")
    recipe = read_recipe(folder)
    ends = Checkpoint(folder / _ENDS)
    shapes = {"embedding": (config.vocabulary, config.hidden), "final_norm": (config.hidden,)}
    shapes |= {} if config.tied_head else {"head": (config.vocabulary, config.hidden)}
    return QuantizedModel(
        config=config,
        layers=[load_layer(folder, index, config) for index in range(config.layers)],
        recipe=recipe,
        **{name: _read(ends, name, shape) for name, shape in shapes.items()},
    )


def load_layer(folder: Path, index: int, config: Config) -> LayerWeights:
    """One layer. Raises FileError as `load` does."""
    path = layer_path(folder, index)
    file = Checkpoint(path)
    shapes = dict.fromkeys(NORMS, (config.hidden,)) | ({"qkv_bias": (config.qkv_width,)} if config.qkv_bias else {})
    parts: dict[str, Any] = {name: _read(file, name, shape) for name, shape in shapes.items()}
    with in_file(path):
        load = layout.load_reordered if holds_reordered(file) else layout.load
        parts |= {name: load(path, name) for name in FUSED}
        return LayerWeights(config=config, **parts)


def layer_path(folder: Path, index: int) -> Path:
    """The file of a layer."""
    return folder / f"layer_{index:03}.safetensors"


def read_recipe(folder: Path) -> dict[str, Any]:
    """The recipe of a folder. Raises FileError if the file is damaged or its digest is wrong."""
    path = folder / RECIPE
    try:
        found = read_json(path)
        recipe, stated, schema = dict(found["recipe"]), found["digest"], found["schema"]
    except (KeyError, TypeError, ValueError):
        raise FileError(f"{path}: must hold schema, digest and recipe") from None
    if schema != SCHEMA:
        raise FileError(f"{path}: schema must be {SCHEMA} (got {schema!r})")
    if stated != digest(recipe):
        raise FileError(f"{path}: the digest must be that of the recipe, {digest(recipe)} (got {stated!r})")
    return recipe


def digest(recipe: Mapping[str, Any]) -> str:
    """SHA-256 of a recipe; the order of its keys does not matter."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def _infos(plain: Mapping[str, Any]) -> list[TensorInfo]:
    return [TensorInfo(name, tuple(a.shape), _STORED[a.dtype.name], int(a.nbytes)) for name, a in plain.items()]


def _on_host(plain: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, array.get() if hasattr(array, "get") else array) for name, array in plain.items()]


def _read(file: Checkpoint, name: str, shape: tuple[int, ...]) -> Any:
    """A tensor as it was saved: bfloat16 as its bits."""
    info = file.tensors.get(name)
    if info is None or info.shape != shape or info.dtype not in _STORED.values():
        got = f"{info.dtype} {list(info.shape)}" if info else "no such tensor"
        raise FileError(f"{file.path}: {name} must be {list(shape)} of {', '.join(_STORED.values())} (got {got})")
    dtype = next(dtype for dtype, spelling in _STORED.items() if spelling == info.dtype)
    return file.read_bytes(name).view(np.dtype(dtype)).reshape(shape)
