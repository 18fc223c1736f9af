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
# # From a wrong carry to a proof
#
# A test shows that nobody found an overflow. A proof shows that there is none. `ptxlab.prove` turns a kernel's PTX
# into a formula over all its inputs, and an SMT solver decides whether a claim can fail. It needs z3:
# `python -m pip install 'ptxlab[prove]'`. No GPU is needed.

# %%
# %load_ext ptxlab
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import ptxlab
from ptxlab import registry
from ptxlab.lowbit import layout, quant
from ptxlab.prove import prove, prove_kernel
from ptxlab.prove.kernels import claims_of

# %% [markdown]
# ## A dequantiser with a mistake
#
# A 4-bit weight is restored to the byte `q * scale + minimum`. The kernel below restores four weights with one
# multiply-add: the nibbles lie in the four bytes of a register, and the minimum is repeated in all four.

# %% language="ptx"
# .version 8.0
# .target sm_80
# .address_size 64
# .visible .entry restore(.param .u64 q, .param .u64 scale, .param .u64 minimum, .param .u64 out)
# {
#     .reg .u32 %w, %s, %m, %d;
#     .reg .u64 %q, %scale, %minimum, %out;
#     ld.param.u64 %q, [q];
#     ld.param.u64 %scale, [scale];
#     ld.param.u64 %minimum, [minimum];
#     ld.param.u64 %out, [out];
#     ld.global.u32 %w, [%q];
#     ld.global.u8 %s, [%scale];
#     ld.global.u8 %m, [%minimum];
#     and.b32 %w, %w, 0x0f0f0f0f;
#     mul.lo.u32 %m, %m, 0x01010101;
#     mad.lo.u32 %d, %w, %s, %m;
#     st.global.u32 [%out], %d;
#     ret;
# }

# %% [markdown]
# The claim is a Python expression for each byte `i` that is stored; its integers never wrap. The assumptions say what
# the quantiser emits: a scale up to 16, and a largest weight that fits a signed byte.

# %%
claim = "out.s8[i] == nibbles(q)[i] * scale + minimum.s8[0]"
assume = ["1 <= scale <= 16", "15 * scale + minimum.s8[0] <= 127"]
refuted = prove_kernel(restore, claim, assume=assume)
print(refuted)

# %% [markdown]
# The solver found an input for which the claim fails. `all` is what the bytes of the word share; each line below is one
# byte, in numbers and in bits. A negative minimum is a large unsigned byte: minimum + 256. Where the sum reaches 256,
# the byte itself is still right, because it wraps; but its carry adds one to the byte above.
#
# ## Run it
#
# The counterexample holds the kernel's arguments. The emulator executes the PTX on them, one instruction after the
# other, and stores the same bytes. On a machine with a GPU `backend="gpu"` does so too.

# %%
arrays = refuted.explanation.arrays
launch = restore(*arrays.values(), grid=1, block=1, backend="emulator")
stored = launch.outputs["out"].view(np.int8)
nibbles, scale, minimum = arrays["q"][:4] & 15, int(arrays["scale"][0]), int(arrays["minimum"].view(np.int8)[0])
expected = nibbles.astype(int) * scale + minimum
for i in range(4):
    print(f"byte {i}: stored {stored[i]:4} ({stored[i].view(np.uint8):08b}), should be {expected[i]:4}")

# %% [markdown]
# ## Mend it
#
# LiquidQuant's remedy: add `128 + minimum`, which is never negative, and subtract the 128 at the end. Both are a flip
# of the top bit of each byte, and no byte carries.

# %% language="ptx"
# .version 8.0
# .target sm_80
# .address_size 64
# .visible .entry mended(.param .u64 q, .param .u64 scale, .param .u64 minimum, .param .u64 out)
# {
#     .reg .u32 %w, %s, %m, %d;
#     .reg .u64 %q, %scale, %minimum, %out;
#     ld.param.u64 %q, [q];
#     ld.param.u64 %scale, [scale];
#     ld.param.u64 %minimum, [minimum];
#     ld.param.u64 %out, [out];
#     ld.global.u32 %w, [%q];
#     ld.global.u8 %s, [%scale];
#     ld.global.u8 %m, [%minimum];
#     and.b32 %w, %w, 0x0f0f0f0f;
#     mul.lo.u32 %m, %m, 0x01010101;
#     xor.b32 %m, %m, 0x80808080;
#     mad.lo.u32 %d, %w, %s, %m;
#     xor.b32 %d, %d, 0x80808080;
#     st.global.u32 [%out], %d;
#     ret;
# }

# %%
print(prove_kernel(mended, claim, assume=assume))

# %% [markdown]
# *Proved* speaks of every word, every scale and every minimum that the assumptions admit. Without the second
# assumption the largest weight may exceed 127, and the claim is refuted again:

# %%
print(prove_kernel(mended, claim, assume=assume[:1]))

# %% [markdown]
# ## The edge of the range
#
# Whether the assumption holds is decided by quantisation. `dequant_lqq.ptx` is the project's kernel with this
# arithmetic. Its spec claims what the whole chain does: the bytes of a group within ±r are quantised, and the kernel
# restores them without an overflow. At r = 120 this holds; at r = 121 it does not.

# %%
spec, sources = registry.find("dequant_lqq")
edges = ("quantised at 120, nearest", "quantised at 121, nearest")
for decision in prove(one for one in claims_of(spec, sources[:1]) if one.name in edges):
    lines = decision.explanation.lines if decision.explanation else []
    print(f"{decision.claim.name}: {decision.verdict}", *lines, sep="\n  ")

# %% [markdown]
# ## Two spellings of one kernel
#
# `equals` runs a second kernel on the same inputs. Its output is `other.out`. LiquidQuant without the last XOR leaves
# bytes that are larger by 128. `unchecked` drops the spec's rules for values, which are assumed otherwise: here none is
# needed, because where one kernel overflows, the other does so too.

# %%
print(prove_kernel("dequant_lqq_unsigned", "out[i] - 128 == other.out[i]", equals="dequant_lqq", unchecked=True))

# %% [markdown]
# The command line does the same: `ptxlab prove dequant_lqq_unsigned --equals dequant_lqq --unchecked --claim ...`.
#
# ## The predicate at the door
#
# The proof has a precondition, and `layout.pack` evaluates it on every group of a weight. A weight that was quantised
# at ±127 is refused, with the first group that would overflow:

# %%
w = np.random.default_rng(0).standard_normal((64, 256), np.float32)
wide = quant.quantize_lqq(w, group=64, protective_range=127)
try:
    layout.pack(wide)
except ptxlab.errors.ArgumentError as error:
    print(error)

# %% [markdown]
# `unchecked=True` packs it nevertheless, to study the damage. At ±120 no exception is needed.

# %%
print(layout.pack(wide, unchecked=True))
print(f"{(wide.level1() != wide.exact_level1()).sum()} bytes that the kernels restore wrong")
print(layout.pack(quant.quantize_lqq(w, group=64, protective_range=120)))

# %% [markdown]
# `ptxlab audit` evaluates the predicate on the tensors of a file. Its last lines say which schemes and ranges are safe
# by proof, and how many groups are not:

# %%
with tempfile.TemporaryDirectory() as folder:
    file = Path(folder, "model.safetensors")
    save_file({"weight": w}, file)
    audit = [sys.executable, "-m", "ptxlab", "audit", "--group", "64", str(file)]
    printed = subprocess.run(audit, capture_output=True, text=True, check=True).stdout
print(*printed.splitlines()[-2:], sep="\n")

# %% [markdown]
# `ptxlab prove --all` decides the project's claims, `ptxlab prove FILE.ptx` those on a kernel of your own. The
# [guide](guide/proofs.md) has the language of claims, what is modelled, and what a proof covers.
