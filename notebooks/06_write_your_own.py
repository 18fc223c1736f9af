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
# # Write your own kernel
#
# From an empty cell to a kernel that is verified, timed and profiled. The task: most 4-bit checkpoints hold *signed*
# weights with one FP16 scale per group; convert them to FP16. Nothing below needs to be part of ptxlab.

# %%
# %load_ext ptxlab
import tempfile
from pathlib import Path

import numpy as np

from ptxlab import Arg, KernelSpec, Launch, PtxlabError, bench, gpu, sass, sources
from ptxlab.lowbit import cost, layout, quant
from ptxlab.lowbit.bench import dequant
from ptxlab.profile import nsight, profiles
from ptxlab.profile.launch_target import LaunchTarget

# %% [markdown]
# ## The contract
#
# The reference comes first, as plain as possible. NumPy multiplies FP16 numbers with one rounding. The kernel has to
# do the same: results are compared bit for bit.


# %%
def reference(q4: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Multiply q4 s8 [R, K] in -8..7 by scale f16 [R, K/g], as f16 [R, K]."""
    return q4.astype(np.float16) * np.repeat(scale, q4.shape[1] // scale.shape[1], axis=1)


def example(rng: np.random.Generator, *, R: int, K: int, g: int) -> dict[str, np.ndarray]:
    """Quantise random normal weights: q4 and scale."""
    w = quant.quantize_int4(rng.standard_normal((R, K), np.float32), group=g)
    return {"q4": w.q4, "scale": w.scale}


# %% [markdown]
# The contract also has the arguments in launch order, with shapes over the sizes; the launch geometry; how to pack
# the inputs; and the sizes to try. One thread processes one word of eight weights.

# %%
contract = KernelSpec(
    name="int4_to_f16",
    summary="signed INT4, one FP16 scale per group",
    args=(
        Arg("qweight", "uint32", ("R", "K/8")),
        Arg("scale", "float16", ("R", "K/g")),
        Arg("out", "float16", ("R", "K"), "out"),
        Arg("words", "uint32", role="scalar", value="R*K/8"),
        Arg("shift", "uint32", role="scalar", value="log2(g/8)"),
    ),
    launch=lambda sizes: Launch(grid=(-(-sizes["R"] * sizes["K"] // 2048), 1, 1), block=(256, 1, 1)),
    example=example,
    pack=lambda logical: {"qweight": layout.pack_s4(logical["q4"]), "scale": logical["scale"]},
    reference=reference,
    rules=("K % g == 0",),
    operations="2*R*K",
    example_sizes=({"R": 1, "K": 32, "g": 32}, {"R": 3, "K": 320, "g": 64}, {"R": 17, "K": 768, "g": 32}),
)
contract

# %% [markdown]
# ## First make it right
#
# The obvious loop shifts the nibble to the top and back down with its sign, and multiplies. `%%cuda` compiles the
# cell and shows what the assembler made of it. With `--verify` it also runs the cell over the contract's sizes, on
# poisoned memory, with every check of the emulator: races, uninitialised reads, bounds, overflowing lanes.

# %% magic_args="--verify contract" language="cuda"
# #include <cuda_fp16.h>
# extern "C" __global__ void __launch_bounds__(256)
# int4_to_f16(const unsigned* qweight, const __half* scale, __half* out, unsigned words, unsigned shift) {
#     const unsigned i = blockIdx.x * 256 + threadIdx.x;
#     if (i >= words) return;
#     const float s = __half2float(scale[i >> shift]);
#     for (int k = 0; k < 8; ++k) {
#         const int bit = 8 * (k % 4) + 4 * (k / 4);  // e0..e3 in the low halves of the bytes, e4..e7 in the high ones
#         const int v = int(qweight[i] << (28 - bit)) >> 28;
#         out[8 * i + k] = __float2half(v * s);
#     }
# }

# %% [markdown]
# ## Then make it fast
#
# Converting one number at a time is slow. The project's headers have a faster method: write the nibble below the bits
# of 1024, and subtract 1024 (`dequant_u4_f16`), two numbers at a time, without a conversion. Run again under the same
# name, the cell shows what changed, and what broke:

# %% magic_args="--verify contract" language="cuda"
# #include "dequant.cuh"
# extern "C" __global__ void __launch_bounds__(256)
# int4_to_f16(const unsigned* qweight, const __half* scale, uint4* out, unsigned words, unsigned shift) {
#     const unsigned i = blockIdx.x * 256 + threadIdx.x;
#     if (i >= words) return;
#     const __half2 s = __half2half2(scale[i >> shift]);
#     uint4 h = ptxlab::logical_order(ptxlab::dequant_u4_f16(qweight[i]));
#     for (unsigned* pair : {&h.x, &h.y, &h.z, &h.w})
#         *pair = ptxlab::as_bits(__hmul2(ptxlab::as_half2(*pair), s));
#     out[i] = h;
# }

# %% [markdown]
# That method is for unsigned nibbles. Flipping the top bit of a signed nibble makes it the unsigned `v + 8`, with one
# XOR for all eight of the word. `dequant_u4_f16_minus` subtracts a zero point with the same instruction that
# subtracts the 1024.

# %% magic_args="--verify contract --listing" language="cuda"
# #include "dequant.cuh"
# extern "C" __global__ void __launch_bounds__(256)
# int4_to_f16(const unsigned* qweight, const __half* scale, uint4* out, unsigned words, unsigned shift) {
#     const unsigned i = blockIdx.x * 256 + threadIdx.x;
#     if (i >= words) return;
#     const __half2 s = __half2half2(scale[i >> shift]);
#     const uint2 eight = {0x64086408u, 0xd480d480u};  // 1024 + 8, and -(64 + 8) of nibbles that count 16
#     uint4 h = ptxlab::logical_order(ptxlab::dequant_u4_f16_minus(qweight[i] ^ 0x88888888u, eight));
#     for (unsigned* pair : {&h.x, &h.y, &h.z, &h.w})
#         *pair = ptxlab::as_bits(__hmul2(ptxlab::as_half2(*pair), s));
#     out[i] = h;
# }

# %% [markdown]
# Half the instructions, and correct. `machine code by line` shows the instructions of each line.
#
# ## What should it reach?
#
# This can be computed without a GPU. A word's four bytes are read from memory and eight results of two bytes are
# written. The instructions go through the pipes of an SM at known rates.

# %%
sizes = {"R": 16384, "K": 16384, "g": 128}
sheet = cost.sheet("h200")
record = bench.load(sources.results_dir() / "h200" / "dequant.json")
mhz = np.median([row.sm_mhz for row in record.rows])
memory_us = contract.bytes_moved(sizes) / sheet.copy_tbps / 1e6
clocks, pipe = sass.pipe_limit(sass.report(int4_to_f16.source, "sm_90a").pipes)
pipes_us = sizes["R"] * sizes["K"] / 8 * clocks / sheet.sms / mhz
print(f"16384 x 16384 weights on an H200: memory {memory_us:.0f} µs, instructions {pipes_us:.0f} µs ({pipe})")

# %% [markdown]
# ## Time it
#
# On a GPU the suite's own function measures it: CUDA-graph replays over data that exceeds the L2, results of the
# timed launch compared, ceilings of the same run. Without a GPU, this shows the recorded time of `dequant_s4_f16`,
# the same method in PTX.

# %%
if gpu.why_not(contract.arch) is None:
    logical = contract.example(np.random.default_rng(0), **{**sizes, "R": 256})
    row = dequant.streaming(contract, int4_to_f16.source, sizes, logical, bench.measure_ceilings())
else:
    row = next(r for r in record.rows if (r.kernel, r.measure) == ("dequant_s4_f16", "streaming"))
print(f"{row}: {row.time_us:.0f} µs, {row.fraction:.0%} of a {row.limit}")

# %% [markdown]
# ## Profile it
#
# `ptxlab profile` launches any file under Nsight Compute: `ptxlab profile int4_to_f16.cu --in arrays.npz --grid 16384
# --block 256`. Where there is no GPU, or no permission to read counters, this shows the record of the PTX kernel.

# %%
recorded = sources.results_dir() / "h200" / "profiles" / "dequant_s4_f16.json"
try:
    gpu.device_info()
    shape = {"R": 4096, "K": 8192, "g": 128}
    arrays = contract.pack(contract.example(np.random.default_rng(0), **shape))
    arrays["out"] = np.zeros(contract.arg("out").resolve(shape), np.float16)
    scalars = {arg.name: contract.scalar(arg, shape) for arg in contract.args if arg.role == "scalar"}
    with tempfile.TemporaryDirectory() as folder:
        source, inputs = Path(folder, "int4_to_f16.cu"), Path(folder, "arrays.npz")
        source.write_text(int4_to_f16.source.text)
        np.savez(inputs, **arrays, **scalars)
        target = LaunchTarget(str(source), inputs=str(inputs), grid=contract.launch(shape).grid, block=(256,))
        profile = profiles.profile(target)
except PtxlabError as error:
    print(f"{error}: as recorded\n")
    profile = profiles.read_saved(recorded)

shown = ("time_us", "dram_pct", "l2_pct", "issue_pct", "alu_pct", "occupancy_pct", "registers")
for figure in (figure for figure in nsight.FIGURES if figure.name in shown):
    print(f"{figure.label:12} {nsight.amount(figure, profile.figures[figure.name])}")
for reason, share in list(profile.stalls.items())[:3]:
    print(f"{share:.0%} of the stalls: {reason.replace('_', ' ')}")

# %% [markdown]
# *Long scoreboard* is a wait for memory. The kernel is memory-bound; its instructions are hidden behind the loads, as
# they would be in any kernel that streams. Whether they are hidden in a GEMM, where they share the pipes, is another
# question (notebook 03).

# %% [markdown]
# ## Make it part of the workbench
#
# Add a file `ptx/<family>/<name>.ptx` or `cuda_src/<family>/<name>.cu`, the reference and the contract. Then `ptxlab
# verify`, `bench`, `sass` and `profile` know the name, property tests draw its inputs, and every opcode is changed in
# turn to see whether a test notices. CONTRIBUTING.md lists the steps for this very kernel.
