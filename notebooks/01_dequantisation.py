# ---
# jupyter:
#   jupytext:
#     custom_cell_magics: cuda,ptx
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Dequantisation and overflow
#
# Hopper's tensor cores multiply 8-bit integers. Weights stored in 4 bits have to be converted to bytes first, and
# every instruction of that conversion costs some of the time that 4 bits save. So kernels convert four weights at
# once, in the four bytes of a register, with instructions that do not know about bytes. Then a byte that overflows
# changes its neighbour. This notebook shows when that happens, why it does not happen with LiquidQuant, and what each
# method costs.
#
# Sources: QServe §4.1, §5.2; LiquidGEMM §4; COMET §4.3.

# %%
# %matplotlib inline
# %load_ext ptxlab
import numpy as np

import ptxlab
from ptxlab import bench, sources
from ptxlab.lowbit import demo, jupyter, layout, quant, reference
from report import dequantplot

# %% [markdown]
# ## Eight weights in a word
#
# Weights e0 to e3 are the low nibbles of the four bytes, e4 to e7 the high nibbles. One AND extracts the low four,
# each in a byte of its own; a shift and the same AND extract the others. That is three instructions for eight
# weights.

# %%
(word,) = layout.pack_u4(np.arange(8, dtype=np.uint8))
low, high = word & np.uint32(0x0F0F0F0F), word >> np.uint32(4) & np.uint32(0x0F0F0F0F)
print(f"word {word:08x}   low halves {low:08x}   high halves {high:08x}")

# %% [markdown]
# ## Two levels
#
# A weight is `(q4 - zero) * s1 * s0`, or `(q4 * s1 + min) * s0`. The float `s0` belongs to a whole row of the matrix,
# and the GEMM multiplies by it once at the end. The kernel undoes the integer level for every weight: its output is
# `q8`, the bytes. Here is a group of a trained weight in both schemes.

# %%
weights_name, matrices = demo.weights()
name, w = max(matrices.items(), key=lambda named: named[1].size)
level1 = quant.quantize_level1(w)
qoq, lqq = quant.quantize_qoq(w, group=64), quant.quantize_lqq(w, group=64)
print(weights_name, "\n")
print("q8    ", level1.q8[0, :12], "... the bytes before 4 bits were made of them")
print("QoQ q4", qoq.q4[0, :12], f"... s1 = {qoq.group_scale[0, 0]}, zero = {qoq.zero[0, 0]}")
print("   q8'", qoq.level1()[0, :12], "... (q4 - zero) * s1")
print("LQQ q4", lqq.q4[0, :12], f"... s1 = {lqq.group_scale[0, 0]}, min = {lqq.minimum[0, 0]}")
print("   q8'", lqq.level1()[0, :12], "... q4 * s1 + min")

# %% [markdown]
# ## The obvious order is wrong
#
# The formula subtracts the zero point, then multiplies. In bytes that share a register, `q4 - zero` is often negative
# and borrows from the byte above it; the multiplication spreads the damage. `dequant_qoq_presub` does this by design.
# The emulator reports the first lane that was disturbed:

# %%
logical = {"q4": qoq.q4[:32], "scale": qoq.group_scale[:32], "zero": qoq.zero[:32]}
presub, _ = ptxlab.find("dequant_qoq_presub")
outcome = ptxlab.run(presub.name, **presub.pack(logical), backend="emulator", checks=["lanes"])
next(finding for finding in outcome.findings if finding.kind == "carry")

# %% [markdown]
# The lowest byte of a register is always correct. The others are correct only where nothing is carried into them:

# %%
dequantplot.wrong_figure(outcome.outputs["out"] != reference.exact_qoq(**logical))

# %% [markdown]
# ## The orders that work
#
# Multiply while the bytes are unsigned: `15 * 16 = 240` fits. The addition that follows makes the difference.
#
# - A plain add carries, because a negative minimum is a large byte.
# - QoQ adds with `vadd4`, which wraps in every byte. It is exact, but Hopper has no such instruction: ptxas emulates
#   it.
# - LiquidQuant adds `128 + min`, which is never negative, in the same multiply-add. It removes the 128 by flipping
#   each byte's top bit.

# %%
jupyter.identities(q4=(15, 3, 0, 9), s1=15, minimum=-104)

# %% [markdown]
# ## Over the edge
#
# With a scale that is larger by one the largest weight no longer fits: `15 * 16 - 104 = 136`. With `vadd4` one weight
# is wrong. With the multiply-add its neighbour is wrong too.

# %%
jupyter.identities(q4=(15, 3, 0, 9), s1=16, minimum=-104)

# %% [markdown]
# This cell shows sliders for the weights, the scale and the minimum, to find the edge by hand:

# %%
jupyter.dequant_sliders()

# %% [markdown]
# ## Why the range is 119
#
# Quantisation decides whether that can happen. Rounding at the second level moves a byte by up to half of `s1`, so
# bytes that use all of ±127 can be restored as more than 127. Level 1 therefore keeps to a *protective range*. The
# left picture tries all possible groups; the right one shows trained weights.

# %%
dequantplot.range_figure(w)

# %% [markdown]
# The kernels rely on the range, so their specs require it. A call that would overflow is refused:

# %%
broken = quant.quantize_lqq(w, group=64, protective_range=127)
inputs = {"qweight": layout.pack_u4(broken.q4), "scale": broken.group_scale, "offset": broken.offset}
try:
    ptxlab.run("dequant_lqq", **inputs, backend="emulator")
except ptxlab.errors.ArgumentError as error:
    print(error)

# %% [markdown]
# ## What it costs
#
# The pictures show machine instructions per eight weights, and how many weights an SM converts per clock, measured on
# an H200 with the words in registers. An SM issues an ALU instruction for 64 threads per clock, and for 128 threads
# in all if the pipes share the work.

# %%
dequantplot.cost_figure(bench.load(sources.results_dir() / "h200" / "dequant.json"))

# %% [markdown]
# Three instructions are the minimum, for unpacking alone: QoQ per channel, which leaves its zero point to the end of
# the GEMM, and COMET, which leaves a factor of 16 to the scale. LiquidQuant adds two multiply-adds and two XORs.
# Without the XORs it needs five; the token sums then remove the 128 at the end. Most of these are faster than the
# memory. But a GEMM needs the same pipes for other work, so the 13 instructions of `vadd4` cost time there (notebook
# 03).
#
# ## Why the scale is an integer
#
# Common 4-bit checkpoints have a float scale per group. `dequant_s4_f16` converts them to FP16: it writes the nibble
# into the last bits of 1032, subtracts 1032 and multiplies by the scale. That takes 13 instructions, where 9 suffice
# without the scale. One instruction for both, `fma(1032 + v, scale, -1032 * scale)`, would not be exact, because the
# last product has to be rounded to FP16:

# %%
v = np.arange(-8, 8).astype(np.float16)
scale = np.arange(0x3C00, 0x4000, dtype=np.uint16).view(np.float16)[:, None]  # all FP16 numbers from 1 to 2
right = v * scale
fused = ((1032 + v.astype(float)) * scale + (np.float16(-1032) * scale)).astype(np.float16)  # exact but for one product
print(f"{(fused != right).mean():.0%} of all products differ, the worst by {abs(fused - right).max()}")
