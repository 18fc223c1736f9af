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
# A slow kernel executes too much or waits too much. Three tools tell which: its machine code shows what has to be
# issued; a launch under Nsight Compute shows what the units did and what the warps waited for; a timeline shows what
# each warp group does when. The first and the last need no GPU. For the second, this notebook uses records of an H200
# where there is no GPU.

# %%
# %matplotlib inline
from IPython.display import Markdown

from ptxlab import registry, sass
from ptxlab.profile import nsight, timeline
from ptxlab.profile.plot import page_figure
from ptxlab.profile.timeline import recorder
from ptxlab.profile.timeline.plot import comparison_figure, timeline_figure
from report import pipelines, profiletables

# %% [markdown]
# ## Machine code
#
# What ptxas makes of eight weights in two schemes. QoQ's `vadd4` became eight instructions, two adds and six logic
# instructions, because Hopper has no such opcode. LiquidQuant needs two XORs instead.

# %%
names = ("dequant_qoq_vadd4", "dequant_lqq")
reports = [sass.report(registry.find(name)[1][0], "sm_90a") for name in names]
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
# `ptxlab profile NAME --compare OTHER` launches both under ncu, warmed up, with clocks as they are. Here the GEMM
# that `gemm_w4a8` launches at 256 tokens (blue) is compared with the last step of the ladder (orange). Read it from
# the top: the time, then which unit is busiest, then what the warps waited for.

# %%
profiles = profiletables.load_compared()
page_figure(profiles)

# %% [markdown]
# The same in words, the largest difference first:

# %%
print("\n".join(nsight.differences(*profiles)))

# %% [markdown]
# The faster kernel executes *more* instructions per weight. It gains elsewhere: nearly all *barrier* stalls of the
# other are at `wgmma.wait_group`, where a warp group waits for its own MMAs. Here hardly a warp does, so more warps
# can issue, and the tensor pipe is busier.
#
# ## At which line
#
# Warps are sampled. A warp that cannot issue is counted at the instruction that it stands at: the cost of a load
# shows at its first consumer. Lines of headers are those of inlined functions.

# %%
lines = ["| line | stalls | mostly for | source |", "| --- | ---: | --- | --- |"]
for carrier in profiles[0].carriers[:6]:
    reason = next(iter(carrier.reasons), "").replace("_", " ")
    lines.append(f"| {carrier.where} | {carrier.share:.0%} | {reason} | `{carrier.text or carrier.sass}` |")
Markdown("\n".join(lines))

# %% [markdown]
# ## What one operation costs
#
# LiquidGEMM §3.2 starts from such a count: 21% of the stalls of QServe's kernel are at the subtraction of its
# dequantisation. The table shows the same on the FFN of LLaMA-2-7B, for QServe's loop and the alternatives:

# %%
Markdown(profiletables.stalls_section())

# %% [markdown]
# In the same loop (`qoq_sm90`, `lqq_sm90`) LiquidQuant's XOR takes a third to a half of that. Pipelined
# (`lqq_imfp_sm90`) its share is larger again, on `down` larger than the subtraction's; but shares are of a kernel's
# own stalls. Where weights stay unsigned there is nothing to wait for.
#
# ## What each warp group does when
#
# Counters are sums over a launch. They cannot show that the tensor cores are idle *while* other warps dequantise. For
# that the kernels can be compiled to store a clock at the start of each phase. The emulator runs the same stores: its
# clock counts instructions per warp, and a wgmma takes as long as at its peak rate. So these are not times, but the
# order of events is the kernel's own. Three ways to feed the tensor cores:

# %%
emulated = []
for name in ("gemm_w4a8_lqq_sm90", "gemm_w4a8_lqq_excp_sm90", "gemm_w4a8_lqq_imfp_sm90"):
    spec, (source, *_) = registry.find(name)
    emulated.append(recorder.record(spec, source, backend="emulator"))
comparison_figure(emulated, [f"{one.kernel}, emulated" for one in emulated], 2500)

# %% [markdown]
# Top: a warp group dequantises, multiplies, waits. Middle (ExCP): one warp group dequantises for the other through
# shared memory, and the one that multiplies waits for it. Bottom (ImFP): two warp groups do the same work out of
# step, and the MMAs of one run during the dequantisation of the other.
#
# The same on an H200, in clocks of one SM, at 256 tokens:

# %%
pipelines.comparison(256)

# %% [markdown]
# At 64 tokens each weight is dequantised for a quarter of the MMAs, and dequantisation (orange) takes the time: the
# tensor cores have gaps under any pipeline.

# %%
pipelines.comparison(64)

# %% [markdown]
# Attention to a 4-bit cache, the whole launch, because it is short. Before the first scores, pages have to be looked
# up and copied; after the last values, the results of several warps are merged into one output. With more pages that
# is a smaller part of the time. In between each warp processes pages of its own. It waits for copies (pale), hardly
# ever for other warps (pink).

# %%
timeline_figure(pipelines.load_timelines(pipelines.ATTENTION)[0])

# %% [markdown]
# ## Looking closer
#
# `ptxlab timeline NAME --trace trace.json` writes a trace that [Perfetto](https://ui.perfetto.dev) opens, to zoom and
# measure. `--out FILE.json` saves a timeline, and `ptxlab timeline --from FILE.json` draws it on another machine. The
# content of the trace:

# %%
events = timeline.trace(emulated[-1])["traceEvents"]
spans = [event for event in events if event["ph"] == "X"]
print(f"{len(spans)} spans of {len(events) - len(spans)} named rows; the first: {spans[0]}")
