"""Drawn Hugging Face folders of safetensors or of torch.save, whole or in shards, and what they may have."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.drawn_models import Draft, DrawnModel, Plan, Twist, Verdict, build_draft
from tests.support.small_models import tokenizer

READ, EITHER, REFUSED = Verdict.READ, Verdict.EITHER, Verdict.REFUSED
_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_SAFETENSORS, _TORCH = ("safetensors", "shards"), ("torch", "torch shards")
_SHARDED = ("shards", "torch shards")


def write_folder(plan: Plan, folder: Path) -> DrawnModel:
    """Write the model of a plan as a folder, which is its own reference."""
    draft = build_draft(plan)
    dtype = str(draft.rng.choice(["float32", "float16", "bfloat16"]))
    for twist in plan.twists:
        twist.edit(draft)
    save(draft, folder, plan.kind, dtype)
    for twist in plan.twists:
        twist.damage(folder, draft.rng)
    return DrawnModel(folder, folder)


def save(draft: Draft, folder: Path, kind: str = "safetensors", dtype: str = "float32") -> None:
    """Write a draft with the tensors of float32 in another dtype."""
    import torch
    from huggingface_hub import save_torch_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: (weights.to(getattr(torch, dtype)) if weights.dtype == torch.float32 else weights).clone()
        for name, weights in draft.tensors.items()
    }
    limit = sum(weights.nbytes for weights in tensors.values()) // 3 if kind in _SHARDED else "1GB"
    safe = kind in _SAFETENSORS
    save_torch_state_dict(tensors, folder, max_shard_size=limit, safe_serialization=safe, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**draft.config, "dtype": dtype}))
    tokenizer().save(str(folder / "tokenizer.json"))


# --- config.json -----------------------------------------------------------------------------------------------------


def set_keys(**changes: Any) -> Callable[[Draft], object]:
    """Return an edit that sets keys of config.json."""
    return lambda draft: draft.config.update(changes)


def drop_keys(*names: str) -> Callable[[Draft], object]:
    """Return an edit that drops keys of config.json."""
    return lambda draft: [draft.config.pop(name, None) for name in names]


def set_rope(**changes: Any) -> Callable[[Draft], object]:
    """Return an edit that sets keys of rope_parameters."""
    return lambda draft: draft.config["rope_parameters"].update(changes)


def use_old_rope_keys(kind: str) -> Callable[[Draft], object]:
    """Return an edit that spells rope_parameters as rope_theta and rope_scaling, whose type the key `kind` names."""

    def edit(draft: Draft) -> None:
        angles = draft.config.pop("rope_parameters")
        draft.config["rope_theta"] = angles.pop("rope_theta")
        rope_type = angles.pop("rope_type")
        draft.config["rope_scaling"] = None if rope_type == "default" else {kind: rope_type, **angles}

    return edit


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
_LINEAR = {"rope_type": "linear", "factor": 4.0}


def set_longrope(draft: Draft) -> None:
    """Give each pair of a head its own factor, as Phi-3 does."""
    pairs = draft.config["head_dim"] // 2
    draft.config["rope_parameters"] = {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
        "short_factor": [1.5] * pairs, "long_factor": [4.0] * pairs,
    }  # fmt: skip


def set_layer_types(*kinds: str) -> Callable[[Draft], object]:
    """Return an edit that names the layers' attention, the kinds in turn."""

    def edit(draft: Draft) -> None:
        draft.config["layer_types"] = [kinds[i % len(kinds)] for i in range(draft.config["num_hidden_layers"])]

    return edit


_FULL, _SLIDING = "full_attention", "sliding_attention"
_WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}
_QWEN2, _LLAMA, _MISTRAL = ("qwen2",), ("llama",), ("mistral",)


def add_zero_bias_of_o(draft: Draft) -> None:
    """Name a bias of o that a model of this family does not have, all zero."""
    import torch

    name = draft.name_of_matrix().replace(".weight", ".bias")
    draft.tensors.setdefault(name, torch.zeros(draft.tensors[name.replace(".bias", ".weight")].shape[0]))


CONFIG_TWISTS: dict[str, Twist] = {
    "plain": Twist(),
    "old rope keys": Twist(edit=use_old_rope_keys("rope_type")),
    "rope_scaling names a type": Twist(edit=use_old_rope_keys("type")),
    "rope_theta beside rope_parameters": Twist(edit=set_keys(rope_theta=77777.0)),
    "rope_scaling beside rope_parameters": Twist(edit=set_keys(rope_scaling=_LINEAR)),
    "rope_scaling and rope_theta beside rope_parameters": Twist(edit=set_keys(rope_scaling=_LINEAR, rope_theta=500.0)),
    "rope_scaling empty beside rope_parameters": Twist(edit=set_keys(rope_scaling={})),
    "rope_scaling null": Twist(edit=set_keys(rope_scaling=None)),
    "rope_parameters with type": Twist(edit=set_keys(rope_parameters={"type": "linear", "factor": 2.0})),
    "rope_type beside type": Twist(edit=set_rope(type="linear", factor=2.0)),
    "no rope keys": Twist(edit=drop_keys("rope_parameters")),
    "partial_rotary_factor 1": Twist(edit=set_keys(partial_rotary_factor=1.0)),
    "partial_rotary_factor 0.5": Twist(EITHER, edit=set_keys(partial_rotary_factor=0.5)),
    "partial_rotary_factor 0.5 in rope_parameters": Twist(EITHER, edit=set_rope(partial_rotary_factor=0.5)),
    "llama3 without original length": Twist(edit=set_keys(rope_parameters=_LLAMA3)),
    "llama3 with original length outside": Twist(
        edit=set_keys(rope_parameters=_LLAMA3, original_max_position_embeddings=16)
    ),
    "yarn": Twist(EITHER, edit=set_keys(rope_parameters=_YARN)),
    "old yarn": Twist(
        EITHER, edit=lambda draft: (set_keys(rope_parameters=dict(_YARN))(draft), use_old_rope_keys("type")(draft))
    ),
    "dynamic": Twist(EITHER, edit=set_rope(rope_type="dynamic", factor=2.0)),
    "longrope": Twist(EITHER, edit=set_longrope),
    "rope by layer type": Twist(
        REFUSED, edit=set_keys(rope_parameters={_FULL: _LINEAR, _SLIDING: {"rope_type": "default"}}), families=_QWEN2
    ),
    "rope_type unknown": Twist(REFUSED, edit=set_rope(rope_type="spiral")),
    "rope_type a list": Twist(REFUSED, edit=set_rope(rope_type=["linear"], factor=2.0)),
    "rope_parameters a list": Twist(REFUSED, edit=set_keys(rope_parameters=[1, 2])),
    "linear without factor": Twist(REFUSED, edit=set_keys(rope_parameters={"rope_type": "linear"})),
    "rope factor a text": Twist(REFUSED, edit=set_rope(rope_type="linear", factor="2")),
    "rope_theta a text": Twist(REFUSED, edit=set_rope(rope_theta="10000")),
    "sliding_window on Llama": Twist(edit=set_keys(sliding_window=5), families=_LLAMA),
    "layer_types all full on Llama": Twist(edit=set_layer_types(_FULL), families=_LLAMA),
    "layer_types sliding on Llama": Twist(REFUSED, edit=set_layer_types(_SLIDING), families=_LLAMA),
    "Mistral without sliding_window": Twist(
        settings={"sliding_window": 4096}, edit=drop_keys("sliding_window"), families=_MISTRAL
    ),
    "Mistral with sliding_window": Twist(settings={"sliding_window": 3}, families=_MISTRAL),
    "use_sliding_window false on Mistral": Twist(edit=set_keys(use_sliding_window=False), families=_MISTRAL),
    "layer_types on Mistral": Twist(
        EITHER, settings={"sliding_window": 3}, edit=set_layer_types(_FULL, _SLIDING), families=_MISTRAL
    ),
    "window in all layers": Twist(settings=_WINDOWED, families=_QWEN2),
    "window from layer 1": Twist(settings={**_WINDOWED, "max_window_layers": 1}, families=_QWEN2),
    "window in no layer": Twist(settings={**_WINDOWED, "max_window_layers": 28}, families=_QWEN2),
    "window unused": Twist(settings={**_WINDOWED, "use_sliding_window": False}, families=_QWEN2),
    "max_window_layers without layer_types": Twist(
        settings={**_WINDOWED, "max_window_layers": 1}, edit=drop_keys("layer_types"), families=_QWEN2
    ),
    "layer_types alternate": Twist(settings=_WINDOWED, edit=set_layer_types(_SLIDING, _FULL), families=_QWEN2),
    "layer_types all full": Twist(settings=_WINDOWED, edit=set_layer_types(_FULL), families=_QWEN2),
    "layer_types against an unused window": Twist(
        REFUSED, settings={"use_sliding_window": False}, edit=set_layer_types(_SLIDING), families=_QWEN2
    ),
    "layer_types unknown": Twist(
        REFUSED, settings=_WINDOWED, edit=set_layer_types("spiral_attention"), families=_QWEN2
    ),
    "layer_types too short": Twist(
        REFUSED, settings={**_WINDOWED, "num_hidden_layers": 3}, edit=set_keys(layer_types=[_SLIDING]), families=_QWEN2
    ),
    "layer_types a text": Twist(REFUSED, settings=_WINDOWED, edit=set_keys(layer_types=_FULL), families=_QWEN2),
    "sliding_window a text": Twist(REFUSED, edit=set_keys(sliding_window="5"), families=_MISTRAL),
    "sliding_window 0": Twist(EITHER, edit=set_keys(sliding_window=0), families=_MISTRAL),
    "kv heads null": Twist(
        settings={"num_key_value_heads": 2, "num_attention_heads": 2}, edit=set_keys(num_key_value_heads=None),
        families=("llama", "qwen2"),
    ),
    "kv heads absent": Twist(
        settings={"num_key_value_heads": 2, "num_attention_heads": 2},
        edit=drop_keys("num_key_value_heads"),
        families=_LLAMA,
    ),
    "kv heads absent where 8 or 32 are meant": Twist(
        REFUSED,
        settings={"num_key_value_heads": 2, "num_attention_heads": 2},
        edit=drop_keys("num_key_value_heads"),
        families=("mistral", "qwen2"),
    ),
    "head_dim absent where it differs": Twist(
        REFUSED,
        settings={"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
        edit=drop_keys("head_dim"),
    ),
    "head_dim absent": Twist(
        settings={"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        edit=drop_keys("head_dim"),
    ),
    "head_dim null": Twist(
        settings={"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        edit=set_keys(head_dim=None),
        families=("llama", "mistral"),
    ),
    "keys with defaults absent": Twist(
        settings={"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False},
        edit=drop_keys("rms_norm_eps", "hidden_act", "tie_word_embeddings", "max_position_embeddings", "rope_scaling"),
    ),
    "swish": Twist(settings={"hidden_act": "swish"}),
    "gelu": Twist(EITHER, settings={"hidden_act": "gelu"}),
    "relu": Twist(EITHER, settings={"hidden_act": "relu"}),
    "gelu_pytorch_tanh": Twist(settings={"hidden_act": "gelu_pytorch_tanh"}),
    "gelu_new": Twist(settings={"hidden_act": "gelu_new"}),
    "activation unknown": Twist(REFUSED, edit=set_keys(hidden_act="spiral")),
    "attention_bias": Twist(EITHER, settings={"attention_bias": True}, families=_LLAMA),
    "mlp_bias": Twist(EITHER, settings={"mlp_bias": True}, families=_LLAMA),
    "attention_bias key of another family": Twist(
        EITHER, edit=set_keys(attention_bias=True), families=("mistral", "qwen2")
    ),
    "context below the text": Twist(edit=set_keys(max_position_embeddings=8)),
    "architectures of another family": Twist(edit=set_keys(architectures=["GPT2LMHeadModel"])),
    "model_type unknown": Twist(REFUSED, edit=set_keys(model_type="spiral")),
    "model_type absent": Twist(REFUSED, edit=drop_keys("model_type")),
    "model_type gemma": Twist(EITHER, edit=set_keys(model_type="gemma")),
    "vocab_size absent": Twist(REFUSED, edit=drop_keys("vocab_size")),
    "vocab_size too small": Twist(REFUSED, edit=set_keys(vocab_size=290)),
    "vocab_size too large": Twist(REFUSED, edit=set_keys(vocab_size=310)),
    "torch_dtype": Twist(edit=set_keys(torch_dtype="bfloat16")),
    "fewer layers than the file": Twist(
        EITHER, settings={"num_hidden_layers": 3}, edit=set_keys(num_hidden_layers=2, layer_types=None)
    ),
    "more layers than the file": Twist(REFUSED, edit=set_keys(num_hidden_layers=4, layer_types=None)),
    "10^9 layers": Twist(REFUSED, edit=set_keys(num_hidden_layers=10**9, layer_types=None)),
    "hidden_size 10^12": Twist(REFUSED, edit=set_keys(hidden_size=10**12)),
    "hidden_size a text": Twist(REFUSED, edit=set_keys(hidden_size="64")),
    "hidden_size true": Twist(REFUSED, edit=set_keys(hidden_size=True)),
    "hidden_size a fraction": Twist(REFUSED, edit=set_keys(hidden_size=64.5)),
    "heads 0": Twist(REFUSED, edit=set_keys(num_attention_heads=0)),
    "kv heads that do not divide": Twist(
        REFUSED, settings={"num_key_value_heads": 2, "num_attention_heads": 4}, edit=set_keys(num_key_value_heads=3)
    ),
    "eps a text": Twist(REFUSED, edit=set_keys(rms_norm_eps="1e-6")),
    "eps NaN": Twist(REFUSED, edit=set_keys(rms_norm_eps=float("nan"))),
    "tied a text": Twist(REFUSED, edit=set_keys(tie_word_embeddings="true")),
    "quant_method unknown": Twist(EITHER, edit=set_keys(quantization_config={"quant_method": "spiral", "bits": 4})),
    "quant_method bitsandbytes": Twist(
        REFUSED, edit=set_keys(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    ),
}  # fmt: skip


# --- tensors ---------------------------------------------------------------------------------------------------------


def edit_matrix(change: Callable[[Any], Any]) -> Callable[[Draft], None]:
    """Return an edit that changes one of the layers' matrices."""

    def edit(draft: Draft) -> None:
        name = draft.name_of_matrix()
        draft.tensors[name] = change(draft.tensors[name])

    return edit


def round_to_float8(matrix: Any) -> Any:
    """Round a matrix to 8 bits."""
    import torch

    return matrix.to(torch.float8_e4m3fn)


def put_number(number: float) -> Callable[[Draft], None]:
    """Return an edit that puts a number into a matrix."""

    def edit(draft: Draft) -> None:
        matrix = draft.tensors[draft.name_of_matrix()]
        matrix[int(draft.rng.integers(len(matrix))), int(draft.rng.integers(matrix.shape[1]))] = number

    return edit


def add_tensor(name: str, *shape: int) -> Callable[[Draft], None]:
    """Return an edit that adds a tensor of random numbers."""

    def edit(draft: Draft) -> None:
        import torch

        draft.tensors[name] = torch.from_numpy(draft.rng.standard_normal(shape).astype(np.float32))

    return edit


def add_other_head(draft: Draft) -> None:
    """Add a head that differs from the embedding."""
    draft.tensors[_HEAD] = draft.tensors[_EMBEDDING].flip(0) / 4


def drop_prefix(draft: Draft) -> None:
    """Name tensors as a model that was saved without its head does."""
    draft.tensors = {name.removeprefix("model."): weights for name, weights in draft.tensors.items()}


TENSOR_TWISTS: dict[str, Twist] = {
    "another head beside tied": Twist(settings={"tie_word_embeddings": True}, edit=add_other_head),
    "the same head beside tied": Twist(
        settings={"tie_word_embeddings": True},
        edit=lambda draft: draft.tensors.update({_HEAD: draft.tensors[_EMBEDDING].clone()}),
    ),
    "untied without head": Twist(
        REFUSED, settings={"tie_word_embeddings": False}, edit=lambda draft: draft.tensors.pop(_HEAD)
    ),
    "tied with the head only": Twist(
        EITHER,
        settings={"tie_word_embeddings": True},
        edit=lambda draft: draft.tensors.update({_HEAD: draft.tensors.pop(_EMBEDDING)}),
    ),
    "matrix missing": Twist(REFUSED, edit=lambda draft: draft.tensors.pop(draft.name_of_matrix())),
    "norm missing": Twist(REFUSED, edit=lambda draft: draft.tensors.pop(_NORM)),
    "bias missing": Twist(
        REFUSED, edit=lambda draft: draft.tensors.pop("model.layers.0.self_attn.k_proj.bias"), families=_QWEN2
    ),
    "row missing": Twist(REFUSED, edit=edit_matrix(lambda matrix: matrix[1:])),
    "matrix flat": Twist(REFUSED, edit=edit_matrix(lambda matrix: matrix.flatten())),
    "matrix of a layer too many": Twist(EITHER, edit=add_tensor("model.layers.9.self_attn.q_proj.weight", 32, 32)),
    "unknown tensor": Twist(EITHER, edit=add_tensor("model.layers.0.self_attn.q_norm.weight", 32)),
    "zero bias": Twist(EITHER, edit=add_zero_bias_of_o),
    "rotary_emb.inv_freq": Twist(edit=add_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", 8)),
    "NaN": Twist(REFUSED, edit=put_number(float("nan"))),
    "infinity": Twist(REFUSED, edit=put_number(float("inf"))),
    "float64": Twist(edit=edit_matrix(lambda matrix: matrix.double())),
    "float8": Twist(EITHER, edit=edit_matrix(round_to_float8)),
    "int8": Twist(EITHER, edit=edit_matrix(lambda matrix: (4 * matrix).char())),
    "names without model.": Twist(EITHER, settings={"tie_word_embeddings": True}, edit=drop_prefix),
}


# --- files -----------------------------------------------------------------------------------------------------------


def weights_in(folder: Path) -> list[Path]:
    """List the files of weights."""
    return sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])


def cut_off(folder: Path, rng: np.random.Generator) -> None:
    """Cut a file of weights off."""
    path = weights_in(folder)[int(rng.integers(len(weights_in(folder))))]
    content = path.read_bytes()
    path.write_bytes(content[: int(rng.integers(len(content)))])


def remove_shard(folder: Path, rng: np.random.Generator) -> None:
    """Remove the second shard."""
    weights_in(folder)[1].unlink()


def remove_weights(folder: Path, rng: np.random.Generator) -> None:
    """Remove every file of weights."""
    for path in weights_in(folder):
        path.unlink()


def overwrite_start(folder: Path, rng: np.random.Generator) -> None:
    """Overwrite the start of a file of weights."""
    path = weights_in(folder)[0]
    path.write_bytes(rng.bytes(64) + path.read_bytes()[64:])


def put_weights_beside(name: str, torch_file: bool = False) -> Callable[[Path, np.random.Generator], None]:
    """Return a damage that writes a file of other weights by the same names beside the model."""

    def damage(folder: Path, rng: np.random.Generator) -> None:
        import torch
        from safetensors.torch import load_file, save_file

        ones: dict[str, Any] = {}
        for source in weights_in(folder):
            tensors = torch.load(source, weights_only=True) if source.suffix == ".bin" else load_file(source)
            ones |= {name: torch.ones_like(weights) for name, weights in tensors.items()}
        torch.save(ones, folder / name) if torch_file else save_file(ones, folder / name, metadata={"format": "pt"})

    return damage


def edit_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path, np.random.Generator], None]:
    """Return a damage that changes the index of the shards."""

    def damage(folder: Path, rng: np.random.Generator) -> None:
        (path,) = folder.glob("*.index.json")
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))

    return damage


def put_index_beside(folder: Path, rng: np.random.Generator) -> None:
    """Put the index of other shards beside a whole file."""
    index = {"metadata": {}, "weight_map": {_NORM: "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def replace_text(name: str, content: str) -> Callable[[Path, np.random.Generator], object]:
    """Return a damage that writes other content into a file."""
    return lambda folder, rng: (folder / name).write_text(content)


def remove_file(name: str) -> Callable[[Path, np.random.Generator], None]:
    """Return a damage that removes a file."""
    return lambda folder, rng: (folder / name).unlink()


FILE_TWISTS: dict[str, Twist] = {
    "adapter_model beside": Twist(damage=put_weights_beside("adapter_model.safetensors"), kinds=_SAFETENSORS),
    "consolidated beside": Twist(damage=put_weights_beside("consolidated.safetensors"), kinds=_SAFETENSORS),
    "consolidated shards beside": Twist(damage=put_weights_beside("consolidated.00.safetensors"), kinds=_SAFETENSORS),
    "fp16 variant beside": Twist(damage=put_weights_beside("model.fp16.safetensors"), kinds=_SAFETENSORS),
    "bin beside": Twist(damage=put_weights_beside("pytorch_model.bin", torch_file=True), kinds=_SAFETENSORS),
    "optimizer beside": Twist(damage=put_weights_beside("optimizer.pt", torch_file=True)),
    "training_args beside": Twist(damage=put_weights_beside("training_args.bin", torch_file=True), kinds=_SAFETENSORS),
    "adapter_model.bin beside": Twist(damage=put_weights_beside("adapter_model.bin", torch_file=True), kinds=_TORCH),
    "stale shard beside": Twist(damage=put_weights_beside("model-00009-of-00009.safetensors"), kinds=("shards",)),
    "index beside a whole file": Twist(damage=put_index_beside, kinds=("safetensors",)),
    "whole file beside shards": Twist(damage=put_weights_beside("model.safetensors"), kinds=("shards",)),
    "shard missing": Twist(REFUSED, damage=remove_shard, kinds=_SHARDED),
    "index lacks a tensor": Twist(damage=edit_index(lambda index: index["weight_map"].pop(_NORM)), kinds=_SHARDED),
    "index names no shards": Twist(REFUSED, damage=edit_index(lambda index: index.pop("weight_map")), kinds=_SHARDED),
    "index names a wrong shard": Twist(
        REFUSED, damage=edit_index(lambda index: index["weight_map"].update({_NORM: "no.safetensors"})), kinds=_SHARDED
    ),
    "cut off": Twist(REFUSED, damage=cut_off),
    "empty": Twist(REFUSED, damage=lambda folder, rng: weights_in(folder)[0].write_bytes(b"")),
    "noise": Twist(REFUSED, damage=overwrite_start),
    "no weights": Twist(REFUSED, damage=remove_weights),
    "no config": Twist(REFUSED, damage=remove_file("config.json")),
    "config cut off": Twist(REFUSED, damage=replace_text("config.json", '{"model_type": "llama", "hid')),
    "config a list": Twist(REFUSED, damage=replace_text("config.json", "[]")),
    "config nested too deep": Twist(REFUSED, damage=replace_text("config.json", "[" * 100_000)),
    "no tokenizer": Twist(REFUSED, damage=remove_file("tokenizer.json")),
    "tokenizer is no tokenizer": Twist(REFUSED, damage=replace_text("tokenizer.json", '{"model": {"type": "?"}}')),
}
