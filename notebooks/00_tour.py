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
# ptxlab is a workbench for low-bit LLM kernels: hand-written PTX and CUDA, run on a GPU, or in a PTX emulator where
# there is none; compared with plain NumPy; timed against what the hardware allows. This notebook shows one example of
# each feature. It needs no GPU, and uses one if there is one.

# %%
# %matplotlib inline
# %load_ext ptxlab
import numpy as np

import ptxlab
from ptxlab import registry
from ptxlab.lowbit import layout, quant, reference
from ptxlab.runtime import verify
from report import figures

# %% [markdown]
# ## A kernel and its contract
#
# A kernel's name finds its source, entry symbol, tests and measurements. `ptxlab list` prints all of them; the
# families are:

# %%
for family in dict.fromkeys(spec.family for spec in registry.specs().values()):
    names = [spec.name for spec in registry.specs().values() if spec.family == family]
    print(f"{family:9} {len(names):2}  {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}")

# %% [markdown]
# A *spec* states what a kernel promises: arguments, rules, and the reference of its results. This kernel converts
# 4-bit weights to 8 bits, four at a time with one multiply-add (notebook 01 shows why that is correct).

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
# This runs every source of the kernel on every available backend, at several sizes, on poisoned memory and with all
# of the emulator's checks. In a shell it is `ptxlab verify dequant_lqq`.

# %%
jobs, skipped = verify.plan(["dequant_lqq"])
for verdict in map(verify.verify, jobs):
    print("passed" if verdict.passed else "FAILED", verdict.kernel, verdict.backend, verdict.sizes, verdict.detail)

# %% [markdown]
# ## Invalid input
#
# A value that breaks a rule is refused before anything runs. The error has the rule and the value:

# %%
packed["scale"] = np.full_like(w.group_scale, 17)
try:
    ptxlab.run("dequant_lqq", **packed)
except ptxlab.errors.ArgumentError as error:
    print(error)

# %% [markdown]
# With `unchecked=True` the kernel runs anyway. The emulator reports the line, the thread, the byte that overflowed
# and the neighbour that it disturbed:

# %%
findings = ptxlab.run("dequant_lqq", **packed, unchecked=True, backend="emulator", checks=["lanes"]).findings
next(finding for finding in findings if finding.kind == "carry")

# %% [markdown]
# ## Check a kernel of your own
#
# A cell's magic compiles any CUDA or PTX and shows what the assembler made of it. This kernel reverses a row through
# shared memory. It lacks a barrier.

# %% magic_args="--check race" language="cuda"
# extern "C" __global__ void reverse(const int* in, int* out) {
#     __shared__ int row[64];
#     row[threadIdx.x] = in[threadIdx.x];
#     out[threadIdx.x] = row[63 - threadIdx.x];
# }

# %% [markdown]
# The result is correct here, as it often is on a GPU. The check still reports the race:

# %%
row = np.arange(64, dtype=np.int32)
launch = reverse(row, np.zeros_like(row), grid=1, block=64)
print("reversed:", np.array_equal(launch.outputs["out"], row[::-1]))
launch

# %% [markdown]
# ## A whole GEMM
#
# `gemm_w4a8` multiplies 8-bit activations by 4-bit weights on the tensor cores and selects the kernel for the shape.
# The emulator runs its `wgmma`, its copies and its barriers. The accumulators are exact integers, so the floats are
# compared bit for bit too.

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
# Timings need the hardware. They are recorded with device, versions and commit, and pictures, tables and this
# notebook are made from the records. Each point shows how near a GEMM comes to its floor (the longer of streaming its
# packed weights and running its MMAs at peak rate), and its speed-up over the fastest of eleven peers, by format.

# %%
figures.picture("gemm_headline")

# %% [markdown]
# ## Next
#
# | notebook | topic |
# | --- | --- |
# | 01 dequantisation and overflow | packed 4-bit arithmetic, its cost, and why the range is 119 |
# | 02 loads | weight layouts without bank conflicts |
# | 03 the GEMM ladder, `gemm_w4a8` | main loops step by step; measurements against floor and peers |
# | 04 KV4 attention | a 4-bit cache at memory bandwidth |
# | 05 profiling | machine code, stalls, timelines |
# | 06 write your own | a kernel from an empty cell to verified, timed and profiled |
# | 07 layer | a decoder layer: norms, gates and products between INT8 activations |
# | 08 real model | a language model in 4 bits, and its text |
# | 09 proofs | what holds for every input, and counterexamples |
# | 10 W4A4 | 4-bit activations, with outliers in 8 bits |
