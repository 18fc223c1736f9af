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
# A tensor core does not take its operand in rows. Every lane of a warp has to hold particular bytes, and the load
# that delivers them for 8-bit weights delivers the wrong ones for 4-bit weights. This notebook runs the kernels of
# `ptx/load/` in the emulator and reads off where the six that load a tile put its elements.
#
# Sources: QServe §5.2.1, LiquidGEMM §5.2, COMET §4.3.

# %%
# %matplotlib inline
# %load_ext ptxlab
import numpy as np
from IPython.display import Markdown

import ptxlab
from ptxlab import registry
from ptxlab.lowbit import jupyter
from ptxlab.lowbit.kernels import holders
from report import figures, sections

# %% [markdown]
# ## The MMA's operand
#
# With 8-bit weights `ldmatrix` gives every lane its bytes. Lane `4 g + t` gets four neighbouring channels of row `g`
# in each of its registers: `a0` is channels `4 t` to `4 t + 3`, `a2` is `16 + 4 t` to `16 + 4 t + 3`. These maps are
# in `ptxlab.hardware.fragments` and pinned by vectors recorded on an H200. The output below is read off the kernel
# itself, which ran on tiles whose elements encode their own position.

# %%
print(holders.as_text("load_ldmatrix_s8"))

# %% [markdown]
# ## ldmatrix with 4-bit weights: wrong
#
# `ldmatrix` distributes equal *bytes*. Four bytes are eight channels here, so lane `t` receives channels `8 t` to `8
# t + 7`, which belong to lanes `2 t` and `2 t + 1` (modulo 4). Only a quarter of the tile is where the MMA needs it.

# %%
print(holders.as_text("load_ldmatrix_u4"))
figures.picture("load_ldmatrix_u4")

# %% [markdown]
# The kernel is *wrong by design*. Verification requires it to be wrong in exactly the places that the model predicts.

# %%
spec, (source, *_) = registry.find("load_ldmatrix_u4")
logical = spec.example(np.random.default_rng(0), T=2)
got = ptxlab.run("load_ldmatrix_u4", **spec.pack(logical), backend="emulator").outputs["fragments"]
missed = got != spec.wrong.truth(**logical)
print(f"{missed.mean():.0%} of the bytes differ; as predicted: {np.array_equal(missed, spec.wrong.misses(**logical))}")

# %% [markdown]
# ## One LDS.32 per four channels: correct and slow
#
# Each load brings eight channels and uses four. Rows that are 32 bytes apart conflict in the same banks: eight loads
# take sixteen wavefronts.

# %%
figures.picture("load_lds32_u4")

# %% [markdown]
# ## Weights in thread order: correct and fast
#
# Weights do not change, so they can be stored in any order. QServe reorders tiles of 32 x 32 so that the 32 weights
# of a thread are one 128-bit word. LiquidGEMM's dual-MMA layout does so for two successive wgmmas. One LDS.128
# suffices, without bank conflicts, and its address needs nothing but the thread's number.

# %%
figures.picture("load_dual_mma")

# %% [markdown]
# This cell shows a list and a slider, for any lane and any layout:

# %%
jupyter.layout_explorer()

# %% [markdown]
# The bank conflicts of a warp's loads:

# %%
for name in ("load_ldmatrix_s8", "load_lds32_u4", "load_qserve_reorder", "load_dual_mma", "load_comet_interleave"):
    accesses = holders.shared_accesses(name)
    loads, wavefronts, fewest = (
        sum(getattr(a, f) for a in accesses) for f in ("requests", "wavefronts", "min_wavefronts")
    )
    print(f"{name:24} {loads} loads per warp, {wavefronts:2} wavefronts, {wavefronts - fewest} of them conflicts")

# %% [markdown]
# ## Keeping shared memory full
#
# Two kernels stream stages of 16 KiB through a ring: `load_cp_async` (sm_80, every thread copies its own pieces) and
# `load_bulk_sm90` (one thread issues a bulk copy of a whole stage, an mbarrier signals its arrival). The emulator
# completes copies *early*, at once, or *late*, when something waits for them. A kernel without its wait gives the
# right result in the first mode and the wrong one in the second.

# %%
ring, (ring_source, *_) = registry.find("load_cp_async")
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
# Resident: only the fragment's loads, from one tile in shared memory, compared with 128 bytes per clock and SM.
# Streaming: tiles from device memory, fragments back to it; for the rings, from device memory into registers,
# compared with the read ceiling of the same run.

# %%
Markdown(sections.load_table())
