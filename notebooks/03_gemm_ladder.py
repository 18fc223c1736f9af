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
# A W4A8 GEMM multiplies 8-bit activations by weights that are stored in 4 bits. It reads half of what an 8-bit GEMM
# reads, which is all that counts while there are few tokens, and pays for it with instructions: every weight has to
# become a byte before the tensor core can have it. Whether that is worth it depends on where these instructions go.
# Six kernels, each readable on its own, climb from QServe's answer to LiquidGEMM's.
#
# Sources: QServe §5.2, LiquidGEMM §3 to §5 and §7. Everything below is made from records: `ptxlab bench gemm` on an
# H200, and `ptxlab sass --record`, which needs no GPU.

# %%
# %matplotlib inline
from IPython.display import Markdown

from ptxlab import cost, kernels
from ptxlab.bench.shapes import LAYERS, TOKENS
from report import figures, ladder

record = ladder.recorded()

# %% [markdown]
# ## The floor
#
# Two things take time whatever the kernel does. The packed weights have to come from device memory into shared memory;
# `ptxlab/bench/stream.ptx` does that and nothing else, with bulk copies into a ring, and is timed in the same run as
# the kernels. And the products have to go through the tensor cores. The larger of the two times is the floor of a
# point: with few tokens it is the stream, from 128 tokens on the products.

# %%
sheet = cost.sheet("h200")
for layer in LAYERS[:3]:
    packed = layer.N * layer.K // 2 + 2 * layer.N * layer.K // 128
    points = [cost.gemm_floor(sheet.stream_us(packed), 2 * M * layer.N * layer.K, "h200") for M in TOKENS]
    print(f"{layer!s:12}", *(f"M={M}: {us:.1f} µs ({limit})" for M, (us, limit) in zip(TOKENS, points, strict=True)))

# %% [markdown]
# ## Where others stand
#
# Times of other projects' kernels, measured on an H200 with CUDA 13.0 in November 2026
# (`notebooks/results/h200/peers`), over that floor. cuBLAS with 8-bit weights is twice the floor because it reads
# twice the bytes. The 4-bit kernels written for Ampere read half of that and are hardly faster, or slower; from 32
# tokens on it is plainly not the memory that takes their time.

# %%
figures.ladder_picture("peers")

# %% [markdown]
# ## The steps
#
# One thing changes from step to step.

# %%
for spec in kernels.gemm.STEPS:
    print(f"{ladder.short(spec.name):18} {spec.summary}")

# %% [markdown]
# ## What a weight costs in instructions
#
# The innermost loop that unpacks weights, in the machine code of the variants that run on 57344 x 8192. A thread's
# instructions per weight: those that every iteration executes once, by pipe. What an iteration executes only sometimes,
# or in a loop of its own (fetching the next stage by all threads, waiting), stands in the last column, uncounted per
# weight. In `lqq_excp_sm90` this is the loop of the warp groups that dequantise: they hand their tiles on through
# shared memory, and other warp groups multiply.

# %%
Markdown(ladder.loop_table())

# %% [markdown]
# An SM issues 128 instructions of threads per clock, and at 4.5 TB/s it receives about 40 weights per clock. So
# beyond about three instructions per weight, all told, a kernel cannot keep up with its memory. The ALU pipe takes 64
# per clock: 1.6 per weight.
#
# ## Measured
#
# Every point is a replayed CUDA graph over weights that exceed the L2, its results compared bit for bit with the
# reference. cuBLAS ran in the same process, QServe before that, on an H200 too.

# %%
figures.ladder_picture("times") if record else ladder.NOT_RECORDED

# %% [markdown]
# How near to the floor:

# %%
figures.ladder_picture("fraction") if record else ladder.NOT_RECORDED

# %% [markdown]
# ## What each step gained
#
# LiquidGEMM's Fig. 13, on an H200: the steps over the baseline, which is the first of them on wgmma.

# %%
figures.ladder_picture("ablation") if record else ladder.NOT_RECORDED

# %%
Markdown(ladder.ladder_table())

# %% [markdown]
# The same under the two roofs. A step's line runs over the tokens of one large matrix; the dots are all the others,
# lower because a small matrix is over before the memory is busy.

# %%
figures.ladder_picture("roofline") if record else ladder.NOT_RECORDED

# %% [markdown]
# ## What limits each step
#
# ncu's counters on one large matrix, at few and at many tokens. `executed per weight` counts everything that ran,
# whatever loop it was in. A warp under `long scoreboard` waits for global memory, under `barrier` for other warps,
# under `gmma` for the tensor core, under `math pipe throttle` for an arithmetic pipe.

# %%
Markdown(ladder.limits_table())

# %% [markdown]
# ## What a model says
#
# LiquidGEMM's cost model (§3.2): a weight takes 1/B to load, α/C to dequantise and 2M/T to multiply. A plain loop does
# the last two in turn while the next weights load. With the instructions α that the machine code has, that is a time
# that a kernel should come near to. The right picture says by how much each does not: the model knows nothing of
# epilogues, of waiting for other warps, or of tiles that leave SMs idle.

# %%
figures.cost_picture("predicted")

# %% [markdown]
# ## What the figures say
#
# - **LiquidQuant pays at every number of tokens**, 1.12 to 1.16 times in the mean: one multiply-add and one XOR where
#   QoQ needs a multiply and an emulated byte-wise add. The kernels are the same but for that one function, each with
#   the tiles that suit it; at 2 of 60 points, where the tiles differ, QoQ is ahead.
# - **A way through shared memory never pays here.** In the explicit pipeline four warps dequantise for the whole block,
#   write every weight back as a byte and wait for the warps that multiply: it is the slowest step on wgmma in the
#   mean at every number of tokens, least so at many, where the multiplication is long enough to hide it: from 64 tokens
#   on there are matrices on which it passes the baseline.
# - **Overlap has two sources.** The implicit pipeline gets it from two warp groups that share nothing but the
#   activations; the plain loop gets it from two or three blocks on an SM, each of which waits at other times. With 16
#   to 64 tokens the small blocks win in the mean, because 64-row tiles divide a matrix more evenly among 132 SMs than
#   128-row tiles do; from 128 tokens on fewer of them fit, and the implicit pipeline wins.
# - **With few tokens the L2 is busier than the memory behind it.** Every block reads all activations of its tile
#   again, beside its weights. Sharing activations between blocks, or keeping them, is what is left to gain.
# - **At 4 tokens unpacking alone on mma.sync is the fastest of all**, on 9 of 10 matrices: strips of 32 rows give every
#   SM its share, the warps of a block split K without leaving the SM, and nothing is padded to 64 rows.
