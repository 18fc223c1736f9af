"""The oracle: one plain function per operation, on logical arrays, written to be read. Imports only NumPy."""

from ptxlab.hardware.floats import bfloat16_bits, fma, from_bfloat16_bits
from ptxlab.hardware.words import as_bytes, as_words, replicate
from ptxlab.lowbit.reference.activations import ACTIVATIONS, apply_gate, exponent, rms_norm
from ptxlab.lowbit.reference.attention import attention, dequantize_kv, rope, rope_tables, rotate_heads
from ptxlab.lowbit.reference.dequant import (
    dequant_comet,
    dequant_int4_naive,
    dequant_lqq,
    dequant_lqq_unsigned,
    dequant_qoq_channel,
    dequant_qoq_presub,
    dequant_qoq_saturating,
    dequant_qoq_vadd4,
    dequant_qoq_vadd4_s32,
    dequant_s4_f16,
    dequant_u4_f16,
    dequant_u4_f16_subnormal,
    scale_rows,
)
from ptxlab.lowbit.reference.exact import exact_lqq, exact_qoq, fits_s8, presub_wrong
from ptxlab.lowbit.reference.experts import combine_expert_rows, rows_by_expert, top_experts
from ptxlab.lowbit.reference.gemm import (
    gemm_accumulators,
    gemm_accumulators_channel,
    gemm_add_groups,
    gemm_epilogue,
    gemm_group_sums,
    rounded_to,
)

__all__ = [
    "ACTIVATIONS",
    "apply_gate",
    "as_bytes",
    "as_words",
    "attention",
    "bfloat16_bits",
    "combine_expert_rows",
    "dequant_comet",
    "dequant_int4_naive",
    "dequant_lqq",
    "dequant_lqq_unsigned",
    "dequant_qoq_channel",
    "dequant_qoq_presub",
    "dequant_qoq_saturating",
    "dequant_qoq_vadd4",
    "dequant_qoq_vadd4_s32",
    "dequant_s4_f16",
    "dequant_u4_f16",
    "dequant_u4_f16_subnormal",
    "dequantize_kv",
    "exact_lqq",
    "exact_qoq",
    "exponent",
    "fits_s8",
    "fma",
    "from_bfloat16_bits",
    "gemm_accumulators",
    "gemm_accumulators_channel",
    "gemm_add_groups",
    "gemm_epilogue",
    "gemm_group_sums",
    "presub_wrong",
    "replicate",
    "rms_norm",
    "rope",
    "rope_tables",
    "rotate_heads",
    "rounded_to",
    "rows_by_expert",
    "scale_rows",
    "top_experts",
]
