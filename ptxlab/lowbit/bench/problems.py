"""The problems of GEMMs and attention by their sizes on a command line: what is swept, profiled and recorded."""

from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import numpy as np

from ptxlab.lowbit.bench.attention import problem as attention
from ptxlab.lowbit.bench.gemm import problem as gemm
from ptxlab.lowbit.bench.shapes import GROUP, HEAD_DIM, Batch, Layer, even
from ptxlab.lowbit.kernels.attention.common import draw_cache
from ptxlab.lowbit.kernels.attention.prefill import PREFILL
from ptxlab.lowbit.kernels.attention.steps import step_of as attention_step
from ptxlab.lowbit.kernels.gemm.ladder import fit_tokens
from ptxlab.lowbit.kernels.gemm.ladder import step_of as gemm_step
from ptxlab.runtime.problems import EXAMPLES, Shape, SizedProblem
from ptxlab.spec import Arrays, KernelSpec

# By backend: as much as shows a steady state. L: tokens of every sequence.
_GEMM: dict[str, dict[str, Any]] = {
    "gpu": {"M": 64, "N": 22016, "K": 4096, "g": 128},
    "emulator": {"M": 64, "N": 256, "K": 2048, "g": 128},
}
_ATTENTION: dict[str, dict[str, Any]] = {
    "gpu": {"B": 64, "L": 1024, "Hq": 32, "Hkv": 8},
    "emulator": {"B": 2, "L": 512, "Hq": 8, "Hkv": 2},
}
_CHUNKS: dict[str, dict[str, Any]] = {  # of the kernel that attends chunks
    "gpu": {"N": 2048, "B": 2, "Hq": 32, "Hkv": 8, "D": 128, "P": 160, "pages": 320, "page": 64, "window": 0}
    | {"blocks": 132, "parts": 1, "softmax_scale": 128**-0.5},
    "emulator": {"N": 300, "blocks": 1, "parts": 1},
}
_EMULATED_SMS = 2  # that attention shares its work out over


def _gemm_sizes(spec: KernelSpec, backend: str) -> dict[str, Any]:
    """Return M, N, K, g of a steady state; the spec's other sizes are those of its example."""
    example = spec.example_sizes[-1]
    return fit_tokens(spec, {name: _GEMM[backend].get(name, size) for name, size in example.items()})


def _gemm_problem(spec: KernelSpec, sizes: Shape, copies: int | None) -> SizedProblem | None:
    step = gemm_step(spec)
    if step is None:
        return None
    shape = dict(sizes)
    logical = gemm.problem(spec, Layer("", "", shape["N"], shape["K"]), shape["M"], shape.get("g", GROUP))
    right = cache(lambda: gemm.expected_bits(spec, logical))
    return SizedProblem(
        gemm.variant(spec, shape),
        lambda constants: gemm.launches(step, shape, logical, copies=copies, constants=constants),
        lambda ready: ready.check(right()),
    )


GEMM = replace(EXAMPLES, usual_sizes=_gemm_sizes, sized=_gemm_problem)


def _batch(sizes: Shape) -> Batch:
    return even((sizes["Hq"], sizes["Hkv"]), sizes["B"], sizes["L"])


def _attention_sizes(spec: KernelSpec, backend: str) -> dict[str, Any]:
    """Return the sizes: B sequences of L tokens with Hq and Hkv heads, or chunks of N queries.

    An append has the sizes of its example.
    """
    if attention_step(spec):
        return dict(_ATTENTION[backend])
    sizes = EXAMPLES.usual_sizes(spec, backend)
    usual_sizes = _CHUNKS[backend] if spec.name == PREFILL.name else {}
    return {name: usual_sizes.get(name, size) for name, size in sizes.items()}


def _check_attention(spec: KernelSpec, sizes: Shape) -> None:
    if attention_step(spec) is None:
        spec.check_sizes(sizes)


def _attention_spec_sizes(spec: KernelSpec, sizes: Shape, backend: str) -> dict[str, Any]:
    step = attention_step(spec)
    if step is None:
        return dict(sizes)
    batch, sms = _batch(sizes), None if backend == "gpu" else _EMULATED_SMS
    return attention.sizes_at(step, batch, attention.scheme_of(step), sum(batch.pages()), sms)


def _attention_example(spec: KernelSpec, rng: np.random.Generator, shape: Shape, sizes: Shape) -> Arrays:
    """Draw logical inputs with sequences of equal length."""
    logical = spec.example(rng, **sizes)
    if attention_step(spec) is None:
        return logical
    lengths, scheme = np.full(shape["B"], shape["L"]), logical["cache"].scheme
    cached_arrays = draw_cache(rng, lengths, Hkv=sizes["Hkv"], P=sizes["P"], pages=sizes["pages"], scheme=scheme)
    return {**logical, "cache": cached_arrays}


def _attention_problem(spec: KernelSpec, sizes: Shape, copies: int | None) -> SizedProblem | None:
    step = attention_step(spec)
    if step is None:
        return None
    batch = _batch(sizes)
    drawn_problem = attention.random_problem(batch, attention.scheme_of(step), copies)
    return SizedProblem(
        step.config(
            attention.sizes_at(step, batch, drawn_problem.scheme, len(drawn_problem.caches[0].pool)), "float16"
        ),
        lambda constants: attention.launches(step, drawn_problem, constants=constants),
        lambda ready: ready.check(drawn_problem),
    )


def _cache_elements(sizes: Shape) -> int | None:
    """Count the keys and values of a cache."""
    size_names = ("B", "L", "Hkv")
    if not set(size_names) <= set(sizes):
        return EXAMPLES.weights(sizes)
    return prod(int(sizes[symbol]) for symbol in size_names) * 2 * HEAD_DIM


ATTENTION = replace(
    EXAMPLES,
    usual_sizes=_attention_sizes,
    check_sizes=_check_attention,
    spec_sizes=_attention_spec_sizes,
    example=_attention_example,
    sized=_attention_problem,
    weights=_cache_elements,
)
