"""`Config`: the shape of a decoder of the Llama family, by name, from a Hugging Face config.json or GGUF metadata."""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.hardware.words import F32
from ptxlab.io.files import read_json
from ptxlab.lowbit import reference
from ptxlab.lowbit.model_shapes import SHAPES, ModelShape
from ptxlab.lowbit.reference.attention import ROPE_SCALINGS
from ptxlab.validate import is_integer, is_one_of, require_integer

FAMILIES = ("llama", "mistral", "mixtral", "qwen2")  # model_type of a config.json
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
# Attribute -> its largest value, far above any model's: what a broken file claims is refused before it is allocated.
_SIZES = {
    "hidden": 1 << 20, "ffn": 1 << 22, "heads": 1 << 12, "kv_heads": 1 << 12, "head_dim": 1 << 14, "layers": 1 << 13,
    "vocabulary": 1 << 24,
}  # fmt: skip
_MOST_POSITIONS = (1 << 31) - 1  # kernels count them in 32 bits
_MOST_EXPERTS = 1 << 12


@dataclass(frozen=True, kw_only=True)
class Config:
    """The numbers of a decoder.

    Attributes:
        hidden: width of the residual stream, H.
        ffn: width of the feed-forward part, F; of one expert where there are experts.
        heads: query heads, Hq.
        kv_heads: Hkv, which divides Hq.
        head_dim: D.
        layers: their number.
        vocabulary: number of tokens.
        rope_base: the base of the angles' frequencies.
        rope_scaling: of these frequencies for longer contexts, as `reference.rope_tables` takes it, or None.
        eps: what RMSNorm adds to the mean square.
        tied_head: whether the LM head is the embedding.
        qkv_bias: whether queries, keys and values have a bias.
        window: tokens that a query sees at most (sliding window), or None.
        window_layers: the layers that have the window, ascending; None for all of them.
        context: tokens of a sequence at most, as the model was trained, or None where nobody says.
        experts: of a layer; 0 for a dense model.
        chosen_experts: how many of them a token takes.
        activation: one of `reference.ACTIVATIONS`.
        name: of the model, where it has one.

    Raises ArgumentError, which names the attribute, for a value that no model can have.
    """

    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocabulary: int
    rope_base: float = 10000.0
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)
    eps: float = 1e-5
    tied_head: bool = False
    qkv_bias: bool = False
    window: int | None = None
    window_layers: tuple[int, ...] | None = None
    context: int | None = None
    experts: int = 0
    chosen_experts: int = 0
    activation: str = "silu"
    name: str = ""

    def __post_init__(self) -> None:
        for name, largest_size in _SIZES.items():
            _require_size(name, getattr(self, name), largest_size)
        for name in ("rope_base", "eps"):
            _require_positive(name, getattr(self, name))
        for name in ("tied_head", "qkv_bias"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(name, "must be True or False", repr(getattr(self, name)))
        if not isinstance(self.name, str):
            raise ArgumentError("name", "must be text", type(self.name).__name__)
        for name in ("window", "context"):
            if getattr(self, name) is not None:
                _require_size(name, getattr(self, name), _MOST_POSITIONS)
        self._check_window_layers()
        if self.heads % self.kv_heads:
            raise ArgumentError("kv_heads", f"must divide the {self.heads} query heads", self.kv_heads)
        if self.head_dim % 2:
            raise ArgumentError("head_dim", "must be even", self.head_dim)
        _check_scaling(self.rope_scaling, self.head_dim)
        if not is_one_of(self.activation, reference.ACTIVATIONS):
            raise ArgumentError("activation", f"must be one of {', '.join(reference.ACTIVATIONS)}", self.activation)
        require_integer("experts", self.experts)
        if self.experts > _MOST_EXPERTS:
            raise ArgumentError("experts", f"must be at most {_MOST_EXPERTS}", self.experts)
        largest_size, smallest = self.experts, min(self.experts, 1)
        if not is_integer(self.chosen_experts) or not smallest <= self.chosen_experts <= largest_size:
            raise ArgumentError("chosen_experts", f"must lie in {smallest}..{largest_size}", repr(self.chosen_experts))

    def _check_window_layers(self) -> None:
        window_layers = self.window_layers
        if window_layers is None:
            return
        are_numbers = isinstance(window_layers, tuple) and all(map(is_integer, window_layers))
        if not are_numbers or [*window_layers] != sorted({*window_layers} & {*range(self.layers)}):
            raise ArgumentError("window_layers", f"must be ascending layers of 0..{self.layers - 1}", window_layers)
        if self.window is None or not window_layers:
            raise ArgumentError("window_layers", "must be None unless some layers have a window", window_layers)

    @classmethod
    def named(cls, name: str) -> "Config":
        """Return a published model's config by name. Raises ArgumentError for a name that is not in `MODELS`."""
        if not is_one_of(name, MODELS):
            raise ArgumentError("Config.named: name", f"must be one of {', '.join(MODELS)}", name)
        return MODELS[name]

    @classmethod
    def from_json(cls, source: str | Path | Mapping[str, Any]) -> Self:
        """Build a config from the config.json of Hugging Face: its path, or its keys and values.

        Families: LLaMA, which Yi and SmolLM are too, Mistral, Mixtral, Qwen2. Raises FileError for a file that cannot
        be read, ArgumentError, which names the key, for what is missing, wrong or not of these families.
        """
        if isinstance(source, str | Path):
            source = read_json(Path(source))
        file_keys = _Keys("config.json", source, {})
        family = file_keys.one_of("model_type", FAMILIES)
        keys = _Keys("config.json", {**_DEFAULTS[family], **file_keys.values}, _JSON)
        for flag in ("attention_bias", "mlp_bias"):
            if keys.flag(flag, False):
                raise keys.wrong(flag, "must be false: only Qwen2's bias of queries, keys and values is known")
        for key, reason in _UNKNOWN_KEYS.items():
            if keys.get(key, None):
                raise keys.wrong(key, f"must be missing: {reason}")
        base, scaling = _rope(keys)
        window, window_layers = _windows(keys, family)
        config: Self = keys.config(
            cls,
            window=window,
            window_layers=window_layers,
            has_experts=family == "mixtral",
            rope_base=base,
            rope_scaling=scaling,
            tied_head=keys.flag("tie_word_embeddings", False),
            qkv_bias=family == "qwen2",
            activation=_ACTIVATIONS[keys.one_of("hidden_act", _ACTIVATIONS, "silu")],
            name=str(keys.get("_name_or_path", "")),
        )
        return config

    def to_json(self) -> dict[str, Any]:
        """Return the keys of a config.json; the inverse of `from_json`.

        Raises ArgumentError for a window of some layers in a family that has one in all.
        """
        is_windowed = self.window is not None
        family = "qwen2" if self.qkv_bias else "mixtral" if self.experts else "mistral" if is_windowed else "llama"
        if self.window_layers is not None and family != "qwen2":
            raise ArgumentError("window_layers", f"must be None in the config of a {family}", self.window_layers)
        sizes = {key: getattr(self, name) for name, key in _JSON.items() if self.experts or "experts" not in name}
        kinds = {True: "sliding_attention", False: "full_attention"}
        types = [kinds[self.window_of(layer) is not None] for layer in range(self.layers)]
        return {
            "model_type": family,
            "architectures": [_ARCHITECTURES[family]],
            **sizes,
            **({"use_sliding_window": is_windowed, "layer_types": types} if family == "qwen2" else {}),
            "rope_theta": self.rope_base,
            "rope_scaling": self.rope_scaling,
            "tie_word_embeddings": self.tied_head,
            "hidden_act": next(
                their_name for their_name, our_name in _ACTIVATIONS.items() if our_name == self.activation
            ),
            "_name_or_path": self.name,
        }

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        *,
        tied_head: bool = False,
        rope_factors: Sequence[float] | None = None,
    ) -> Self:
        """Build a config from the metadata of a GGUF file of architecture `llama` (Mistral and Mixtral too) or `qwen2`.

        The metadata do not say whether the head is tied: it is where the file has no tensor `output.weight`. Nor do
        they hold LLaMA-3's scaling: its factors per pair are the tensor `rope_freqs.weight`. As llama.cpp has it, a
        window is ignored in these architectures. Raises ArgumentError, which names the key, for what is missing or
        wrong.
        """
        arch = _Keys("GGUF", metadata, {}).one_of("general.architecture", ("llama", "qwen2"))
        keys = _Keys("GGUF", metadata, {field: f"{arch}.{key}" for field, key in _GGUF.items()})
        scaling = _gguf_scaling(keys, arch)
        if rope_factors is not None:
            if scaling is not None:
                raise keys.wrong(f"{arch}.rope.scaling.factor", "must be missing beside a tensor of factors per pair")
            scaling = {"rope_type": "per_pair", "factors": list(rope_factors)}
        tokens = keys.get("tokenizer.ggml.tokens", None)
        if not isinstance(tokens, list | None):
            raise ArgumentError("GGUF: tokenizer.ggml.tokens", "must be a list", type(tokens).__name__)
        config: Self = keys.config(
            cls,
            window=None,
            window_layers=None,
            has_experts=not _equals(keys.get(f"{arch}.expert_count", 0), 0),
            tokens=None if tokens is None else len(tokens),
            rope_base=keys.positive(f"{arch}.rope.freq_base", 10000.0),
            rope_scaling=scaling,
            tied_head=tied_head,
            qkv_bias=arch == "qwen2",
            name=str(keys.get("general.name", "")),
        )
        for key in ("rope.dimension_count", "attention.value_length"):
            if not _equals(keys.get(f"{arch}.{key}", config.head_dim), config.head_dim):
                raise keys.wrong(f"{arch}.{key}", f"must be head_dim, {config.head_dim}")
        return config

    def share(self, n: int) -> "Config":
        """Return one GPU's share under tensor parallelism over n GPUs: 1/n of the heads and of the rows of gate and up.

        Raises ArgumentError unless n divides them.
        """
        require_integer("n", n, 1)
        for name in ("heads", "kv_heads", "ffn"):
            if getattr(self, name) % n:
                raise ArgumentError("n", f"must divide the {getattr(self, name)} of {name}", n)
        parts = {name: getattr(self, name) // n for name in ("heads", "kv_heads", "ffn")}
        return self if n == 1 else replace(self, **parts, name=f"{self.name} 1/{n}".strip())

    def window_of(self, layer: int | None = None) -> int | None:
        """Return the most tokens that a query of a layer sees, or None for all.

        Raises ArgumentError for a number that no layer has, and for None where only some layers have the window.
        """
        if layer is not None and not (is_integer(layer) and 0 <= layer < self.layers):
            raise ArgumentError("layer", f"must be a number in 0..{self.layers - 1}", repr(layer))
        if self.window_layers is None:
            return self.window
        if layer is None:
            raise ArgumentError("layer", "must be given where only some layers have the window", "None")
        return self.window if layer in self.window_layers else None

    def rope_tables(self, positions: int | npt.NDArray[Any]) -> tuple[F32, F32]:
        """Return (cos, sin) f32 [.., D/2] at positions [..]; an integer stands for so many positions from 0 on."""
        position_array = np.arange(positions) if is_integer(positions) and 0 <= positions < 2**31 else positions
        if not isinstance(position_array, np.ndarray) or position_array.dtype.kind not in "iu":
            raise ArgumentError("positions", "must be integers [..], or how many", type(positions).__name__)
        return reference.rope_tables(position_array, self.head_dim, self.rope_base, self.rope_scaling)

    @property
    def qkv_width(self) -> int:
        """Width of a token's queries, keys and values, one after the other: (Hq + 2·Hkv)·D."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """(N, K) of a layer's weights in the order of their use; of the last two each expert has its own."""
        shape = ModelShape(self.name, self.hidden, self.ffn, self.heads, self.kv_heads, self.layers, self.head_dim)
        return shape.matrices

    @property
    def separate_matrices(self) -> dict[str, tuple[int, int]]:
        """(N, K) of a layer's weights as checkpoints have them, by name: q, k, v, o, gate, up, down.

        With experts `gate.0`, `up.0`, `down.0` and so on instead of the last three.
        """
        kv_shape, fused = (self.kv_heads * self.head_dim, self.hidden), self.matrices
        attention = {"q": (self.heads * self.head_dim, self.hidden), "k": kv_shape, "v": kv_shape, "o": fused["o"]}
        ffn = {"gate": (self.ffn, self.hidden), "up": (self.ffn, self.hidden), "down": fused["down"]}
        if not self.experts:
            return attention | ffn
        return attention | {f"{part}.{e}": size for e in range(self.experts) for part, size in ffn.items()}


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}  # fmt: skip
# Attribute of `Config` -> key of a config.json; of GGUF metadata, where the name of the architecture stands before it.
_JSON = {
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "layers": "num_hidden_layers",
    "vocabulary": "vocab_size",
    "eps": "rms_norm_eps",
    "window": "sliding_window",
    "context": "max_position_embeddings",
    "experts": "num_local_experts",
    "chosen_experts": "num_experts_per_tok",
}
_GGUF = {
    "hidden": "embedding_length",
    "ffn": "feed_forward_length",
    "heads": "attention.head_count",
    "kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "layers": "block_count",
    "vocabulary": "vocab_size",
    "eps": "attention.layer_norm_rms_epsilon",
    "context": "context_length",
    "experts": "expert_count",
    "chosen_experts": "expert_used_count",
}


# What transformers takes for a key that is missing, by family.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6},
    "mistral": {"rms_norm_eps": 1e-6, "num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {
        "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1e6, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen2": {"rms_norm_eps": 1e-6, "num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
}  # fmt: skip
_UNKNOWN_KEYS = {  # keys that transformers follows in every family
    "per_layer_config": "layers of different sizes are not known",
    "transformers_weights": "weights are looked for by their usual names",
}
_LAYER_TYPES = {"full_attention": False, "attention": False, "sliding_attention": True}  # whether with a window


class _Keys:
    """Values of a file by key; `names`: attribute of `Config` -> key. Every error names the key."""

    def __init__(self, label: str, values: Any, names: Mapping[str, str]) -> None:
        if not isinstance(values, Mapping):
            raise ArgumentError(label, "must be an object of keys and values", type(values).__name__)
        self.values, self._label, self._names = values, label, names

    def get(self, key: str, *default: Any) -> Any:
        """Return the value of a key, or the default if it is missing; without a default it must not be null either."""
        setting = self.values.get(key, *default)
        if setting is None and not default:
            raise ArgumentError(f"{self._label}: {key}", "must be given", "nothing")
        return setting.item() if isinstance(setting, np.generic) else setting

    def count(self, field: str, *default: Any) -> Any:
        """Return the integer, 1 or more, of an attribute of `Config`."""
        key = self._names[field]
        setting = self.get(key, *default)
        if setting is not None:
            _require_size(f"{self._label}: {key}", setting, _SIZES.get(field, _MOST_POSITIONS))
        return setting

    def positive(self, key: str, *default: float) -> float:
        """Return the value of a key, a number above 0."""
        return _require_positive(f"{self._label}: {key}", self.get(key, *default))

    def flag(self, key: str, default: bool) -> bool:
        """Return the value of a key, true or false."""
        setting = self.get(key, default)
        if not isinstance(setting, bool):
            raise self.wrong(key, "must be true or false")
        return setting

    def one_of(self, key: str, choices: Collection[str], *default: str) -> str:
        """Return the value of a key, which must be a name in `choices`."""
        setting = self.get(key, *default)
        if not isinstance(setting, str) or setting not in choices:
            raise self.wrong(key, f"must be one of {', '.join(choices)}")
        return setting

    def part(self, key: str) -> "_Keys | None":
        """Return the object that a key holds, or None if the key is missing."""
        entries = self.get(key, None)
        return None if entries is None else _Keys(f"{self._label}: {key}", entries, {})

    def wrong(self, key: str, rule: str) -> ArgumentError:
        """Return the error for a key's wrong value."""
        return ArgumentError(f"{self._label}: {key}", rule, repr(self.values.get(key)))

    def config(self, kind: Any, *, has_experts: bool, tokens: int | None = None, **fields: Any) -> Any:
        """Build the config; its errors name keys. `tokens` is the number of tokens that the file lists, if it does."""
        heads, hidden = self.count("heads"), self.count("hidden")
        numbers = {
            "hidden": hidden,
            "ffn": self.count("ffn"),
            "heads": heads,
            "kv_heads": self.count("kv_heads", None) or heads,
            "head_dim": self.count("head_dim", None) or max(1, hidden // heads),
            "layers": self.count("layers"),
            "vocabulary": self.count("vocabulary", *(() if tokens is None else (tokens,))),
            "eps": self.positive(self._names["eps"]),
            "context": self.count("context", None),
            "experts": self.count("experts") if has_experts else 0,
            "chosen_experts": self.count("chosen_experts") if has_experts else 0,
        }
        try:
            return kind(**numbers, **fields)
        except ArgumentError as error:
            key = self._names.get(error.argument, error.argument)
            raise ArgumentError(f"{self._label}: {key}", error.rule, error.value) from None


def _rope(keys: _Keys) -> tuple[float, dict[str, Any] | None]:
    """Return RoPE's base and the scaling of a config.json, where old and new keys may stand side by side.

    As transformers has it: `rope_scaling` stands for all of `rope_parameters`, a `rope_theta` in either for the one
    beside them, `rope_type` for `type`, and `original_max_position_embeddings` beside them for the one in them.
    """
    parts = filter(None, map(keys.part, ("rope_scaling", "rope_parameters")))
    rope_keys = next((part for part in parts if part.values), _Keys("config.json", {}, {}))
    if nested_key := next((key for key, entry in rope_keys.values.items() if isinstance(entry, Mapping)), None):
        raise rope_keys.wrong(nested_key, "must be a number: angles by kind of layer are not known")
    for part in (keys, rope_keys):
        if part.get("partial_rotary_factor", None) is not None and part.positive("partial_rotary_factor") != 1:
            raise part.wrong("partial_rotary_factor", "must be 1: only rotations of whole heads are known")
    base = (rope_keys if "rope_theta" in rope_keys.values else keys).positive("rope_theta", 10000.0)
    kind = rope_keys.one_of("rope_type" if "rope_type" in rope_keys.values else "type", ROPE_SCALINGS, "default")
    original_context = keys.get("original_max_position_embeddings", None)
    if original_context is None:
        original_context = rope_keys.get("original_max_position_embeddings", keys.get("max_position_embeddings", None))
    numbers = {**rope_keys.values, "original_max_position_embeddings": original_context}
    scaling = {"rope_type": kind, **{name: numbers[name] for name in ROPE_SCALINGS[kind] if name in numbers}}
    return base, scaling if ROPE_SCALINGS[kind] else None


def _windows(keys: _Keys, family: str) -> tuple[int | None, tuple[int, ...] | None]:
    """Return the window of a config.json and the layers that have it (None for all), as transformers does.

    LLaMA has no window, whatever the config says; Mistral and Mixtral have it in all layers; Qwen2 in those that
    `layer_types` names, else from `max_window_layers` on, and only with `use_sliding_window`.
    """
    layers, listed_layers = keys.count("layers"), _named_layers(keys)
    is_windowed = family != "llama" and (family != "qwen2" or keys.flag("use_sliding_window", False))
    window, first_windowed_layer = keys.count("window", None) if is_windowed else None, 0
    if family == "qwen2" and window is not None and listed_layers is None:
        first_windowed_layer = keys.get("max_window_layers")
        require_integer("config.json: max_window_layers", first_windowed_layer)
    windowed_layers = tuple(range(min(first_windowed_layer, layers) if window is not None else layers, layers))
    if listed_layers is not None:
        if listed_layers != windowed_layers and (family != "qwen2" or window is None):
            raise keys.wrong("layer_types", f"must agree with the window of a {family}, {window}")
        windowed_layers = listed_layers
    return (window, None if len(windowed_layers) == layers else windowed_layers) if windowed_layers else (None, None)


def _named_layers(keys: _Keys) -> tuple[int, ...] | None:
    """Return the layers that have a window by `layer_types`, or None if a config.json has no such key."""
    layers, types = keys.count("layers"), keys.get("layer_types", None)
    if types is None:
        return None
    are_known = isinstance(types, list) and all(isinstance(kind, str) and kind in _LAYER_TYPES for kind in types)
    if not are_known or len(types) != layers:
        raise keys.wrong("layer_types", f"must be {layers} of {', '.join(_LAYER_TYPES)}")
    return tuple(layer for layer, kind in enumerate(types) if _LAYER_TYPES[kind])


def _gguf_scaling(keys: _Keys, arch: str) -> dict[str, Any] | None:
    """Return the scaling of a GGUF file as llama.cpp reads it.

    It is linear unless a type is named; a factor of 0 means no scaling.
    """
    prefix = f"{arch}.rope.scaling"
    if unknown_key := next((key for key in keys.values if key.startswith(f"{prefix}.yarn_")), None):
        raise keys.wrong(unknown_key, "must be missing: YaRN is not known")
    if keys.positive(f"{prefix}.attn_factor", 1.0) != 1:
        raise keys.wrong(f"{prefix}.attn_factor", "must be 1: scaled attention is not known")
    kind = keys.one_of(f"{prefix}.type", ("none", "linear"), "linear")
    name = f"{prefix}.factor" if f"{prefix}.factor" in keys.values else f"{arch}.rope.scale_linear"
    factor = keys.get(name, 0)
    if type(factor) not in (int, float) or factor != 0:
        factor = keys.positive(name)
    return None if kind == "none" or factor in (0, 1) else {"rope_type": "linear", "factor": factor}


def _check_scaling(scaling: dict[str, Any] | None, head_dim: int) -> None:
    """Raise ArgumentError for what `reference.rope_tables` does not take."""
    if scaling is not None and not isinstance(scaling, dict):
        raise ArgumentError("rope_scaling", "must be a dictionary or None", type(scaling).__name__)
    for name, number in (scaling or {}).items():
        if name not in ("rope_type", "type", "factors"):
            _require_positive(f"rope_scaling {name}", number)
    try:
        with np.errstate(over="raise"):
            reference.rope_tables(np.zeros(1), head_dim, scaling=scaling)
    except (TypeError, ValueError, FloatingPointError) as error:
        raise ArgumentError("rope_scaling", "must be one that rope_tables takes", error) from None


def require_config(name: str, config: Any) -> None:
    """Raise ArgumentError for what is no Config."""
    if not isinstance(config, Config):
        raise ArgumentError(name, "must be a Config", type(config).__name__)


def _equals(setting: Any, integer: int) -> bool:
    """Tell whether a file's setting, of whatever type, is this integer."""
    return is_integer(setting) and setting == integer


def _require_size(name: str, size: Any, largest: int) -> None:
    require_integer(name, size, 1)
    if size > largest:
        raise ArgumentError(name, f"must be at most {largest}", size)


def _require_positive(name: str, number: Any) -> float:
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number <= sys.float_info.max:
        raise ArgumentError(name, "must be a number above 0", repr(number))
    return float(number)


def _published_config(name: str, vocabulary: int = 32000, **fields: Any) -> Config:
    """Build a published model's config from its shape, its vocabulary and further fields."""
    shape = asdict(SHAPES[name])
    return Config(vocabulary=vocabulary, **shape, **fields)


MODELS = {
    config.name: config
    for config in (
        _published_config("LLaMA-30B", eps=1e-6),
        _published_config("LLaMA-2-7B"),
        _published_config("LLaMA-2-13B"),
        _published_config("LLaMA-2-70B"),
        _published_config("LLaMA-3-8B", 128256, rope_base=500000.0),
        _published_config("LLaMA-3-70B", 128256, rope_base=500000.0),
        _published_config("Mistral-7B"),
        _published_config("Yi-34B", 64000, rope_base=5000000.0),
        _published_config("Mixtral-8x7B", rope_base=1000000.0),
        _published_config("Qwen1.5-72B", 152064, rope_base=1000000.0, eps=1e-6, qkv_bias=True),
    )
}
