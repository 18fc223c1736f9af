"""Small decoders of each family with random weights, written as Hugging Face folders and as GGUF files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

VOCABULARY = 300
_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    "max_position_embeddings": 128, "eos_token_id": 1, "bos_token_id": None, "dtype": "float32",
}  # fmt: skip
# By family, what a config.json says.
CONFIGS: dict[str, dict[str, Any]] = {
    "smollm": {**_LLAMA, "tie_word_embeddings": True, "rope_theta": 1e5},
    "llama3": {
        **_LLAMA,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {**_LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 5},
    "qwen2": {
        **_LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6,
        "num_key_value_heads": 1, "tie_word_embeddings": True, "use_sliding_window": False, "eos_token_id": [1, 2],
    },
}  # fmt: skip
_FAMILIES: dict[str, dict[str, Any]] = {
    **CONFIGS,
    "mixtral": {
        **_LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "intermediate_size": 96,
        "sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
}  # fmt: skip


def tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Make random weights f32 by the names of Hugging Face.

    No version of NumPy changes this generator's numbers.
    """
    rng = np.random.RandomState(seed)
    H, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    D = H // config["num_attention_heads"]
    of_kv = config["num_key_value_heads"] * D
    weights = {"model.embed_tokens.weight": rng.standard_normal((V, H)), "model.norm.weight": rng.uniform(0.5, 1.5, H)}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = rng.standard_normal((V, H)) / 4
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        ffn = {"mlp.gate_proj": (F, H), "mlp.up_proj": (F, H), "mlp.down_proj": (H, F)}
        if config["model_type"] == "mixtral":
            of_experts = range(config["num_local_experts"])
            shapes = {"w1": (F, H), "w3": (F, H), "w2": (H, F)}
            ffn = {f"block_sparse_moe.experts.{e}.{name}": size for e in of_experts for name, size in shapes.items()}
            ffn["block_sparse_moe.gate"] = len(of_experts), H
        for name, (N, K) in {
            "self_attn.q_proj": (H, H), "self_attn.k_proj": (of_kv, H), "self_attn.v_proj": (of_kv, H),
            "self_attn.o_proj": (H, H), **ffn,
        }.items():  # fmt: skip
            weights[f"{prefix}{name}.weight"] = rng.standard_normal((N, K)) / np.sqrt(K)
            if config["model_type"] == "qwen2" and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                weights[f"{prefix}{name}.bias"] = rng.standard_normal(N)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = rng.uniform(0.5, 1.5, H)
    return {name: array.astype(np.float32) for name, array in weights.items()}


def tokenizer() -> tokenizers.Tokenizer:
    """Make a byte-level BPE of 256 bytes, two tokens for ends, a word and the merges of its letters."""
    bytes_of_text = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<end>", "<turn>", *bytes_of_text, "th", "the", "Ġthe"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    bpe = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.add_special_tokens(["<end>", "<turn>"])
    return bpe


def random_tokens(windows: int = 2, length: int = 24) -> np.ndarray:
    """Return random token ids [windows, length], always the same ones."""
    return np.random.RandomState(1).randint(0, VOCABULARY, (windows, length))


def write_folder(folder: Path, family: str, *, shards: int = 1, **changes: Any) -> Path:
    """Write a model as a Hugging Face folder; `changes` are those of its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**_FAMILIES[family], **changes}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer().save(str(folder / "tokenizer.json"))
    weights = tensors(config)
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(weights)}
    for file in {*files.values()}:
        save_file(
            {name: weights[name] for name in weights if files[name] == file}, folder / file, metadata={"format": "pt"}
        )
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


_GGUF = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "block_sparse_moe.gate": "ffn_gate_inp", "block_sparse_moe.w1": "ffn_gate_exps",
    "block_sparse_moe.w3": "ffn_up_exps", "block_sparse_moe.w2": "ffn_down_exps",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a Hugging Face tensor."""
    ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, suffix = name.rpartition(".")
    if stem in ends:
        return f"{ends[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF[part]}.{suffix}"


def write_gguf(path: Path, family: str, quantization: str = "F32", **metadata: Any) -> Path:
    """Write a model as llama.cpp's converter does, with further metadata.

    Matrices but the embedding are in a type of GGUF.
    """
    import gguf

    config = _FAMILIES[family]
    arch = "qwen2" if family == "qwen2" else "llama"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    words = json.loads(tokenizer().to_str())["model"]
    tokens = sorted(words["vocab"], key=words["vocab"].get)
    tokens += [f"[{i}]" for i in range(len(tokens), VOCABULARY)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * 259, *[5] * (VOCABULARY - 261)])  # control, normal, unused
    writer.add_token_merges([" ".join(pair) for pair in words["merges"]])
    writer.add_eos_token_id(1)
    for key, setting in metadata.items():
        getattr(writer, f"add_{key}")(setting)
    kind = gguf.GGMLQuantizationType[quantization]
    if "num_local_experts" in config:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    for name, array in with_stacked_experts(tensors(config)).items():
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):  # the two of a pair side by side
            D = config["hidden_size"] // config["num_attention_heads"]
            array = array.reshape(-1, 2, D // 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        packed = array.ndim >= 2 and "embed" not in name and "moe.gate" not in name
        raw = gguf.quants.quantize(np.ascontiguousarray(array), kind) if packed else array
        writer.add_tensor(gguf_name(name), raw, raw_dtype=kind if packed else None)
    if "rope_scaling" in config:
        writer.add_tensor("rope_freqs.weight", rope_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_stacked_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stack the matrices of a layer's experts, `..block_sparse_moe.w1.weight` [E, N, K], as llama.cpp has them."""
    stacked: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        layer, is_of_expert, part = name.partition(".experts.")
        if is_of_expert:
            of_all = f"{layer}.{part.partition('.')[2]}"
            stacked[of_all] = np.concatenate([*([stacked[of_all]] if of_all in stacked else []), array[None]])
        else:
            stacked[name] = array
    return stacked


def rope_factors(config: dict[str, Any]) -> np.ndarray:
    """Compute LLaMA-3's scaling as llama.cpp's converter writes it: the divisor of each pair's frequency."""
    scaling, D = config["rope_scaling"], config["hidden_size"] // config["num_attention_heads"]
    old, low, high = (
        scaling[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    factors = []
    for frequency in 1.0 / config["rope_theta"] ** (np.arange(0, D, 2) / D):
        length = 2 * np.pi / frequency
        if length < old / high:
            factors.append(1)
        elif length > old / low:
            factors.append(scaling["factor"])
        else:
            smooth = (old / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)
