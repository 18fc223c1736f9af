"""A NumPy runner with the attention of `attention_kv4_sm90` in its own order of operations: the kernels' very bits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.llm.model import NumpyRunner
from ptxlab.llm.model.runner import Rows, padded_rows
from ptxlab.lowbit.kernels.attention import exact
from ptxlab.lowbit.kernels.attention.call import check_call
from ptxlab.lowbit.kernels.attention.options import AttentionOptions
from ptxlab.lowbit.kernels.attention.steps import choose
from ptxlab.spec.dtypes import convert_to_dtype, floats


class KernelAttentionRunner(NumpyRunner):
    """Its rows of decoding attend as those of a `KernelRunner` do that has the same batch and context.

    Those of prompts attend in float64, as `attention_kv4_prefill_sm90` has no oracle in its own order. What the kernel
    adds up apart depends on all rows of a launch, so padding counts. On a GPU the oracle runs there, with the
    arithmetic of its tensor cores.
    """

    backend = "emulator"
    _decodes = False

    def decode(self, tokens: Any, at: Sequence[int] | None = None) -> Any:
        """Run a step, its attention as that of the kernels."""
        self._decodes = True
        try:
            return super().decode(tokens, at)
        finally:
            self._decodes = False

    def _attend(self, i: int, q: Any, rows: Rows, of_chunk: Any) -> Any:
        if not self._decodes:
            return super()._attend(i, q, rows, of_chunk)
        to_backend = gpu.to_device if self.backend == "gpu" else np.asarray
        R, padding = len(q), padded_rows(len(q), self.batch) - len(q)
        table = np.pad(self.caches[i].block_table[rows.sequence], ((0, padding), (0, 0)))
        lengths = np.pad(rows.position + 1, (0, padding))
        pool = to_backend(self.caches[i].pool)
        cache = replace(self.caches[i], pool=pool, block_table=to_backend(table), lengths=to_backend(lengths))
        queries = to_backend(np.pad(convert_to_dtype(q, self._dtype), ((0, padding), (0, 0), (0, 0))))
        options = AttentionOptions(window=self.config.window_of(i), backend=self.backend, programmatic=True)
        call = check_call(options, {"q": queries}, cache)
        step = choose(options)
        sizes = step.sizes(call, 1 if self.backend == "emulator" else gpu.device_info().sms)
        call_sizes = {name: sizes[name] for name in ("softmax_scale", "window", "blocks")}
        out, _ = exact.attention(
            queries[:, None], cache, config=step.config(sizes, self._dtype, rotated=cache.rotated), **call_sizes
        )
        host_out = gpu.to_host(out) if self.backend == "gpu" else out
        return floats(host_out[:R, 0]).reshape(R, -1)
