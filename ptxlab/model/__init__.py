"""Decoders of the Llama family on the kernels: their shapes, packed weights, a layer as a chain of launches, twins.

`decode_layer` is the layer, `layer_calls` what it calls, `reference` its NumPy twins.
"""

from ptxlab.model.config import MODELS, Config
from ptxlab.model.floats import FloatModel, perplexity
from ptxlab.model.layer import LayerBuffers, LayerCall, decode_layer, layer_calls
from ptxlab.model.quantized import QuantizedModel
from ptxlab.model.reference import LayerInputs
from ptxlab.model.weights import LayerWeights

__all__ = [
    "MODELS",
    "Config",
    "FloatModel",
    "LayerBuffers",
    "LayerCall",
    "LayerInputs",
    "LayerWeights",
    "QuantizedModel",
    "decode_layer",
    "layer_calls",
    "perplexity",
]
