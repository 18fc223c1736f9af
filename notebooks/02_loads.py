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
# # Loads: from the wrong bytes to zero bank conflicts
#
# A tensor core does not want its operand in rows. Every lane of a warp has to hold particular bytes, and a 4-bit
# weight matrix cannot get them there by the road that an 8-bit one takes. This notebook runs the kernels of
# `ptx/load/` in the emulator, which is all that a laptop needs, and asks the six that bring a tile where its elements
# went.
#
# Sources: QServe §5.2.1, LiquidGEMM §5.2, COMET §4.3.

# %%
# %matplotlib inline
# %load_ext ptxlab
import numpy as np
from IPython.display import Markdown

import ptxlab
from ptxlab import jupyter, kernels
from ptxlab.kernels import holders
from report import figures
from report import sections as report

# %% [markdown]
# ## What the MMA wants
#
# With 8-bit weights `ldmatrix` deals every lane exactly its bytes. Lane `4 g + t` gets four neighbouring channels of
# row `g` in each of its registers: `a0` is channels `4 t` to `4 t + 3`, `a2` is `16 + 4 t` to `16 + 4 t + 3`. (These
# maps are data, `ptxlab.layout.fragments`, and pinned by vectors recorded on an H200. What is printed here is read
# off the kernel itself: it ran on tiles whose elements are the digits of their own position.)

# %%
print(holders.as_text("load_ldmatrix_s8"))

# %% [markdown]
# ## The same road with 4-bit weights: wrong
#
# `ldmatrix` deals out equal *bytes*. Four bytes are eight channels now, so lane `t` receives channels `8 t` to `8 t +
# 7`, which belong to lanes `2 t` and `2 t + 1` (modulo 4). Only a quarter of the tile is where the MMA wants it.

# %%
print(holders.as_text("load_ldmatrix_u4"))
figures.load_picture("load_ldmatrix_u4")

# %% [markdown]
# The kernel is *wrong by design*, and verification holds it to being wrong in exactly the places that the model
# predicts.

# %%
spec, (source, *_) = kernels.find("load_ldmatrix_u4")
logical = spec.example(np.random.default_rng(0), T=2)
got = ptxlab.run("load_ldmatrix_u4", **spec.pack(logical), backend="emulator").outputs["fragments"]
missed = got != spec.wrong.truth(**logical)
print(f"{missed.mean():.0%} of the bytes differ; as predicted: {np.array_equal(missed, spec.wrong.misses(**logical))}")

# %% [markdown]
# ## Right, and slow: one LDS.32 for every four channels
#
# Each load brings eight channels and uses four. And rows that lie 32 bytes apart meet in the same banks: eight loads
# take sixteen wavefronts.

# %%
figures.load_picture("load_lds32_u4")

# %% [markdown]
# ## Right, and fast: put the weights in the order of the threads
#
# Weights do not change, so they may lie in any order. QServe reorders tiles of 32 x 32 so that the 32 weights of a
# thread are one 128-bit word; LiquidGEMM's dual-MMA layout does it for two successive wgmmas. One LDS.128, no
# conflict, and no address arithmetic but the thread's number.

# %%
figures.load_picture("load_dual_mma")

# %% [markdown]
# To ask for any lane and any layout, run this: a list and a slider.

# %%
jupyter.layout_explorer()

# %% [markdown]
# What that is worth, by the banks that a warp's loads meet:

# %%
for name in ("load_ldmatrix_s8", "load_lds32_u4", "load_qserve_reorder", "load_dual_mma", "load_comet_interleave"):
    accesses = holders.shared_accesses(name)
    loads, fronts, least = (sum(getattr(a, f) for a in accesses) for f in ("requests", "wavefronts", "least"))
    print(f"{name:24} {loads} loads per warp, {fronts:2} wavefronts, {fronts - least} of them conflicts")

# %% [markdown]
# ## Keeping shared memory full
#
# Two kernels stream stages of 16 KiB through a ring: `load_cp_async` (sm_80, every thread copies its own pieces) and
# `load_bulk_sm90` (one thread asks the copy engine for a whole stage, an mbarrier says when it is there). The
# emulator completes copies *early*, at once, or *late*, when something waits for them; a kernel that forgets to wait
# gets away with the first and not with the second.

# %%
ring, (ring_source, *_) = kernels.find("load_cp_async")
stages = ring.example(np.random.default_rng(0), P=5, B=1)
forgetful = ring_source.text.replace("cp.async.wait_group 3;", "")
kernel = ptxlab.load(forgetful)
digest = np.zeros((1, 128), np.uint32)
geometry = ring.launch({"P": 5, "B": 1})
outcome = kernel(
    stages["words"],
    digest,
    np.uint32(5),
    grid=1,
    block=128,
    shared_bytes=geometry.shared_bytes,
    backend="emulator",
    checks=["async"],
)
print(*outcome.findings[:2], sep="\n")

# %% [markdown]
# ## Measured on an H200
#
# Resident: the fragment's loads alone, from the same tile in shared memory, against 128 bytes per clock and SM.
# Streaming: tiles from device memory, fragments back to it; for the rings, from device memory into registers, against
# the read ceiling of the same run.

# %%
Markdown(report.load_table())
