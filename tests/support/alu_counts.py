"""Instruction counts, pinned: they are claims of the README, and of the papers."""

# What h200 SASS needs per 8 weights; the papers' 7 for LQQ, 13 for QoQ with vadd4, 64 for the spelling to avoid.
PINNED = {
    "dequant_lqq.ptx": 7,
    "dequant_lqq.cu": 7,
    "dequant_lqq_unsigned.ptx": 5,
    "dequant_lqq_unsigned.cu": 5,
    "dequant_qoq_vadd4.ptx": 13,
    "dequant_qoq_vadd4.cu": 13,
    "dequant_qoq_vadd4_s32.ptx": 64,
    "dequant_qoq_saturating.ptx": 62.25,  # a move in some words
    "dequant_qoq_presub.ptx": 7,
    "dequant_qoq_channel.ptx": 3,
    "dequant_qoq_channel.cu": 3,
    "dequant_int4_naive.ptx": 21,
    "dequant_comet.ptx": 3,
    "dequant_u4_f16.ptx": 9,
    "dequant_u4_f16.cu": 9,
    "dequant_u4_f16_subnormal.ptx": 7,
    "dequant_u4_f16_subnormal.cu": 7,
    "dequant_s4_f16.ptx": 13,
}
