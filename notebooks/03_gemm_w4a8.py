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
# # `gemm_w4a8` compared with its floor and its peers
#
# `03_gemm_ladder` goes through the ladder step by step. This notebook shows the result: the time of a call of
# `ptxlab.gemm_w4a8` on the matrices of LLaMA-2-7B and -70B, from one token to 8192, with the kernel that it selects.
# Everything is made from the record of `python -m benchmarks gemm` on an H200.

# %%
# %matplotlib inline
from IPython.display import Markdown

from report import figures, gemm, ladder, predictions, targets

record = ladder.load_record()
measured = not gemm.points(record).empty

# %% [markdown]
# ## Floor and peers
#
# The *floor* of a point is the longer of two times: streaming its packed weights into shared memory (measured in the
# same run, by a kernel that does nothing else), or 2 µs plus the MMAs at 1920 TOPS. There are eleven *peers*. Three
# have the same format, INT4 weights in groups of 128 (QServe, QQQ, humming). Three have one scale per channel: fewer
# instructions, and 1.4 times the weight error. Five have 8 or 16 bits: cuBLAS FP8 (per tensor and per row), INT8 and
# FP16, QServe W8A8. The picture is of one run with all of them, `ptxlab` included. In what follows a peer that ran
# beside `gemm_w4a8` has the time of that run.

# %%
figures.picture("ladder_peers")

# %% [markdown]
# ## Every matrix, one to 8192 tokens
#
# Weights in groups of 128, always from memory, never from the L2. FP16 output, compared with the reference bit for
# bit. Activations come from the fused quantiser, row-major with their token sums.

# %%
figures.picture("gemm_headline") if measured else ladder.NOT_RECORDED

# %%
Markdown(gemm.matrices_table(record))

# %%
Markdown(gemm.means_table(record))

# %% [markdown]
# The cost of other orders of the activations, in the quantiser and in the GEMM. Activations from elsewhere come
# without token sums; the kernel then flips the weights' top bits instead.

# %%
Markdown(gemm.orders_table(record))

# %% [markdown]
# ## Targets, met and missed
#
# "Level" allows for the 3% by which two runs can differ.

# %%
Markdown(targets.table(targets.gemm(record)))

# %% [markdown]
# ## When four bits stop paying
#
# With few tokens half the bytes take half the time. With many tokens both formats wait for the same tensor cores, and
# the 4-bit kernel, which also dequantises, can at best be level. So 8-bit weights may be faster from some number of
# tokens on; it depends on how well the dequantisation is hidden.

# %%
figures.picture("cost_crossover") if measured else ladder.NOT_RECORDED

# %%
Markdown(predictions.crossover_table(record))

# %% [markdown]
# ## The four GEMMs of a layer in a row
#
# In a model they follow each other. With programmatic launches each can start to load weights while the one before it
# still stores results.

# %%
Markdown(gemm.chains_table(record))

# %% [markdown]
# ## Experts, and other models
#
# Mixtral's experts: a loop of single GEMMs over the experts that have tokens, and one grouped launch. Then four other
# models at odd numbers of tokens; four of their sixteen matrices are in no sweep that a tile table was made from.

# %%
figures.picture("gemm_beyond") if measured else ladder.NOT_RECORDED

# %%
Markdown(gemm.experts_table(record))

# %%
Markdown(gemm.untuned_table(record))
