"""A quantised model as a folder: config.json, recipe.json, a safetensors file per layer and one for the two ends.

A layer's file has packed weights as `layout.save` writes them, norms, biases and the router. Layers are written one by
one, so the model need not fit into memory. Names are those of Hugging Face, with `qkv_proj` and `gate_up_proj` for the
matrices of one product, those of experts beneath `block_sparse_moe`. config.json says by `quantization_config` how the
weights are packed: vLLM's plugin takes a folder of a dense model as it is. Folders of schema 1 had names of their own
and no `quantization_config`; they are read, and `rewrite` renews them.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ptxlab.errors import FileError, in_file
from ptxlab.io.files import read_json, write_text
from ptxlab.llm.model.config import Config
from ptxlab.llm.model.decoder import NORMS, ROUTER, expert_of, expert_part
from ptxlab.llm.model.quantized import (
    CACHE_CONSTANTS,
    OF_EXPERTS,
    QuantizedModel,
    fused_parts,
    product_weight,
)
from ptxlab.llm.model.weights import DEFAULT_CACHE, LayerWeights
from ptxlab.lowbit import layout
from ptxlab.lowbit.layout import stack_experts
from ptxlab.lowbit.layout.checkpoint import Checkpoint, TensorInfo, write_checkpoint
from ptxlab.lowbit.layout.storage import collect_file_contents, holds_reordered, packed_headers
from ptxlab.lowbit.quant.kv import BY_CHANNEL, check_channel
from ptxlab.validate import is_one_of

RECIPE = "recipe.json"
SCHEMA = 2
METHOD = "ptxlab"  # of quantization_config
CONFIG_VERSION = 1  # of quantization_config
_READ = (1, 2)  # schemas
_ENDS = "ends.safetensors"
_END_NAMES = {
    "embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight",
}  # fmt: skip
_MODULES = {
    "qkv": "self_attn.qkv_proj", "o": "self_attn.o_proj", "gate_up": "mlp.gate_up_proj", "down": "mlp.down_proj",
}  # fmt: skip
_PLAIN = {
    "input_norm": "input_layernorm.weight", "post_norm": "post_attention_layernorm.weight",
    "qkv_bias": "self_attn.qkv_proj.bias", "router": "block_sparse_moe.gate.weight",
}  # fmt: skip
_EXPERTS = {"gate_up": "gate_up_proj", "down": "down_proj"}  # beneath block_sparse_moe.experts.NUMBER
_CHANNELS = {"k_channel": "keys", "v_channel": "values"}
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
    announced, arrays, metadata = collect_file_contents(
        {part_name(name, index): product_weight(layer, name) for name in fused_parts(layer.config)}
    )
    plain_arrays = {part_name(name, index): part for name, part in layer.parts.items() if name in _PLAIN}
    plain_arrays |= {
        channel_name(layer.cache, name, index): layer.parts[name] for name in CACHE_CONSTANTS if name in layer.parts
    }
    write_checkpoint(
        layer_path(folder, index), announced + _infos(plain_arrays), arrays + _on_host(plain_arrays), metadata
    )


def save_ends(folder: Path, config: Config, recipe: Mapping[str, Any], **ends: Any) -> None:
    """Write what lies outside the layers: embedding, final_norm, head (or None); then config.json and recipe.json.

    The layers are there already: config.json says how they are packed.
    """
    plain_arrays = {_END_NAMES[name]: array for name, array in ends.items() if array is not None}
    write_checkpoint(folder / _ENDS, _infos(plain_arrays), _on_host(plain_arrays), {})
    dtype = "bfloat16" if ends["final_norm"].dtype == np.uint16 else "float16"
    packing = packing_config(folder, config.layers)
    packing |= {"rotated_values": True} if recipe.get("rotate_heads") else {}
    cache = _stored_cache(Checkpoint(layer_path(folder, 0)), 0)
    packing |= {"kv_cache": cache} if cache in BY_CHANNEL else {}
    content = {**config.to_json(), "dtype": dtype, "quantization_config": packing}
    write_text(folder / "config.json", json.dumps(content, indent=1) + "\n")
    save_recipe(folder, recipe)


def packing_config(folder: Path, layers: int) -> dict[str, Any]:
    """Describe the packed weights of a folder's layers: what most matrices have, and what others have by their names.

    Keys are quant_method, version, layout, scheme and group, `interleaved` where it is true, and `exceptions`. Raises
    FileError for a layer that is missing or damaged.
    """
    fields: dict[str, dict[str, Any]] = {}
    for index in range(layers):
        for name, header in packed_headers(layer_path(folder, index)).items():
            keys = ("layout", "scheme", "group", "interleaved")
            fields[name] = {key: header[key] for key in keys if header.get(key, False) is not False}
    usual_packing = Counter(json.dumps(packing, sort_keys=True) for packing in fields.values()).most_common(1)[0][0]
    exceptions = {
        name: packing for name, packing in fields.items() if json.dumps(packing, sort_keys=True) != usual_packing
    }
    config = {"quant_method": METHOD, "version": CONFIG_VERSION, **json.loads(usual_packing)}
    return {**config, "exceptions": exceptions} if exceptions else config


def save_recipe(folder: Path, recipe: Mapping[str, Any]) -> None:
    """Write recipe.json: the recipe (JSON values) and its digest."""
    content = {"schema": SCHEMA, "digest": digest(recipe), "recipe": dict(recipe)}
    write_text(folder / RECIPE, json.dumps(content, indent=1) + "\n")


def load(folder: Path | str) -> QuantizedModel:
    """Load the quantised model of a folder into NumPy arrays.

    Raises FileError for a file that is missing, damaged or does not fit the config, or a recipe with a wrong digest.
    """
    folder = Path(folder)
    if not (folder / RECIPE).is_file():
        raise FileError(f"{folder}: no quantised model: no {RECIPE}")
    config = load_config(folder)
    recipe = read_recipe(folder)
    layers = [load_layer(folder, index, config) for index in range(config.layers)]
    with in_file(folder):
        return QuantizedModel(config=config, layers=layers, recipe=recipe, **load_ends(folder, config))


def load_config(folder: Path) -> Config:
    """Read the config of a folder. Raises FileError as `load` does."""
    with in_file(folder):
        return Config.from_json(folder / "config.json")


def load_ends(folder: Path, config: Config) -> dict[str, Any]:
    """Load embedding, final_norm and, unless it is tied, head. Raises FileError as `load` does."""
    file = Checkpoint(folder / _ENDS)
    shapes = {"embedding": (config.vocabulary, config.hidden), "final_norm": (config.hidden,)}
    shapes |= {} if config.tied_head else {"head": (config.vocabulary, config.hidden)}
    is_old = "embedding" in file.tensors
    return {name: _read(file, name if is_old else _END_NAMES[name], shape) for name, shape in shapes.items()}


def load_layer(folder: Path, index: int, config: Config) -> LayerWeights:
    """Load one layer of a folder. Raises FileError as `load` does."""
    path = layer_path(folder, index)
    file = Checkpoint(path)
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(NORMS, (config.hidden,))
    shapes |= {"qkv_bias": (config.qkv_width,)} if config.qkv_bias else {}
    shapes |= {ROUTER: (config.experts, config.hidden)} if config.experts else {}
    cache = _stored_cache(file, index)
    constants = (2, config.kv_heads, config.head_dim)
    is_old = "input_norm" in file.tensors
    fused = fused_parts(config)
    names = {name: name if is_old else part_name(name, index) for name in (*shapes, *fused)}
    parts: dict[str, Any] = {name: _read(file, names[name], shape) for name, shape in shapes.items()}
    for name in CACHE_CONSTANTS if cache in BY_CHANNEL else ():
        parts[name] = _read(file, channel_name(cache, name, index), constants)
        with in_file(path):
            check_channel(channel_name(cache, name, index), cache, tuple(parts[name]), constants[1:])
    with in_file(path):
        load = layout.load_reordered if holds_reordered(file) else layout.load
        parts |= {name: load(path, names[name]) for name in fused}
        for name in OF_EXPERTS if config.experts else ():
            parts[name] = stack_experts([parts.pop(expert_part(name, e)) for e in range(config.experts)])
        return LayerWeights(config=config, cache=cache, **parts)


def layer_path(folder: Path, index: int) -> Path:
    """Return the path of a layer's file."""
    return folder / f"layer_{index:03}.safetensors"


def part_name(part: str, index: int) -> str:
    """Return the file's name of a layer's tensor or packed weight; `part` is its attribute of `LayerWeights`.

    A weight of an expert has the name of `fused_parts`: `gate_up.3`.
    """
    expert = expert_of(part)
    if expert is None:
        return f"model.layers.{index}.{(_MODULES | _PLAIN)[part]}"
    return f"model.layers.{index}.block_sparse_moe.experts.{expert}.{_EXPERTS[part.partition('.')[0]]}"


def channel_name(scheme: str, part: str, index: int) -> str:
    """Name the tensor of constants by channel of a layer's keys or values in a scheme.

    The tensor is (scale, zero), f32 [2, Hkv, D].
    """
    return f"model.layers.{index}.self_attn.{scheme}.{_CHANNELS[part]}"


def _stored_cache(file: Checkpoint, index: int) -> str:
    """Return the scheme whose constants by channel a layer's file holds; kv4 if it holds none."""
    stored_names = (
        scheme for scheme in BY_CHANNEL for part in _CHANNELS if channel_name(scheme, part, index) in file.tensors
    )
    return next(stored_names, DEFAULT_CACHE)


def read_recipe(folder: Path) -> dict[str, Any]:
    """Read the recipe of a folder. Raises FileError if the file is damaged or its digest is wrong."""
    path = folder / RECIPE
    try:
        content = read_json(path)
        recipe, stored_digest, schema = dict(content["recipe"]), content["digest"], content["schema"]
    except (KeyError, TypeError, ValueError):
        raise FileError(f"{path}: must hold schema, digest and recipe") from None
    if not is_one_of(schema, _READ):
        raise FileError(f"{path}: schema must be {' or '.join(map(str, _READ))} (got {schema!r})")
    if stored_digest != digest(recipe):
        raise FileError(f"{path}: the digest must be that of the recipe, {digest(recipe)} (got {stored_digest!r})")
    return recipe


def digest(recipe: Mapping[str, Any]) -> str:
    """Compute the SHA-256 of a recipe; the order of its keys does not matter."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def _infos(plain: Mapping[str, Any]) -> list[TensorInfo]:
    return [TensorInfo(name, tuple(a.shape), _STORED[a.dtype.name], int(a.nbytes)) for name, a in plain.items()]


def _on_host(plain: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, array.get() if hasattr(array, "get") else array) for name, array in plain.items()]


def _read(file: Checkpoint, name: str, shape: tuple[int, ...]) -> Any:
    """Read a tensor as it was saved, bfloat16 as its bits. Raises FileError for another shape or dtype."""
    tensor = file.tensors.get(name)
    if tensor is None or tensor.shape != shape or tensor.dtype not in _STORED.values():
        got = f"{tensor.dtype} {list(tensor.shape)}" if tensor else "no such tensor"
        raise FileError(f"{file.path}: {name} must be {list(shape)} of {', '.join(_STORED.values())} (got {got})")
    dtype = next(dtype for dtype, spelling in _STORED.items() if spelling == tensor.dtype)
    return file.read_bytes(name).view(np.dtype(dtype)).reshape(shape)
