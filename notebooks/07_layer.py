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
# # A decoder layer, built from a config and taken apart
#
# A model does more than products and attention: RMSNorm, the rotary embedding, SiLU, and quantisation before every
# product. `ptxlab.llm.model.decode_layer` puts the kernels of this project together to one layer, as a chain of ten
# launches (QServe, Fig. 11). This notebook builds a tiny layer, runs it in the emulator, looks at what every launch
# reads and writes, removes a wait, and then asks where the bytes of LLaMA-2-7B and 70B go.
#
# Sources: QServe §5, LiquidGEMM Table 1. Everything here runs on the CPU, without a GPU.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown

from ptxlab import KVCache, emulator, runtime
from ptxlab.llm.model import Config, LayerBuffers, LayerInputs, LayerWeights, decode_layer
from ptxlab.llm.model.reference import compare, in_float64
from ptxlab.lowbit import cost, quant
from ptxlab.lowbit.layout import buffer_shapes, page_bytes, scatter


def table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return Markdown("\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines))


# %% [markdown]
# ## From a config to packed weights
#
# `Config` reads the config.json of Hugging Face, here that of a model with two query heads of 128 dimensions that share
# one KV head. Queries, keys and values are one matrix, gate and up another, so that a layer has four products.

# %%
config = Config.from_json(
    {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 100,
    }
)
weights = LayerWeights.random(config, seed=0, scheme="lqq", group=128)
rows = [
    (name, N, K, weights.parts[name].nbytes, f"{8 * weights.parts[name].nbytes / (N * K):.2f}")
    for name, (N, K) in config.matrices.items()
]
table(("matrix", "N", "K", "bytes", "bits per weight"), rows)

# %% [markdown]
# ## Three sequences of different lengths
#
# A page holds 64 tokens. The lengths include the token that is about to come; `slots` is where its key and value go.
# `LayerBuffers` is all that lies between the launches. It is made once, for all layers and steps of a decoder.

# %%
lengths = (70, 1, 33)
rng = np.random.default_rng(0)


def problem():
    cache = KVCache.empty(len(lengths), 2, config.kv_heads, config.head_dim)
    cache.lengths[:] = lengths
    shapes = [(length, config.kv_heads, config.head_dim) for length in lengths]
    keys, values = ([quant.quantize_kv(rng.standard_normal(shape, np.float32)) for shape in shapes] for _ in "kv")
    scatter(cache, keys, values)
    slots = np.array([cache.slots(b)[-1] for b in range(len(lengths))], np.int32)
    x, residual = rng.standard_normal((2, len(lengths), config.hidden)).astype(np.float16)
    return cache, slots, x, residual, (*config.rope_tables(128), cache.lengths - 1)


cache, slots, x, residual, rope = problem()
buffers = LayerBuffers.empty(weights, cache)
layer_inputs = LayerInputs.of(x, residual, cache, slots, rope)

# %% [markdown]
# ## One layer, as one sequence of launches
#
# On a GPU every launch but the first begins while the one before it still runs (programmatic dependent launch).
# `emulator.chain` runs the launches as such a sequence: each finds memory as it was before the kernels that may still
# run, until it waits for them. All checks are on.

# %%
with emulator.chain(emulator.CHECKS, given=[cache.pool]) as chain:
    stream = decode_layer(x, residual, weights, cache, slots, rope=rope, buffers=buffers, backend="emulator")
print(f"{len(chain.launches)} launches, {len(chain.findings)} findings")

# %% [markdown]
# Each launch leaves its result in the buffers. `compare` holds every one against the twin in exact integers, and
# `in_float64` is the layer on the same packed weights and cache with nothing else quantised: what is left between the
# two is the price of INT8 activations and of the new token's 4 bits.

# %%
print(compare(layer_inputs, weights, buffers, residual, cache))
exact = sum(in_float64(layer_inputs, weights)) - layer_inputs.x - layer_inputs.residual  # what the layer has added
added = stream - layer_inputs.x.astype(np.float64) - layer_inputs.residual
print(f"relative error {np.linalg.norm(added - exact) / np.linalg.norm(exact):.4f}, most of all quantisation")

# %%
written = {
    "rmsnorm_quantize": ("x, residual", ("residual", "qkv_in")),
    "gemm_w4a8 (QKV)": ("qkv_in", ("qkv",)),
    "rope_append_kv4": ("qkv", ("q",)),
    "attention_kv4": ("q, cache", ("attention",)),
    "quantize_activations": ("attention", ("o_in",)),
    "gemm_w4a8 (O)": ("o_in, residual", ("residual",)),
    "rmsnorm_quantize ": ("residual", ("gate_up_in",)),
    "gemm_w4a8 (gate, up)": ("gate_up_in", ("gate_up",)),
    "silu_mul_quantize": ("gate_up", ("down_in",)),
    "gemm_w4a8 (down)": ("down_in, residual", ("residual",)),
}


def describe_buffer(name):
    array = residual if name == "residual" else getattr(buffers, name)
    inside = array.x_q if name.endswith("_in") else array
    suffix = ", a scale and a sum per token" if name.endswith("_in") else ""
    return f"`{name}`: {inside.dtype} {list(inside.shape)}{suffix}"


table(
    ("launch", "kernel", "reads", "writes"),
    [
        (call, kernel, reads, "; ".join(map(describe_buffer, names)))
        for kernel, (call, (reads, names)) in zip(chain.launches, written.items(), strict=True)
    ],
)

# %% [markdown]
# ## A missing wait
#
# Without `griddepcontrol.wait`, the kernel that quantises attention's result reads what was there before. On a GPU it
# would mostly be late enough, and right; in the emulator it is found, with the line.

# %%
parse = runtime._parse_cached


def without_wait(text, *paths):
    changed = text.replace("griddepcontrol.wait;", "") if "quantize_activations_s8(" in text else text
    return emulator.parse(changed, *paths)


runtime._parse_cached = without_wait
cache, slots, x, residual, rope = problem()
with emulator.chain({"race"}, begin="late") as broken:
    decode_layer(x, residual, weights, cache, slots, rope=rope, buffers=buffers, backend="emulator")
runtime._parse_cached = parse
for finding in broken.findings[:1] + broken.findings[-1:]:
    print(f"{finding.path.rpartition('/')[2]}:{finding.line}: {finding.message}")

# %% [markdown]
# ## Where the bytes go
#
# A step of decoding reads every weight once and the whole cache. What lies between the launches is read and written
# once each. For sequences of 1024 tokens the model of costs gives each part the longer of its bytes at the measured
# read rate of an H200, and its products at the INT8 rate.

# %%
device, length = cost.sheet("h200"), 1024
batches = (1, 4, 16, 64, 128, 256)


def packed_bytes(N, K):
    shapes = buffer_shapes("strips", "lqq", N, K, 128)
    return sum(np.dtype(dtype).itemsize * int(np.prod(shape)) for dtype, shape in shapes.values())


def parts(config, M):
    """Estimate the microseconds of weights, of the cache, and of everything between the launches."""
    H, F, qkv, heads = config.hidden, config.ffn, config.qkv_width, config.heads * config.head_dim
    products = [
        max(packed_bytes(N, K) / device.read_tbps, 2 * M * N * K / device.tops["int8"]) / 1e6
        for N, K in config.matrices.values()
    ]
    per_token = 2 * config.kv_heads * page_bytes("kv4", 64, config.head_dim) / 64
    floats = 2 * (qkv + 2 * heads + 2 * F + 2 * H) + 2 * 2 * H  # written and read; the residual twice
    integers = H + heads + H + F
    between = 2 * M * (floats + integers)
    return {
        "products": sum(products),
        "attention": M * length * per_token / device.read_tbps / 1e6,
        "between": between / device.read_tbps / 1e6,
    }


figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), sharey=True, layout="constrained")
for axis, name in zip(axes, ("LLaMA-2-7B", "LLaMA-2-70B"), strict=True):
    times = [parts(Config.named(name), M) for M in batches]
    bottom = np.zeros(len(batches))
    for part, colour in (("products", "#3b6ea5"), ("attention", "#d98b3a"), ("between", "#6aa56a")):
        share = np.array([us[part] / sum(us.values()) for us in times])
        axis.bar([str(M) for M in batches], share, bottom=bottom, label=part, color=colour)
        bottom += share
    axis.set(xlabel="sequences of 1024 tokens", title=name)
axes[0].set(ylabel="share of the floor")
axes[1].legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
figure.suptitle("Floor of a layer on an H200: products give way to attention, what lies between stays below a tenth")
plt.show()

# %%
rows = []
for name in ("LLaMA-2-7B", "LLaMA-2-70B"):
    for M in batches:
        us = parts(Config.named(name), M)
        rows.append((name, M, *(f"{us[part]:.1f}" for part in us), f"{sum(us.values()):.1f}"))
table(("model", "batch", "products, µs", "attention, µs", "between, µs", "floor, µs"), rows)

# %% [markdown]
# These are floors, not times. A launch takes some 2 µs to begin and end, whatever it moves, and ten of them follow each
# other: at batch 1 that is nearly as much as the floor of a 7B layer. So the launches overlap, and what lies between
# the products is fused into as few launches as there are.
