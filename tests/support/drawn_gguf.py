"""Drawn GGUF files of architecture llama or qwen2, in types of llama.cpp; their reference is a folder of the floats."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.drawn_folders import save
from tests.support.drawn_models import Draft, DrawnModel, Plan, Twist, Verdict, build_draft
from tests.support.small_models import VOCABULARY, gguf_name, rope_factors, tokenizer

READ, EITHER, REFUSED = Verdict.READ, Verdict.EITHER, Verdict.REFUSED
_WRITTEN = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")  # the library `gguf` quantises to these
# Those of which it only reads: bytes of a block, places of the scales in FP16, and a scale for weights below 1.
_DRAWN = {
    "Q2_K": (84, (80, 82), 2e-3), "Q3_K": (110, (108,), 1e-3), "Q4_K": (144, (0, 2), 2e-4),
    "Q5_K": (176, (0, 2), 1e-4), "Q6_K": (210, (208,), 4e-5), "IQ4_NL": (18, (0,), 1e-3), "IQ4_XS": (136, (0,), 5e-5),
}  # fmt: skip
_OF_ANY = ("general.", "tokenizer.")  # keys that do not begin with the name of the architecture
_OF_32 = {"hidden_size": 64, "intermediate_size": 96}
_OF_256 = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2,
           "head_dim": 32}  # fmt: skip


@dataclass
class GgufDraft:
    """The content of a GGUF file: metadata, and tensors in a type as bytes (or floats)."""

    arch: str
    metadata: dict[str, Any]
    tensors: dict[str, tuple[np.ndarray, str]]
    rng: np.random.Generator
    alignment: int | None = None


@dataclass(frozen=True)
class GgufTwist(Twist):
    """A twist of a GGUF file: `edit_file` changes it before it is written, `edit` the model before."""

    edit_file: Callable[[GgufDraft], object] = lambda file: None
    kinds: tuple[str, ...] = ("gguf",)
    families: tuple[str, ...] = ("llama", "qwen2")


def write_gguf(plan: Plan, folder: Path) -> DrawnModel:
    """Write the model of a plan as a GGUF file, and its floats as a folder."""
    assert isinstance(plan.twist, GgufTwist)
    types = np.random.default_rng([plan.seed, 2])
    narrow = types.random() < 0.6
    kinds = [str(kind) for kind in types.choice(_WRITTEN if narrow else [*_WRITTEN, *_DRAWN], 2)]
    heads = {"num_attention_heads": 4, "num_key_value_heads": int(types.choice([1, 2, 4])), "head_dim": 16}
    sizes: dict[str, Any] = {**_OF_32, **heads} if narrow else {**_OF_256}
    if plan.family == "qwen2":
        sizes["use_sliding_window"] = False
    draft = build_draft(plan, hidden_act="silu", **sizes)
    plan.twist.edit(draft)
    file = _fill(draft, kinds)
    save(draft, folder / "reference")
    plan.twist.edit_file(file)
    path = folder / "model.gguf"
    _write(file, path)
    plan.twist.damage(path, draft.rng)
    return DrawnModel(path, folder / "reference")


def _fill(draft: Draft, kinds: list[str]) -> GgufDraft:
    """Put a draft's tensors into types of GGUF, and what they stand for back into the draft."""
    import torch

    arch = "qwen2" if draft.family == "qwen2" else "llama"
    file = GgufDraft(arch, _metadata(draft.config, arch), {}, draft.rng)
    for name, weights in draft.tensors.items():
        array = weights.numpy()
        kind = str(draft.rng.choice(kinds if array.ndim == 2 else ["F32", "F16"]))
        content, floats = _quantize(array, kind, draft.rng)
        draft.tensors[name] = torch.from_numpy(floats)
        rows = name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias"))
        file.tensors[gguf_name(name)] = (_interleave(content, draft.config["head_dim"]) if rows and arch == "llama"
                                         else content, kind)  # fmt: skip
    if draft.config["rope_parameters"]["rope_type"] == "llama3":
        angles = draft.config["rope_parameters"]
        shape = {"hidden_size": draft.config["head_dim"], "num_attention_heads": 1}
        config = {**shape, "rope_scaling": angles, "rope_theta": angles["rope_theta"]}
        file.tensors["rope_freqs.weight"] = (rope_factors(config), "F32")
    return file


def _interleave(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Put the two halves of each head's rows side by side, as llama.cpp does for its architecture llama."""
    return rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _quantize(array: np.ndarray, kind: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Give a matrix's content in a type, and the floats that it stands for; random ones for types only read."""
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    if kind in _DRAWN:
        nbytes, scales, scale = _DRAWN[kind]
        weights = gguf.GGML_QUANT_SIZES[number][0]
        blocks = rng.integers(0, 256, (len(array), array.shape[1] // weights, nbytes)).astype(np.uint8)
        for place in scales:
            blocks[:, :, place : place + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        content = blocks.reshape(len(array), -1)
    else:
        content = gguf.quants.quantize(array, number)
    return content, gguf.quants.dequantize(content, number).reshape(array.shape).astype(np.float32)


def _metadata(config: dict[str, Any], arch: str) -> dict[str, Any]:
    """Describe a model as llama.cpp's converter does."""
    words = json.loads(tokenizer().to_str())["model"]
    texts = sorted(words["vocab"], key=words["vocab"].get)
    numbers = {
        "general.name": "drawn",
        "context_length": config["max_position_embeddings"],
        "block_count": config["num_hidden_layers"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "rope.dimension_count": config["head_dim"],
        "vocab_size": VOCABULARY,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts + [f"[{i}]" for i in range(len(texts), VOCABULARY)],
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(texts) - 2), *[5] * (VOCABULARY - len(texts))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in words["merges"]],
        "tokenizer.ggml.eos_token_id": 1,
    }
    if config["rope_parameters"]["rope_type"] == "linear":
        numbers["rope.scaling.type"] = "linear"
        numbers["rope.scaling.factor"] = float(config["rope_parameters"]["factor"])
    return {key if key.startswith(_OF_ANY) else f"{arch}.{key}": number for key, number in numbers.items()}


def _write(file: GgufDraft, path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, file.arch)
    if file.alignment is not None:
        writer.add_custom_alignment(file.alignment)
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
              list: writer.add_array}  # fmt: skip
    for key, setting in file.metadata.items():
        adders[type(setting)](key, setting)
    for name, (content, kind) in file.tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(content), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- twists ----------------------------------------------------------------------------------------------------------


def set_metadata(**changes: Any) -> Callable[[GgufDraft], object]:
    """Return an edit that changes metadata; `__` stands for a dot, None drops a key."""

    def edit(file: GgufDraft) -> None:
        for name, setting in changes.items():
            full = f"{file.arch}.{name.replace('__', '.')}"
            full = full.removeprefix(f"{file.arch}.") if name.startswith("tokenizer__") else full
            if setting is None:
                file.metadata.pop(full, None)
            else:
                file.metadata[full] = setting

    return edit


def drop_tensor(name: str) -> Callable[[GgufDraft], object]:
    """Return an edit that drops a tensor."""
    return lambda file: file.tensors.pop(name)


def change_tensor(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[GgufDraft], None]:
    """Return an edit that changes the content of a tensor."""

    def edit(file: GgufDraft) -> None:
        content, kind = file.tensors[name]
        file.tensors[name] = change(content), kind

    return edit


def add(name: str) -> Callable[[GgufDraft], object]:
    """Return an edit that adds a tensor."""
    return lambda file: file.tensors.update({name: (np.ones(8, np.float32), "F32")})


def put_nan(content: np.ndarray) -> np.ndarray:
    """Return a copy with a NaN in it."""
    changed = content.copy()
    changed[1] = np.nan
    return changed


def align(alignment: int) -> Callable[[GgufDraft], None]:
    """Return an edit that aligns tensors to so many bytes."""

    def edit(file: GgufDraft) -> None:
        file.alignment = alignment

    return edit


def set_architecture(name: str) -> Callable[[GgufDraft], None]:
    """Return an edit that names another architecture."""

    def edit(file: GgufDraft) -> None:
        file.metadata = {name + k.removeprefix(file.arch) if k.startswith(file.arch) else k: v
                         for k, v in file.metadata.items()}  # fmt: skip
        file.arch = name

    return edit


def cut_off(path: Path, rng: np.random.Generator) -> None:
    """Cut the file off."""
    content = path.read_bytes()
    path.write_bytes(content[: int(rng.integers(len(content)))])


def overwrite_bytes(place: int, content: bytes) -> Callable[[Path, np.random.Generator], None]:
    """Return a damage that overwrites bytes from a place on."""

    def damage(path: Path, rng: np.random.Generator) -> None:
        whole = path.read_bytes()
        path.write_bytes(whole[:place] + content + whole[place + len(content) :])

    return damage


def _rope_config(kind: str, **numbers: Any) -> dict[str, Any]:
    """Return the config keys of a rotation of this type."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **numbers}}


_DEFAULT, _LINEAR = _rope_config("default"), _rope_config("linear", factor=4.0)
# Sizes that blocks of 256 divide too
_SQUARE = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32, "hidden_size": 256}
_YARN = _rope_config("yarn", factor=4.0, original_max_position_embeddings=32)
_OTHER_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 256}

GGUF_TWISTS: dict[str, GgufTwist] = {
    "gguf": GgufTwist(),
    "gguf of types": GgufTwist(),
    "gguf of further types": GgufTwist(),
    "gguf tied": GgufTwist(settings={"tie_word_embeddings": True}),
    "gguf linear": GgufTwist(settings=_LINEAR),
    "rope.scaling.factor without type": GgufTwist(settings=_LINEAR, edit_file=set_metadata(rope__scaling__type=None)),
    "rope.scale_linear": GgufTwist(
        settings=_LINEAR,
        edit_file=set_metadata(rope__scaling__type=None, rope__scaling__factor=None, rope__scale_linear=4.0),
    ),
    "rope.scaling.type none": GgufTwist(
        settings=_DEFAULT, edit_file=set_metadata(rope__scaling__type="none", rope__scaling__factor=4.0)
    ),
    "rope.scaling.factor 0": GgufTwist(settings=_DEFAULT, edit_file=set_metadata(rope__scaling__factor=0.0)),
    "rope.scaling.factor 1": GgufTwist(settings=_DEFAULT, edit_file=set_metadata(rope__scaling__factor=1.0)),
    "gguf yarn": GgufTwist(
        EITHER,
        settings=_YARN,
        edit_file=set_metadata(
            rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=32
        ),
    ),
    "rope.scaling.attn_factor": GgufTwist(
        REFUSED, settings=_LINEAR, edit_file=set_metadata(rope__scaling__attn_factor=1.5)
    ),
    "rope.scaling.type unknown": GgufTwist(REFUSED, edit_file=set_metadata(rope__scaling__type="spiral")),
    "rope.freq_base absent": GgufTwist(settings=_DEFAULT, edit_file=set_metadata(rope__freq_base=None)),
    "key_length absent": GgufTwist(
        settings=_SQUARE, edit_file=set_metadata(attention__key_length=None, attention__value_length=None)
    ),
    "key_length absent where it differs": GgufTwist(
        REFUSED,
        settings=_OTHER_HEADS,
        edit_file=set_metadata(attention__key_length=None, attention__value_length=None, rope__dimension_count=None),
    ),
    "value_length another": GgufTwist(REFUSED, edit_file=set_metadata(attention__value_length=4)),
    "rope.dimension_count absent": GgufTwist(edit_file=set_metadata(rope__dimension_count=None)),
    "rope.dimension_count half": GgufTwist(REFUSED, edit_file=set_metadata(rope__dimension_count=4)),
    "head_count_kv absent": GgufTwist(settings=_SQUARE, edit_file=set_metadata(attention__head_count_kv=None)),
    "head_count_kv by layer": GgufTwist(
        EITHER,
        settings={**_SQUARE, "num_hidden_layers": 2},
        edit_file=set_metadata(attention__head_count_kv=[8, 8]),
    ),
    "vocab_size absent in metadata": GgufTwist(edit_file=set_metadata(vocab_size=None)),
    "vocab_size another": GgufTwist(REFUSED, edit_file=set_metadata(vocab_size=310)),
    "context_length absent": GgufTwist(edit_file=set_metadata(context_length=None)),
    "epsilon absent": GgufTwist(
        EITHER, settings={"rms_norm_eps": 1e-3}, edit_file=set_metadata(attention__layer_norm_rms_epsilon=None)
    ),
    "block_count a text": GgufTwist(REFUSED, edit_file=set_metadata(block_count="2")),
    "block_count 10^9": GgufTwist(REFUSED, edit_file=set_metadata(block_count=10**9)),
    "expert_count 8": GgufTwist(
        REFUSED, edit_file=set_metadata(expert_count=8, expert_used_count=2), families=("llama",)
    ),
    "architecture unknown": GgufTwist(REFUSED, edit_file=set_architecture("spiral")),
    "architecture gemma": GgufTwist(REFUSED, edit_file=set_architecture("gemma")),
    "biases of llama": GgufTwist(EITHER, settings={"attention_bias": True}, families=("llama",)),
    "alignment 64": GgufTwist(edit_file=align(64)),
    "no tokens": GgufTwist(REFUSED, edit_file=set_metadata(tokenizer__ggml__tokens=None)),
    "gguf norm missing": GgufTwist(REFUSED, edit_file=drop_tensor("output_norm.weight")),
    "gguf matrix missing": GgufTwist(REFUSED, edit_file=drop_tensor("blk.0.ffn_up.weight")),
    "gguf row missing": GgufTwist(REFUSED, edit_file=change_tensor("blk.0.ffn_up.weight", lambda rows: rows[1:])),
    "gguf NaN": GgufTwist(REFUSED, edit_file=change_tensor("output_norm.weight", put_nan)),
    "gguf unknown tensor": GgufTwist(
        EITHER,
        edit_file=lambda file: file.tensors.update({"blk.0.attn_q_norm.weight": (np.ones(8, np.float32), "F32")}),
    ),
    "gguf cut off": GgufTwist(REFUSED, damage=cut_off),
    "gguf empty": GgufTwist(REFUSED, damage=lambda path, rng: path.write_bytes(b"")),
    "gguf of version 1": GgufTwist(REFUSED, damage=overwrite_bytes(4, b"\1\0\0\0")),
    "gguf big-endian": GgufTwist(REFUSED, damage=overwrite_bytes(4, b"\0\0\0\3")),
    "gguf of 10^18 tensors": GgufTwist(REFUSED, damage=overwrite_bytes(8, (10**18).to_bytes(8, "little"))),
}
