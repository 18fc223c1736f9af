"""Claims on main loops, as invariants: what holds before a step of the loop holds after it.

A GEMM's main loop takes K/step steps and cannot be unrolled; `loops` executes one, from anything. That sums begin at 0,
and over how many channels a loop goes, is not part of these proofs: `verify` runs that.
"""

from collections.abc import Iterator
from functools import lru_cache, partial
from typing import Any

from ptxlab import registry, toolchain
from ptxlab.prove.claims import Claim, register
from ptxlab.prove.loop_claim import LoopClaim
from ptxlab.runtime import Kernel

BEYOND = 4096  # more channels than a step has


_LQQ, _QOQ = LoopClaim(packed="scaled_offset"), LoopClaim(packed="scaled")
# Not among them: gemm_w4ax_remap_sm80 and _comet_sm80, whose sums go through memory, which may hold anything here.
MAIN_LOOPS = {
    "sum_activations_s8": LoopClaim(b=(1, 1)),
    "quantize_activations_s8": LoopClaim(b=(1, 1)),
    "gemm_tile_lqq_sm80": _LQQ,
    "gemm_w4a8_qoq_sm80": _QOQ,
    "gemm_w4a8_lqq_sm80": _LQQ,
    "gemm_w4a8_qoq_channel_sm80": LoopClaim(a=(0, 15)),
    "gemm_w4a8_qoq_sm90": _QOQ,
    "gemm_w4a8_lqq_sm90": _LQQ,
    "gemm_w4a8_lqq_imfp_sm90": _LQQ,
    "gemm_w4a8_lqq_dynamic_sm90": _LQQ,
    "gemm_w4a8_small_sm90": _LQQ,
    "gemm_w4a8_sm90": _LQQ,
    "gemm_w4a8_grouped_sm90": _LQQ,
    "gemm_w4a8_lqq_excp_sm90": LoopClaim(),
    "gemm_w8a8_sm90": LoopClaim(),
    "gemm_w8a8_sm80": LoopClaim(),
    "gemm_w4a4_s4_sm80": LoopClaim(a=(-8, 7), b=(-8, 7)),
    "gemm_w4a4_outlier_sm80": LoopClaim(),
    "gemm_w4a4_atom_sm80": LoopClaim(),
    "gemm_w4a4_sm90": LoopClaim(sums="converted", packed="s4"),
    "gemm_w4ax_naive_sm80": LoopClaim(sums="converted", packed="s4"),
    "gemm_w4ax_sm90": LoopClaim(sums="converted"),
}
_PACKED = {
    "scaled_offset": (
        "any words, scales, offsets: while q*scale + offset <= 255 no lane carries, and operand A is that - 128"
    ),
    "scaled": "any words, scales: while scale <= 17 no lane of q*scale carries",
    "s4": "any words: each byte of INT4 in operand A, as s8, is 16 times a nibble, as s4",
}


@register
def main_loops() -> Iterator[Claim]:
    """Yield the claims on main loops of kernels that sum integers; a `.cu` is checked as NVRTC compiles it."""
    for name, loop in MAIN_LOOPS.items():
        _, (source, *_) = registry.find(name)
        if source.language == "cu" and "nvrtc" in toolchain.missing():
            continue
        low, high = loop.product
        claim = partial(Claim, f"{source.label}, a step of its loop")
        build = partial(_queries, name, loop)
        if loop.sums == "grow":
            text = (
                f"sums of k products, each {low}..{high}, lie within {low}*k..{high}*k before a step "
                "=> so do those of k + step after it, up to K = {:,}"
            )
            K, products_beyond = loop.max_products, loop.max_products + BEYOND
            yield claim(f"s32 up to K = {K:,}", text.format(K), partial(build, "sums_fit", K))
            wraps = partial(build, "sums_fit", products_beyond)
            yield claim(
                f"s32 up to K = {products_beyond:,}", text.format(products_beyond), wraps, "refuted", quick=False
            )
        else:
            text = "a step leaves no sum behind, and the sums that it converts to FP32 are held by it exactly"
            yield claim("sums are exact in FP32", text, partial(build, "sums_are_exact"))
        if loop.packed:
            step_name = "converts" if loop.packed == "s4" else "dequantises"
            yield claim(step_name, _PACKED[loop.packed], partial(build, step_name))


def _queries(name: str, loop: LoopClaim, claim: str, *arguments: Any) -> Any:
    """Build the formulas of a claim on a kernel."""
    from ptxlab.prove import loops  # needs z3

    return getattr(loops, claim)(_steps(name), loop, *arguments)


@lru_cache(maxsize=1)
def _steps(name: str) -> Any:
    """Return the steps of a kernel's loops, in the variant of its largest example; cached for several claims."""
    from ptxlab.prove import loops

    spec, (source, *_) = registry.find(name)
    config = spec.config_for({k: int(v) for k, v in max(spec.example_sizes, key=spec.bytes_moved).items()})
    return loops.steps_of(Kernel.of(spec, source, config).module.entries[spec.name])
