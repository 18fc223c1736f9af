"""Family `quantize`: activations to INT8 per token with their sums, in the order that a GEMM reads (QServe §4.1)."""

from ptxlab.kernels.quantize.api import quantize_activations
from ptxlab.kernels.quantize.specs import QUANTIZE, SPECS, SUM

__all__ = ["QUANTIZE", "SPECS", "SUM", "quantize_activations"]
