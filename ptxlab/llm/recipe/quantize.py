"""Quantise a model by a recipe into a folder of packed weights, layer by layer; an interrupted run resumes."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ptxlab import __version__, gpu
from ptxlab.errors import ArgumentError, FileError, naming
from ptxlab.io.files import require_new, sole_writer
from ptxlab.llm.checkpoints import folder as folders
from ptxlab.llm.checkpoints.tokenizer import Tokenizer
from ptxlab.llm.model.decoder import Layer
from ptxlab.llm.model.floats import FloatModel, Tokens
from ptxlab.llm.model.quantized import convert_ends, dequantize_layer, pack_layer
from ptxlab.llm.model.weights import DEFAULT_CACHE, DTYPES
from ptxlab.llm.recipe import Recipe
from ptxlab.llm.recipe.calibrate import QuantizedLayer, prepare_model, quantize_layers, require_text
from ptxlab.llm.recipe.settings import PACKED
from ptxlab.lowbit.layout import buffer_shapes, pack_reordered
from ptxlab.lowbit.layout.reordered import reordered_shapes
from ptxlab.validate import is_one_of

Progress = Callable[[str], None]  # called when a layer is done, with its name
_SHOWN = 60  # characters of values in a message, fewer than a digest has


def quantize_model(
    model: FloatModel,
    tokens: Tokens,
    recipe: Recipe,
    out: Path,
    *,
    tokenizer: Tokenizer | None = None,
    layout: str = "strips",
    dtype: str = "float16",
    progress: Progress = lambda label: None,
) -> dict[int, dict[str, float | None]]:
    """Quantise a model into the folder `out`, which appears only when it is complete.

    Until then its layers lie in the hidden folder `.NAME.partial` beside it. After a crash the same call resumes there
    and gives the same bytes as an uninterrupted run.

    Args:
        model: of NumPy arrays, or of CuPy arrays (`FloatModel.to_device`), which are computed with on the GPU.
        tokens: the calibration text, [S, T].
        recipe: the steps.
        out: the folder to create.
        tokenizer: written into the folder.
        layout: of the packed weights.
        dtype: of the activations between the kernels, `float16` or `bfloat16`.
        progress: called after each layer.

    Returns:
        By the number of each layer that this call quantised, its `QuantizedLayer.errors`.

    Raises ArgumentError for a recipe that no kernel supports or that does not fit the model, and for a matrix that
    cannot be quantised or would overflow, with its layer. Raises FileError if `out` exists, if another process is
    writing it, or if the hidden folder has layers of a run that began with other settings, weights, text, tokenizer or
    versions.
    """
    scheme = check_packable(recipe, out)
    require_text(recipe, tokens)
    if not is_one_of(dtype, DTYPES):
        raise ArgumentError("dtype", f"must be one of {', '.join(DTYPES)}", dtype)
    prepared_model = prepare_model(model, recipe)
    config = prepared_model.config
    for name, (N, K) in config.matrices.items():
        with naming(name):
            if recipe.reorders:
                input_scheme = "atom" if recipe.int8 is None else "fmpq"
                reordered_shapes(input_scheme, layout, N, K, recipe.kept, recipe.group or 0, int8=0)
            else:
                buffer_shapes(layout, scheme, N, K, K if scheme == "qoq_channel" else recipe.group or 0)
    # Before the layers take their time: what float16 does not hold is refused.
    ends = convert_ends(prepared_model, dtype)
    run = {**recipe.to_json(), "layout": layout, "dtype": dtype, **_identity(model, tokens, tokenizer)}
    record = run | {name: folders.digest(run[name]) for name in ("config", "weights")}
    with sole_writer(out):
        require_new(out)  # another process may have finished it meanwhile
        partial_folder = _open_partial(out, run, record)
        errors = _write_layers(
            prepared_model, tokens, recipe, partial_folder, layout=layout, dtype=dtype, progress=progress
        )
        folders.save_ends(partial_folder, config, record, **ends)
        if tokenizer is not None:
            tokenizer.save(partial_folder)
        try:
            os.replace(partial_folder, out)
        except OSError as error:
            raise FileError(f"{out}: cannot be written: {error.strerror or error}") from None
    return errors


def _write_layers(
    model: FloatModel, tokens: Tokens, recipe: Recipe, partial: Path, *, layout: str, dtype: str, progress: Progress
) -> dict[int, dict[str, float | None]]:
    """Write the layers that `partial` lacks; returns their errors."""
    config = model.config

    def load_finished(index: int) -> Layer | None:
        if not folders.layer_path(partial, index).is_file():
            return None
        layer = folders.load_layer(partial, index, config)
        return dequantize_layer(layer.to_device() if gpu.is_device_array(model.embedding) else layer)

    errors = {}
    for index, quantized_layer in enumerate(quantize_layers(model, tokens, recipe, load_finished)):
        if quantized_layer is not None:
            with naming(f"layer {index}"):  # a group that would overflow is refused there
                cache = str(recipe.kv) if recipe.calibrates_cache else DEFAULT_CACHE
                weights = _pack_matrices(quantized_layer, recipe, layout)
                layer = pack_layer(config, quantized_layer.floats, weights, layout, dtype, cache=cache)
            folders.save_layer(partial, index, layer)
            errors[index] = quantized_layer.errors
        progress(f"layer {index}")
    return errors


def _pack_matrices(layer: QuantizedLayer, recipe: Recipe, layout: str) -> Mapping[str, Any]:
    """Return the quantised matrices; W4A4's are packed, with the orders of their inputs."""
    if not recipe.reorders:
        return layer.weights
    return {
        name: pack_reordered(weight, channels.order, layout, int8=channels.int8, clip=recipe.act_clip)
        for (name, weight), channels in zip(layer.weights.items(), layer.inputs.values(), strict=True)
    }


def check_packable(recipe: Recipe, out: Path) -> str:
    """Return the recipe's scheme. Raises as `quantize_model` does for a recipe that cannot be packed, or for `out`."""
    keeps_order = recipe.scheme == "int4" and recipe.reorders and recipe.acts == 4 and recipe.kept_bits == 8
    if recipe.scheme is None or not (recipe.scheme in PACKED or keeps_order):
        rule = f"scheme must be one of {', '.join(PACKED)} to be packed, or int4 with 4-bit activations in order"
        raise ArgumentError("recipe", f"{rule}; others are measured: ptxlab accuracy", recipe.scheme)
    require_new(out)
    return recipe.scheme


def _open_partial(out: Path, run: dict[str, Any], record: dict[str, Any]) -> Path:
    """Make the folder of unfinished layers, or find that of an interrupted run of the same settings.

    Its recipe.json says `run`, and `record` if that one was interrupted after its last layer.
    """
    partial_folder = out.with_name(f".{out.name}.partial")
    if not (partial_folder / folders.RECIPE).is_file():
        try:
            partial_folder.mkdir(exist_ok=True)
        except OSError as error:
            raise FileError(f"{partial_folder}: cannot be made: {error.strerror or error}") from None
        folders.save_recipe(partial_folder, run)
    for unfinished_file in partial_folder.glob(".*.tmp"):  # of a write that was killed
        unfinished_file.unlink()
    earlier_record = folders.read_recipe(partial_folder)
    expected_record = record if isinstance(earlier_record.get("config"), str) else run
    if earlier_record != expected_record:
        difference = _difference(earlier_record, expected_record)
        raise FileError(f"{partial_folder}: holds layers of another run, whose {difference}; remove it to begin anew")
    return partial_folder


_ABSENT = "absent"  # of a setting that one of two runs does not have


def _difference(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Say of the first setting that differs how: `config.rope_theta differs (10000.0, now 500000.0)`."""
    name = next(name for name in {**now, **earlier} if earlier.get(name, _ABSENT) != now.get(name, _ABSENT))
    old_entry, new_entry = earlier.get(name, _ABSENT), now.get(name, _ABSENT)
    if isinstance(old_entry, dict) and isinstance(new_entry, dict):
        return f"{name}.{_difference(old_entry, new_entry)}"
    values = f"{old_entry}, now {new_entry}"
    return f"{name} differs ({values})" if len(values) < _SHOWN else f"{name} differs"  # digests say nothing


def _identity(model: FloatModel, tokens: Tokens, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Describe what a run begins with, beside its settings. All weights are read, layer by layer, for digests."""
    end_arrays = {"embedding": model.embedding, "final_norm": model.final_norm, "head": model.head}
    weights = {name: _digest({name: array}) for name, array in end_arrays.items() if array is not None}
    weights |= {f"layer {index}": _digest(layer) for index, layer in enumerate(model.layers)}
    return {
        "model": model.config.name,
        "config": json.loads(json.dumps(model.config.to_json())),  # as it is read again
        "weights": weights,
        "text": _digest({"tokens": tokens}),
        "tokenizer": _tokenizer_digest(tokenizer),
        "versions": {"ptxlab": __version__, "numpy": np.__version__},
    }


def _tokenizer_digest(tokenizer: Tokenizer | None) -> str | None:
    """Digest the files that a tokenizer is saved as."""
    if tokenizer is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        contents = [path.name.encode() + path.read_bytes() for path in sorted(Path(folder).iterdir())]
    return hashlib.sha256(b"".join(contents)).hexdigest()


def _digest(arrays: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        host_array = gpu.to_host(array) if gpu.is_device_array(array) else np.asarray(array)
        digest.update(f"{name}{host_array.dtype}{host_array.shape}".encode())
        digest.update(np.ascontiguousarray(host_array).data)
    return digest.hexdigest()
