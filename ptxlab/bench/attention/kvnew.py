"""The new tokens of a decoding step, which `append_kv4` rotates and writes before attention reads them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ptxlab import gpu, quant, reference
from ptxlab.bench.attention.problem import Problem
from ptxlab.bench.shapes import HEAD_DIM, PAGE
from ptxlab.errors import BenchmarkError
from ptxlab.kernels.attention.append import APPEND
from ptxlab.layout import write_slots
from ptxlab.sources import of_kernel


class Appending:
    """Random keys and values for the last token of every sequence of a problem; the cache's constants are per token."""

    def __init__(self, of: Problem) -> None:
        rng, batch = np.random.default_rng(1), len(of.batch.lengths)
        self._of = of
        self._k, self._v = (
            gpu.to_device(x)
            for x in rng.standard_normal((2, batch, of.batch.Hkv, HEAD_DIM), np.float32).astype(np.float16)
        )
        last = np.array(of.batch.lengths, np.int32) - 1
        angles = rng.uniform(-4, 4, (max(of.batch.lengths), HEAD_DIM // 2)).astype(np.float32)
        self._tables = [gpu.to_device(array) for array in (np.cos(angles), np.sin(angles), last)]
        pages = gpu.to_host(of.caches[0].block_table)[np.arange(batch), last // PAGE]
        self._slots = pages * PAGE + last % PAGE  # s32 [B], of the first copy

    def calls(self, programmatic: bool) -> list[Callable[[], None]]:
        """One launch per copy of the cache."""
        of, (cos, sin, positions) = self._of, self._tables
        cache, copies = of.caches[0], len(of.caches)
        sizes = {"T": len(self._slots), "H": of.batch.Hkv, "D": HEAD_DIM, "pages": cache.pages, "size": PAGE, "bits": 4}
        sizes |= {"channel": 0, "R": len(cos)}
        config = APPEND.config_for(sizes)
        everything = {**sizes, **config}
        kernel = gpu.load(of_kernel(APPEND.name)[0], APPEND.name, defines=config)
        geometry = replace(APPEND.launch(everything), programmatic=programmatic)
        given = {"k": self._k, "v": self._v, "pool": cache.pool, "cos": cos, "sin": sin, "positions": positions}
        arguments = [
            APPEND.arguments({**given, "slots": gpu.to_device(self._at(copy))}, everything) for copy in range(copies)
        ]
        return [gpu.prepare(kernel, of_copy, geometry) for of_copy in arguments]

    def check(self) -> None:
        """Raise BenchmarkError unless every copy has the new tokens as the quantiser makes them, and nothing else."""
        of, (cos, sin, positions) = self._of, self._tables
        pool, pages = of.caches[0].pool, self._slots // PAGE
        right = replace(
            of.caches[0],
            pool=pool[gpu.to_device(pages)],
            block_table=gpu.to_device(np.arange(len(pages), dtype=np.int32)[:, None]),
        )
        rotated = reference.rope(self._k, cos[positions], sin[positions])
        slots = gpu.to_device(np.arange(len(pages), dtype=np.int32) * PAGE + self._slots % PAGE)
        write_slots(right, quant.quantize_kv(rotated), quant.quantize_kv(self._v), slots)
        for copy in range(len(of.caches)):
            if not bool((pool[gpu.to_device(self._at(copy) // PAGE)] == right.pool).all()):
                raise BenchmarkError(f"{APPEND.name}: wrong bytes for the new tokens of {of.batch}")

    def _at(self, copy: int) -> Any:
        """The slots of one copy's new tokens, s32 [B]."""
        return self._slots + np.int32(copy * self._of.pages * PAGE)
