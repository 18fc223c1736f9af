"""Small random models of `transformers`, of five families, one of them also with a window in its last layer only."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SHARED: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
    "num_hidden_layers": 2, "vocab_size": 96, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 1e4,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": _LLAMA3}),
    "smollm": ("Llama", {"tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7}),
    "windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
}


def small_model(family: str = "llama", dtype: str = "float16", **changes: Any) -> Any:
    """Make a small model whose weights matter for its results; they are the same each time."""
    kind, differs = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**{**SHARED, **differs, **changes})
    model, rng = getattr(transformers, f"{kind}ForCausalLM")(config), np.random.RandomState(1)
    for name, parameter in model.named_parameters():
        values = rng.standard_normal(parameter.shape) / np.sqrt(parameter.shape[-1]) + (1 if "norm" in name else 0)
        parameter.data = torch.from_numpy(values.astype(np.float32))
    return model.to(getattr(torch, dtype)).eval()
