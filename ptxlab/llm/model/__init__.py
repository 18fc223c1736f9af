"""Decoders of the Llama family: in floats, and with packed weights on the kernels.

`open_model` reads a trained model, `open_text` a text; `perplexity` measures how well the model predicts the text.
`decode_layer` runs one layer on the kernels, `layer_calls` lists its launches, `reference` has its NumPy twins.
"""

from ptxlab.llm.accuracy.parting import Parting, parting
from ptxlab.llm.accuracy.text import Corpus, open_text, tokens_of, windows
from ptxlab.llm.checkpoints.open import open_model
from ptxlab.llm.model.config import MODELS, Config
from ptxlab.llm.model.floats import FloatModel, perplexity
from ptxlab.llm.model.generate import generate
from ptxlab.llm.model.kernel_runner import KernelRunner
from ptxlab.llm.model.layer import LayerBuffers, LayerCall, decode_layer, layer_calls
from ptxlab.llm.model.memory import Footprint, largest_batch, require_batch
from ptxlab.llm.model.numpy_runner import NumpyRunner
from ptxlab.llm.model.quantized import QuantizedModel
from ptxlab.llm.model.reference import LayerInputs
from ptxlab.llm.model.runner import Runner
from ptxlab.llm.model.weights import LayerWeights
from ptxlab.llm.server import Request, Server

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
