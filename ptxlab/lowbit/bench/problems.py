"""The problem of a GEMM or an attention by its sizes on a command line: what is swept, or put under a profiler."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ptxlab.bench.launching import Launches
from ptxlab.lowbit.bench.attention import problem as attention
from ptxlab.lowbit.bench.gemm import problem as gemm
from ptxlab.lowbit.bench.shapes import GROUP, Layer, even
from ptxlab.lowbit.kernels.attention.steps import step_of as attention_step
from ptxlab.lowbit.kernels.gemm.ladder import step_of as gemm_step
from ptxlab.spec import KernelSpec


@dataclass(frozen=True)
class SizedProblem:
    """Inputs of one kernel, on the device.

    Attributes:
        chosen: the constants that the spec chooses.
        launches: prepares launches of the variant with these constants.
        check: raises BenchmarkError unless what such launches wrote is right.
    """

    chosen: dict[str, int]
    launches: Callable[[dict[str, int]], Launches]
    check: Callable[[Any], object]


def sized(spec: KernelSpec, sizes: Mapping[str, Any], copies: int | None = None) -> SizedProblem | None:
    """The problem of a kernel of a W4A8 GEMM (M, N, K, g) or of attention (B, L, Hq, Hkv); None of any other.

    `copies` of the weight or the cache, a launch for each; by default as many as exceed the L2.
    """
    if step := gemm_step(spec):
        known = dict(sizes)
        logical = gemm.problem(spec, Layer("", "", known["N"], known["K"]), known["M"], known.get("g", GROUP))
        right = cache(lambda: gemm.expected(spec, logical))
        return SizedProblem(
            gemm.variant(spec, known),
            lambda constants: gemm.launches(step, known, logical, copies=copies, constants=constants),
            lambda ready: ready.check(right()),
        )
    if attending := attention_step(spec):
        batch = even((sizes["Hq"], sizes["Hkv"]), sizes["B"], sizes["L"])
        of = attention.random_problem(batch, attention.scheme_of(attending), copies)
        return SizedProblem(
            attending.config(attention.sizes_at(attending, batch, of.scheme, len(of.caches[0].pool)), "float16"),
            lambda constants: attention.launches(attending, of, constants=constants),
            lambda ready: ready.check(of),
        )
    return None
