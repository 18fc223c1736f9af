"""Tiny decoders of random weights, in memory and as folders of Hugging Face, with a tokenizer of bytes."""

import json
from pathlib import Path

import numpy as np
import safetensors.numpy

from ptxlab.model import Config, FloatModel

TINY_MODEL = Config(
    hidden=64, ffn=96, heads=2, kv_heads=1, head_dim=64, layers=2, vocabulary=260, tied_head=True, context=200
)
END = 257  # of the tokenizer: behind the bytes come <|im_start|>, <|im_end|> and <|endoftext|>
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_NAMES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    "input_norm": "input_layernorm", "post_norm": "post_attention_layernorm",
}  # fmt: skip


def write_model_folder(folder: Path, model: FloatModel) -> Path:
    """config.json, model.safetensors and tokenizer.json of a model with tied head and no biases."""
    config = model.config
    tensors = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.final_norm}
    for i, layer in enumerate(model.layers):
        tensors |= {f"model.layers.{i}.{_NAMES[name]}.weight": np.ascontiguousarray(w) for name, w in layer.items()}
    folder.mkdir(parents=True)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    numbers = {
        "model_type": "llama", "hidden_size": config.hidden, "intermediate_size": config.ffn,
        "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim,
        "num_hidden_layers": config.layers, "vocab_size": config.vocabulary, "tie_word_embeddings": True,
        "rms_norm_eps": config.eps, "max_position_embeddings": config.context, "eos_token_id": END,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(numbers))
    write_tokenizer(folder / "tokenizer.json")
    return folder


def write_tokenizer(path: Path) -> None:
    """Byte-level BPE without a merge: a token for each byte, and three that are special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(list(_SPECIAL))
    made.save(str(path))
