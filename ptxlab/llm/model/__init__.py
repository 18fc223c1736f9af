"""Decoders of the Llama family: in floats, and with packed weights on the kernels.

`checkpoints.open_model` reads a trained model; `perplexity` measures how well it predicts a text.
`decode_layer` runs one layer on the kernels, `layer_calls` lists its launches, `reference` has its NumPy twins.
"""

from ptxlab.llm.model.config import MODELS, Config
from ptxlab.llm.model.float_runner import FloatRunner
from ptxlab.llm.model.floats import FloatModel, perplexity
from ptxlab.llm.model.generate import generate
from ptxlab.llm.model.kernel_runner import KernelRunner
from ptxlab.llm.model.layer import LayerBuffers, LayerCall, decode_layer, layer_calls
from ptxlab.llm.model.memory import Footprint, largest_batch, require_batch
from ptxlab.llm.model.numpy_runner import NumpyRunner
from ptxlab.llm.model.quantized import QuantizedModel
from ptxlab.llm.model.reference import LayerInputs
from ptxlab.llm.model.runner import Runner
from ptxlab.llm.model.sampling import Sampling
from ptxlab.llm.model.weights import LayerWeights

__all__ = [
    "MODELS",
    "Config",
    "FloatModel",
    "FloatRunner",
    "Footprint",
    "KernelRunner",
    "LayerBuffers",
    "LayerCall",
    "LayerInputs",
    "LayerWeights",
    "NumpyRunner",
    "QuantizedModel",
    "Runner",
    "Sampling",
    "decode_layer",
    "generate",
    "largest_batch",
    "layer_calls",
    "perplexity",
    "require_batch",
]
