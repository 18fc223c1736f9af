# ---
# jupyter:
#   jupytext:
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
# # The GEMM ladder: from QServe's main loop to one that hides its dequantisation
#
# A W4A8 GEMM multiplies 8-bit activations by weights that are stored in 4 bits. It reads half the bytes of an 8-bit
# GEMM, which decides with few tokens. It pays with instructions: every weight has to become a byte before the tensor
# core can use it. Where these instructions run decides whether 4 bits pay. Six kernels, each readable on its own,
# lead from QServe's solution to LiquidGEMM's.
#
# Sources: QServe §5.2, LiquidGEMM §3 to §5 and §7. Everything below is made from records:
# `python -m benchmarks gemm` on an H200, and `ptxlab sass --record`, which needs no GPU.

# %%
# %matplotlib inline
from IPython.display import Markdown

from ptxlab.lowbit import cost, kernels
from ptxlab.lowbit.bench.shapes import LAYERS, TOKENS
from report import figures, ladder

record = ladder.load_record()

# %% [markdown]
# ## The floor
#
# Two things take time in any kernel. The packed weights have to be copied from device memory into shared memory;
# `ptxlab/lowbit/bench/stream.ptx` does only that, with bulk copies into a ring, and is timed in the same run as the
# kernels. And the MMAs have to run. The longer of the two times is the floor of a point: with few tokens the stream,
# from 128 tokens on the MMAs.

# %%
sheet = cost.sheet("h200")
for layer in LAYERS[:3]:
    packed = layer.N * layer.K // 2 + 2 * layer.N * layer.K // 128
    points = [cost.gemm_floor(sheet.stream_us(packed), 2 * M * layer.N * layer.K, "h200") for M in TOKENS]
    print(f"{layer!s:12}", *(f"M={M}: {us:.1f} µs ({limit})" for M, (us, limit) in zip(TOKENS, points, strict=True)))

# %% [markdown]
# ## Peers
#
# Times of other projects' kernels relative to that floor, measured on an H200 with CUDA 13.0 in November 2026
# (`notebooks/results/h200/peers`). cuBLAS with 8-bit weights takes twice the floor because it reads twice the bytes.
# The 4-bit kernels written for Ampere (QServe, QQQ) read half of that and are hardly faster, or slower. From 32 tokens
# on they are not memory-bound. humming is written for Hopper too; with one scale per channel it unpacks with fewer
# instructions than with groups, and its weights have 1.4 times the error.

# %%
figures.picture("ladder_peers")

# %% [markdown]
# ## The steps
#
# One thing changes from step to step.

# %%
for spec in kernels.gemm.STEPS:
    print(f"{ladder.short_name(spec.name):18} {spec.summary}")

# %% [markdown]
# ## Instructions per weight
#
# The table shows the innermost loop that unpacks weights, in the machine code of the variants that run on 57344 x
# 8192. It counts a thread's instructions per weight that every iteration executes once, by pipe. What an iteration
# executes only sometimes, or in a loop of its own (fetching the next stage by all threads, waiting), is in the last
# column and not counted per weight. In `lqq_excp_sm90` this is the loop of the warp groups that dequantise: they pass
# their tiles on through shared memory, and other warp groups multiply.

# %%
Markdown(ladder.loop_table())

# %% [markdown]
# An SM issues 128 thread instructions per clock, and at 4.5 TB/s it receives about 40 weights per clock. Beyond about
# three instructions per weight in all, a kernel cannot keep up with the memory. The ALU pipe executes 64 per clock:
# 1.6 per weight.
#
# ## Measured
#
# Every point is a replayed CUDA graph over weights that exceed the L2, with its results compared bit for bit with the
# reference. cuBLAS ran in the same process; QServe ran before that, also on an H200.

# %%
figures.picture("ladder_times") if record else ladder.NOT_RECORDED

# %% [markdown]
# Fraction of the floor:

# %%
figures.picture("ladder_fraction") if record else ladder.NOT_RECORDED

# %% [markdown]
# ## What each step gained
#
# LiquidGEMM's Fig. 13 on an H200: the steps relative to the baseline, which is the first step on wgmma. In the document
# ExCP gains with many tokens and ImFP at every batch; here ExCP is slower than the step before it, and ImFP about as
# fast as that. LiquidGEMM §7.3 ascribes the gain to pipelines that run on from one grouped GEMM to the next, above all
# in mixtures of experts; these are single matrices.

# %%
figures.picture("ladder_ablation") if record else ladder.NOT_RECORDED

# %%
Markdown(ladder.ladder_table())

# %% [markdown]
# The same as a roofline. A line is one large matrix at all numbers of tokens. The dots are the other matrices; they
# are lower because a small matrix ends before the memory is busy.

# %%
figures.picture("ladder_roofline") if record else ladder.NOT_RECORDED

# %% [markdown]
# ## What limits each step
#
# ncu's counters on one large matrix, at few and at many tokens. `executed per weight` counts every executed
# instruction, in any loop. A warp under `long scoreboard` waits for global memory, under `barrier` for other warps,
# under `gmma` for the tensor core, under `math pipe throttle` for an arithmetic pipe.

# %%
Markdown(ladder.limits_table())

# %% [markdown]
# ## The cost model
#
# The cost model of LiquidGEMM §3.2: a weight takes 1/B to load, α/C to dequantise and 2M/T to multiply. A plain loop
# does the last two in turn while the next weights load. With the α of the machine code this gives a time that a
# kernel should come near to. The picture shows how far each is from it: the model does not include epilogues,
# waiting for other warps, or tiles that leave SMs idle.

# %%
figures.picture("cost_predicted")

# %% [markdown]
# ## Findings
#
# - **LiquidQuant pays at every number of tokens**, 1.12 to 1.16 times in the mean: one multiply-add and one XOR
#   replace QoQ's multiply and emulated byte-wise add. The kernels differ in that one function only, each with the
#   tiles that suit it. At 2 of 60 points, where the tiles differ, QoQ is faster.
# - **The detour through shared memory never pays here.** In the explicit pipeline four warps dequantise for the whole
#   block, write every weight back as a byte and wait for the warps that multiply. It is the slowest step on wgmma in
#   the mean at every number of tokens. The gap is smallest with many tokens, where the MMAs are long enough to hide
#   it: from 64 tokens on it passes the baseline on some matrices.
# - **Overlap has two sources.** The implicit pipeline has two warp groups that share only the activations. The plain
#   loop has two or three blocks on an SM, which wait at different times. With 16 to 64 tokens the small blocks win in
#   the mean, because 64-row tiles divide a matrix more evenly among 132 SMs than 128-row tiles. From 128 tokens on
#   fewer of them fit, and the implicit pipeline wins.
# - **With few tokens the L2 is busier than the memory behind it.** Every block reads all activations of its tile
#   again, next to its weights. Sharing activations between blocks, or keeping them, is what is left to gain.
# - **At 4 tokens unpacking alone on mma.sync is the fastest**, on 9 of 10 matrices: strips of 32 rows give every SM
#   its share, the warps of a block split K within the SM, and nothing is padded to 64 rows.
