"""Decoders of the Llama family: in floats, and with packed weights on the kernels.

`open_model` reads a trained model, `open_text` a text; `perplexity` measures how well the model predicts the text.
`decode_layer` runs one layer on the kernels, `layer_calls` lists its launches, `reference` has its NumPy twins.
"""

from ptxlab.model.config import MODELS, Config
from ptxlab.model.floats import FloatModel, perplexity
from ptxlab.model.generate import generate
from ptxlab.model.kernel_runner import KernelRunner
from ptxlab.model.layer import LayerBuffers, LayerCall, decode_layer, layer_calls
from ptxlab.model.memory import Footprint, largest_batch, require_batch
from ptxlab.model.numpy_runner import NumpyRunner
from ptxlab.model.open import open_model
from ptxlab.model.parting import Parting, parting
from ptxlab.model.quantized import QuantizedModel
from ptxlab.model.reference import LayerInputs
from ptxlab.model.runner import Runner
from ptxlab.model.server import Request, Server
from ptxlab.model.text import Corpus, open_text, tokens_of, windows
from ptxlab.model.weights import LayerWeights

__all__ = [
    "MODELS",
    "Config",
    "Corpus",
    "FloatModel",
    "Footprint",
    "KernelRunner",
    "LayerBuffers",
    "LayerCall",
    "LayerInputs",
    "LayerWeights",
    "NumpyRunner",
    "Parting",
    "QuantizedModel",
    "Request",
    "Runner",
    "Server",
    "decode_layer",
    "generate",
    "largest_batch",
    "layer_calls",
    "open_model",
    "open_text",
    "parting",
    "perplexity",
    "require_batch",
    "tokens_of",
    "windows",
]
