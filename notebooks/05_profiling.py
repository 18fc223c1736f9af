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
# # Profiling: what a kernel waits for
#
# A kernel that is too slow has too much to do, or waits too much. Three instruments tell: its machine code, which
# says what has to be issued; a launch under Nsight Compute, which says what the units did and what the warps waited
# for; and a timeline, which says who did what when. The first and the last need no GPU; where the second would,
# what an H200 recorded stands in.

# %%
# %matplotlib inline
from IPython.display import Markdown

from ptxlab import kernels, nsight, sass, timeline
from ptxlab.profile.plot import page_figure
from ptxlab.timeline import recorder
from ptxlab.timeline.plot import comparison_figure, timeline_figure
from report import pipelines, profiletables

# %% [markdown]
# ## Machine code
#
# What ptxas makes of eight weights, in two schemes. The `vadd4` of QoQ became eight instructions, two adds and six of
# logic, since Hopper has no such opcode; LiquidQuant needs two XORs instead.

# %%
names = ("dequant_qoq_vadd4", "dequant_lqq")
reports = [sass.report(kernels.find(name)[1][0], "sm_90a") for name in names]
opcodes = dict.fromkeys(opcode for report in reports for opcode in report.opcodes_per_8)
at_most = [8 / sass.pipe_limit(report.pipes_per_8)[0] for report in reports]
lines = [f"| per 8 weights | {names[0]} | {names[1]} |", "| --- | ---: | ---: |"]
lines += [
    f"| `{o}` | {reports[0].opcodes_per_8.get(o, 0):g} | {reports[1].opcodes_per_8.get(o, 0):g} |" for o in opcodes
]
lines += [f"| weights per clock and SM, at most | {at_most[0]:.0f} | {at_most[1]:.0f} |"]
Markdown("\n".join(lines))

# %% [markdown]
# ## A launch on a page
#
# `ptxlab profile NAME --compare OTHER` launches both under ncu, warmed up, clocks as they are. Here the GEMM that
# `gemm_w4a8` launches at 256 tokens (blue) is beside the last step of the ladder (orange). Read it from the top: the
# time, then which unit is busiest, then what the warps waited for that kept it from being busier.

# %%
found = profiletables.compared()
page_figure(found)

# %% [markdown]
# The same in words, the largest difference first:

# %%
print("\n".join(nsight.differences(*found)))

# %% [markdown]
# The faster one executes *more* instructions per weight. What it gains is elsewhere: nearly all of the other's stalls
# for a *barrier* are at `wgmma.wait_group`, where a warp group waits for its own products. Here hardly a warp does,
# so more of them are there to issue, and the tensor pipe is busier.
#
# ## At which line
#
# Warps are sampled, and a warp that cannot issue counts for the instruction that it stands at: a load's cost shows
# at the first one that needs what it brings. Lines of headers are those of functions inlined there.

# %%
lines = ["| line | stalls | mostly for | source |", "| --- | ---: | --- | --- |"]
for carrier in found[0].carriers[:6]:
    reason = next(iter(carrier.reasons), "").replace("_", " ")
    lines.append(f"| {carrier.where} | {carrier.share:.0%} | {reason} | `{carrier.text or carrier.sass}` |")
Markdown("\n".join(lines))

# %% [markdown]
# ## What one operation costs
#
# LiquidGEMM §3.2 starts from such a count: 21% of the stalls of QServe's kernel are at the subtraction of its
# dequantisation. The same on the FFN of LLaMA-2-7B, for QServe's loop and for the ways around it:

# %%
Markdown(profiletables.stalls_section())

# %% [markdown]
# In the same loop (`qoq_sm90`, `lqq_sm90`) the XOR that LiquidQuant needs in its place takes a third to a half of that.
# Pipelined (`lqq_imfp_sm90`) its share is larger again, on `down` than the subtraction's: shares are of a kernel's own
# stalls. Where weights stay unsigned there is nothing to wait for.
#
# ## Who did what when
#
# Counters are sums over a launch. They cannot say that the tensor cores stand idle *while* others dequantise. For
# that the kernels stamp a clock at the beginning of each phase, if they are compiled to, and the emulator runs the
# very stamps: its clock counts instructions per warp, and a wgmma lasts as long as at its peak rate. So these are
# no times, but the order of things is the kernel's own. Three ways to feed the tensor cores:

# %%
emulated = []
for name in ("gemm_w4a8_lqq_sm90", "gemm_w4a8_lqq_excp_sm90", "gemm_w4a8_lqq_imfp_sm90"):
    spec, (source, *_) = kernels.find(name)
    emulated.append(recorder.record(spec, source, backend="emulator"))
comparison_figure(emulated, [f"{one.kernel}, emulated" for one in emulated], 2500)

# %% [markdown]
# Above, a warp group dequantises, multiplies, waits. In the middle (ExCP) one dequantises for the other, by way of
# shared memory, and the one that multiplies waits for it. Below (ImFP) two do the same work out of step, and one's
# products run under the other's dequantisation.
#
# The same on an H200, in clocks of one SM, at 256 tokens:

# %%
measured = pipelines.compared(256)
comparison_figure(measured, pipelines.titles(measured), pipelines.WIDTH)

# %% [markdown]
# At 64 tokens each weight is dequantised for a quarter of the products, and dequantisation (orange) is what lasts:
# the gaps of the tensor cores are there under any pipeline.

# %%
measured = pipelines.compared(64)
comparison_figure(measured, pipelines.titles(measured), pipelines.WIDTH)

# %% [markdown]
# And attention to a 4-bit cache: not a part of the launch but all of it, since it is short. Before the first scores,
# pages have to be looked up and to arrive; after the last values, what several warps found of one sequence becomes one
# output. With more pages that is a smaller part of the time. In between each warp goes through pages of its own, and
# what it waits for are copies (pale), hardly ever other warps (pink).

# %%
timeline_figure(pipelines.recorded(pipelines.ATTENTION)[0])

# %% [markdown]
# ## Looking closer
#
# `ptxlab timeline NAME --trace trace.json` writes a trace that [Perfetto](https://ui.perfetto.dev) opens, to zoom and
# measure. `--out FILE.json` keeps a timeline, and `ptxlab timeline --from FILE.json --plot FILE.png` draws it again, on
# a machine without that GPU too. What is in the trace:

# %%
events = timeline.trace(emulated[-1])["traceEvents"]
spans = [event for event in events if event["ph"] == "X"]
print(f"{len(spans)} spans of {len(events) - len(spans)} named rows; the first: {spans[0]}")
