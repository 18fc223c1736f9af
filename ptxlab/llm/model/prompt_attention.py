"""`PromptAttention`: prompts attended by PyTorch, causally, over rotated keys and values that were not quantised yet.

The decode attention reads the cache once for every row of a prompt. PyTorch's reads keys and values once for many rows,
in 16 bits: what was rounded to 4 bits for the cache is not looked at until a later launch goes on with the sequence.

Imported only when it is asked for, as PyTorch may not be installed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ptxlab import gpu
from ptxlab.errors import UnavailableError
from ptxlab.llm.model.layer import LayerBuffers, LayerCall
from ptxlab.llm.model.runner import Indices, Rows

try:
    import torch
except ModuleNotFoundError as error:
    raise UnavailableError(f"{error.name}: not installed; python -m pip install 'ptxlab[torch]'") from None
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 5):
    raise UnavailableError(f"torch: 2.5 or newer is needed (got {torch.__version__})")


class Prompts(NamedTuple):
    """Rows of a launch from `start` on: `sequences` of `length` tokens each, all from position 0."""

    start: int
    sequences: int
    length: int

    @property
    def stop(self) -> int:
        """The row behind the last one."""
        return self.start + self.sequences * self.length


def begun(rows: Rows, window: int | None) -> list[Prompts]:
    """The sequences that begin in these rows, neighbours of the same length together.

    One that is longer than the window is left to the decode attention: PyTorch has no fast kernel for a window.
    """
    starts = np.flatnonzero(np.diff(rows.sequence, prepend=-1))
    lengths = np.diff(starts, append=len(rows.sequence))
    found: list[Prompts] = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        if rows.position[start] or (window is not None and length > window):
            continue
        if found and (found[-1].stop, found[-1].length) == (start, length):
            found[-1] = found[-1]._replace(sequences=found[-1].sequences + 1)
        else:
            found.append(Prompts(start, 1, length))
    return found


def lengths_left(position: Indices, prompts: Sequence[Prompts]) -> Indices:
    """How many tokens each row sees in the cache, s32 [R]: rows of the prompts none, the others as in any launch."""
    lengths = position + 1
    for each in prompts:
        lengths[each.start : each.stop] = 0
    return lengths


class _Views(NamedTuple):
    """Prompts in a launch's buffers, [n, L, heads, D]."""

    q: Any
    k: Any
    v: Any
    out: Any


class PromptAttention:
    """Stands in for the call `attention` of every layer in one launch.

    PyTorch attends rows of the prompts. The kernel attends other rows, which go on with a sequence, as in any launch;
    it is not launched where there are none.
    """

    def __init__(
        self,
        buffers: LayerBuffers,
        keys: Any,
        prompts: Sequence[Prompts],
        lengths: Any,
        *,
        others: bool,
    ) -> None:
        """Of a launch's buffers; on a GPU inside `callers_stream`, where the launch has to follow, too.

        Args:
            buffers: of M rows, NumPy's or CuPy's.
            keys: rotated, [M, Hkv, D] of the buffers' dtype, as each layer leaves them (`layer_calls`).
            prompts: from `begun`.
            lengths: `lengths_left` with zeros for padding, s32 [M], where the buffers are.
            others: whether any of these is not 0.
        """
        config = buffers.config
        arrays = buffers.q, keys, buffers.qkv, buffers.attention
        q, k, qkv, out = (_tensor(array, buffers.dtype) for array in arrays)
        v = qkv.unflatten(1, (-1, config.head_dim))[:, -config.kv_heads :]

        def views(of: Prompts) -> _Views:
            return _Views(
                *(each[of.start : of.stop].unflatten(0, (of.sequences, of.length)) for each in (q, k, v, out))
            )

        self._prompts, self._grouped = [views(each) for each in prompts], config.heads > config.kv_heads
        self._lengths, self._others = lengths, others
        out.zero_()  # padding, which nothing else writes, might be NaN

    def __call__(self, call: LayerCall) -> None:
        """In place of `call`, which is `attention_kv4` of a layer; enqueues on PyTorch's current stream."""
        if self._others:
            q, cache = call.args
            call.function(q, replace(cache, lengths=self._lengths), **call.keywords)
        for each in self._prompts:
            each.out.copy_(attended(each.q, each.k, each.v, grouped=self._grouped))


def attended(q: Any, k: Any, v: Any, *, grouped: bool) -> Any:
    """PyTorch's causal attention, [n, L, Hq, D] of queries so shaped, and keys and values [n, L, Hkv, D]."""
    by_head = (each.transpose(1, 2) for each in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*by_head, is_causal=True, enable_gqa=grouped)
    return out.transpose(1, 2)


def require_cuda() -> None:
    """Raise UnavailableError where PyTorch does not see the GPU."""
    if not torch.cuda.is_available():
        raise UnavailableError(f"torch: {torch.__version__} sees no GPU; install a build with CUDA")


@contextmanager
def callers_stream() -> Iterator[None]:
    """PyTorch and CuPy both on the caller's stream while inside, so that what either frees is reused in order."""
    with gpu.caller_stream() as stream:
        # `ExternalStream(0)` would be a stream of PyTorch's pool.
        same = torch.cuda.ExternalStream(stream.ptr) if stream.ptr else torch.cuda.default_stream()
        with torch.cuda.stream(same):
            yield


def _tensor(array: Any, dtype: str) -> Any:
    """On the same memory; bfloat16 comes as its bits."""
    return gpu.like(array, torch.empty(0), dtype)
