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
# # KV4 attention at memory bandwidth
#
# In decoding, every new token of a sequence attends to all tokens before it. Their keys and values are read once and
# multiplied once or a few times, so the kernel should be memory-bound: a 4-bit cache could be nearly four times as
# fast as an FP16 cache. The difficulty is that every 4 bits have to be converted to a number first.
#
# Sources: QServe §4.2, §5.1 and §5.3, Atom §4.4. This notebook runs without a GPU: the emulator executes the
# kernels on a small case, and the times are those of `python -m benchmarks attention` on an H200.

# %%
# %matplotlib inline
import numpy as np
from IPython.display import Markdown

import ptxlab
from ptxlab import registry
from ptxlab.lowbit import quant, reference
from ptxlab.lowbit.layout import KVCache, gather
from report import attention, figures, targets

record = attention.load_record()

# %% [markdown]
# ## A cache, a token, an output
#
# A page of the pool holds the nibbles of 64 tokens of one head, followed by the scale and zero of each token in FP16:
# 68 bytes per token, head, and key or value. `append_kv4` quantises and writes new tokens. `attention_kv4` reads them
# through the block table, here for two sequences with 70 and 3 tokens, whose pages are in arbitrary order.

# %%
rng = np.random.default_rng(0)
lengths, Hq, Hkv, D, page = (70, 3), 4, 2, 128, 64
cache = KVCache.empty(2, 2, Hkv, D)
cache.block_table[:] = [[3, 0], [2, 1]]
k, v = rng.standard_normal((2, sum(lengths), Hkv, D), np.float32).astype(np.float16)
slots = [cache.block_table[b, t // page] * page + t % page for b in range(2) for t in range(lengths[b])]
ptxlab.append_kv4(k, v, cache, np.array(slots, np.int32), backend="emulator")
cache.lengths[:] = lengths

# %% [markdown]
# Every kernel of the ladder gives the same result within its own roundings. The reference computes in float64 on the
# integers in the cache. Each spec has a bound: what the kernel's roundings exceed in less than one of 1e9 elements.

# %%
q = rng.standard_normal((2, Hq, D), np.float32).astype(np.float16)
keys, values = gather(cache)
right = np.concatenate(
    [
        reference.attention(q[b : b + 1], keys[b].dequantize(), values[b].dequantize(), scale=D**-0.5)[0]
        for b in range(2)
    ]
)
ladder = [name for name in registry.specs() if name.startswith("attention_kv4") and "prefill" not in name]
for name in ladder:
    out = ptxlab.attention_kv4(q, cache, kernel=name, backend="emulator")
    print(f"{name:24} {np.abs(out - right).max():.1e} off")

# %% [markdown]
# The error of quantising to 4 bits is separate: it is the quantiser's, in any kernel.

# %%
for scheme in quant.KV_SCHEMES:
    x = rng.standard_normal((256, Hkv, D), np.float32)
    lost = np.linalg.norm(quant.quantize_kv(x, scheme).dequantize() - x) / np.linalg.norm(x)
    print(f"{scheme:12} relative error {lost:.4f} on Gaussian data")

# %% [markdown]
# ## Floor and peers
#
# The *floor* of a batch is one read of all its packed keys and values, with scales and zeros, at the read ceiling
# measured in the same run. The *peers* are eleven kernels on an H200: PyTorch's two and FlashInfer's three in FP16,
# FlashInfer's three in FP8, QServe's in 8 and in 4 bits, LServe's in 4. The picture shows the speed-up over the best
# of each kind. A peer at the memory's speed with 8 bits takes twice as long as one with 4 bits, with 16 bits four
# times. Of 256 sequences only PyTorch was measured.

# %%
figures.picture("attention_speedup")

# %% [markdown]
# QServe's and LServe's 4-bit kernels dequantise on CUDA cores, and read the cache anew for each query head, as many
# times as heads share it: the speed-up grows with the heads that share.

# %%
Markdown(attention.batches_table(record))

# %% [markdown]
# The means of these. All times are of plain launches, one after the other. In a decoder the kernel before can let the
# next one begin early, and `programmatic=True` makes use of that: the table has a column for it.

# %%
Markdown(attention.means_table(record))

# %% [markdown]
# ## The steps
#
# The ablation of QServe §6.4 is on an A100, at 64 sequences of 1024 tokens. The table shows the same steps here, and
# two more, which no document has: tensor cores with the queries of a group side by side, so that each key is read and
# unpacked once; then bulk copies and equal shares of ragged work.
#
# QServe's steps gain less here than there, and the step to FP16 gains nothing. By the data sheets an H200 makes 14 FP32
# operations in the time of a byte, an A100 9.8 (QServe §5.3): there is less to gain where CUDA cores are the limit. No
# profile of these steps has been taken to show it.

# %%
Markdown(attention.steps_table(record))

# %% [markdown]
# ## One long sequence, ragged batches, new tokens
#
# A single sequence has to be split over all SMs, and the partial results have to be merged exactly and always in the
# same order. The block in which a sequence begins receives the results of the others word by word; each word carries
# a flag that says whether it has arrived. Ragged batches are divided into pieces of equal cost.

# %%
Markdown(attention.single_table(record))

# %%
Markdown(attention.others_table(record))

# %% [markdown]
# ## Targets, met and missed

# %%
Markdown(targets.table(targets.attention(record)))
