"""Drawn 4-bit folders of GPTQ, AWQ, compressed-tensors and AutoRound; their reference is a folder of the floats."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.support import foreign_files
from tests.support.drawn_folders import cut_off, save
from tests.support.drawn_models import Draft, DrawnModel, Plan, Twist, Verdict, build_draft

READ, EITHER, REFUSED = Verdict.READ, Verdict.EITHER, Verdict.REFUSED
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Quantization:
    """The quantisation of a model's matrices.

    Attributes:
        group: weights of a row that share a scale, or 0 for the whole row.
        symmetric: whether the zero point is 8.
        act_order: whether groups are not contiguous.
        negative: share of the scales that are negative.
        second: whether GPTQ's zero points are stored as they are, not less 1.
        zero_biases: whether every matrix has a bias of zeros, as AutoGPTQ writes them.
        ignored: the end of the names of matrices that stay floats.
        spread: groups by the end of a matrix's name, where they differ.
        integers: whether compressed-tensors keeps bytes.
        zero_scale: whether the first group of each matrix has the scale 0.
        head: whether the LM head is quantised too.
    """

    group: int = 32
    symmetric: bool = True
    act_order: bool = False
    negative: float = 0.0
    second: bool = False
    zero_biases: bool = False
    ignored: tuple[str, ...] = ()
    spread: Mapping[str, int] = field(default_factory=dict)
    integers: bool = False
    zero_scale: bool = False
    head: bool = False


@dataclass
class QuantizedDraft:
    """The content of a quantised folder."""

    config: dict[str, Any]
    arrays: Arrays
    rng: np.random.Generator
    further: dict[str, Any] = field(default_factory=dict)  # files beside config.json

    @property
    def quantization(self) -> dict[str, Any]:
        """The config of the quantisation."""
        quantization: dict[str, Any] = self.config["quantization_config"]
        return quantization


@dataclass(frozen=True)
class QuantizedTwist(Twist):
    """A twist of a quantised folder: scheme it is quantised, and a change of the file."""

    scheme: Quantization = Quantization()
    edit_file: Callable[[QuantizedDraft], object] = lambda file: None
    kinds: tuple[str, ...] = ("gptq",)
    container: str = "model.safetensors"


def write_quantized(plan: Plan, folder: Path) -> DrawnModel:
    """Write the model of a plan in its format, and what its numbers stand for as a folder of floats."""
    twist = plan.twist
    assert isinstance(twist, QuantizedTwist)
    draft = build_draft(plan, **_sizes(np.random.default_rng([plan.seed, 2])))
    draft.tensors = {name: weights.half().float() for name, weights in draft.tensors.items()}
    twist.edit(draft)
    file = _quantize(draft, plan.kind, twist.scheme)
    save(draft, folder / "reference")
    twist.edit_file(file)
    _write(file, folder / "model", twist.container)
    twist.damage(folder / "model", draft.rng)
    return DrawnModel(folder / "model", folder / "reference")


def _sizes(rng: np.random.Generator) -> dict[str, Any]:
    kv_heads = int(rng.choice([1, 2]))
    return {"hidden_size": 64, "intermediate_size": int(rng.choice([64, 96])), "head_dim": 32,
            "num_attention_heads": 2, "num_key_value_heads": kv_heads}  # fmt: skip


def _quantize(draft: Draft, kind: str, scheme: Quantization) -> QuantizedDraft:
    """Quantise a draft's matrices; the draft keeps the floats that they stand for."""
    import torch

    arrays: Arrays = {}
    ends = ("proj.weight", "lm_head.weight") if scheme.head else ("proj.weight",)
    for name, weights in draft.tensors.items():
        array = weights.numpy()
        if not name.endswith(ends) or name.endswith(scheme.ignored or ("-",)):
            arrays[name] = array.astype(np.float16)
            continue
        group = next((group for end, group in scheme.spread.items() if name.endswith(end)), scheme.group)
        parts, floats = _of_matrix(array, kind, replace(scheme, group=group or array.shape[1]), draft.rng)
        draft.tensors[name] = torch.from_numpy(floats)
        module = name.removesuffix("weight")
        if scheme.zero_biases and f"{module}bias" not in draft.tensors:
            parts["bias"] = np.zeros(len(array), np.float16)
        arrays |= {f"{module}{part}": array for part, array in parts.items()}
    config = {**draft.config, "quantization_config": _state(kind, scheme), "dtype": "float16"}
    return QuantizedDraft(config, arrays, draft.rng)


def _of_matrix(w: np.ndarray, kind: str, scheme: Quantization, rng: np.random.Generator) -> tuple[Arrays, np.ndarray]:
    """Quantise one matrix: its tensors in a format, and the formula's floats."""
    K, groups = w.shape[1], -(-w.shape[1] // scheme.group)
    group_of = np.arange(K) // scheme.group
    if scheme.act_order:
        group_of = rng.permutation(group_of)
    columns = np.argsort(group_of, kind="stable")  # group by group
    padded = np.pad(w[:, columns], ((0, 0), (0, groups * scheme.group - K)))
    ordered, scale, zero = foreign_files.quantize_affine(padded, scheme.group, symmetric=scheme.symmetric)
    q4 = np.empty(w.shape, np.uint8)
    q4[:, columns] = ordered[:, :K]
    mirrored = rng.random(scale.shape) < scheme.negative
    scale = np.where(mirrored, -scale, scale).astype(np.float16)
    if scheme.zero_scale:
        scale[0, 0] = 0
    q4 = np.where(mirrored[:, group_of], (16 - q4.astype(int)).clip(0, 15), q4).astype(np.uint8)
    floats = (q4.astype(np.float32) - zero[:, group_of]) * scale[:, group_of].astype(np.float32)
    return _parts(kind, scheme, q4, scale, zero, group_of.astype(np.int32)), floats


def _parts(
    kind: str, scheme: Quantization, q4: np.ndarray, scale: np.ndarray, zero: np.ndarray, group_of: np.ndarray
) -> Arrays:
    if kind == "awq":
        return foreign_files.awq(q4, scale, zero)
    if kind == "compressed-tensors":
        if scheme.integers:
            return foreign_files.compressed_integers(q4, scale)
        parts = foreign_files.compressed_tensors(q4, scale, None if scheme.symmetric else zero)
        return parts | ({"weight_g_idx": group_of} if scheme.act_order else {})
    parts = foreign_files.gptq(q4, scale, zero, group_of, 0 if scheme.second else -1)
    if kind == "auto-round":
        parts.pop("g_idx")
    return parts


def _state(kind: str, scheme: Quantization) -> dict[str, Any]:
    """State the quantisation in the config as the format's writers do."""
    group = scheme.group or -1
    if kind == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    if kind == "auto-round":
        return {
            "quant_method": "auto-round", "bits": 4, "group_size": group, "sym": scheme.symmetric, "data_type": "int",
            "packing_format": "auto_round:auto_gptq",
        }  # fmt: skip
    if kind == "gptq":
        return {
            "quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": scheme.act_order,
            "sym": scheme.symmetric, "lm_head": False, "checkpoint_format": "gptq_v2" if scheme.second else "gptq",
        }  # fmt: skip
    schemes = dict(scheme.spread) or {"": scheme.group}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if scheme.integers else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", *(f"re:.*{end.removesuffix('.weight')}$" for end in scheme.ignored)],
        "config_groups": {
            f"group_{i}": {
                "targets": [f"re:.*{end.removesuffix('.weight')}$" if end else "Linear"],
                "weights": {
                    "num_bits": 4, "type": "int", "symmetric": scheme.symmetric,
                    "strategy": "group" if group else "channel", "group_size": group or None,
                    "actorder": "group" if scheme.act_order else None,
                },
            }
            for i, (end, group) in enumerate(schemes.items())
        },
    }  # fmt: skip


def _write(file: QuantizedDraft, folder: Path, container: str) -> None:
    from safetensors.numpy import save_file

    from tests.support.small_models import tokenizer

    folder.mkdir(parents=True)
    if container.endswith(".safetensors"):
        save_file({name: np.ascontiguousarray(weights) for name, weights in file.arrays.items()}, folder / container,
                  metadata={"format": "pt"})  # fmt: skip
    else:
        foreign_files.write_torch(
            folder / container, {name: np.ascontiguousarray(weights) for name, weights in file.arrays.items()}
        )
    (folder / "config.json").write_text(json.dumps(file.config))
    for name, content in file.further.items():
        (folder / name).write_text(json.dumps(content))
    tokenizer().save(str(folder / "tokenizer.json"))


# --- twists ----------------------------------------------------------------------------------------------------------


def set_config_keys(**changes: Any) -> Callable[[QuantizedDraft], object]:
    """Return an edit that sets keys of quantization_config; None drops a key."""

    def edit(file: QuantizedDraft) -> None:
        file.quantization.update(changes)
        for name in [name for name, setting in changes.items() if setting is None]:
            file.quantization.pop(name)

    return edit


def set_weights_keys(**changes: Any) -> Callable[[QuantizedDraft], object]:
    """Return an edit that sets keys of the weights in the first of config_groups."""
    return lambda file: file.quantization["config_groups"]["group_0"]["weights"].update(changes)


def change_parts(end: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[QuantizedDraft], None]:
    """Return an edit that changes the tensors whose names end with `end`."""

    def edit(file: QuantizedDraft) -> None:
        file.arrays |= {name: change(array) for name, array in file.arrays.items() if name.endswith(end)}

    return edit


def drop_parts(end: str) -> Callable[[QuantizedDraft], None]:
    """Return an edit that drops the tensors whose names end with `end`."""

    def edit(file: QuantizedDraft) -> None:
        file.arrays = {name: array for name, array in file.arrays.items() if not name.endswith(end)}

    return edit


def set_first(number: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Return a change that sets the first element of a copy."""

    def change(array: np.ndarray) -> np.ndarray:
        changed = array.copy()
        changed.flat[0] = number
        return changed

    return change


def as_bytes(words: np.ndarray) -> np.ndarray:
    """Unpack zero points [N/8, G] to signed bytes [N, G], as old versions of compressed-tensors keep them."""
    nibbles = words.view(np.uint32)[:, None] >> np.arange(0, 32, 4, dtype=np.uint32)[:, None] & 15
    return nibbles.reshape(-1, words.shape[1]).astype(np.int8) - np.int8(8)


def move_config_to_own_file(file: QuantizedDraft) -> None:
    """State the quantisation in quantize_config.json alone."""
    file.further["quantize_config.json"] = file.config.pop("quantization_config")


def copy_config_to_own_file(**changes: Any) -> Callable[[QuantizedDraft], None]:
    """Return an edit that also states the quantisation in quantize_config.json, with changes."""

    def edit(file: QuantizedDraft) -> None:
        file.further["quantize_config.json"] = {**file.quantization, **changes}

    return edit


def add_bias_of_o(file: QuantizedDraft) -> None:
    """Give o a bias, which these families do not have."""
    rows = file.arrays["model.layers.0.self_attn.o_proj.scales"].shape[1]
    file.arrays["model.layers.0.self_attn.o_proj.bias"] = np.ones(rows, np.float16)


_GPTQ, _AWQ, _CT, _AR = ("gptq",), ("awq",), ("compressed-tensors",), ("auto-round",)
_ASYMMETRIC, _SECOND = Quantization(symmetric=False), Quantization(second=True)
_ORDERED = Quantization(act_order=True, symmetric=False)
_ROWS = Quantization(group=0, symmetric=False)
_WIDE = {"hidden_size": 80, "intermediate_size": 144, "head_dim": 40}
_SPREAD = {"self_attn.q_proj.weight": 32, "self_attn.k_proj.weight": 32, "self_attn.v_proj.weight": 32,
           "self_attn.o_proj.weight": 64, "mlp.gate_proj.weight": 16, "mlp.up_proj.weight": 16,
           "mlp.down_proj.weight": 0}  # fmt: skip

QUANTIZED_TWISTS: dict[str, QuantizedTwist] = {
    "gptq": QuantizedTwist(),
    "gptq asymmetric": QuantizedTwist(scheme=_ASYMMETRIC),
    "gptq act order": QuantizedTwist(scheme=_ORDERED),
    "gptq act order symmetric": QuantizedTwist(scheme=Quantization(act_order=True)),
    "gptq rows": QuantizedTwist(scheme=_ROWS),
    "gptq v2": QuantizedTwist(scheme=_SECOND),
    "gptq v2 asymmetric": QuantizedTwist(scheme=Quantization(second=True, symmetric=False)),
    "gptq v2 act order": QuantizedTwist(scheme=Quantization(second=True, act_order=True, symmetric=False)),
    "gptq without checkpoint_format": QuantizedTwist(edit_file=set_config_keys(checkpoint_format=None)),
    "gptq with zero biases": QuantizedTwist(scheme=Quantization(zero_biases=True, symmetric=False)),
    "gptq with negative scales": QuantizedTwist(scheme=Quantization(negative=0.5)),
    "gptq without g_idx": QuantizedTwist(edit_file=drop_parts(".g_idx")),
    "gptq in quantize_config.json": QuantizedTwist(scheme=_SECOND, edit_file=move_config_to_own_file),
    "gptq in both files": QuantizedTwist(scheme=_SECOND, edit_file=copy_config_to_own_file()),
    "gptq in a torch file": QuantizedTwist(container="pytorch_model.bin"),
    "gptq scales in float32": QuantizedTwist(edit_file=change_parts(".scales", lambda array: array.astype(np.float32))),
    "gptq zero scale": QuantizedTwist(scheme=Quantization(zero_scale=True)),
    "gptq head": QuantizedTwist(
        settings={"tie_word_embeddings": False, "vocab_size": 304},
        scheme=Quantization(head=True),
        edit_file=set_config_keys(lm_head=True),
    ),
    "gptq short last group": QuantizedTwist(scheme=_ASYMMETRIC, settings=_WIDE),
    "gptq group order that desc_act denies": QuantizedTwist(scheme=_ORDERED, edit_file=set_config_keys(desc_act=False)),
    "gptq v1 label on v2 zeros": QuantizedTwist(scheme=_SECOND, edit_file=set_config_keys(checkpoint_format="gptq")),
    "gptq no label on v2 zeros": QuantizedTwist(scheme=_SECOND, edit_file=set_config_keys(checkpoint_format=None)),
    "gptq v2 label on v1 zeros": QuantizedTwist(edit_file=set_config_keys(checkpoint_format="gptq_v2")),
    "gptq sym label on other zeros": QuantizedTwist(EITHER, scheme=_ASYMMETRIC, edit_file=set_config_keys(sym=True)),
    "gptq files that contradict": QuantizedTwist(
        REFUSED, edit_file=copy_config_to_own_file(checkpoint_format="gptq_v2")
    ),
    "gptq act order without g_idx": QuantizedTwist(REFUSED, scheme=_ORDERED, edit_file=drop_parts(".g_idx")),
    "gptq of 8 bits": QuantizedTwist(REFUSED, edit_file=set_config_keys(bits=8)),
    "gptq of another group": QuantizedTwist(REFUSED, edit_file=set_config_keys(group_size=64)),
    "gptq checkpoint_format marlin": QuantizedTwist(REFUSED, edit_file=set_config_keys(checkpoint_format="marlin")),
    "gptq dynamic": QuantizedTwist(EITHER, edit_file=set_config_keys(dynamic={"-:.*down_proj": {}})),
    "gptq of quant_method fp8": QuantizedTwist(REFUSED, edit_file=set_config_keys(quant_method="fp8")),
    "gptq NaN scale": QuantizedTwist(REFUSED, edit_file=change_parts("up_proj.scales", set_first(np.nan))),
    "gptq g_idx out of range": QuantizedTwist(REFUSED, edit_file=change_parts("up_proj.g_idx", set_first(99))),
    "gptq g_idx negative": QuantizedTwist(REFUSED, edit_file=change_parts("up_proj.g_idx", set_first(-1))),
    "gptq zeros missing": QuantizedTwist(REFUSED, edit_file=drop_parts("up_proj.qzeros")),
    "gptq bias of o": QuantizedTwist(REFUSED, edit_file=add_bias_of_o),
    "gptq word missing": QuantizedTwist(REFUSED, edit_file=change_parts("up_proj.qweight", lambda array: array[1:])),
    "gptq cut off": QuantizedTwist(REFUSED, damage=cut_off),
    "awq": QuantizedTwist(kinds=_AWQ, scheme=_ASYMMETRIC),
    "awq rows": QuantizedTwist(kinds=_AWQ, scheme=_ROWS),
    "awq symmetric": QuantizedTwist(kinds=_AWQ),
    "awq in a torch file": QuantizedTwist(kinds=_AWQ, scheme=_ASYMMETRIC, container="pytorch_model.bin"),
    "awq with floats kept": QuantizedTwist(
        kinds=_AWQ,
        scheme=Quantization(symmetric=False, ignored=("down_proj.weight",)),
        edit_file=set_config_keys(modules_to_not_convert=["down_proj"]),
    ),
    "awq zero_point false": QuantizedTwist(kinds=_AWQ, edit_file=set_config_keys(zero_point=False)),
    "awq zero_point false with other zeros": QuantizedTwist(
        EITHER, kinds=_AWQ, scheme=_ASYMMETRIC, edit_file=set_config_keys(zero_point=False)
    ),
    "awq version gemv": QuantizedTwist(
        REFUSED, kinds=_AWQ, scheme=_ASYMMETRIC, edit_file=set_config_keys(version="gemv")
    ),
    "awq version marlin": QuantizedTwist(
        REFUSED, kinds=_AWQ, scheme=_ASYMMETRIC, edit_file=set_config_keys(version="marlin")
    ),
    "awq of 8 bits": QuantizedTwist(REFUSED, kinds=_AWQ, edit_file=set_config_keys(bits=8)),
    "awq of another group": QuantizedTwist(REFUSED, kinds=_AWQ, edit_file=set_config_keys(group_size=128)),
    "awq scale infinite": QuantizedTwist(
        REFUSED, kinds=_AWQ, edit_file=change_parts("up_proj.scales", set_first(np.inf))
    ),
    "ct": QuantizedTwist(kinds=_CT),
    "ct asymmetric": QuantizedTwist(kinds=_CT, scheme=_ASYMMETRIC),
    "ct rows": QuantizedTwist(kinds=_CT, scheme=Quantization(group=0)),
    "ct integers": QuantizedTwist(kinds=_CT, scheme=Quantization(group=0, integers=True)),
    "ct integers of groups": QuantizedTwist(kinds=_CT, scheme=Quantization(integers=True)),
    "ct group order": QuantizedTwist(kinds=_CT, scheme=Quantization(act_order=True)),
    "ct short last group": QuantizedTwist(kinds=_CT, settings=_WIDE),
    "ct short last group, asymmetric": QuantizedTwist(kinds=_CT, scheme=_ASYMMETRIC, settings=_WIDE),
    "ct zero points in bytes": QuantizedTwist(
        EITHER, kinds=_CT, scheme=_ASYMMETRIC, edit_file=change_parts(".weight_zero_point", as_bytes)
    ),
    "ct one group longer than the row": QuantizedTwist(
        kinds=_CT, scheme=Quantization(group=0), edit_file=set_weights_keys(strategy="group", group_size=128)
    ),
    "ct of several groups": QuantizedTwist(kinds=_CT, scheme=Quantization(spread=_SPREAD)),
    "ct with floats kept": QuantizedTwist(
        kinds=_CT, scheme=Quantization(ignored=("down_proj.weight", "o_proj.weight"))
    ),
    "ct with negative scales": QuantizedTwist(kinds=_CT, scheme=Quantization(negative=0.3)),
    "ct with INT8 activations": QuantizedTwist(
        kinds=_CT,
        edit_file=lambda file: file.quantization["config_groups"]["group_0"].update(
            input_activations={"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        ),
    ),
    "ct with a KV cache scheme": QuantizedTwist(
        EITHER,
        kinds=_CT,
        edit_file=set_config_keys(kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor"}),
    ),
    "ct of 8 bits": QuantizedTwist(REFUSED, kinds=_CT, edit_file=set_weights_keys(num_bits=8)),
    "ct of floats": QuantizedTwist(REFUSED, kinds=_CT, edit_file=set_weights_keys(type="float")),
    "ct of another group": QuantizedTwist(REFUSED, kinds=_CT, edit_file=set_weights_keys(group_size=64)),
    "ct format marlin-24": QuantizedTwist(REFUSED, kinds=_CT, edit_file=set_config_keys(format="marlin-24")),
    "ct sparse": QuantizedTwist(
        REFUSED,
        kinds=_CT,
        edit_file=set_config_keys(sparsity_config={"format": "sparse-24-bitmask", "targets": ["Linear"]}),
    ),
    "ct with transforms": QuantizedTwist(
        REFUSED, kinds=_CT, edit_file=set_config_keys(transform_config={"config_groups": {"R1": {"type": "hadamard"}}})
    ),
    "ct asymmetric without zeros": QuantizedTwist(REFUSED, kinds=_CT, edit_file=set_weights_keys(symmetric=False)),
    "ct shape of another matrix": QuantizedTwist(
        REFUSED, kinds=_CT, edit_file=change_parts("up_proj.weight_shape", set_first(63))
    ),
    "ct scale missing": QuantizedTwist(REFUSED, kinds=_CT, edit_file=drop_parts("up_proj.weight_scale")),
    "ct integer of 8 bits": QuantizedTwist(
        REFUSED,
        kinds=_CT,
        scheme=Quantization(group=0, integers=True),
        edit_file=change_parts("up_proj.weight", set_first(100)),
    ),
    "auto-round": QuantizedTwist(kinds=_AR, scheme=Quantization(negative=0.5)),
    "auto-round asymmetric": QuantizedTwist(kinds=_AR, scheme=_ASYMMETRIC),
    "auto-round of 8 bits": QuantizedTwist(REFUSED, kinds=_AR, edit_file=set_config_keys(bits=8)),
    "auto-round of data_type mx_fp": QuantizedTwist(REFUSED, kinds=_AR, edit_file=set_config_keys(data_type="mx_fp")),
    "auto-round packed as awq": QuantizedTwist(
        REFUSED, kinds=_AR, edit_file=set_config_keys(packing_format="auto_round:auto_awq")
    ),
    "auto-round with extra_config": QuantizedTwist(
        EITHER, kinds=_AR, edit_file=set_config_keys(extra_config={"model.layers.0.mlp.up_proj": {"bits": 8}})
    ),
}
