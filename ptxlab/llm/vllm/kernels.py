"""Kernels of a model's products, compiled side by side before vLLM captures graphs, in which nothing may compile."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from vllm.config import VllmConfig

from ptxlab.llm.vllm import log
from ptxlab.llm.vllm.options import CHANNEL
from ptxlab.lowbit.kernels.gemm import ladder
from ptxlab.lowbit.kernels.gemm.common import DTYPES
from ptxlab.lowbit.kernels.gemm.options import GemmOptions
from ptxlab.lowbit.kernels.gemm.w8a8 import W8A8, W8A8_SM80
from ptxlab.lowbit.kernels.spec_call import choose_spec
from ptxlab.lowbit.layout import PackedWeight, buffer_shapes
from ptxlab.lowbit.layout.packings import Shapes
from ptxlab.lowbit.quant import PROTECTIVE_RANGE
from ptxlab.runtime.launching import compile_all
from ptxlab.sources import Source, sources_of_kernel
from ptxlab.spec.dtypes import name_of

LOWEST, HIGHEST = (8, 0), (9, 0)  # compute capabilities
CAPABILITIES = "8.0 to 9.0 (Ampere, Ada, Hopper)"
_STEP = 64  # between numbers of tokens beyond the captured ones, which have few tiles to choose from


@dataclass(frozen=True)
class MatrixShape:
    """A packed matrix [N, K] of a layer."""

    layout: str
    scheme: str
    N: int
    K: int
    group: int

    def shapes(self) -> Shapes:
        """Return dtype and shape of each buffer. Raises ArgumentError for sizes that no kernel supports."""
        return buffer_shapes(self.layout, self.scheme, self.N, self.K, self.group)

    def weight(self, buffers: Mapping[str, Any] | None = None) -> PackedWeight:
        """Return the weight of these buffers; without any, one whose memory is never touched."""
        if buffers is None:
            buffers = {name: np.zeros(shape, dtype) for name, (dtype, shape) in self.shapes().items()}
        return PackedWeight(
            layout=self.layout,
            scheme=self.scheme,
            N=self.N,
            K=self.K,
            group=self.group,
            protective_range=0 if self.scheme == CHANNEL else PROTECTIVE_RANGE,
            buffers=dict(buffers),
        )


def is_served(capability: tuple[int, int] | None) -> bool:
    """Tell whether the plugin serves on a GPU of this compute capability; None: there is no GPU."""
    return capability is not None and LOWEST <= tuple(capability) <= HIGHEST


def token_counts(vllm_config: VllmConfig) -> tuple[int, ...]:
    """Return numbers of tokens of a step: those of captured graphs, and some of those beyond."""
    captured = vllm_config.compilation_config.cudagraph_capture_sizes or range(8, 257, 8)
    largest_batch = vllm_config.scheduler_config.max_num_batched_tokens
    return tuple(sorted({1, *captured, *range(max(captured), largest_batch, _STEP), largest_batch}))


def product_variants(
    matrices: Iterable[MatrixShape], tokens: Iterable[int], dtype: str
) -> Iterator[tuple[Source, dict[str, int]]]:
    """Yield the source and the constants of every product's kernel, some of them again."""
    counts, out_dtype = tuple(tokens), DTYPES.index(dtype)
    for matrix in matrices:
        weight = matrix.weight()
        for M in counts:
            step = ladder.choose(weight, "row_major", M, GemmOptions())
            sizes = step.sizes(M, matrix.N, matrix.K, matrix.group)
            yield sources_of_kernel(step.spec.name)[0], step.config(sizes, out_dtype, True)


def head_variants(
    heads: Iterable[tuple[int, int]], tokens: Iterable[int], dtype: str
) -> Iterator[tuple[Source, dict[str, int]]]:
    """Yield the source and the constants of the kernel of every product with a head [V, H] in INT8."""
    counts, out = tuple(tokens), {"OUT": DTYPES.index(dtype)}
    for N, K in heads:
        for M in counts:
            sizes = {"M": M, "N": N, "K": K}
            spec = choose_spec((W8A8, W8A8_SM80), sizes, None)
            yield sources_of_kernel(spec.name)[0], {**spec.config_for(sizes), **out}


class ProductKernels:
    """Kernels of a model's products.

    Attributes:
        matrices: those of layers whose kernels are not compiled yet.
        heads: (V, H) of heads in INT8, likewise.
        tokens: numbers of tokens for which they are compiled.
    """

    def __init__(self) -> None:
        self.matrices: set[MatrixShape] = set()
        self.heads: set[tuple[int, int]] = set()
        self.tokens: tuple[int, ...] = ()

    def use_tokens_of(self, vllm_config: VllmConfig) -> None:
        """Set the numbers of tokens, once."""
        self.tokens = self.tokens or token_counts(vllm_config)

    def compile(self, dtype: object) -> None:
        """Compile what is not there yet, for products of that dtype; other processes wait for the cache's lock."""
        matrices, self.matrices = self.matrices, set()
        heads, self.heads = self.heads, set()
        if not matrices and not heads:
            return
        start = time.perf_counter()
        layer_variants = product_variants(matrices, self.tokens, name_of(dtype))
        compile_all(chain(layer_variants, head_variants(heads, self.tokens, name_of(dtype))))
        log.info("ptxlab: kernels of all products are there after %.1f s", time.perf_counter() - start)
