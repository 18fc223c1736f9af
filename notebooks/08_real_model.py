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
# # A real model: quantise it, look where the error is, ask it something
#
# SmolLM2-135M-Instruct is a language model of 30 layers, small enough for a laptop. This notebook rounds its weights to
# 4 bits, measures what weights, activations and KV cache cost it layer by layer, tries the steps of the papers' recipe
# on one layer, and then lets it write with W4A8KV4: in NumPy, with the integers that the kernels compute.
#
# Sources: LiquidGEMM §4 (LQQ), QServe §4 (QoQ: rotation, smoothing, clipping, KV4), GPTQ. Everything here runs on the
# CPU, without a GPU. `ptxlab weights smollm2` downloads the model (93 MB), `ptxlab weights wikipedia` the text (28 MB).

# %%
# %matplotlib inline
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown

from ptxlab.llm.accuracy.text import open_text, tokens_of
from ptxlab.llm.checkpoints import open_model
from ptxlab.llm.checkpoints.open import dequantize_model
from ptxlab.llm.model import NumpyRunner, QuantizedModel, generate
from ptxlab.llm.model.floats import negative_log_likelihood
from ptxlab.llm.model.numerics import FakeQuantized
from ptxlab.llm.recipe import Recipe
from ptxlab.llm.recipe.calibrate import quantize_layer
from ptxlab.lowbit.layout import unpack

model, tokenizer = open_model("smollm2")
model = replace(model, layers=list(model.layers))  # read once; they fit
corpus = open_text("wikipedia")
config = model.config


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return Markdown("\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines))


config

# %% [markdown]
# ## Weights in 4 bits
#
# LQQ rounds twice: each row to 8 bits, then each group of 64 along K to 4 bits with an integer scale. Queries, keys and
# values become one packed matrix, gate and up another. What remains in 16 bits is the embedding, which is the LM head
# too, and the norms.

# %%
rounded = QuantizedModel.rounded(model, scheme="lqq", group=64, rounding="search")
weights = dequantize_model(rounded)  # what the integers stand for
weights = replace(weights, layers=list(weights.layers))


def relative(actual, expected):
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


names = ("q", "k", "v", "o", "gate", "up", "down")
pairs = list(zip(weights.layers, model.layers, strict=True))
errors = {name: [relative(ours[name], theirs[name]) for ours, theirs in pairs] for name in names}
packed = sum(layer.nbytes for layer in rounded.layers)
count = sum(N * K for N, K in config.matrices.values()) * config.layers
print(
    f"{count / 1e6:.0f} million weights in the layers: {2 * count / 1e6:.0f} MB in FP16, {packed / 1e6:.0f} MB packed"
)
table(
    ("matrix", "relative error of the weights", "worst layer"),
    [(name, f"{np.mean(each):.3f}", f"{int(np.argmax(each))} ({max(each):.3f})") for name, each in errors.items()],
)

# %% [markdown]
# Every matrix loses about as much: what 16 levels per group cost. How much of that reaches the output is another
# question, and weights are not the only thing that is rounded.
#
# ## Layer by layer
#
# A passage runs through the float model and through models of which one thing each is quantised. After every layer we
# compare the residual stream, and at the end the likelihood of the text. `FakeQuantized` rounds activations to 8 bits
# per token before every product, and keys and values to 4 bits per token and head; the products are those of floats.

# %%
passage = tokens_of(corpus.evaluation, tokenizer)[:128]
variants = {
    "float32": (model, FakeQuantized(acts=None, kv=None)),
    "A8": (model, FakeQuantized(acts=8, kv=None)),
    "KV4": (model, FakeQuantized(acts=None, kv="kv4")),
    "W4": (weights, FakeQuantized(acts=None, kv=None)),
    "W4A8KV4": (weights, FakeQuantized(acts=8, kv="kv4")),
}
streams, perplexities = {}, {}
for name, (variant, numerics) in variants.items():
    x, streams[name] = variant.embed(passage[None]), []
    for layer in variant.layers:
        x = variant.run_layer(x, layer, numerics)
        streams[name].append(x[0])
    perplexities[name] = np.exp(negative_log_likelihood(variant.logits(x)[0, :-1], passage[1:]))

figure, axes = plt.subplots(figsize=(7.5, 3.8), layout="constrained")
for name, style in zip(list(variants)[1:], ("C7-s", "C0-o", "C1-^", "C3-D"), strict=True):
    # Median over tokens: the first one has a few huge channels, which would hide all others.
    by_token = [
        np.linalg.norm(stream - right, axis=1) / np.linalg.norm(right, axis=1)
        for stream, right in zip(streams[name], streams["float32"], strict=True)
    ]
    axes.plot(np.median(by_token, axis=1), style, markersize=4, label=name)
axes.set(xlabel="layer", ylabel="relative error of the residual stream", ylim=0)
axes.set_title("4-bit weights cost most; errors grow with depth, and once more in the last layer", loc="left")
axes.legend(frameon=False, ncols=2)
plt.show()

# %%
table(
    ("quantised", "perplexity of the passage", "by that of float32"),
    [(name, f"{found:.2f}", f"{found / perplexities['float32']:.2f}") for name, found in perplexities.items()],
)

# %% [markdown]
# A passage of 128 tokens is an example, not a measurement: `ptxlab perplexity` takes whole texts, and the
# [guide](guide/README.md) has tables.
#
# ## Step by step, on one layer
#
# The recipe does better than rounding to nearest: it looks at what the layer reads. Clipping searches the levels of
# each group that give the least error of the output. GPTQ rounds column after column, and lets the columns that are
# left make up for the error so far. Here layer 3 goes through both, calibrated on 768 tokens of other articles than
# the passage is from. The error is that of what the layer adds to the stream, on both texts.

# %%
steps = {
    "round to nearest, as above": None,
    "levels of least error of the weights": Recipe(clip="weights"),
    "levels of least error of the output": Recipe(clip="output"),
    "GPTQ": Recipe(gptq=True),
    "both": Recipe(clip="output", gptq=True),
}
LAYER = 3
states = [model.embed(tokens_of(corpus.calibration[:8], tokenizer)[:768].reshape(4, 192))]
for layer in model.layers[:LAYER]:
    states = [model.run_layer(x, layer) for x in states]
texts = (states[0], streams["float32"][LAYER - 1][None])


def layer_change(x, layer):
    return model.run_layer(x, layer) - x


exact = [layer_change(x, model.layers[LAYER]) for x in texts]
by_step = {}
for name, recipe in steps.items():
    quantised = quantize_layer(model, model.layers[LAYER], states, recipe).floats if recipe else weights.layers[LAYER]
    by_step[name] = [relative(layer_change(x, quantised), right) for x, right in zip(texts, exact, strict=True)]
table(
    ("weights of layer 3", "error on the calibration text", "error on the passage"),
    [(name, *(f"{error:.3f}" for error in of_texts)) for name, of_texts in by_step.items()],
)

# %% [markdown]
# Looking at outputs takes away two fifths of the error. With 768 tokens GPTQ learns the calibration text rather than
# the language: it gains less on the passage than on what it was calibrated on. The recipe takes 128 samples of 1,024
# tokens.
#
# The whole recipe also rotates the stream, smooths inputs and keys, and reorders channels. Its result is a folder, and
# that takes the place of the model's name everywhere:
#
# ```sh
# ptxlab quantize smollm2 --recipe lqq --out smollm2-lqq
# ptxlab perplexity smollm2-lqq
# ptxlab generate "The capital of France is" --model smollm2-lqq
# ```
#
# ## Ask it something
#
# `NumpyRunner` computes what the kernels compute: INT8 activations times the integers of the weights, exact sums, the
# epilogue rounded as the kernel rounds it, keys and values in the pages of a 4-bit cache. On a GPU, `KernelRunner` does
# the same with a CUDA graph per step. Weights are those that were rounded to nearest, so do not expect too much.


# %%
runner = NumpyRunner(rounded, batch=1, context=64)


def write(prompt, tokens=20, **options):
    steps = generate(runner, [tokenizer.encode(prompt).tolist()], tokens, **options)
    return tokenizer.decode(int(step[0]) for step in steps)


for prompt in ("The capital of France is", "Water boils at"):
    print(f"{prompt}|{write(prompt)}\n")

# %% [markdown]
# The model was trained on questions in ChatML, and likes to be asked so. Above temperature 0, tokens are drawn.

# %%
question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
print(write(question, temperature=0.5, seed=0))
bytes_of_a_token = sum(cache.pool.nbytes / (cache.pages * cache.page_size) for cache in runner.caches)
in_halves = 2 * 2 * config.kv_heads * config.head_dim * config.layers
print(f"\n{runner.lengths[0]} tokens in the cache, {bytes_of_a_token:.0f} bytes each; in FP16 {in_halves}")

# %% [markdown]
# ## Checks

# %%
layer = rounded.layers[0]
assert all(not unpack(getattr(layer, name)).overflows().any() for name in config.matrices)
assert perplexities["float32"] < perplexities["A8"] * 1.02 < perplexities["W4A8KV4"]
assert all(0.07 < error < 0.12 for layer_errors in errors.values() for error in layer_errors)
on_passage = {name: of_passage for name, (_, of_passage) in by_step.items()}
assert on_passage["both"] < on_passage["round to nearest, as above"] > on_passage["levels of least error of the output"]
