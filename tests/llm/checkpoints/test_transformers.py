"""Folders are read as transformers reads them: which layers have a window, rope keys old and new, heads, side files."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ptxlab.errors import FileError
from ptxlab.llm.checkpoints import open_model
from tests.support.small_models import random_tokens, write_folder

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.torch

TOLERANCE = 2e-5  # of the largest logit
NEVER = "a key that is left out"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FULL, SLIDING = "full_attention", "sliding_attention"


class Case(NamedTuple):
    """A family, keys of its config.json, and what else is done to the folder."""

    family: str
    keys: Mapping[str, Any] = {}
    change: Callable[[Path], object] = lambda folder: None


def window_keys(**keys: Any) -> dict[str, Any]:
    """Return keys of a Qwen2 with windows of 5 tokens."""
    return {"use_sliding_window": True, "sliding_window": 5, **keys}


def write_head(scale: float) -> Callable[[Path], None]:
    """Return an edit that writes a head beside a tied embedding: its copy at scale 1, else its reversed rows scaled."""

    def write(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"] = (
            weights["model.embed_tokens.weight"][::-1] * np.float32(scale)
            if scale != 1
            else weights["model.embed_tokens.weight"].copy()
        )
        save_file({name: np.ascontiguousarray(w) for name, w in weights.items()}, folder / "model.safetensors")

    return write


def add_files(*names: str) -> Callable[[Path], None]:
    """Return an edit that adds files which are no part of the model: other weights, by the same or another's names."""

    def write(folder: Path) -> None:
        for name in names:
            tensors = {"layers.0.attention.wq.weight": np.ones((4, 4), np.float32)}
            if not name.startswith("consolidated"):
                tensors = {"model.norm.weight": np.ones(32, np.float32), "base.lora_A.weight": np.ones(3, np.float32)}
            save_file(tensors, folder / name) if name.endswith(".safetensors") else (folder / name).write_bytes(b"junk")

    return write


def convert_to_torch(folder: Path) -> None:
    """Write by `torch.save` instead of safetensors."""
    state = {name: torch.from_numpy(w) for name, w in load_file(folder / "model.safetensors").items()}
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def replace_by_shards(folder: Path) -> None:
    """Write shards and an index in place of the one file, and copies in another layout and dtype."""
    write_folder(folder / "shards", "llama3", shards=2)
    (folder / "model.safetensors").unlink()
    for path in (folder / "shards").glob("model*"):
        shutil.move(path, folder / path.name)
    add_files("consolidated.safetensors", "model.fp16.safetensors", "adapter_model.safetensors")(folder)


def with_index(folder: Path) -> None:
    """Write an index beside the one file, which names another file."""
    tensors = {name: w * 2 for name, w in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


OLD, NEW = {"type": "linear", "factor": 4.0}, {"rope_type": "default", "rope_theta": 77.0}
SAME = {
    "window-llama": Case("smollm", {"sliding_window": 5, "use_sliding_window": True}),
    "window-llama_types": Case("smollm", {"layer_types": ["attention", FULL]}),
    "window-mistral": Case("mistral"),
    "window-mistral_null": Case("mistral", {"sliding_window": None}),
    "window-mistral_use_false": Case("mistral", {"use_sliding_window": False}),
    "window-qwen2": Case("qwen2", window_keys()),
    "window-qwen2_first": Case("qwen2", window_keys(max_window_layers=0)),
    "window-qwen2_second": Case("qwen2", window_keys(max_window_layers=1)),
    "window-qwen2_none": Case("qwen2", window_keys(max_window_layers=2)),
    "window-qwen2_types": Case("qwen2", window_keys(layer_types=[SLIDING, FULL])),
    "window-qwen2_both": Case("qwen2", window_keys(layer_types=[SLIDING, FULL], max_window_layers=1)),
    "window-qwen2_full": Case("qwen2", window_keys(layer_types=[FULL, FULL], max_window_layers=0)),
    "window-qwen2_unused": Case("qwen2", window_keys(use_sliding_window=False, max_window_layers=0)),
    "window-qwen2_null": Case("qwen2", window_keys(sliding_window=None, max_window_layers=0)),
    "experts-mixtral": Case("mixtral"),
    "experts-mixtral_window": Case("mixtral", {"sliding_window": 5, "num_experts_per_tok": 3}),
    "rope-theta": Case("smollm"),
    "rope-missing": Case("smollm", {"rope_theta": NEVER}),
    "rope-new": Case("smollm", {"rope_parameters": NEW, "rope_theta": NEVER}),
    "rope-new_beside_theta": Case("smollm", {"rope_parameters": NEW}),
    "rope-new_without_theta": Case("smollm", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "rope-old_beside_new": Case("smollm", {"rope_scaling": OLD, "rope_parameters": NEW}),
    "rope-empty_beside_new": Case("smollm", {"rope_scaling": {}, "rope_parameters": NEW}),
    "rope-theta_within_old": Case("smollm", {"rope_scaling": {**OLD, "rope_theta": 50.0}}),
    "rope-two_types": Case("smollm", {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}}),
    "rope-default": Case("smollm", {"rope_scaling": {"type": "default", "factor": 2.0}}),
    "rope-llama3": Case("llama3"),
    "rope-llama3_no_context": Case("smollm", {"rope_scaling": LLAMA3}),
    "rope-llama3_beside": Case("llama3", {"original_max_position_embeddings": 100}),
    "rope-more_keys": Case("smollm", {"rope_scaling": {**OLD, "mscale": 3, "beta_fast": 32}}),
    "head-tied": Case("smollm"),
    "head-tied_copy": Case("smollm", change=write_head(1)),
    "head-tied_other": Case("smollm", change=write_head(0.5)),
    "head-untied": Case("llama3"),
    "files-adapter": Case("smollm", change=add_files("adapter_model.safetensors", "adapter_model.bin")),
    "files-consolidated": Case("smollm", change=add_files("consolidated.00.safetensors", "consolidated.safetensors")),
    "files-fp16": Case("smollm", change=add_files("model.fp16.safetensors", "optimizer.bin", "pytorch_model.bin")),
    "files-index": Case("smollm", change=with_index),
    "files-shards": Case("llama3", change=replace_by_shards),
    "files-torch": Case("smollm", change=convert_to_torch),
    "files-torch_beside": Case(
        "smollm", change=lambda folder: (convert_to_torch(folder), add_files("adapter_model.safetensors")(folder))
    ),
}  # fmt: skip


def write_case(folder: Path, case: Case) -> Path:
    """Write the folder of a case."""
    write_folder(folder, case.family)
    stated_config = {**json.loads((folder / "config.json").read_text()), **case.keys}
    config = {key: setting for key, setting in stated_config.items() if setting is not NEVER}
    (folder / "config.json").write_text(json.dumps(config))
    case.change(folder)
    return folder


@pytest.mark.default_cases(
    "window-llama", "window-mistral", "window-qwen2_second", "window-qwen2_types", "rope-new_beside_theta",
    "rope-old_beside_new", "rope-llama3_beside", "head-tied_other", "experts-mixtral", "files-fp16",
    "files-torch_beside",
)  # fmt: skip
@pytest.mark.parametrize("name", SAME)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = write_case(tmp_path, SAME[name])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = random_tokens()
    with torch.no_grad():
        right = theirs(torch.from_numpy(tokens)).logits.numpy()
    model, _ = open_model(folder)
    logits = model.logits(model.states([tokens])[0])
    assert np.abs(logits - right).max() < TOLERANCE * np.abs(right).max()


def types(*kinds: str) -> dict[str, Any]:
    """Return the key `layer_types`."""
    return {"layer_types": [*kinds]}


REFUSED = {
    "a window of none": (Case("mistral", {"sliding_window": 0}), "sliding_window: must be an integer, 1 or more"),
    "a window that is true": (Case("mistral", {"sliding_window": True}), "sliding_window: must be an integer"),
    "LLaMA with a window": (Case("smollm", types(FULL, SLIDING)), "layer_types: must agree with the window of a llama"),
    "Mistral without": (Case("mistral", types(FULL, FULL)), "layer_types: must agree with the window of a mistral, 5"),
    "no window at all": (
        Case("qwen2", {"use_sliding_window": False, "sliding_window": 5, **types(FULL, SLIDING)}),
        "layer_types: must agree with the window of a qwen2, None",
    ),
    "too few types": (Case("qwen2", window_keys(**types(FULL))), "layer_types: must be 2 of full_attention, "),
    "an unknown type": (Case("qwen2", window_keys(**types(FULL, "chunked"))), "layer_types: must be 2 of full"),
    "types are a text": (Case("qwen2", window_keys(layer_types="full_attention")), "layer_types: must be 2 of full"),
    "types are lists": (Case("qwen2", window_keys(layer_types=[[], []])), "layer_types: must be 2 of full"),
    "no first layer": (Case("qwen2", window_keys(max_window_layers=None)), "max_window_layers: must be given"),
    "a fraction of layers": (Case("qwen2", window_keys(max_window_layers=1.5)), "max_window_layers: must be an int"),
    "theta is null": (Case("smollm", {"rope_theta": None}), "rope_theta: must be a number above 0"),
    "theta within is null": (
        Case("smollm", {"rope_parameters": {"rope_theta": None}}),
        "rope_parameters: rope_theta: must be a number above 0",
    ),
    "a type that is null": (
        Case("smollm", {"rope_scaling": {"rope_type": None, "type": "linear", "factor": 2.0}}),
        "rope_scaling: rope_type: must be one of default, linear, llama3",
    ),
    "a type that is a list": (
        Case("smollm", {"rope_scaling": {"rope_type": ["linear"]}}),
        r"rope_scaling: rope_type: must be one of .* \(got \['linear'\]\)",
    ),
    **{
        kind: (
            Case("smollm", {"rope_scaling": {"type": kind, "factor": 2.0}}),
            rf"rope_scaling: type: must be one of default, linear, llama3, per_pair \(got '{kind}'\)",
        )
        for kind in ("yarn", "dynamic", "longrope", "su")
    },
    "angles of half a head": (
        Case("smollm", {"partial_rotary_factor": 0.5}),
        "partial_rotary_factor: must be 1: only rotations of whole heads",
    ),
    "angles of half a head within": (
        Case("smollm", {"rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}}),
        "rope_scaling: partial_rotary_factor: must be 1",
    ),
    "angles by kind of layer": (
        Case("smollm", {"rope_parameters": {FULL: NEW}}),
        "rope_parameters: full_attention: must be a number",
    ),
    "a factor that is true": (
        Case("smollm", {"rope_scaling": {"type": "linear", "factor": True}}),
        "rope_scaling factor: must be a number above 0",
    ),
    "a factor that is text": (
        Case("smollm", {"rope_scaling": {"type": "linear", "factor": "2"}}),
        "rope_scaling factor: must be a number above 0",
    ),
    "a factor of 10^-320": (
        Case("smollm", {"rope_scaling": {"type": "linear", "factor": 1e-320}}),
        "rope_scaling: must be one that rope_tables takes",
    ),
    "a theta of 10^400": (Case("smollm", {"rope_theta": 10**400}), "rope_theta: must be a number above 0"),
    "layers of their own": (Case("smollm", {"per_layer_config": {"0": {}}}), "per_layer_config: must be missing"),
    "weights by another name": (
        Case("smollm", {"transformers_weights": "other.safetensors"}),
        "transformers_weights: must be missing: weights are looked for",
    ),
    "eps is null": (Case("smollm", {"rms_norm_eps": None}), "rms_norm_eps: must be given"),
    "activation is null": (Case("smollm", {"hidden_act": None}), "hidden_act: must be one of"),
    "tied by a text": (Case("smollm", {"tie_word_embeddings": "true"}), "tie_word_embeddings: must be true or false"),
    "an attention bias": (Case("smollm", {"attention_bias": True}), "attention_bias: must be false"),
    "an FFN bias": (Case("smollm", {"mlp_bias": True}), "mlp_bias: must be false"),
    **{
        f"{key} of 10^12": (Case("smollm", {key: 10**12}), rf"{key}: must be at most \d+ \(got 1000000000000\)")
        for key in ("num_hidden_layers", "max_position_embeddings", "head_dim")
    },
    "no head": (
        Case("llama3", change=lambda f: save_file(
            {name: w for name, w in load_file(f / "model.safetensors").items() if "lm_head" not in name},
            f / "model.safetensors",
        )),
        r"lm_head\.weight: missing",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_is_refused(name: str, tmp_path: Path) -> None:
    case, message = REFUSED[name]
    write_case(tmp_path, case)
    with pytest.raises(FileError, match=rf"^{tmp_path}: .*{message}") as error:
        open_model(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "vocab_size", "num_attention_heads"])
def test_sizes_are_compared_before_anything_is_allocated(key: str, tmp_path: Path) -> None:
    """Claim the largest sizes of a config, and larger ones."""
    folder = write_case(tmp_path, Case("smollm"))
    stated_config = json.loads((folder / "config.json").read_text())
    for size in (1 << 12, 1 << 20, 10**12):
        (folder / "config.json").write_text(
            json.dumps({**stated_config, key: size, "num_key_value_heads": 1, "head_dim": 8})
        )
        with pytest.raises(FileError, match=r"must be (at most \d+|\[.*\]) \(got .*\)$"):
            open_model(folder)
