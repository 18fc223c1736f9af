"""ptxlab: a workbench for low-bit LLM kernels."""

__version__ = "0.1.0"
