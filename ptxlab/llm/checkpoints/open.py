"""`open_model`: a trained model by name, from a Hugging Face folder or a GGUF file; layers are read when needed."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ptxlab.errors import FileError, in_file, nearest_of
from ptxlab.io import downloads as weights
from ptxlab.llm.checkpoints.folder import RECIPE, load, load_layer
from ptxlab.llm.checkpoints.foreign import ForeignCheckpoint
from ptxlab.llm.checkpoints.gguf import GgufFile
from ptxlab.llm.checkpoints.tokenizer import Tokenizer
from ptxlab.llm.model.config import Config
from ptxlab.llm.model.decoder import EXPERT_MATRICES, NORMS, ROUTER, Layer, expert_of, expert_part
from ptxlab.llm.model.floats import FloatModel, MappedLayers
from ptxlab.llm.model.numerics import FakeQuantized
from ptxlab.llm.model.quantized import QuantizedModel, dequantize_layer, numerics_of
from ptxlab.lowbit.layout.checkpoint import FLOATS
from ptxlab.lowbit.quant.inputs import extremes
from ptxlab.spec.dtypes import floats

# Names of tensors: ours -> the file's. `{}` is the number of the layer.
_GGUF = {
    "embedding": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight",
    "input_norm": "blk.{}.attn_norm.weight", "post_norm": "blk.{}.ffn_norm.weight",
    "q": "blk.{}.attn_q.weight", "k": "blk.{}.attn_k.weight", "v": "blk.{}.attn_v.weight",
    "o": "blk.{}.attn_output.weight", "gate": "blk.{}.ffn_gate.weight", "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
    "q_bias": "blk.{}.attn_q.bias", "k_bias": "blk.{}.attn_k.bias", "v_bias": "blk.{}.attn_v.bias",
    "router": "blk.{}.ffn_gate_inp.weight",
}  # fmt: skip
_GGUF_STACKS = {  # of all experts of a layer, [E, N, K]
    "gate": "blk.{}.ffn_gate_exps.weight", "up": "blk.{}.ffn_up_exps.weight", "down": "blk.{}.ffn_down_exps.weight",
}  # fmt: skip
_HUGGING_FACE = {
    "embedding": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight",
    "input_norm": "model.layers.{}.input_layernorm.weight",
    "post_norm": "model.layers.{}.post_attention_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight", "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight", "o": "model.layers.{}.self_attn.o_proj.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight", "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
    "q_bias": "model.layers.{}.self_attn.q_proj.bias", "k_bias": "model.layers.{}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{}.self_attn.v_proj.bias",
    "router": "model.layers.{}.block_sparse_moe.gate.weight",
}  # fmt: skip
_EXPERTS = {  # of a Hugging Face folder; the second `{}` is the number of the expert
    "gate": "model.layers.{}.block_sparse_moe.experts.{}.w1.weight",
    "up": "model.layers.{}.block_sparse_moe.experts.{}.w3.weight",
    "down": "model.layers.{}.block_sparse_moe.experts.{}.w2.weight",
}
_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # org/name
_FILES = (".gguf", ".safetensors", ".pt", ".bin")
_ROPE_FACTORS = "rope_freqs.weight"
MODELS = tuple(name for name, shipped in weights.KNOWN.items() if shipped.kind == "model")


def open_model(
    source: str | Path, progress: weights.Progress = lambda done, total: None
) -> tuple[FloatModel, Tokenizer]:
    """Open the model in float32 and its tokenizer.

    Args:
        source: a folder with config.json, tokenizer.json and safetensors (LLaMA, Mistral, Mixtral, Qwen2, Yi, SmolLM),
            also one that other projects quantised (`foreign`), which is dequantised; a .gguf file of these families;
            "smollm2", which is downloaded unless it is cached; or the folder of a quantised model, dequantised.
        progress: called during the download with (bytes done, bytes in total).

    A layer is read from the file each time it is needed, so memory holds one layer, the embedding and the head. Names,
    shapes and types of all tensors are checked before any is read; NaN and infinity when a tensor is read.

    Raises FileError for a file that is broken or of another architecture, UnavailableError without the libraries of the
    extra `model`, or where the download fails.
    """
    path = Path(source)
    if str(source) in MODELS:
        folder = weights.fetch(str(source), progress)
        path = folder / next(file.name for file in weights.KNOWN[str(source)].files if file.name.endswith(".gguf"))
    if path.is_file() and path.suffix in (".safetensors", ".pt", ".bin"):
        raise FileError(f"{source}: a file of weights, no model; pass its folder, which has config.json too")
    if path.is_file():
        return _open_gguf(path)
    if not path.is_dir():
        rule = f"one of {', '.join(MODELS)}"
        raise missing(source, f"no model: a folder, a .gguf file, or {rule}{nearest_of(rule, str(source))}")
    if is_quantized(path):
        model = dequantize_model(load(path))
        return model, open_tokenizer(path, model.config)
    return _open_folder(path)


def missing(source: str | Path, rule: str) -> FileError:
    """Make the error for a missing model or checkpoint; a repository's name gets the command that fetches it."""
    path = Path(source)
    if not _REPOSITORY.fullmatch(str(source)) or path.suffix in _FILES or path.parent.is_dir():
        return FileError(f"{source}: {rule}")
    name = path.name
    if "gguf" not in name.lower():
        return FileError(
            f"{source}: no folder here; fetch it by `hf download {source} --local-dir {name}`, then pass {name}"
        )
    fetch = f"hf download {source} --include '*[qQ]8_0*.gguf' --local-dir {name}"
    return FileError(f"{source}: no file here; fetch one by `{fetch}`, then pass {name}/FILE.gguf")


def tensor_name(part: str, layer: int) -> str:
    """Name the tensor of a Hugging Face folder that is a part of a layer: `q`, `input_norm`, of an expert `gate.3`."""
    return _tensor_name(_HUGGING_FACE, part, layer)


def _tensor_name(names: Mapping[str, str], part: str, layer: int | None) -> str:
    expert = expert_of(part)
    return names[part].format(layer) if expert is None else _EXPERTS[part.partition(".")[0]].format(layer, expert)


def is_quantized(path: Path) -> bool:
    """Check whether `path` is the folder of a quantised model."""
    return (path / RECIPE).is_file()


def stored_numerics(folder: Path) -> FakeQuantized:
    """Return the numerics of the quantised model in a folder, read from its first layer."""
    with in_file(folder):
        config = Config.from_json(folder / "config.json")
    return numerics_of(load_layer(folder, 0, config))


def dequantize_model(model: QuantizedModel) -> FloatModel:
    """Convert a quantised model to a float32 model; a layer is dequantised each time it is needed."""
    return FloatModel(
        config=model.config,
        embedding=floats(model.embedding),
        layers=MappedLayers(model.layers, dequantize_layer),
        final_norm=floats(model.final_norm),
        head=None if model.head is None else floats(model.head),
    )


def _open_gguf(path: Path) -> tuple[FloatModel, Tokenizer]:
    file = GgufFile(path)
    factors = file.read(_ROPE_FACTORS).tolist() if _ROPE_FACTORS in file.tensors else None
    is_head_tied = _GGUF["head"] not in file.tensors
    with in_file(path):
        config = Config.from_gguf(file.metadata, tied_head=is_head_tied, rope_factors=factors)
    head_counts = {"q": config.heads, "k": config.kv_heads} if file.metadata["general.architecture"] == "llama" else {}

    def deinterleave_heads(name: str, array: Any) -> Any:
        """Reorder rows of q and k for `reference.rope`: GGUF's `llama` interleaves the two halves of a head."""
        if name not in head_counts:
            return array
        return array.reshape(head_counts[name], -1, 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)

    names = _GGUF | (_GGUF_STACKS if config.experts else {})
    model = _model(
        _Weights(file, names, config, deinterleave_heads, in_stacks=bool(config.experts)), unused={_ROPE_FACTORS}
    )
    return model, _require_fit(Tokenizer.from_gguf(path, file.metadata), config, path)


def _open_folder(path: Path) -> tuple[FloatModel, Tokenizer]:
    if not (path / "config.json").is_file():
        raise FileError(f"{path}: no config.json: not a Hugging Face model")
    with in_file(path):
        config = Config.from_json(path / "config.json")
    file = ForeignCheckpoint(path)
    unused = {name for name in file.tensors if name.endswith("rotary_emb.inv_freq")}  # of old checkpoints
    unused |= file.zero_biases()
    if unsupported := next((tensor for name, tensor in file.tensors.items() if tensor.dtype not in FLOATS), None):
        raise FileError(
            f"{path}: {unsupported.name}: dtype must be one of {', '.join(FLOATS)} (got {unsupported.dtype})"
        )
    if config.tied_head and _HUGGING_FACE["head"] in file.tensors:  # transformers believes the file, not the config
        untied = _model(_Weights(file, _HUGGING_FACE, replace(config, tied_head=False)), unused)
        model = replace(untied, config=config, head=None) if (untied.head == untied.embedding).all() else untied
    else:
        model = _model(_Weights(file, _HUGGING_FACE, config), unused)
    return model, open_tokenizer(path, config)


def open_tokenizer(folder: Path, config: Config) -> Tokenizer:
    """Open the tokenizer of a Hugging Face folder or of a quantised model's. Raises FileError if it is broken."""
    return _require_fit(Tokenizer.from_folder(folder), config, folder)


def _require_fit(tokenizer: Tokenizer, config: Config, path: Path) -> Tokenizer:
    if tokenizer.vocabulary > config.vocabulary:
        raise FileError(f"{path}: tokenizer: at most {config.vocabulary} tokens (got {tokenizer.vocabulary})")
    if tokens_beyond := [token for token in tokenizer.starts if token >= config.vocabulary]:
        raise FileError(f"{path}: tokenizer: start tokens must be below {config.vocabulary} (got {tokens_beyond[0]})")
    return tokenizer


def _model(weights: "_Weights", unused: set[str]) -> FloatModel:
    weights.check(unused)
    head = None if weights.config.tied_head else weights.read("head")
    return FloatModel(
        config=weights.config,
        embedding=weights.read("embedding"),
        layers=MappedLayers(range(weights.config.layers), weights.layer),
        final_norm=weights.read("final_norm"),
        head=head,
    )


@dataclass(frozen=True)
class _Weights:
    """A file's tensors by our names.

    `reorder(name, array)` puts rows into this project's order; `in_stacks`: a tensor holds all experts of a layer.
    """

    file: GgufFile | ForeignCheckpoint
    names: Mapping[str, str]
    config: Config
    reorder: Callable[[str, Any], Any] = lambda name, array: array
    in_stacks: bool = False

    def read(self, name: str, layer: int | None = None) -> Any:
        """Read one tensor as f32. Raises FileError for NaN or infinity."""
        stored_name = _tensor_name(self.names, name, layer)
        with np.errstate(over="ignore"):  # of float64; what becomes infinite is refused
            array = self.file.read(stored_name).astype(np.float32, copy=False)
        with in_file(self.file.path):
            extremes(stored_name, array)
        return self.reorder(name, array)

    def layer(self, index: int) -> Layer:
        """Read every tensor of a layer."""
        parts = {name: self.read(name, index) for name in self.shapes}
        for part in EXPERT_MATRICES if self.in_stacks else ():
            parts |= {expert_part(part, expert): w for expert, w in enumerate(parts.pop(part))}
        return parts

    def check(self, unused: set[str]) -> None:
        """Raise FileError unless the file has the tensors of the config in their shapes, and no others but `unused`."""
        unread_names = self.file.tensors.keys() - unused
        V, H = self.config.vocabulary, self.config.hidden
        shapes = {"embedding": (V, H), "final_norm": (H,)} | ({} if self.config.tied_head else {"head": (V, H)})
        self._check_shapes(shapes, None, unread_names)
        for layer in range(self.config.layers):  # stops at the first missing layer, however many the config claims
            self._check_shapes(self.shapes, layer, unread_names)
        if unread_names:
            raise FileError(f"{self.file.path}: {min(unread_names)}: not known in a model of this family")

    def _check_shapes(self, shapes: Mapping[str, tuple[int, ...]], layer: int | None, unread: set[str]) -> None:
        for name, shape in shapes.items():
            stored_name = _tensor_name(self.names, name, layer)
            if stored_name not in self.file.tensors:
                raise FileError(f"{self.file.path}: {stored_name}: missing")
            if (stored_shape := self.file.tensors[stored_name].shape) != shape:
                raise FileError(f"{self.file.path}: {stored_name}: must be {[*shape]} (got {[*stored_shape]})")
            unread.discard(stored_name)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a layer's tensors by our names."""
        matrices = self.config.separate_matrices
        if self.in_stacks:
            stacks = {part: (self.config.experts, *matrices[expert_part(part, 0)]) for part in EXPERT_MATRICES}
            matrices = {name: size for name, size in matrices.items() if expert_of(name) is None}
            matrices |= stacks  # type: ignore[arg-type]
        biases = {f"{name}_bias": matrices[name][:1] for name in ("q", "k", "v")} if self.config.qkv_bias else {}
        router = {ROUTER: (self.config.experts, self.config.hidden)} if self.config.experts else {}
        return {**matrices, **biases, **router, **dict.fromkeys(NORMS, (self.config.hidden,))}
