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
# # A tour
#
# ptxlab is a workbench for low-bit LLM kernels: hand-written PTX and CUDA, run on a GPU, or line by line in a PTX
# emulator where there is none; held against plain NumPy; timed against what the hardware allows. This notebook takes
# one thing of each kind into the hand. It needs no GPU, and uses one if it is there.

# %%
# %matplotlib inline
# %load_ext ptxlab
import numpy as np

import ptxlab
from ptxlab import kernels, layout, quant, reference, verify
from report import figures

# %% [markdown]
# ## A kernel and its contract
#
# A name finds everything: the source, the entry symbol, the tests, the measurements. `ptxlab list` prints all of
# them; the families are:

# %%
for family in dict.fromkeys(spec.family for spec in kernels.specs().values()):
    names = [spec.name for spec in kernels.specs().values() if spec.family == family]
    print(f"{family:9} {len(names):2}  {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}")

# %% [markdown]
# A *spec* says what a kernel promises: arguments, rules, and to what its results are compared. This one turns 4-bit
# weights into 8-bit ones, four at a time with one multiply-add (notebook 01 shows why that is right).

# %%
spec, sources = ptxlab.find("dequant_lqq")
spec

# %% [markdown]
# ## Run it
#
# Quantise a matrix, pack it into words, run the kernel. The call is the same with CuPy or PyTorch arrays on a GPU.

# %%
rng = np.random.default_rng(0)
w = quant.quantize_lqq(rng.standard_normal((8, 256), np.float32), group=64)
packed = {"qweight": layout.pack_u4(w.q4), "scale": w.group_scale, "offset": w.offset}
outcome = ptxlab.run("dequant_lqq", **packed)
print("equal to the NumPy reference:", np.array_equal(outcome.outputs["out"], w.level1()))
outcome

# %% [markdown]
# ## Verify it
#
# Every source of a kernel, on every backend that is here, at several sizes; on poisoned memory, with all of the
# emulator's checks on. That is `ptxlab verify dequant_lqq` in a shell.

# %%
jobs, skipped = verify.plan(["dequant_lqq"])
for verdict in map(verify.verify, jobs):
    print("passed" if verdict.passed else "FAILED", verdict.kernel, verdict.backend, verdict.sizes, verdict.detail)

# %% [markdown]
# ## Give it something bad
#
# What breaks a rule is refused before anything runs, with the rule and the value:

# %%
packed["scale"] = np.full_like(w.group_scale, 17)
try:
    ptxlab.run("dequant_lqq", **packed)
except ptxlab.errors.ArgumentError as error:
    print(error)

# %% [markdown]
# Insist on it, and the emulator shows what happens: the line, the thread, the byte that did not fit, and the
# neighbour that it spoiled.

# %%
found = ptxlab.run("dequant_lqq", **packed, unchecked=True, backend="emulator", checks=["lanes"]).findings
next(finding for finding in found if finding.kind == "carry")

# %% [markdown]
# ## Check a kernel of your own
#
# Any CUDA or PTX will do; a cell's magic compiles it, and says what the assembler made of it. This one reverses a
# row by way of shared memory, and forgets something.

# %% magic_args="--check race" language="cuda"
# extern "C" __global__ void reverse(const int* in, int* out) {
#     __shared__ int row[64];
#     row[threadIdx.x] = in[threadIdx.x];
#     out[threadIdx.x] = row[63 - threadIdx.x];
# }

# %% [markdown]
# Its result is right here, as it often is on a GPU. The check is not content with that:

# %%
row = np.arange(64, dtype=np.int32)
launch = reverse(row, np.zeros_like(row), grid=1, block=64)
print("reversed:", np.array_equal(launch.outputs["out"], row[::-1]))
launch

# %% [markdown]
# ## A whole GEMM
#
# `gemm_w4a8` multiplies 8-bit activations by 4-bit weights with tensor-core instructions, and chooses the kernel
# for the shape itself. The emulator runs its `wgmma`, its copies and its barriers; the accumulators are exact
# integers, so the floats are compared bit for bit too.

# %%
w = quant.quantize_lqq(rng.standard_normal((64, 256), np.float32), group=64)
x = ptxlab.quantize_activations(rng.standard_normal((16, 256), np.float32).astype(np.float16), backend="emulator")
y = ptxlab.gemm_w4a8(x, weight=ptxlab.pack(w, "strips"), out_dtype="float32", backend="emulator")

accumulators = reference.gemm_accumulators(layout.unpack_activations(x).q, w.exact_level1())
expected = reference.gemm_epilogue(accumulators, x.scale, w.channel_scale, out="float32")
print(f"{y.shape[0]} tokens, {y.shape[1]} channels: equal bit for bit: {np.array_equal(y, expected)}")

# %% [markdown]
# ## How fast
#
# Timings need the hardware; they are recorded with everything that belongs to them, and pictures, tables and this
# notebook are made from the records. Each point: how near a GEMM comes to the time that its packed weights alone
# need to arrive, or its products on the tensor cores; and how far ahead of the fastest of nine others it is.

# %%
figures.gemm_picture("headline")

# %% [markdown]
# ## From here
#
# | notebook | |
# | --- | --- |
# | 01 dequantisation and overflow | eight weights in a word: what unpacking costs, and why the range is 119 |
# | 02 loads | from the wrong bytes to zero bank conflicts |
# | 03 the GEMM ladder, `gemm_w4a8` | main loops step by step; against its floor and everyone else |
# | 04 KV4 attention | a 4-bit cache at the memory's speed |
# | 05 profiling | what a kernel waits for, and what happens when |
# | 06 write your own | from an empty cell to verified, timed and profiled |
