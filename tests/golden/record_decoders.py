"""Record what transformers computes for the small decoders of `tests/support/small_models.py`.

`python -m tests.golden.record_decoders`, where PyTorch and transformers are installed.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.small_models import CONFIGS, random_tokens, write_folder

PATH = Path(__file__).with_name("decoders.npz")


def by_transformers(folder: Path, tokens: np.ndarray) -> tuple[Any, float]:
    """Compute logits [B, T, V] and perplexity, by PyTorch's implementation."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        inputs = torch.from_numpy(tokens)
        outputs = model(inputs, labels=inputs)
    return outputs.logits.numpy(), float(outputs.loss.exp())


def record() -> None:
    """Write every tenth logit of the first window, and the perplexity of both."""
    recorded: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for family in CONFIGS:
            logits, perplexity = by_transformers(write_folder(Path(folder) / family, family), random_tokens())
            recorded |= {f"{family}.logits": logits[0, :, ::10], f"{family}.perplexity": perplexity}
    np.savez_compressed(PATH, **recorded)


if __name__ == "__main__":
    record()
