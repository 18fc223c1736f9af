"""Family `quantize`: activations to INT8 per token with their sums, in the order that a GEMM reads (QServe §5.1), by
themselves or with what a decoder computes before: RMSNorm, the gate of its FFN."""

from ptxlab.lowbit.kernels.quantize import atom
from ptxlab.lowbit.kernels.quantize.api import quantize_activations, rmsnorm_quantize, silu_mul_quantize
from ptxlab.lowbit.kernels.quantize.atom_api import (
    reorder_quantize,
    rmsnorm_reorder_quantize,
    silu_mul_reorder_quantize,
)
from ptxlab.lowbit.kernels.quantize.gated import SILU_MUL, SILU_MUL_BLOCK
from ptxlab.lowbit.kernels.quantize.rmsnorm import RMSNORM, RMSNORM_BLOCK
from ptxlab.lowbit.kernels.quantize.specs import QUANTIZE, SUM

SPECS = (QUANTIZE, SUM, RMSNORM, SILU_MUL, *atom.SPECS)

# `NAME:block`: a row is one block's, for GPUs without clusters.
FORMS = (RMSNORM_BLOCK, SILU_MUL_BLOCK, *atom.FORMS)

__all__ = [
    "FORMS",
    "QUANTIZE",
    "RMSNORM",
    "SILU_MUL",
    "SPECS",
    "SUM",
    "quantize_activations",
    "reorder_quantize",
    "rmsnorm_quantize",
    "rmsnorm_reorder_quantize",
    "silu_mul_quantize",
    "silu_mul_reorder_quantize",
]
