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
# # 4-bit activations: W4A4, W4Ax, and when W4A8 is better
#
# INT4 tensor cores multiply twice as fast as INT8 ones. To use them, activations need 4 bits as well, and activations
# have outliers. This notebook takes the inputs of a trained model's layer, quantises them as Atom and as COMET do,
# multiplies them in a kernel, and asks what that is worth: in time on several GPUs, in COMET's schedules, and in
# perplexity.
#
# Sources: Atom §4, COMET §3 and §4. Everything here runs on the CPU, without a GPU. `ptxlab weights smollm2` downloads
# the model (93 MB), `ptxlab weights wikipedia` the text (28 MB).

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown

import ptxlab
from ptxlab.llm.accuracy.audit_inputs import audit_input
from ptxlab.llm.accuracy.text import open_text, tokens_of
from ptxlab.llm.checkpoints import open_model
from ptxlab.llm.model.decoder import EXACT, Numerics
from ptxlab.lowbit import quant
from ptxlab.lowbit.bench import counts
from ptxlab.lowbit.cost import published
from ptxlab.lowbit.cost.plot import schedule_figure
from ptxlab.lowbit.cost.schedule import SCHEDULES, Costs, Tile, makespan, rate_bound, ratio_needed, schedule
from report import accuracy, w4a4

model, tokenizer = open_model("smollm2")
passage = tokens_of(open_text("wikipedia").evaluation, tokenizer)[:128]


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return Markdown("\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines))


# %% [markdown]
# ## What a layer reads
#
# A passage of 128 tokens runs through the first layers. `Numerics` says how a layer multiplies; this one also keeps
# what each matrix is given.

# %%
LAYER = 3


class Inputs(Numerics):
    """Exact products; `seen` has the last input of each matrix."""

    def __init__(self):
        self.seen = {}

    def product(self, name, x, layer):
        self.seen[name] = x[0]
        return EXACT.product(name, x, layer)


x = model.embed(passage[None])
for index in range(LAYER + 1):
    inputs, layer = Inputs(), model.layers[index]
    x = model.run_layer(x, layer, inputs)

figure, panels = plt.subplots(1, 3, figsize=(11, 3), layout="constrained")
for axes, (name, matrices) in zip(panels, {"q": "q, k, v", "o": "o", "down": "down"}.items(), strict=True):
    peaks = np.sort(np.abs(inputs.seen[name]).max(axis=0))[::-1]
    axes.plot(peaks / np.median(peaks), color="C0")
    axes.axhline(quant.fmpq.OUTLIER, color="C7", linestyle="--", label="six times the median channel")
    axes.set(title=f"input of {matrices}", xlabel="channel, the largest first", yscale="log")
panels[0].set_ylabel("largest |x|, by the median channel's")
panels[0].legend(frameon=False)
plt.show()

# %% [markdown]
# A few channels are much larger than the others. The input of `down` has the most of them, that of `o` none. One scale
# for a whole token has to hold them, and all other channels round to a few of its steps.
#
# ## Atom's ladder on one product
#
# Atom keeps the channels of the largest squares, reordered to the end, in INT8, and gives each group of the others a
# scale of its own. The error is that of the product, relative to the exact one; weights are in INT4 as well.

# %%
GROUP = 64
x, w = inputs.seen["down"], layer["down"]
order = quant.outlier_order(quant.channel_sizes(x), GROUP)
exact = x @ w.T


def error(x_read, w_read):
    return float(np.linalg.norm(x_read @ w_read.T - exact) / np.linalg.norm(exact))


def product_error(group, outliers, clip):
    rows = quant.quantize_atom_activations(x[:, order], group, outliers, clip=clip)
    weight = quant.quantize_atom_weight(w[:, order], group, outliers, clip=clip)
    return error(rows.dequantize(), weight.dequantize())


ladder = {
    "INT4, one scale per token": product_error(None, 0, 1.0),
    f"{GROUP} outlier channels in INT8": product_error(None, GROUP, 1.0),
    f"groups of {GROUP}": product_error(GROUP, GROUP, 1.0),
    "clipped at 0.9": product_error(GROUP, GROUP, 0.9),
}
eight = quant.quantize_activations(x).dequantize()
ladder["W4A8, for comparison"] = error(eight, quant.quantize_lqq(w, GROUP).dequantize())
table(("down of layer 3", "relative error"), [(step, f"{loss:.3f}") for step, loss in ladder.items()])

# %% [markdown]
# COMET gathers the outliers into blocks, and makes those blocks INT8; weights stay in INT4. How much of a layer has to
# be INT8?

# %%
shares = np.linspace(0, 1, 9)
figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
sizes, curve = quant.channel_sizes(x, "max"), []
by_size = np.argsort(sizes, kind="stable")
w_blocks = quant.quantize_block_weight(w[:, by_size], GROUP).dequantize()
for share in shares:
    blocks = quant.int8_blocks(sizes, outlier=0, most=share, block=GROUP)
    curve.append(error(quant.quantize_blocks(x[:, by_size], blocks, GROUP).dequantize(), w_blocks))
axes.plot(shares, curve, "o-", color="C1", label="COMET, by the share of INT8 blocks")
axes.axhline(ladder["clipped at 0.9"], color="C3", linestyle="--", label=f"Atom, {GROUP} INT8 channels")
axes.axhline(ladder["W4A8, for comparison"], color="C0", linestyle="--", label="W4A8")
axes.set(xlabel="share of the blocks in INT8", ylabel="relative error of down's product", ylim=0)
axes.set_title("The first INT8 blocks gain most", loc="left")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# `ptxlab audit smollm2 --scheme atom --scheme fmpq --group 64` does this for every matrix. Here are those of this
# layer: outliers are channels beyond six times the median one, and INT8 blocks are made for them alone, at most a
# fifth of all. Both limits are this project's: COMET gives no rule, and finds less than 20% (COMET §3.2).

# %%
rows = []
for parts in (("q", "k", "v"), ("o",), ("gate", "up"), ("down",)):
    together = np.concatenate([layer[part] for part in parts])
    rows += audit_input(together, inputs.seen[parts[0]], group=GROUP, tensor=", ".join(parts))
table(
    ("matrix", "scheme", "outliers", "INT8 channels", "error of the product"),
    [(r.tensor, r.scheme, r.outliers, f"{r.channels8} of {r.channels}", f"{r.output_error:.3f}") for r in rows],
)

# %% [markdown]
# ## In a kernel
#
# `reorder_quantize` reorders and quantises a token in one pass, and `gemm_w4a4` multiplies. A weight in `rows` is for
# INT4 tensor cores, one in `strips` for Hopper, which has none: there the same integers run as INT8. Sums of integers
# are exact, and floats are added in a fixed order, so both give the same bits; here in the emulator.

# %%
few_tokens, few_rows = np.ascontiguousarray(x[:4]), np.ascontiguousarray(w[:64])
weight = quant.quantize_atom_weight(few_rows[:, order], GROUP, GROUP)
products = {}
for layout, of_tokens in {"rows": "pairs", "strips": "bytes"}.items():
    tokens = ptxlab.reorder_quantize(
        few_tokens, quant.channel_places(order), outliers=GROUP, group=GROUP, layout=of_tokens, backend="emulator"
    )
    packed = ptxlab.pack_atom(weight, layout)
    products[layout] = ptxlab.gemm_w4a4(tokens, packed, out_dtype="float32", backend="emulator")
right = few_tokens @ few_rows.T
print(f"{np.linalg.norm(products['rows'] - right) / np.linalg.norm(right):.3f} from the exact product")
print("the same bits for both GPUs:", np.array_equal(products["rows"], products["strips"]))

# %% [markdown]
# ## What a GPU gains
#
# Scales of groups have a price: every 128 channels, each sum leaves the tensor cores, is converted, scaled and added on
# CUDA cores. Atom measured it on the RTX 4090 with many tokens. The model counts the instructions of our kernels in
# machine code; the grey end has all of them overlapped with the MMAs, the coloured end none.

# %%
bars = [p for p in published.predictions(counts.loop_counts) if p.figure.source == "Atom §5.4.2"]
names = ("pure INT4", "and outliers in INT8", "and scales of groups")
figure, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
for place, p in enumerate(bars):
    axes.barh(place, p.overlapped, height=0.5, color="#dfe5ec", label="predicted, overlapped" if not place else None)
    axes.barh(place, p.in_turn, height=0.5, color="C0", label="predicted, in turn" if not place else None)
    axes.plot(p.figure.least, place, "D", color="black", label="reported by Atom" if not place else None)
axes.set_yticks(range(len(bars)), names)
axes.invert_yaxis()
axes.set_xlabel("TOPS on an RTX 4090, 4,096 tokens")
axes.set_title("Scales of groups cost more than outliers do", loc="left")
axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()

# %% [markdown]
# An SM of an A100 has half as many FP32 lanes, and tensor cores twice as fast. There W4A4 in groups of 128 is predicted
# slower than INT8, and APEX4 measured so; the [guide](guide/w4a4.md) has the table by GPU. On Hopper, INT4 operands run
# at the rate of INT8 ones, and only bytes are saved.
#
# ## COMET's schedules
#
# INT8 tiles take twice as long as INT4 tiles. In the order of the grid, every round waits for its slowest tile.
# Without barriers and with the longest tiles first, no SM waits; what is left at the end can be cut into quarters. They
# are dealt out beforehand, or stolen at run time by whoever is idle (COMET §4.4).

# %%
tiles = [Tile(0, tile // 3, tile % 3, tile % 2 == 0) for tile in range(18)]
figure = schedule_figure({"18 tiles, 4 SMs": (tiles, 4, Costs())}, SCHEDULES)
figure

# %%
reported = {"LLaMA-3-8B": 1.71, "LLaMA-3-70B": 1.67}
table(
    ("", "over W4A8", "INT8 tile, in INT4 tiles"),
    [
        ("bound with 75% INT4", f"{rate_bound(0.75, 2):.2f}x", "2.00"),
        *(
            (f"COMET, {model}", f"{times:.2f}x", f"{ratio_needed(0.75, times):.2f}")
            for model, times in reported.items()
        ),
    ],
)

# %% [markdown]
# With three quarters of the blocks in INT4, no schedule gains more than 1.60x over a W4A8 that pays nothing for the
# conversion of its weights. COMET's figures need a W4A8 whose tiles take longer than two INT4 tiles.
#
# ## Which precision should I take?
#
# Perplexity of SmolLM2-135M against the bytes that the GEMMs of 1,024 tokens read. W4A8KV4, W4AxKV4 and W4A4KV4 went
# through clipping and GPTQ where they do not say otherwise; in Atom's ladder each step adds to those before it.

# %%
record = accuracy.load_record()
Markdown(w4a4.accuracy_table().partition("![")[0])

# %%
w4a4.accuracy_picture(record)

# %% [markdown]
# `ptxlab accuracy --only 'FMPQ/*' --only 'Atom/*' --only 'g64/*' --only alone/W8A8` measures the points. The first
# lines of the [guide's page](guide/w4a4.md) say what follows from all this, by GPU.
#
# ## Checks

# %%
steps = list(ladder.values())
assert steps[0] > 1.2 * steps[1] and steps[1] > 1.5 * steps[2] and steps[3] < 1.05 * steps[2]
assert ladder["W4A8, for comparison"] < steps[3]
assert np.all(np.diff(curve) <= 0.002) and curve[0] > curve[-1]
assert np.array_equal(products["rows"].view(np.uint32), products["strips"].view(np.uint32))
assert [makespan(schedule(name, tiles, 4, Costs())) for name in SCHEDULES] == [10, 10, 7, 6.75, 6.75]
ratios = {row.name: row.ratio for row in w4a4.precisions(record).itertuples(index=False)}
assert ratios["W4A8KV4, the whole recipe"] < ratios["W4A4KV4, Atom"]
