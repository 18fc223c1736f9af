"""The product with `lm_head` in INT8, a scale per row of the head and per token; sums are exact."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.llm.torch import operators as _operators  # noqa: F401  (defines torch.ops.ptxlab)
from ptxlab.llm.vllm import NAME
from ptxlab.llm.vllm.kernels import ProductKernels
from ptxlab.lowbit.quant import quantize_level1
from ptxlab.lowbit.quant.inputs import DEVICE_STRIP

_LARGEST = 127
_STEP = 32  # of the columns that activations are quantised in


class Int8HeadMethod(QuantizeMethodBase):
    """Method of a head, whose float weight is quantised when all layers are loaded.

    Attributes:
        kernels: those of all products.
        prefix: the layer's name.
        is_embedding: whether the layer is the embedding, too, whose floats are then kept for looking up.
    """

    def __init__(self, kernels: ProductKernels, prefix: str, *, is_embedding: bool = False) -> None:
        self.kernels, self.prefix, self.is_embedding = kernels, prefix, is_embedding

    def create_weights(self, layer: nn.Module, input_size_per_partition: int, *sizes: Any, **options: Any) -> None:
        """Give the layer a float weight [V, H]. Raises ArgumentError for a width that cannot be quantised."""
        if input_size_per_partition % _STEP:
            rule = f"width must be a multiple of {_STEP} for a head in INT8"
            raise ArgumentError(f"--quantization {NAME}: {self.prefix}", rule, input_size_per_partition)
        UnquantizedEmbeddingMethod.create_weights(self, layer, input_size_per_partition, *sizes, **options)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Quantise the head where it lies. Raises ArgumentError for a weight that is not finite, and for a reload."""
        if hasattr(layer, "int8_weight"):
            raise ArgumentError(f"--quantization {NAME}: {self.prefix}", "weights are loaded once", "a reload")
        weight = layer.weight.data
        rows = max(1, DEVICE_STRIP // weight.shape[1])
        try:
            parts = [_quantise(part) for part in weight.split(rows)]
        except ArgumentError as error:
            raise ArgumentError(f"--quantization {NAME}: {self.prefix}", error.rule, error.value) from None
        layer.int8_weight, layer.int8_scale = (
            nn.Parameter(torch.cat(tensors), requires_grad=False) for tensors in zip(*parts, strict=True)
        )
        self.kernels.heads.add(tuple(weight.shape))
        if not self.is_embedding:
            del layer.weight
        gpu.free_pool()
        if weight.is_cuda:
            self.kernels.compile(weight.dtype)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return logits [T, V] of x [T, H], in its dtype."""
        x_q, scale, token_sum = torch.ops.ptxlab.quantize_activations(x.contiguous())
        operands = x_q, scale, token_sum, layer.int8_weight, layer.int8_scale
        logits = torch.ops.ptxlab.gemm_w8a8(*operands, out_dtype=x.dtype)
        return logits if bias is None else logits + bias

    def embedding(self, layer: nn.Module, tokens: Tensor) -> Tensor:
        """Look up rows of the float weight."""
        return nn.functional.embedding(tokens, layer.weight)


def _quantise(floats: Tensor) -> tuple[Tensor, Tensor]:
    with gpu.caller_stream() if floats.is_cuda else nullcontext():
        quantised_weight = quantize_level1(gpu.as_array("weight", floats.float()), _LARGEST)
        return gpu.like(quantised_weight.q8, floats), gpu.like(quantised_weight.scale, floats)
