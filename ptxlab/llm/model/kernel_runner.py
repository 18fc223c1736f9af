"""`KernelRunner`: W4A8KV4 on the kernels: `decode_layer` over all layers, on a GPU or in the emulator.

On a GPU a step is one CUDA graph, from the embedding to the norm behind the last layer, captured once for each size
(`Runner.sizes`). The product with the LM head follows on the same stream, as CuPy keeps cuBLAS out of graphs. Nothing
in a step waits for the GPU.

A prompt goes through the same graphs, a chunk of rows at a time: its rows are a batch of sequences that share their
pages, each as long as its row's position. So the decode attention does the prompt's attention too, with a query a row.
Or PyTorch's attention does it (`prompt_attention="torch"`): then what lies between two layers' attentions is a graph.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.llm.model.layer import LayerBuffers, LayerCall, into, layer_calls
from ptxlab.llm.model.memory import Footprint
from ptxlab.llm.model.quantized import QuantizedModel
from ptxlab.llm.model.runner import PAGE, Indices, Rows, Runner, quantized_head
from ptxlab.lowbit.kernels.gemm import gemm_f16, gemm_w8a8
from ptxlab.lowbit.kernels.quantize import quantize_activations, rmsnorm_quantize
from ptxlab.lowbit.layout import KVCache
from ptxlab.lowbit.quant import Level1Weight
from ptxlab.runtime.arguments import check_flags
from ptxlab.runtime.backends import BACKENDS
from ptxlab.spec.dtypes import floats, storage, stored
from ptxlab.validate import is_one_of

PROMPT_ATTENTIONS = ("cache", "torch")
_Attend = Callable[[LayerCall], None]
_Piece = tuple[Callable[[], None], LayerCall | None]


class KernelRunner(Runner):
    """See `Runner`.

    Attributes:
        backend: `gpu` or `emulator`.
        prompt_attention: what attends prompts: `cache`, the decode attention over the cache, or `torch`.
        caches: of each layer; one block table and lengths for all of them.
    """

    def __init__(
        self,
        model: QuantizedModel,
        batch: int = 1,
        context: int = 2048,
        *,
        backend: str = "gpu",
        programmatic: bool = True,
        prompt_attention: str = "cache",
        **how: Any,
    ) -> None:
        """See `Runner`. `backend` is `gpu` or, for tiny models, `emulator`. Raises UnavailableError without a GPU.

        With `prompt_attention="torch"` a sequence's first rows in a launch, of a whole prompt or as much of it as the
        chunk has room for, are attended by PyTorch (2.5 or newer, else UnavailableError). They see keys and values of
        16 bits; rows that go on with a sequence, and steps, see the cache's 4. So how prompts are cut into chunks
        matters, and `batch_invariant` is refused. A launch's part of a prompt that is longer than the model's window is
        left to the decode attention.

        `programmatic` launches overlap; weights in a packing whose kernels do not wait for each other need False.

        Where it is `batch_invariant`, attention splits a sequence by its own length alone, and a float16 LM head is
        `gemm_f16`, as cuBLAS adds in an order that depends on the number of rows. All other sums are integers, as those
        of an int8 head are, or of one row.
        """
        super().__init__(model, batch, context, **how)
        if not is_one_of(backend, BACKENDS):
            raise ArgumentError("backend", f"must be one of {', '.join(BACKENDS)}", backend)
        check_flags(programmatic=programmatic)
        if not is_one_of(prompt_attention, PROMPT_ATTENTIONS):
            raise ArgumentError("prompt_attention", f"must be one of {', '.join(PROMPT_ATTENTIONS)}", prompt_attention)
        if prompt_attention != "cache" and self.batch_invariant:
            raise ArgumentError("prompt_attention", "must be cache where batch_invariant is True", prompt_attention)
        self.backend, self._on_gpu, self._programmatic = backend, backend == "gpu", programmatic
        self.prompt_attention = prompt_attention
        if self._on_gpu:
            self._require_room(gpu.device_info())  # or the reason why there is none
        if prompt_attention == "torch":
            require_torch(on_gpu=self._on_gpu)
        config, layers = self.config, model.layers
        self._dtype = layers[0].dtype
        self._layers = [weights.to_device() for weights in layers] if self._on_gpu else list(layers)
        # A token's row has the layers' dtype; the head stays in float16 unless it is quantised.
        self._embedding = self._placed(stored(floats(model.embedding), self._dtype))
        head, shared = model.embedding if model.head is None else model.head, model.head is None
        if self.head == "int8":
            on_host = quantized_head(gpu.to_host(head) if gpu.is_device_array(head) else head)
            weight: Any = replace(on_host, q8=self._placed(on_host.q8), scale=self._placed(on_host.scale))
        else:
            weight = self._embedding if shared and self._dtype == "float16" else self._placed(head)
        self._head = LMHead(weight, config.vocabulary, self.batch_invariant, backend, programmatic)
        self._final_norm = self._placed(model.final_norm)
        self._angles = tuple(self._placed(table) for table in config.rope_tables(context))
        like, sizes = self._embedding, (1, self.pages, config.kv_heads, config.head_dim)
        first = KVCache.empty(*sizes, page_size=PAGE, like=like)
        self._pools = [first.pool, *(np.zeros_like(first.pool) for _ in layers[1:])]
        self._steps: dict[int, _Step] = {}
        self._eager = False
        if prompt_attention == "torch":  # rotated keys of a layer, of the largest launch
            keys = max(self.sizes), config.kv_heads, config.head_dim
            self._keys = np.zeros(keys, storage(self._dtype), like=self._embedding)
        self.caches = self._step(self.batch).caches

    def _require_room(self, device: gpu.DeviceInfo) -> None:
        """Raise ArgumentError, with the figures, for a runner that is larger than the card."""
        footprint = Footprint.of_model(self.model, self.batch, self.context, chunk=self.chunk, head=self.head)
        if footprint.total(self.pages) > device.memory_bytes:
            rule = f"must fit the {device.memory_bytes / 1e9:.2f} GB of {device.name}"
            raise ArgumentError("model", rule, footprint.needed(self.pages))

    def decode(self, tokens: Any, at: Sequence[int] | None = None) -> Any:
        """See `Runner`. On a GPU `tokens` may be CuPy's, and the call only enqueues, on the caller's stream."""
        at = self._sequences(at)
        if not gpu.is_device_array(tokens):
            tokens = self._placed(self._checked("tokens", tokens, len(at)))
        with self._grown("decode", at, [1] * len(at)):
            return self._logits(self._launch(tokens, np.array(at, np.int32), self.lengths[at] - 1))

    def _run(self, rows: Rows) -> Any:
        with self._attending(rows) as attend:
            return self._launch(self._placed(rows.token), rows.sequence, rows.position, attend)

    @contextmanager
    def _attending(self, rows: Rows) -> Iterator[_Attend | None]:
        """What stands in for every layer's attention of these rows, if PyTorch attends sequences that begin in them."""
        if self.prompt_attention != "torch":
            yield None
            return
        from ptxlab.llm.model import prompt_attention as by_torch

        prompts = by_torch.begun(rows, self.config.window)
        if not prompts:
            yield None
            return
        step, left = self._step(self.launched(len(rows.token))), by_torch.lengths_left(rows.position, prompts)
        with by_torch.callers_stream() if self._on_gpu else nullcontext():
            lengths, keys = self._placed(np.pad(left, (0, step.rows - len(left)))), self._keys[: step.rows]
            yield by_torch.PromptAttention(step.buffers, keys, prompts, lengths, others=bool(left.any()))

    def _launch(self, tokens: Any, sequence: Indices, position: Indices, attend: _Attend | None = None) -> Any:
        """The normalised stream [R, H] of rows whose tokens are on the device.

        `attend`, which may allocate, is called in place of every layer's `attention`, with that call.
        """
        R = len(tokens)
        pieces = self._pieces(self._step(self.launched(R))) if attend else ()  # which may clear the step
        step = self._placed_step(sequence, position)
        left, step.left = step.left, ()  # until it has run: nobody knows what an interrupted step leaves
        step.tokens[:R] = tokens
        if attend:
            for piece, attention in pieces:
                piece()
                if attention:
                    attend(attention)
        elif step.graph is None or self._eager:
            self._forward(step)
        else:
            step.graph.replay(gpu.caller_stream())
        step.left = left
        return step.normed[:R]

    def _placed_step(self, sequence: Indices, position: Indices) -> "_Step":
        """The step for these rows. Its numbers on the device are those before it adds `live`: they are set anew unless
        the step before has left them so. What is set is enqueued on the caller's stream, ahead of the step."""
        step = self._step(self.launched(len(sequence)))
        padding = (0, step.rows - len(sequence))
        slots = self.table[sequence, position // PAGE] * PAGE + position % PAGE
        live = np.pad(np.ones_like(sequence), padding)
        # Padding sees nothing, having length 0, and writes nothing, having no slot.
        counters = [np.pad(position + 1, padding), np.pad(position, padding)]
        counters.append(np.pad(slots, padding, constant_values=-1))
        wanted = [np.pad(self.table[sequence], (padding, (0, 0))), live, *(counter - live for counter in counters)]
        if not step.left or not all(map(np.array_equal, step.left, wanted)):
            on_device = step.caches[0].block_table, step.live, step.lengths, step.positions, step.slots
            for target, values in zip(on_device, wanted, strict=True):
                target[...] = self._placed(values.astype(np.int32))
        step.left = [*wanted[:2], *counters]
        return step

    def _step(self, rows: int) -> "_Step":
        """The step of so many rows; on a GPU it is captured at its first use, when it sees and writes nothing."""
        if rows not in self._steps:
            config, like = self.config, self._embedding
            table, lengths = (np.zeros(shape, np.int32, like=like) for shape in ((rows, self.max_pages), (rows,)))
            shared: dict[str, Any] = {"block_table": table, "lengths": lengths, "page_size": PAGE}
            caches = [KVCache(pool=pool, head_dim=config.head_dim, **shared) for pool in self._pools]
            step = _Step.of(self._layers[0], caches, self.batch_invariant, self._programmatic)
            if self._steps:  # launches follow each other, so one workspace of attention is enough
                one = self._steps[self.batch].buffers.attention_workspace
                step.buffers = replace(step.buffers, attention_workspace=one)
            self._steps[rows] = step
            if self._on_gpu:
                step.graph = gpu.capture([lambda: self._forward(step)])
        return self._steps[rows]

    def _pieces(self, b: "_Step") -> Sequence[_Piece]:
        """A step cut at every layer's attention: what comes ahead of it, and that call; last the rest, and None.

        On a GPU what comes ahead is a graph, of whatever prompts there are. It is captured at its first use, when the
        step sees and writes nothing: its rows are cleared.
        """
        if not b.pieces:
            b.clear()
            pieces: list[_Piece] = []
            ahead: list[Callable[[], Any]] = []
            for call in self._work(b, self._keys[: b.rows]):
                if isinstance(call, LayerCall) and call.name == "attention":
                    pieces.append((self._as_one(ahead), call))
                    ahead = []
                else:
                    ahead.append(call)
            b.pieces = [*pieces, (self._as_one(ahead), None)]
        return b.pieces

    def _as_one(self, calls: Sequence[Callable[[], Any]]) -> Callable[[], None]:
        """One call that makes these; on a GPU it replays a graph of them on the caller's stream."""
        if self._on_gpu:
            graph = gpu.capture(calls).graph  # without its stream: there are hundreds
            return lambda: graph.launch(gpu.caller_stream())

        def one_by_one() -> None:
            for call in calls:
                call()

        return one_by_one

    def _forward(self, b: "_Step") -> None:
        """All layers and the last norm, for the rows of a step; on a GPU it only enqueues and allocates nothing."""
        for call in self._work(b):
            call()

    def _work(self, b: "_Step", keys: Any = None) -> Iterator[Callable[[], Any]]:
        """The calls of `_forward`, those of a layer looked at before the first of them is made."""
        yield partial(self._begin, b)
        for layer in self._calls(b, keys):
            yield from layer
        yield partial(self._end, b)

    def _begin(self, b: "_Step") -> None:
        """What comes ahead of the first layer."""
        for counter in (b.lengths, b.positions, b.slots):  # a sequence goes on in its page without the host
            np.add(counter, b.live, out=counter)
        np.take(self._embedding, b.tokens, axis=0, out=b.x)
        b.residual.fill(0)

    def _end(self, b: "_Step") -> None:
        """The last norm."""
        out: dict[str, Any] = {"normed": b.normed, **into(b.buffers.qkv_in)}
        last: dict[str, Any] = {"eps": self.config.eps, "backend": self.backend, "programmatic": self._programmatic}
        x = b.buffers.result(b.residual)
        rmsnorm_quantize(x, self._final_norm, residual=None if x is b.residual else b.residual, **out, **last)

    def _calls(self, b: "_Step", keys: Any = None) -> Iterator[list[LayerCall]]:
        """Of every layer; they leave rotated keys in `keys`, if it is given."""
        how: dict[str, Any] = {"rope": (*self._angles, b.positions), "buffers": b.buffers, "backend": self.backend}
        x = b.x
        for i, (weights, cache) in enumerate(zip(self._layers, b.caches, strict=True)):
            follows = self._programmatic and i > 0
            yield layer_calls(x, b.residual, weights, cache, b.slots, index=i, keys=keys, programmatic=follows, **how)
            x = b.buffers.result(b.residual)

    def operations(self, rows: int) -> list[list[LayerCall]]:
        """The calls of every layer in a launch of so many rows, to be made one by one: the next launch undoes them but
        for the last tokens in the cache."""
        return list(self._calls(self._step(self.launched(rows))))

    def logits(self, rows: int, head: "LMHead | None" = None) -> Any:
        """A head alone, by default its own: logits f16 [rows, V] of what the last launch of so many rows has left."""
        return (head or self._head)(self._step(self.launched(rows)).normed[:rows])

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Inside, the launches of steps are made one by one instead of as a graph."""
        self._eager = True
        try:
            yield
        finally:
            self._eager = False

    def _logits(self, normed: Any) -> Any:
        return self._head(normed)

    def _placed(self, array: np.ndarray) -> Any:
        return gpu.to_device(array) if self._on_gpu else array


def require_torch(*, on_gpu: bool) -> None:
    """Raise UnavailableError without PyTorch, and on a GPU without one that sees it."""
    from ptxlab.llm.model.prompt_attention import require_cuda

    if on_gpu:
        require_cuda()


@dataclass(frozen=True, eq=False)
class LMHead:
    """The product behind the last norm.

    Attributes:
        weight: f16 [V, H], or INT8 with a scale per row, padded (`quantized_head`).
        vocabulary: V.
        batch_invariant: whether an FP16 weight is added up in one order in any batch; by cuBLAS it is not.
        backend, programmatic: of the kernels.
    """

    weight: Any
    vocabulary: int
    batch_invariant: bool = False
    backend: str = "gpu"
    programmatic: bool = True

    def __call__(self, normed: Any) -> Any:
        """Logits f16 [R, V] of the normalised stream [R, H], f16 or bf16."""
        if isinstance(self.weight, Level1Weight):
            x = quantize_activations(normed, backend=self.backend)
            logits = gemm_w8a8(x, self.weight, backend=self.backend, programmatic=self.programmatic)
            return logits[:, : self.vocabulary]
        halves = normed if normed.dtype == np.float16 else floats(normed).astype(np.float16)
        if self.batch_invariant:
            return gemm_f16(halves, self.weight, backend=self.backend)
        return np.matmul(halves, self.weight.T)


@dataclass(eq=False)
class _Step:
    """A launch for so many rows: buffers, caches by layer, and on a GPU the graph.

    Attributes:
        tokens, positions, slots: s32 [R].
        live: what each row's length, position and slot grow by first: 1, or 0 of padding.
        x, residual, normed: the stream's ends, [R, H].
        left: table, `live`, lengths, positions and slots as the last launch has left them.
        pieces: of `KernelRunner._pieces`, once there are any.
    """

    tokens: Any
    positions: Any
    slots: Any
    live: Any
    x: Any
    residual: Any
    normed: Any
    buffers: LayerBuffers
    caches: Sequence[KVCache]
    graph: gpu.Graph | None = None
    left: Sequence[Indices] = ()
    pieces: Sequence[_Piece] = ()

    def clear(self) -> None:
        """Rows that see and write nothing, until the next launch sets them."""
        for numbers, value in ((self.live, 0), (self.lengths, 0), (self.positions, 0), (self.slots, -1)):
            numbers.fill(value)
        self.left = ()

    @property
    def rows(self) -> int:
        """R."""
        return len(self.tokens)

    @property
    def lengths(self) -> Any:
        """Of the caches' sequences, s32 [R]."""
        return self.caches[0].lengths

    @classmethod
    def of(cls, weights: Any, caches: Sequence[KVCache], batch_invariant: bool, programmatic: bool) -> "_Step":
        """For the rows of these caches, which see and write nothing yet."""
        cache, R, H = caches[0], caches[0].batch, weights.config.hidden

        def zeros(*shape: int, of: Any = np.int32) -> Any:
            return np.zeros(shape, of, like=cache.pool)

        tokens, positions, slots, live = (zeros(R) for _ in range(4))
        x, residual, normed = (zeros(R, H, of=storage(weights.dtype)) for _ in range(3))
        buffers = LayerBuffers.empty(weights, cache, batch_invariant=batch_invariant, programmatic=programmatic)
        step = cls(tokens, positions, slots, live, x, residual, normed, buffers, caches)
        step.clear()
        return step
