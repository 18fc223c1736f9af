"""`KernelRunner`: W4A8KV4 on the kernels: `decode_layer` over all layers, on a GPU or in the emulator.

On a GPU a step of decoding is one CUDA graph, from the embedding to the norm behind the last layer. The product with
the LM head follows on the same stream, as CuPy keeps cuBLAS out of graphs. Nothing in a step waits for the GPU.

A prompt goes through the same layers, a chunk of rows at a time: its rows are a batch of sequences that share their
pages, each as long as its row's position. So the decode attention does the prompt's attention too, with a query a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.kernels.quantize import rmsnorm_quantize
from ptxlab.layout import KVCache
from ptxlab.model.layer import LayerBuffers, decode_layer, into
from ptxlab.model.quantized import QuantizedModel
from ptxlab.model.runner import PAGE, Rows, Runner
from ptxlab.runtime.backends import BACKENDS
from ptxlab.spec.dtypes import floats, storage, stored
from ptxlab.validate import is_one_of


class KernelRunner(Runner):
    """See `Runner`.

    Attributes:
        caches: of each layer; one block table and lengths for all of them.
    """

    def __init__(
        self,
        model: QuantizedModel,
        batch: int = 1,
        context: int = 2048,
        *,
        chunk: int | None = None,
        backend: str = "gpu",
    ) -> None:
        """See `Runner`. `backend` is `gpu` or, for tiny models, `emulator`. Raises UnavailableError without a GPU."""
        super().__init__(model, batch, context, chunk=chunk)
        if not is_one_of(backend, BACKENDS):
            raise ArgumentError("backend", f"must be one of {', '.join(BACKENDS)}", backend)
        self._backend, self._on_gpu = backend, backend == "gpu"
        if self._on_gpu:
            gpu.device_info()  # or the reason why there is none
        config, layers = self.config, model.layers
        self._dtype = layers[0].dtype
        self._layers = [weights.to_device() for weights in layers] if self._on_gpu else list(layers)
        # A token's row has the layers' dtype; the head stays in float16.
        self._embedding = self._placed(stored(floats(model.embedding), self._dtype))
        shared = model.head is None and self._dtype == "float16"
        self._head = self._embedding if shared else self._placed(model.embedding if model.head is None else model.head)
        self._final_norm = self._placed(model.final_norm)
        self._angles = tuple(self._placed(table) for table in config.rope_tables(context))
        like, sizes = self._embedding, (batch, self.max_pages, config.kv_heads, config.head_dim)
        first = KVCache.empty(*sizes, page_size=PAGE, like=like)
        self.caches = [replace(first, pool=np.zeros_like(first.pool)) for _ in layers]
        self._table = np.arange(batch * self.max_pages, dtype=np.int32).reshape(batch, -1)  # as `KVCache.empty` has it
        self._step = _Batch.of(self._layers[0], self.caches)
        table = np.zeros((self.chunk, self.max_pages), np.int32, like=like)
        rows = replace(first, block_table=table, lengths=np.zeros(self.chunk, np.int32, like=like))
        self._prompt = _Batch.of(self._layers[0], [replace(rows, pool=cache.pool) for cache in self.caches])
        self._graph = gpu.capture([self._decode_rows]) if self._on_gpu else None  # runs once; `prefill` starts anew

    def prefill(self, prompts: Sequence[Sequence[int]]) -> Any:
        """See `Runner`."""
        logits, b = super().prefill(prompts), self._step
        self._set(b.lengths, self.lengths)
        self._set(b.positions, self.lengths - 1)
        self._set(b.slots, self._slots(np.arange(self.batch), self.lengths - 1))
        return logits

    def decode(self, tokens: Any) -> Any:
        """See `Runner`. On a GPU `tokens` may be CuPy's, and the call only enqueues, on the caller's stream."""
        if not gpu.is_device_array(tokens):
            tokens = self._placed(self._checked("tokens", tokens, self.batch))
        self._grow()
        self._step.tokens[...] = tokens
        if self._graph is None:
            self._decode_rows()
        else:
            self._graph.replay(gpu.caller_stream())
        return self._logits(self._step.normed)

    def _decode_rows(self) -> None:
        b = self._step
        for counter in (b.lengths, b.positions, b.slots):  # pages of a sequence follow each other
            np.add(counter, 1, out=counter)
        self._forward(b)

    def _run(self, rows: Rows) -> Any:
        b, R = self._prompt, len(rows.token)
        padding = {"tokens": 0, "positions": 0, "lengths": 0, "slots": -1}  # such rows see and write nothing
        slots = self._slots(rows.sequence, rows.position)
        given = {"tokens": rows.token, "positions": rows.position, "lengths": rows.position + 1, "slots": slots}
        for name, value in given.items():
            self._set(getattr(b, name), np.pad(value, (0, self.chunk - R), constant_values=padding[name]))
        table = np.pad(self._table[rows.sequence], ((0, self.chunk - R), (0, 0)))
        self._set(b.caches[0].block_table, table)
        self._forward(b)
        return b.normed[:R]

    def _forward(self, b: "_Batch") -> None:
        """All layers and the last norm, for the rows of a batch; on a GPU it only enqueues and allocates nothing."""
        np.take(self._embedding, b.tokens, axis=0, out=b.x)
        b.residual.fill(0)
        x, rope = b.x, (*self._angles, b.positions)
        how: dict[str, Any] = {"rope": rope, "buffers": b.buffers, "backend": self._backend}
        for i, (weights, cache) in enumerate(zip(self._layers, b.caches, strict=True)):
            x = decode_layer(x, b.residual, weights, cache, b.slots, programmatic=i > 0, **how)
        out: dict[str, Any] = {"normed": b.normed, **into(b.buffers.qkv_in)}
        last: dict[str, Any] = {"eps": self.config.eps, "backend": self._backend, "programmatic": True}
        rmsnorm_quantize(x, self._final_norm, residual=b.residual, **out, **last)

    def _logits(self, normed: Any) -> Any:
        halves = normed if normed.dtype == np.float16 else floats(normed).astype(np.float16)
        return np.matmul(halves, self._head.T)

    def _slots(self, sequence: Any, position: Any) -> Any:
        return (self._table[sequence, position // PAGE] * PAGE + position % PAGE).astype(np.int32)

    def _placed(self, array: np.ndarray) -> Any:
        return gpu.to_device(array) if self._on_gpu else array

    def _set(self, target: Any, values: np.ndarray) -> None:
        target[...] = self._placed(values.astype(target.dtype))


@dataclass(frozen=True, eq=False)
class _Batch:
    """Buffers for so many rows: `tokens`, `positions` and `slots` s32 [R], the stream's ends, caches by layer."""

    tokens: Any
    positions: Any
    slots: Any
    x: Any
    residual: Any
    normed: Any
    buffers: LayerBuffers
    caches: Sequence[KVCache]

    @property
    def lengths(self) -> Any:
        """Of the caches' sequences, s32 [R]."""
        return self.caches[0].lengths

    @classmethod
    def of(cls, weights: Any, caches: Sequence[KVCache]) -> "_Batch":
        """For the rows of these caches."""
        cache, R, H = caches[0], caches[0].batch, weights.config.hidden

        def zeros(*shape: int, of: Any = np.int32) -> Any:
            return np.zeros(shape, of, like=cache.pool)

        tokens, positions, slots = (zeros(R) for _ in range(3))
        x, residual, normed = (zeros(R, H, of=storage(weights.dtype)) for _ in range(3))
        return cls(tokens, positions, slots, x, residual, normed, LayerBuffers.empty(weights, cache), caches)
