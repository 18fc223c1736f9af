"""Decoders of the Llama family on the kernels: their shapes, packed weights, a layer as a chain of launches, twins."""

from ptxlab.model.config import MODELS, Config

__all__ = ["MODELS", "Config"]
