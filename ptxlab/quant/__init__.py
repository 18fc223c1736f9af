"""Floats to integers: the quantisers, and the formats they produce."""

from ptxlab.quant.activations import QuantizedActivations, quantize_activations, token_scales
from ptxlab.quant.inputs import GROUPS
from ptxlab.quant.level1 import PROTECTIVE_RANGE, Level1Weight, quantize_level1
from ptxlab.quant.lqq import LQQWeight, Rounding, lqq_groups, quantize_lqq
from ptxlab.quant.qoq import QoQChannelWeight, QoQWeight, qoq_groups, quantize_qoq, quantize_qoq_channel
from ptxlab.quant.two_level import TwoLevelWeight

__all__ = [
    "GROUPS",
    "PROTECTIVE_RANGE",
    "LQQWeight",
    "Level1Weight",
    "QoQChannelWeight",
    "QoQWeight",
    "QuantizedActivations",
    "Rounding",
    "TwoLevelWeight",
    "lqq_groups",
    "qoq_groups",
    "quantize_activations",
    "quantize_level1",
    "quantize_lqq",
    "quantize_qoq",
    "quantize_qoq_channel",
    "token_scales",
]
