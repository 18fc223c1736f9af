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
# Hopper's tensor cores multiply 8-bit integers. Weights that are stored in 4 bits have to become bytes first, and
# every instruction spent on that is taken from the time that 4 bits save. The way out is to treat four weights at
# once, in the four bytes of a register, with instructions that know nothing of bytes. Then a byte that overflows
# spoils its neighbour. This notebook shows when that happens, why it does not with LiquidQuant, and what each way
# costs.
#
# Sources: QServe §4.1, §5.2; LiquidGEMM §4; COMET §4.3.

# %%
# %matplotlib inline
# %load_ext ptxlab
import numpy as np

import ptxlab
from ptxlab import bench, demo, jupyter, layout, quant, reference, sources
from report import dequantplot

# %% [markdown]
# ## Eight weights in a word
#
# Weights e0 to e3 lie in the low halves of the four bytes, e4 to e7 in the high ones. So an AND frees four of them,
# each in a byte of its own; a shift and the same AND free the others: three instructions for eight weights.

# %%
(word,) = layout.pack_u4(np.arange(8, dtype=np.uint8))
low, high = word & np.uint32(0x0F0F0F0F), word >> np.uint32(4) & np.uint32(0x0F0F0F0F)
print(f"word {word:08x}   low halves {low:08x}   high halves {high:08x}")

# %% [markdown]
# ## Two levels
#
# A weight is `(q4 - zero) * s1 * s0`, or `(q4 * s1 + min) * s0`. The float `s0` belongs to a whole row of the
# matrix, and the GEMM multiplies by it once at the end. What has to be undone for every weight is the integer
# level: the kernel is to give `q8`, the bytes. Here is a group of a trained weight under both schemes.

# %%
what, matrices = demo.weights()
name, w = max(matrices.items(), key=lambda item: item[1].size)
level1 = quant.quantize_level1(w)
qoq, lqq = quant.quantize_qoq(w, group=64), quant.quantize_lqq(w, group=64)
print(what, "\n")
print("q8    ", level1.q8[0, :12], "... the bytes before 4 bits were made of them")
print("QoQ q4", qoq.q4[0, :12], f"... s1 = {qoq.group_scale[0, 0]}, zero = {qoq.zero[0, 0]}")
print("   q8'", qoq.level1()[0, :12], "... (q4 - zero) * s1")
print("LQQ q4", lqq.q4[0, :12], f"... s1 = {lqq.group_scale[0, 0]}, min = {lqq.minimum[0, 0]}")
print("   q8'", lqq.level1()[0, :12], "... q4 * s1 + min")

# %% [markdown]
# ## The obvious order is wrong
#
# Subtract the zero point, then multiply, as the formula has it. In bytes that share a register, `q4 - zero` is often
# negative, and borrows from the byte above it; the multiplication spreads the damage. `dequant_qoq_presub` does so by
# design. The emulator names the first lane that was disturbed:

# %%
logical = {"q4": qoq.q4[:32], "scale": qoq.group_scale[:32], "zero": qoq.zero[:32]}
presub, _ = ptxlab.find("dequant_qoq_presub")
outcome = ptxlab.run(presub.name, **presub.pack(logical), backend="emulator", checks=["lanes"])
next(finding for finding in outcome.findings if finding.kind == "carry")

# %% [markdown]
# The lowest byte of a register is always right, the others only where nothing comes up from below:

# %%
dequantplot.wrong_figure(outcome.outputs["out"] != reference.exact_qoq(**logical))

# %% [markdown]
# ## The ways that work
#
# Multiply while the bytes are unsigned: `15 * 16 = 240` fits. What is added afterwards decides.
#
# - A plain add carries: a negative minimum is a large byte.
# - QoQ adds with `vadd4`, which wraps in every byte. It is exact, but Hopper has no such instruction any more:
#   ptxas makes four of it.
# - LiquidQuant adds `128 + min`, which is never negative, in the same multiply-add, and takes the 128 off by
#   flipping each byte's top bit.

# %%
jupyter.identities(q4=(15, 3, 0, 9), s1=15, minimum=-104)

# %% [markdown]
# ## Over the edge
#
# One more on the scale, and the largest weight no longer fits: `15 * 16 - 104 = 136`. With `vadd4` one weight is
# wrong. With the multiply-add its neighbour is, too.

# %%
jupyter.identities(q4=(15, 3, 0, 9), s1=16, minimum=-104)

# %% [markdown]
# To look for the edge by hand, run this cell: sliders for the weights, the scale and the minimum.

# %%
jupyter.dequant_sliders()

# %% [markdown]
# ## Why the range is 119
#
# Whether that can happen is decided when the weights are quantised. Rounding at the second level moves a byte by up
# to half of `s1`, so bytes that use all of ±127 come back as more. Level 1 therefore keeps to a *protective range*.
# On the left all groups there can be were tried; on the right are trained weights.

# %%
dequantplot.range_figure(w)

# %% [markdown]
# The kernels rely on it, so their specs demand it, and a call that would overflow is refused:

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
# Machine instructions per eight weights, and how many weights an SM then makes per clock, measured on an H200 with
# the words in registers. An SM runs 64 threads of an ALU instruction per clock, and 128 in all if the pipes share
# the work.

# %%
dequantplot.cost_figure(bench.load(sources.results_dir() / "h200" / "dequant.json"))

# %% [markdown]
# Three instructions are the least, for unpacking alone: QoQ per channel, which leaves its zero point to the end of
# the GEMM, and COMET's, which leaves a factor of 16 to the scale. LiquidQuant adds two multiply-adds and two XORs;
# without the XORs, whose 128 the token sums take off in the end, it is five. Most of these are faster than the
# memory; but a GEMM needs the same pipes for other things too, which is why the 13 of `vadd4` hurt there (notebook
# 03).
#
# ## Why the scale is an integer
#
# The usual 4-bit checkpoints have a float scale per group. `dequant_s4_f16` makes FP16 numbers of them: the nibble
# becomes the last bits of 1032, which subtracting 1032 turns into the number itself, and then comes the scale: 13
# instructions, where 9 are enough without it. Could the subtraction not do both, `fma(1032 + v, scale, -1032 *
# scale)`? In FP16 the last product has to be rounded:

# %%
v = np.arange(-8, 8).astype(np.float16)
scale = np.arange(0x3C00, 0x4000, dtype=np.uint16).view(np.float16)[:, None]  # all FP16 numbers from 1 to 2
right = v * scale
fused = ((1032 + v.astype(float)) * scale + (np.float16(-1032) * scale)).astype(np.float16)  # exact but for one product
print(f"{(fused != right).mean():.0%} of all products differ, the worst by {abs(fused - right).max()}")
