"""Files of models: Hugging Face folders, GGUF, PyTorch files, tokenizers, other projects' quantised weights."""

from ptxlab.llm.checkpoints.open import open_model

__all__ = ["open_model"]
