"""Kernels of a model's products, compiled side by side before vLLM captures graphs, in which nothing may compile."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
from vllm.config import VllmConfig

from ptxlab.llm.vllm import log
from ptxlab.llm.vllm.options import CHANNEL
from ptxlab.llm.vllm.packing import LAYOUT
from ptxlab.lowbit.kernels.gemm import ladder
from ptxlab.lowbit.kernels.gemm.common import DTYPES
from ptxlab.lowbit.kernels.gemm.options import GemmOptions
from ptxlab.lowbit.kernels.gemm.w8a8 import W8A8
from ptxlab.lowbit.layout import PackedWeight, buffer_shapes
from ptxlab.lowbit.quant import PROTECTIVE_RANGE
from ptxlab.runtime.launching import compile_all
from ptxlab.sources import Source, sources_of_kernel
from ptxlab.spec.dtypes import name_of

_STEP = 64  # between numbers of tokens beyond the captured ones, which have few tiles to choose from


@dataclass(frozen=True)
class MatrixShape:
    """A packed matrix [N, K] of a layer."""

    scheme: str
    N: int
    K: int
    group: int

    def weight(self) -> PackedWeight:
        """Return a weight of this shape, whose memory is never touched."""
        shapes = buffer_shapes(LAYOUT, self.scheme, self.N, self.K, self.group)
        buffers = {name: np.zeros(shape, dtype) for name, (dtype, shape) in shapes.items()}
        return PackedWeight(
            layout=LAYOUT,
            scheme=self.scheme,
            N=self.N,
            K=self.K,
            group=self.group,
            protective_range=0 if self.scheme == CHANNEL else PROTECTIVE_RANGE,
            buffers=buffers,
        )


def token_counts(vllm_config: VllmConfig) -> tuple[int, ...]:
    """Return numbers of tokens of a step: those of captured graphs, and some of those beyond."""
    captured = vllm_config.compilation_config.cudagraph_capture_sizes or range(8, 257, 8)
    largest = vllm_config.scheduler_config.max_num_batched_tokens
    return tuple(sorted({1, *captured, *range(max(captured), largest, _STEP), largest}))


def product_variants(
    matrices: Iterable[MatrixShape], tokens: Iterable[int], dtype: str
) -> Iterator[tuple[Source, dict[str, int]]]:
    """Yield the source and the constants of every product's kernel, some of them again."""
    counts, out = tuple(tokens), DTYPES.index(dtype)
    for matrix in matrices:
        weight = matrix.weight()
        for M in counts:
            step = ladder.choose(weight, "row_major", M, GemmOptions())
            sizes = step.sizes(M, matrix.N, matrix.K, matrix.group)
            yield sources_of_kernel(step.spec.name)[0], step.config(sizes, out, True)


def head_variants(
    heads: Iterable[tuple[int, int]], tokens: Iterable[int], dtype: str
) -> Iterator[tuple[Source, dict[str, int]]]:
    """Yield the source and the constants of the kernel of every product with a head [V, H] in INT8."""
    counts, out = tuple(tokens), {"OUT": DTYPES.index(dtype)}
    for N, K in heads:
        for M in counts:
            yield sources_of_kernel(W8A8.name)[0], {**W8A8.config_for({"M": M, "N": N, "K": K}), **out}


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
        of_layers = product_variants(matrices, self.tokens, name_of(dtype))
        compile_all(chain(of_layers, head_variants(heads, self.tokens, name_of(dtype))))
        log.info("ptxlab: kernels of all products are there after %.1f s", time.perf_counter() - start)
