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
# # `gemm_w4a8` against its floor and everyone else
#
# `03_gemm_ladder` takes the ladder apart, step by step. This one asks what comes out: what a call of `ptxlab.gemm_w4a8`
# takes on the matrices of LLaMA-2-7B and -70B, from one token to 8192, with the kernel that it chooses by itself.
# Everything is made from the record of `ptxlab bench gemm` on an H200.

# %%
# %matplotlib inline
from IPython.display import Markdown

from report import figures, gemmtables, headline, ladder, predictions, targets

record = ladder.recorded()
measured = bool(headline.points(record))

# %% [markdown]
# ## The yardsticks
#
# The *floor* of a point is the time that its packed weights alone take into shared memory (measured in the same run, by
# a kernel that does nothing else), or 2 µs and the products at 1920 TOPS, whichever is longer. The *peers* are nine:
# cuBLAS FP8, INT8 and FP16 in the same run; FP8 per row, three kernels of QServe and two of QQQ measured before that
# on an H200 too, and scaled where cuBLAS took more than 5% longer or shorter then. This is where they stand:

# %%
figures.picture("ladder_peers")

# %% [markdown]
# ## Every matrix, one to 8192 tokens
#
# Weights in groups of 128 from memory, never from the L2; FP16 out, every bit of it compared with the reference.
# Activations come from the fused quantiser, row-major with their token sums.

# %%
figures.picture("gemm_headline") if measured else ladder.NOT_RECORDED

# %%
Markdown(gemmtables.matrices_table(record))

# %%
Markdown(gemmtables.means_table(record))

# %% [markdown]
# What other activations cost, in the quantiser and in the GEMM. Those from elsewhere come without token sums: then the
# kernel flips the weights' top bits instead.

# %%
Markdown(gemmtables.orders_table(record))

# %% [markdown]
# ## What was aimed at
#
# "Level" allows for the 3% by which two runs may differ.

# %%
Markdown(targets.table(targets.gemm(record)))

# %% [markdown]
# ## When four bits stop paying
#
# With few tokens half the bytes are half the time. With many, both sides wait for the same tensor cores, and the side
# that also dequantises can at best be level. So there may be a number of tokens from which on 8-bit weights are faster;
# how well the dequantisation hides decides.

# %%
figures.picture("cost_crossover") if measured else ladder.NOT_RECORDED

# %%
Markdown(predictions.crossover_table(record))

# %% [markdown]
# ## The four GEMMs of a layer in a row
#
# In a model they follow each other. Launched programmatically, each may begin to load weights while the one before it
# is still storing results.

# %%
Markdown(gemmtables.chains_table(record))

# %% [markdown]
# ## Experts, and other models
#
# Mixtral's experts: a loop of single GEMMs over those that have tokens, and one grouped launch. Then four other
# models, at odd numbers of tokens; four of their sixteen matrices are in no sweep that a table of tiles came from.

# %%
figures.picture("gemm_beyond") if measured else ladder.NOT_RECORDED

# %%
Markdown(gemmtables.experts_table(record))

# %%
Markdown(gemmtables.untuned_table(record))
