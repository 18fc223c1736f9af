"""Floats to integers: the quantisers, and the formats they produce.

Quantisers take float arrays of NumPy and CuPy, and give such; those of PyTorch and whatever else shares host memory by
DLPack, bfloat16 too, are taken as NumPy's.
"""

from ptxlab.lowbit.quant.activations import QuantizedActivations, quantize_activations, token_scales
from ptxlab.lowbit.quant.affine import AffineWeight, lqq_group
from ptxlab.lowbit.quant.atom import (
    ATOM_CODE,
    ATOM_GROUPS,
    ATOM_OUTLIERS,
    ATOM_PAPER,
    AtomRows,
    AtomRules,
    channel_places,
    channel_sizes,
    outlier_order,
    quantize_atom_activations,
    quantize_atom_weight,
)
from ptxlab.lowbit.quant.fmpq import BlockRows, int8_blocks, quantize_block_weight, quantize_blocks
from ptxlab.lowbit.quant.inputs import GROUPS
from ptxlab.lowbit.quant.int4 import MAX_INT4_SCALE, Int4Weight, quantize_int4
from ptxlab.lowbit.quant.kv import KV_SCHEMES, KVScheme, QuantizedKV, calibrate_kv, quantize_kv
from ptxlab.lowbit.quant.level1 import PROTECTIVE_RANGE, Level1Weight, quantize_level1
from ptxlab.lowbit.quant.lqq import LQQWeight, Rounding, lqq_groups, quantize_lqq
from ptxlab.lowbit.quant.qoq import QoQChannelWeight, QoQWeight, qoq_groups, quantize_qoq, quantize_qoq_channel
from ptxlab.lowbit.quant.smooth import SmoothedAttention, smooth_attention
from ptxlab.lowbit.quant.two_level import TwoLevelWeight

__all__ = [
    "ATOM_CODE",
    "ATOM_GROUPS",
    "ATOM_OUTLIERS",
    "ATOM_PAPER",
    "GROUPS",
    "KV_SCHEMES",
    "MAX_INT4_SCALE",
    "PROTECTIVE_RANGE",
    "AffineWeight",
    "AtomRows",
    "AtomRules",
    "BlockRows",
    "Int4Weight",
    "KVScheme",
    "LQQWeight",
    "Level1Weight",
    "QoQChannelWeight",
    "QoQWeight",
    "QuantizedActivations",
    "QuantizedKV",
    "Rounding",
    "SmoothedAttention",
    "TwoLevelWeight",
    "calibrate_kv",
    "channel_places",
    "channel_sizes",
    "int8_blocks",
    "lqq_group",
    "lqq_groups",
    "outlier_order",
    "qoq_groups",
    "quantize_activations",
    "quantize_atom_activations",
    "quantize_atom_weight",
    "quantize_block_weight",
    "quantize_blocks",
    "quantize_int4",
    "quantize_kv",
    "quantize_level1",
    "quantize_lqq",
    "quantize_qoq",
    "quantize_qoq_channel",
    "smooth_attention",
    "token_scales",
]
