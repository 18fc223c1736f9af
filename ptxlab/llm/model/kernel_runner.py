"""`KernelRunner`: a quantised model on the kernels: `decode_layer` over all layers, on a GPU or in the emulator.

On a GPU a step is one CUDA graph, from the embedding to the norm behind the last layer, captured once for each size
(`launch_sizes`). The product with the LM head follows on the same stream, as CuPy keeps cuBLAS out of graphs. Nothing
in a step waits for the GPU.

Rows of prompts have graphs of their own, for a chunk of rows of one or more sequences: their attention is
`attention_kv4_prefill_sm90`, which dequantises a page once for 128 queries. It reads the cache as decoding does, and a
query has the same bits in any chunk. It reads kv4 alone: in other schemes each row of a prompt attends by itself, as a
sequence that decodes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.llm.model.inputs import calls_of, output_arguments
from ptxlab.llm.model.layer import LayerBuffers, LayerCall, layer_calls
from ptxlab.llm.model.memory import Footprint
from ptxlab.llm.model.quantized import QuantizedModel
from ptxlab.llm.model.runner import Indices, Rows, Runner, padded_rows, quantize_head
from ptxlab.llm.model.weights import LayerWeights
from ptxlab.lowbit.kernels.attention.prefill import CHUNKED
from ptxlab.lowbit.kernels.gemm import gemm_f16, gemm_w8a8
from ptxlab.lowbit.kernels.quantize import quantize_activations
from ptxlab.lowbit.layout import KVCache
from ptxlab.lowbit.quant import Level1Weight
from ptxlab.runtime.backends import BACKENDS
from ptxlab.spec.dtypes import convert_to_dtype, floats, storage
from ptxlab.validate import is_one_of


class KernelRunner(Runner):
    """See `Runner`.

    Attributes:
        backend: `gpu` or `emulator`.
        caches: of each layer; one block table and lengths for all of them.
    """

    def __init__(
        self,
        model: QuantizedModel,
        batch: int = 1,
        context: int = 2048,
        *,
        backend: str = "gpu",
        programmatic: bool | None = None,
        **options: Any,
    ) -> None:
        """See `Runner`. `backend` is `gpu` or, for tiny models, `emulator`. Raises UnavailableError without a GPU.

        Where no kernel for the layout of the weights runs, they are packed for one that does: on a GPU of sm_80 or
        sm_89 in `qserve`, those of W4A4 in `rows`. The model keeps its own. `programmatic` launches overlap, which
        needs kernels that wait for each other: by default those for weights in strips.

        Where it is `batch_invariant`, attention splits a sequence by its own length alone, and a float16 LM head is
        `gemm_f16`, as cuBLAS adds in an order that depends on the number of rows. All other sums are integers, as those
        of an int8 head are, or of one row.
        """
        super().__init__(model, batch, context, **options)
        if not is_one_of(backend, BACKENDS):
            raise ArgumentError("backend", f"must be one of {', '.join(BACKENDS)}", backend)
        self.backend, self._on_gpu = backend, backend == "gpu"
        if self._on_gpu:
            self._require_room(gpu.device_info())  # or the reason why there is none
        config, layers = self.config, model.layers
        self._dtype = layers[0].dtype
        self._layers = [self._place_layer(weights) for weights in layers]
        are_in_strips = all(getattr(self._layers[0], name).layout == "strips" for name in config.matrices)
        self._programmatic = are_in_strips if programmatic is None else programmatic
        # A token's row has the layers' dtype; the head stays in float16 unless it is quantised.
        self._embedding = self._to_backend(convert_to_dtype(floats(model.embedding), self._dtype))
        head, is_head_shared = model.embedding if model.head is None else model.head, model.head is None
        if self.head == "int8":
            quantized_head = quantize_head(gpu.to_host(head) if gpu.is_device_array(head) else head)
            weight: Any = replace(
                quantized_head, q8=self._to_backend(quantized_head.q8), scale=self._to_backend(quantized_head.scale)
            )
        else:
            weight = self._embedding if is_head_shared and self._dtype == "float16" else self._to_backend(head)
        self._head = LMHead(weight, config.vocabulary, self.batch_invariant, backend, self._programmatic)
        self._final_norm = self._to_backend(model.final_norm)
        self._angles = tuple(self._to_backend(table) for table in config.rope_tables(context))
        self._pools = [self._pool(self._embedding) for _ in layers]
        self._decode_steps: dict[int, _Step] = {}
        self._prompt_steps: dict[int, _Step] = {}
        self._eager = False
        self.caches = self._decode_step(self.batch).caches

    def _place_layer(self, weights: LayerWeights) -> LayerWeights:
        """Move a layer to where its kernels run, in a layout that one of them takes."""
        placed_weights = weights.to_device() if self._on_gpu else weights
        return placed_weights.in_layout_here(self.backend)

    def _require_room(self, device: gpu.DeviceInfo) -> None:
        """Raise ArgumentError, with the figures, for a runner that is larger than the card."""
        options: dict[str, Any] = {name: getattr(self, name) for name in ("chunk", "head", "cache", "own_keys")}
        footprint = Footprint.of_model(self.model, self.batch, self.context, **options)
        if footprint.total(self.pages) > device.memory_bytes:
            rule = f"must fit the {device.memory_bytes / 1e9:.2f} GB of {device.name}"
            raise ArgumentError("model", rule, footprint.describe(self.pages))

    def decode(self, tokens: Any, sequences: Sequence[int] | None = None) -> Any:
        """See `Runner`. On a GPU `tokens` may be CuPy's, and the call only enqueues, on the caller's stream."""
        sequences = self._check_sequences(sequences)
        if not gpu.is_device_array(tokens):
            tokens = self._to_backend(self._check_tokens("tokens", tokens, len(sequences)))
        with self._grow_sequences("decode", sequences, [1] * len(sequences)):
            step = self._prepare_decode_step(np.array(sequences, np.int32), self.lengths[sequences] - 1)
            expected_numbers, step.device_numbers = step.device_numbers, ()  # an interrupted step leaves any numbers
            step.tokens[: len(sequences)] = tokens
            self._launch(step)
            step.device_numbers = expected_numbers
            return self._logits(step.normed[: len(sequences)])

    def _run(self, rows: Rows) -> Any:
        step = self._prepare_prompt_step(rows)
        self._launch(step)
        return step.normed[: len(rows.token)]

    def _launch(self, step: "_Step") -> None:
        """Enqueue a step whose numbers are on the device."""
        if step.graph is None or self._eager:
            self._forward(step)
        else:
            step.graph.replay(gpu.caller_stream())

    def _prepare_decode_step(self, sequence: Indices, position: Indices) -> "_Step":
        """Return the decoding step for these rows, with its table, lengths, positions and slots set on the device.

        The step begins by adding `increments` to lengths, positions and slots. Unless the last launch has left the
        right ones, they are written on the caller's stream, ahead of the step.
        """
        step = self._decode_step(padded_rows(len(sequence), self.batch))
        padding = (0, step.rows - len(sequence))
        increments = np.pad(np.ones_like(sequence), padding)
        # Padding sees nothing, having length 0, and writes nothing, having no slot.
        counters = [np.pad(position + 1, padding), np.pad(position, padding)]
        counters.append(np.pad(self._slots(sequence, position), padding, constant_values=-1))
        table = np.pad(self.table[sequence], (padding, (0, 0)))
        needed_arrays = [table, increments, *(counter - increments for counter in counters)]
        if not step.device_numbers or not all(map(np.array_equal, step.device_numbers, needed_arrays)):
            arrays = [step.caches[0].block_table, step.increments, step.lengths, step.positions, step.slots]
            self._write(arrays, needed_arrays)
        step.device_numbers = [table, increments, *counters]
        return step

    def _prepare_prompt_step(self, rows: Rows) -> "_Step":
        """Return the step for rows of prompts; its numbers are enqueued on the caller's stream.

        Its sequences are those of the rows, in their order, followed by empty ones; or each row is a sequence.
        """
        step = self._prompt_step(padded_rows(len(rows.token), self.chunk))
        count, padding = len(rows.token), (0, step.rows - len(rows.token))
        starts = np.arange(count)
        if step.starts is not None:
            starts = np.flatnonzero(np.diff(rows.sequence, prepend=-1))
        stops, empty_sequences = np.append(starts[1:], count), step.caches[0].batch - len(starts)
        slots = self._slots(rows.sequence, rows.position)
        numbers = {
            "tokens": (step.tokens, np.pad(rows.token, padding)),
            "positions": (step.positions, np.pad(rows.position, padding)),
            "slots": (step.slots, np.pad(slots, padding, constant_values=-1)),
            "table": (
                step.caches[0].block_table,
                np.pad(self.table[rows.sequence[starts]], ((0, empty_sequences), (0, 0))),
            ),
            "lengths": (step.lengths, np.pad(rows.position[stops - 1] + 1, (0, empty_sequences))),
        }
        if step.starts is not None:
            numbers["starts"] = step.starts, np.pad(starts, (0, empty_sequences + 1), constant_values=count)
        self._write(*zip(*numbers.values(), strict=True))
        return step

    def _write(self, targets: Iterable[Any], numbers: Iterable[Any]) -> None:
        """Copy numbers into arrays of a step."""
        for target_array, array in zip(targets, numbers, strict=True):
            target_array[...] = self._to_backend(array.astype(np.int32))

    def _decode_step(self, rows: int) -> "_Step":
        """Return the decoding step of `rows` rows.

        On a GPU it is captured at its first use, when it writes nothing.
        """
        if rows not in self._decode_steps:
            caches = self._caches(rows)
            buffers = _share_workspace(self._decode_steps, self._buffers(caches))
            self._decode_steps[rows] = self._capture(_Step.of(buffers, caches, prompts=False))
        return self._decode_steps[rows]

    def _prompt_step(self, rows: int) -> "_Step":
        """Return the step of `rows` rows of prompts.

        On a GPU it is captured at its first use, when it writes nothing.
        """
        if rows not in self._prompt_steps:
            takes_chunks = self.cache in CHUNKED
            caches = self._caches(self.batch if takes_chunks else rows)
            own_buffers = self._buffers(caches, tokens=rows if takes_chunks else None)
            buffers = _share_workspace(self._prompt_steps, own_buffers)
            self._prompt_steps[rows] = self._capture(_Step.of(buffers, caches, prompts=takes_chunks))
        return self._prompt_steps[rows]

    def _caches(self, sequences: int) -> list[KVCache]:
        """Build every layer's cache for `sequences` sequences, with a block table and lengths of their own."""
        shapes = (sequences, self.max_pages), (sequences,)
        table, lengths = (np.zeros(shape, np.int32, like=self._embedding) for shape in shapes)
        layers = zip(self._layers, self._pools, strict=True)
        return [self._cache(weights, pool, table, lengths) for weights, pool in layers]

    def _buffers(self, caches: Sequence[KVCache], tokens: int | None = None) -> LayerBuffers:
        """Build the buffers that all layers share."""
        flags: dict[str, Any] = {"batch_invariant": self.batch_invariant, "programmatic": self._programmatic}
        flags["own_keys"] = tokens is not None and self.own_keys == "16-bit"
        return LayerBuffers.empty(self._layers[0], caches[0], tokens=tokens, **flags)

    def _capture(self, step: "_Step") -> "_Step":
        if self._on_gpu:
            step.graph = gpu.capture([lambda: self._forward(step)])
        return step

    def _forward(self, step: "_Step") -> None:
        """Run every layer and the last norm for the rows of a step.

        On a GPU this only enqueues and allocates nothing.
        """
        for call in self._forward_calls(step):
            call()

    def _forward_calls(self, step: "_Step") -> Iterator[Callable[[], Any]]:
        """Yield the calls of `_forward`; a layer's arguments are checked before the first of its calls is made."""
        yield partial(self._begin, step)
        for layer in self._calls(step):
            yield from layer
        yield partial(self._end, step)

    def _begin(self, step: "_Step") -> None:
        """Fill the step's input and clear its residual stream before the first layer."""
        step.begin()
        np.take(self._embedding, step.tokens, axis=0, out=step.x)
        step.residual.fill(0)

    def _end(self, step: "_Step") -> None:
        """Run the last norm. Its quantised output is not used."""
        weight = self._layers[-1].qkv
        out: dict[str, Any] = {"normed": step.normed, **output_arguments(weight, step.buffers.qkv_in)}
        options: dict[str, Any] = {"eps": self.config.eps, "backend": self.backend, "programmatic": self._programmatic}
        x = step.buffers.output(step.residual)
        residual = None if x is step.residual else step.residual
        calls_of(weight).normed(x, self._final_norm, residual=residual, **out, **options)

    def _calls(self, step: "_Step") -> Iterator[list[LayerCall]]:
        """Yield the calls of each layer."""
        options: dict[str, Any] = {"rope": (*self._angles, step.positions), "buffers": step.buffers}
        options |= {"query_start_loc": step.starts, "backend": self.backend}
        x = step.x
        for i, (weights, cache) in enumerate(zip(self._layers, step.caches, strict=True)):
            overlaps = self._programmatic and i > 0
            yield layer_calls(x, step.residual, weights, cache, step.slots, index=i, programmatic=overlaps, **options)
            x = step.buffers.output(step.residual)

    def operations(self, rows: int) -> list[list[LayerCall]]:
        """Return the calls of every layer in a decoding launch of `rows` rows, to be made one by one.

        The next launch undoes them, except for the last tokens in the cache.
        """
        return list(self._calls(self._decode_step(padded_rows(rows, self.batch))))

    def logits(self, rows: int, head: "LMHead | None" = None) -> Any:
        """Return the logits f16 [rows, V] of the last decoding launch of `rows` rows, by a head alone.

        The head is by default the runner's own.
        """
        return (head or self._head)(self._decode_step(padded_rows(rows, self.batch)).normed[:rows])

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Launch the kernels of steps one by one, without a graph, inside this context."""
        self._eager = True
        try:
            yield
        finally:
            self._eager = False

    def _logits(self, normed: Any) -> Any:
        return self._head(normed)

    def _to_backend(self, array: np.ndarray) -> Any:
        return gpu.to_device(array) if self._on_gpu else array


@dataclass(frozen=True, eq=False)
class LMHead:
    """The product behind the last norm.

    Attributes:
        weight: f16 [V, H], or INT8 with a scale per row, padded (`quantize_head`).
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
        """Compute logits f16 [R, V] from the normalised stream [R, H], f16 or bf16."""
        if isinstance(self.weight, Level1Weight):
            x = quantize_activations(normed, backend=self.backend)
            logits = gemm_w8a8(x, self.weight, backend=self.backend, programmatic=self.programmatic)
            return logits[:, : self.vocabulary]
        half_precision = normed if normed.dtype == np.float16 else floats(normed).astype(np.float16)
        if self.batch_invariant:
            return gemm_f16(half_precision, self.weight, backend=self.backend)
        return np.matmul(half_precision, self.weight.T)


def _share_workspace(steps: Mapping[int, "_Step"], buffers: LayerBuffers) -> LayerBuffers:
    """Give buffers the workspace of attention that other steps have: launches follow each other, so one is enough."""
    first_step = next(iter(steps.values()), None)
    return (
        buffers if first_step is None else replace(buffers, attention_workspace=first_step.buffers.attention_workspace)
    )


@dataclass(eq=False, kw_only=True)
class _Step:
    """A launch for so many rows, of decoding or of prompts: buffers, caches by layer, and on a GPU the graph.

    Attributes:
        tokens, positions, slots: s32 [R].
        increments: of decoding, what a launch adds to each row's length, position and slot first: 1, or 0 of padding.
        starts: of prompts, where the rows of each of B sequences begin, s32 [B + 1]; behind the last one is padding.
        x, residual, normed: the stream's ends, [R, H].
        device_numbers: of decoding, table, `increments`, lengths, positions, slots as the last launch has left them;
            empty if nobody knows.
    """

    tokens: Any
    positions: Any
    slots: Any
    increments: Any = None
    starts: Any = None
    x: Any
    residual: Any
    normed: Any
    buffers: LayerBuffers
    caches: Sequence[KVCache]
    graph: gpu.Graph | None = None
    device_numbers: Sequence[Indices] = ()

    @classmethod
    def of(cls, buffers: LayerBuffers, caches: Sequence[KVCache], *, prompts: bool) -> Self:
        """Make a step for as many rows as the buffers have; its rows see and write nothing yet."""
        R, H = buffers.qkv_in.M, buffers.config.hidden

        def zeros(*shape: int, of: Any = np.int32) -> Any:
            return np.zeros(shape, of, like=caches[0].pool)

        own_arrays = {"starts": zeros(caches[0].batch + 1)} if prompts else {"increments": zeros(R)}
        tokens, positions, slots = (zeros(R) for _ in range(3))
        slots.fill(-1)
        x, residual, normed = (zeros(R, H, of=storage(buffers.dtype)) for _ in range(3))
        return cls(
            tokens=tokens,
            positions=positions,
            slots=slots,
            x=x,
            residual=residual,
            normed=normed,
            buffers=buffers,
            caches=caches,
            **own_arrays,
        )

    @property
    def rows(self) -> int:
        """R."""
        return len(self.tokens)

    @property
    def lengths(self) -> Any:
        """Lengths of the caches' sequences, s32: [R] for decoding, [B] for prompts."""
        return self.caches[0].lengths

    def begin(self) -> None:
        """Go on to the next token of every sequence that decodes, in its page, without the host.

        Of prompts, clear the rows of padding, which attention leaves as they are.
        """
        if self.starts is None:
            for counter in (self.lengths, self.positions, self.slots):
                np.add(counter, self.increments, out=counter)
        else:
            self.buffers.attention.fill(0)
