"""`FloatRunner`: a model of floats with a cache of floats, to compare a quantised model's text with."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.llm.model.decoder import EXACT, causal_attention
from ptxlab.llm.model.floats import FloatModel
from ptxlab.llm.model.pages import PAGE
from ptxlab.llm.model.runner import Rows, Runner
from ptxlab.lowbit.reference import rms_norm
from ptxlab.lowbit.reference.attention import rope


class FloatRunner(Runner):
    """See `Runner`. Weights, cache and logits have the model's dtype, and lie where the model does, all layers at once.

    Its sums are of floats, in the library's order, so it is not batch-invariant.
    """

    runs = FloatModel

    def __init__(
        self,
        model: FloatModel,
        batch: int = 1,
        context: int = 2048,
        *,
        chunk: int | None = None,
        pages: int | None = None,
    ) -> None:
        """See `Runner`."""
        super().__init__(model, batch, context, chunk=chunk, pages=pages, rotated=False)
        config, embedding = self.config, model.embedding
        self._layers = list(model.layers)
        self._angles = [
            np.asarray(table, like=embedding).astype(embedding.dtype) for table in config.rope_tables(context)
        ]
        shape = (len(self._layers), self.pages * PAGE, config.kv_heads, config.head_dim)
        self._keys, self._values = (np.zeros(shape, embedding.dtype, like=embedding) for _ in range(2))

    def decode(self, tokens: Any, sequences: Sequence[int] | None = None) -> Any:
        """See `Runner`."""
        sequences = self._check_sequences(sequences)
        tokens = self._check_tokens(
            "tokens", gpu.fetch(tokens)() if gpu.is_device_array(tokens) else tokens, len(sequences)
        )
        with self._append_tokens("decode", {b: tokens[i : i + 1] for i, b in enumerate(sequences)}) as rows:
            return self._logits(self._run(rows))

    @np.errstate(over="ignore", invalid="ignore")  # of logits that are not finite, which whoever chooses refuses
    def _run(self, rows: Rows) -> Any:
        config = self.config
        x = self.model.embed(rows.token)
        position = np.asarray(rows.position, like=x)
        angles = [table[position] for table in self._angles]
        for i, layer in enumerate(self._layers):
            y = rms_norm(x, layer["input_norm"], config.eps).astype(x.dtype)
            q, k, v = (EXACT.product(name, y, layer).reshape(len(x), -1, config.head_dim) for name in ("q", "k", "v"))
            attention = self._attend(i, rope(q, *angles), rope(k, *angles), v, rows)
            x = self.model.run_feed_forward(x + EXACT.product("o", attention, layer), layer)
        return x

    def _attend(self, i: int, q: Any, k: Any, v: Any, rows: Rows) -> Any:
        """Write the rows' rotated keys and values [R, Hkv, D], and attend their queries [R, Hq, D]: [R, Hq·D]."""
        attended = np.empty_like(q)
        for b in np.unique(rows.sequence):
            own_rows = np.flatnonzero(rows.sequence == b)
            chunk, first_position = slice(own_rows[0], own_rows[-1] + 1), int(rows.position[own_rows[0]])
            slots = np.asarray(self._slots(b, np.arange(rows.position[own_rows[-1]] + 1)), like=q)
            self._keys[i, slots[first_position:]], self._values[i, slots[first_position:]] = k[chunk], v[chunk]
            keys, values = self._keys[i, slots], self._values[i, slots]
            attended[chunk] = causal_attention(q[None, chunk], keys[None], values[None], self.config.window_of(i))[0]
        return attended.reshape(len(q), -1)

    def _logits(self, normed: Any) -> Any:
        return self.model.logits(normed)
