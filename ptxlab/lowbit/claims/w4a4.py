"""Claims on how activations become INT4: `reorder_quantize` and its fused sisters, from their PTX.

What becomes of INT4 in a GEMM's loop is proved in `main_loops`, claims `converts`.
"""

from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import product
from typing import Any

from ptxlab import registry, toolchain
from ptxlab.prove.claims import Claim, register
from ptxlab.runtime import Kernel

KERNELS = ("reorder_quantize", "rmsnorm_reorder_quantize", "silu_mul_reorder_quantize")
_TEXTS = {
    "rounds": "any FP32 quotients: what is stored is each of four clipped to -8..7 or -128..127 and rounded, in order; "
    "half to even by Atom's paper and by COMET, half away from zero by Atom's code",
    "divides": "any thread and values: each quotient is of the channel that the integer is stored for, read from where "
    "it was sent, and of the scale of its group (by Atom's code of a reciprocal)",
    "scales": "any thread and values: the stored scale is the FP16 quotient of a magnitude that none of the thread's "
    "channels exceeds, clipped; 1 for a group of zeros, and 2^-24 at least",
    "sends": "any thread and `place`: each of 16 channels goes to where `place` says, in the block that reads it there",
}


@register
def quantisers() -> Iterator[Claim]:
    """Yield the claims on one thread of each kernel, as NVRTC compiles it, at the sizes of its examples."""
    if "nvrtc" in toolchain.missing():
        return
    for name in KERNELS:
        spec, (source, *_) = registry.find(name)
        warps = [spec.config_for(sizes)["THREADS"] // 32 for sizes in spec.example_sizes]
        sets = {
            "one warp": [i for i, number in enumerate(warps) if number == 1],
            "more warps": [i for i, number in enumerate(warps) if number > 1],
        }
        for (rows, examples), (claim, text) in product(sets.items(), _TEXTS.items()):
            build = partial(_queries, name, tuple(examples), claim)
            is_quick = name == KERNELS[0] and rows == "one warp" and claim in ("divides", "sends")
            yield Claim(source.label, f"{claim}, rows of {rows}", text, build, quick=is_quick)


def _queries(name: str, examples: tuple[int, ...], claim: str) -> Any:
    """Build the formulas of a claim."""
    from ptxlab.lowbit.claims import reordering  # needs z3

    return list(getattr(reordering, claim)(_rows(name, examples)))


@lru_cache(maxsize=1)
def _rows(name: str, examples: tuple[int, ...]) -> Any:
    from ptxlab.lowbit.claims import reordering

    spec, (source, *_) = registry.find(name)
    rows = []
    for sizes in (spec.example_sizes[i] for i in examples):
        constants = spec.config_for(sizes)
        entry = Kernel.of(spec, source, constants).module.entries[name]
        rows.append(reordering.row_of(entry, spec, {**sizes, **constants}))
    return rows
