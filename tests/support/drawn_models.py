"""Small models drawn by seed, written as the files that people share: what a reader of checkpoints has to make of each.

A draw has a kind of file, a family with sizes of its own, and twists: things that a file may have. The first twist's
verdict says what a reader may do. `plan` needs no library; `write` needs PyTorch and transformers, whose classes make
the model and whose logits are the reference.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.small_models import VOCABULARY

FAMILIES = ("llama", "mistral", "qwen2")
_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}
FOLDERS = ("safetensors", "shards", "torch", "torch shards")
TOKENS = 24


class Verdict(Enum):
    """The outcomes that are right for a file: that it is read, that it is refused, or either."""

    READ = "read"
    EITHER = "either"
    REFUSED = "refused"


@dataclass
class Draft:
    """A model before it is written: the keys of its config.json, its tensors (PyTorch's), its random numbers."""

    family: str
    config: dict[str, Any]
    tensors: dict[str, Any]
    rng: np.random.Generator

    def name_of_matrix(self) -> str:
        """Draw one of the layers' matrices."""
        return str(self.rng.choice([name for name in self.tensors if name.endswith("proj.weight")]))


@dataclass(frozen=True)
class Twist:
    """Something that a file may have.

    Attributes:
        verdict: what a reader may do.
        settings: of the model's config, before it is built.
        edit: changes config.json and tensors of the model that was built.
        damage: changes the files that were written.
        families: those that can have it.
        kinds: of files that can have it.
    """

    verdict: Verdict = Verdict.READ
    settings: Mapping[str, Any] = field(default_factory=dict)
    edit: Callable[[Draft], object] = lambda draft: None
    damage: Callable[[Path, np.random.Generator], object] = lambda path, rng: None
    families: tuple[str, ...] = FAMILIES
    kinds: tuple[str, ...] = FOLDERS


@dataclass(frozen=True)
class Plan:
    """The draw of a seed."""

    seed: int
    kind: str
    family: str
    name: str
    twist: Twist
    further: Mapping[str, Twist] = field(default_factory=dict)  # that change nothing of what a reader may do

    @property
    def twists(self) -> list[Twist]:
        """List all twists in the order in which they are applied."""
        return [*self.further.values(), self.twist]

    def __str__(self) -> str:
        names = "+".join([self.name, *self.further])
        return f"{self.seed:03}-{self.kind}-{self.family}-{names}".replace(" ", "_")


@dataclass(frozen=True)
class DrawnModel:
    """Files on disk: what a reader opens, and the folder that transformers reads for the reference."""

    path: Path
    reference: Path


def plan(seed: int, twists: Mapping[str, Twist], groups: Sequence[Mapping[str, Twist]]) -> Plan:
    """Draw the kind, family and twist of a seed: the twists in turn, so that every one is drawn.

    A twist of one of the groups gets company, often: twists of the other groups that a reader must read.
    """
    rng = np.random.default_rng(seed)
    name = list(twists)[seed % len(twists)]
    twist = twists[name]
    kind, family, further = str(rng.choice(twist.kinds)), str(rng.choice(twist.families)), {}
    for group in groups if any(name in group for group in groups) else ():
        fitting = [
            candidate
            for candidate, twist_of_group in group.items()
            if twist_of_group.verdict is Verdict.READ
            and kind in twist_of_group.kinds
            and family in twist_of_group.families
        ]
        if name not in group and rng.random() < 0.5:
            companion = str(rng.choice(fitting))
            further[companion] = group[companion]
    return Plan(seed, kind, family, name, twist, further)


def build_draft(plan: Plan, **settings: Any) -> Draft:
    """Build the model of a plan with the classes of transformers. Settings come before those that are drawn."""
    import torch
    import transformers

    rng = np.random.default_rng([plan.seed, 1])
    keys = {**_sizes(rng, plan.family), **settings}
    for twist in plan.twists:
        keys |= twist.settings
    kind = _CLASSES[plan.family]
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**keys))
    for name, parameter in model.named_parameters():
        values = rng.standard_normal(parameter.shape) / (1 if parameter.ndim == 1 else np.sqrt(parameter.shape[-1]))
        parameter.data = torch.from_numpy(np.asarray(1 + values / 4 if "norm" in name else values, np.float32))
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    draft = Draft(plan.family, model.config.to_diff_dict(), tensors, rng)
    draft.config["architectures"] = [f"{kind}ForCausalLM"]
    return draft


def _sizes(rng: np.random.Generator, family: str) -> dict[str, Any]:
    """Draw what every model has: shape, rotary angles, window, activation."""
    kv_heads, head_dim = int(rng.choice([1, 2])), int(rng.choice([8, 16, 32]))
    heads = kv_heads * int(rng.choice([1, 2, 3]))
    hidden = heads * (head_dim if rng.random() < 0.5 else int(rng.choice([12, 16, 24])))
    angles: dict[str, Any] = {"rope_type": "default"}
    match rng.choice(["default", "linear", "llama3"]):
        case "linear":
            angles = {"rope_type": "linear", "factor": float(rng.choice([2, 2.5, 8]))}
        case "llama3":
            angles = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": int(rng.choice([16, 32, 64]))}  # fmt: skip
    layers, window = int(rng.choice([1, 2, 3])), int(rng.integers(2, 12))
    by_family: dict[str, dict[str, Any]] = {
        "llama": {},
        "mistral": {"sliding_window": None if rng.random() < 0.3 else window},
        "qwen2": {
            "use_sliding_window": bool(rng.random() < 0.5),
            "sliding_window": window,
            "max_window_layers": int(rng.integers(layers + 1)),
        },
    }
    return {
        "hidden_size": hidden,
        "head_dim": head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": int(rng.choice([48, 64, 112])),
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "rms_norm_eps": float(rng.choice([1e-5, 1e-6, 1e-3])),
        "hidden_act": str(rng.choice(["silu", "silu", "gelu_pytorch_tanh", "gelu_new"])),
        "tie_word_embeddings": bool(rng.random() < 0.5),
        "rope_parameters": {**angles, "rope_theta": float(rng.choice([1e4, 5e5, 123.4]))},
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": None,
        **by_family[family],
    }


def tokens() -> np.ndarray:
    """Draw token ids [1, T]."""
    return np.random.default_rng(0).integers(0, VOCABULARY, (1, TOKENS))
