"""`NumpyRunner`: a quantised model, W4A8 or W4A4, in NumPy, in the very integers that the kernels compute.

Its steps are those of `model.reference.exact`, bit for bit, with weights unpacked once and nothing else recomputed;
with W4A4's weights, products and their inputs are those of `gemm_w4a4` and `reorder_quantize`, or of COMET's kernels.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ptxlab.hardware.words import F32, S8, S32
from ptxlab.llm.model.pages import PAGE
from ptxlab.llm.model.quantized import QuantizedModel
from ptxlab.llm.model.runner import Rows, Runner, quantize_head
from ptxlab.llm.model.weights import DTYPES, LayerWeights
from ptxlab.lowbit import quant, reference
from ptxlab.lowbit.kernels.moe.specs import router_logits
from ptxlab.lowbit.kernels.quantize.gated import compute_gate, silu_mul_quantize_reference
from ptxlab.lowbit.kernels.quantize.rmsnorm import normalize_rows
from ptxlab.lowbit.layout import PackedWeight, ReorderedWeight, unpack, write_slots
from ptxlab.lowbit.quant import AtomRows, BlockRows, Level1Weight, QoQChannelWeight, QuantizedActivations
from ptxlab.spec.dtypes import convert_to_dtype, floats, round_to_dtype

_EXACT = 1 << 24  # up to which float32 counts
_NEVER = int(np.iinfo(np.int32).max)


class IntegerProduct:
    """A weight for exact integer products on float32 BLAS.

    Every sum of integers up to 2^24 is exact in float32, in whatever order it is added. Activations lie in ±127, so K
    is cut into as few pieces as keep 127·Σ|w| of every row within that. No piece of 1,040 can exceed it; trained
    weights rarely need a cut at all.
    """

    def __init__(self, weight: PackedWeight | Level1Weight, bias: F32 | None = None) -> None:
        quantized_weight = weight if isinstance(weight, Level1Weight) else unpack(weight)
        if isinstance(quantized_weight, Level1Weight):
            integers: Any = quantized_weight.q8
            self.scale = quantized_weight.scale
        elif isinstance(quantized_weight, QoQChannelWeight):
            integers = quantized_weight.q4.astype(np.int32) - quantized_weight.zero[:, None]
            self.scale = quantized_weight.scale
        else:
            integers, self.scale = quantized_weight.exact_level1(), quantized_weight.channel_scale
        N = len(integers)
        magnitude, pieces = np.abs(integers.astype(np.int32)), 1
        while 127 * magnitude.reshape(N, pieces, -1).sum(axis=2).max() > _EXACT:
            pieces *= 2  # K is a multiple of 32
        self.bias = bias
        self.pieces = integers.astype(np.float32).reshape(N, pieces, -1).transpose(1, 2, 0)  # [pieces, K/pieces, N]

    def quantize(self, y: F32) -> QuantizedActivations:
        """Quantise the input y f32 [M, K] as the kernel reads it."""
        return quant.quantize_activations(y)

    def quantize_gated(self, gate_up: F32, activation: int, dtype: int) -> QuantizedActivations:
        """Apply the gate ACTIVATIONS[activation] to gate_up [M, 2·K] and quantise the product for the kernel."""
        x_q, scale, token_sum = silu_mul_quantize_reference(gate_up, 1, 32, activation, dtype)
        return QuantizedActivations(x_q, scale.astype(np.float32), token_sum.astype(np.int32))

    def accumulators(self, x_q: S8) -> S32:
        """Multiply x_q s8 [M, K] by the weight: s32 [M, N]."""
        M, pieces = len(x_q), len(self.pieces)
        sums = x_q.astype(np.float32).reshape(M, pieces, -1).transpose(1, 0, 2) @ self.pieces
        total: S32 = sums.astype(np.int32).sum(axis=0, dtype=np.int32)
        return total

    def __call__(self, x: QuantizedActivations, dtype: str) -> F32:
        """Compute the product as the kernel stores it, f32 [M, N]."""
        return floats(reference.gemm_epilogue(self.accumulators(x.q), x.scale, self.scale, self.bias, dtype))


class GroupProduct:
    """A weight of W4A4 likewise: exact sums of groups, added up in float32 in the kernels' order.

    No group's sum exceeds 128·128·128 = 2^21.
    """

    def __init__(self, weight: ReorderedWeight, bias: F32 | None = None) -> None:
        rows = weight.rows
        parts = np.split(rows.q4, rows.scale4.shape[1], axis=1) + [rows.q8] * (weight.outliers > 0)
        self.groups = [np.ascontiguousarray(part.T, np.float32) for part in parts]
        self.scales = rows.scales[:, : len(parts)]
        self.quantize, self.bias = weight.quantize_input, bias

    def quantize_gated(self, gate_up: F32, activation: int, dtype: int) -> AtomRows | BlockRows:
        """Apply the gate ACTIVATIONS[activation] to gate_up [M, 2·K] and quantise the product for the kernel."""
        return self.quantize(compute_gate(gate_up, activation, dtype)[0].astype(np.float32))

    def __call__(self, x: AtomRows | BlockRows, dtype: str) -> F32:
        """Compute the product as the kernel stores it, f32 [M, N]."""
        if isinstance(x, AtomRows):
            parts, scales = [*np.split(x.q4, x.scale4.shape[1], axis=1), x.q8], x.scales
        else:
            parts, scales = np.split(x.q, x.scale.shape[1], axis=1), x.scale
        # Without outliers the weight has no group for them.
        sums: Any = (part.astype(np.float32) @ group for part, group in zip(parts, self.groups, strict=False))
        total = reference.gemm_add_groups(sums, scales, self.scales)
        return floats(reference.rounded_to(total if self.bias is None else total + self.bias, dtype))


def _make_product(weight: PackedWeight | ReorderedWeight, bias: F32 | None = None) -> Any:
    kind: Any = GroupProduct if isinstance(weight, ReorderedWeight) else IntegerProduct
    return kind(weight, bias)


class _Layer:
    """The weights of a layer as products, and norms in float32."""

    def __init__(self, weights: LayerWeights) -> None:
        self.qkv = _make_product(weights.qkv, weights.qkv_bias)
        self.o = _make_product(weights.o)
        if weights.router is None:
            self.gate_up, self.down = map(_make_product, (weights.gate_up, weights.down))
        else:
            self.router, numbers = floats(weights.router), range(weights.gate_up.E)
            expert_weights = (weights.gate_up.expert, weights.down.expert)
            self.experts = [tuple(_make_product(expert(e)) for expert in expert_weights) for e in numbers]
        self.input_norm, self.post_norm = floats(weights.input_norm), floats(weights.post_norm)


class NumpyRunner(Runner):
    """See `Runner`. Weights are kept as float32: 4 bytes for each, so it is for small models.

    Where a token's state is not finite, its sequence has logits NaN from there on, as on a GPU.

    Attributes:
        caches: of each layer, with the bytes that the kernels write; one block table and lengths for all of them.
    """

    def __init__(self, model: QuantizedModel, batch: int = 1, context: int = 2048, **options: Any) -> None:
        """See `Runner`. Where it is `batch_invariant` a float16 head's products are added in float64, which their
        float16 results do not tell from any other order; else in float32, in BLAS's order."""
        super().__init__(model, batch, context, **options)
        config, self._dtype = self.config, model.layers[0].dtype
        self._layers = [_Layer(weights) for weights in model.layers]
        self._final_norm, self._embedding = floats(model.final_norm), floats(model.embedding)
        self._head: Any = self._embedding if model.head is None else floats(model.head)
        if self.head == "int8":
            self._head = IntegerProduct(quantize_head(self._head))
        elif self.batch_invariant:
            self._head = self._head.astype(np.float64)
        self._angles = config.rope_tables(context)
        self.caches = [self._cache(layer, self._pool(), self.table, self.lengths) for layer in model.layers]
        shape = (len(model.layers), self.pages * PAGE, config.kv_heads, config.head_dim)
        self._keys, self._values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)  # the caches, dequantised
        self._first_nonfinite = np.full(
            batch, _NEVER
        )  # the first position of a sequence at which something was not finite

    def decode(self, tokens: Any, sequences: Sequence[int] | None = None) -> Any:
        """See `Runner`."""
        sequences = self._check_sequences(sequences)
        tokens = self._check_tokens("tokens", tokens, len(sequences))
        with self._append_tokens("decode", {b: tokens[i : i + 1] for i, b in enumerate(sequences)}) as rows:
            return self._logits(self._run(rows, of_prompts=False))

    def release(self, b: int) -> None:
        """See `Runner`."""
        super().release(b)
        self._first_nonfinite[b] = _NEVER

    def _logits(self, normed: Any) -> Any:
        x = floats(normed).copy()
        nonfinite = np.flatnonzero(np.isnan(x).any(axis=1))
        x[nonfinite] = 0
        if self.head == "int8":
            logits: Any = self._head(quant.quantize_activations(x), "float16")[:, : self.config.vocabulary]
        else:
            logits = round_to_dtype(x, "float16").astype(self._head.dtype, copy=False) @ self._head.T
        halves = logits.astype(np.float16)
        halves[nonfinite] = np.nan
        return halves

    @np.errstate(over="ignore", invalid="ignore")  # of what `_clear_nonfinite` finds
    def _run(self, rows: Rows, of_prompts: bool = True) -> Any:
        config, dtype = self.config, self._dtype
        reads_own_keys = of_prompts and self.own_keys == "16-bit"
        self._first_nonfinite[rows.sequence[rows.position <= self._first_nonfinite[rows.sequence]]] = (
            _NEVER  # computed anew
        )
        angles = tuple(table[rows.position] for table in self._angles)
        x = round_to_dtype(self._embedding[rows.token], dtype)
        stream = np.zeros_like(x)
        for i, layer in enumerate(self._layers):
            stream, y = self._add_and_normalize(x, stream, layer.input_norm, rows)
            heads = self._clear_nonfinite(layer.qkv(layer.qkv.quantize(y), dtype), rows).reshape(
                len(x), -1, config.head_dim
            )
            q, k, v = np.split(heads, [config.heads, config.heads + config.kv_heads], axis=1)
            q, k = reference.rope(q, *angles), reference.rope(k, *angles)
            self._append(i, k, v, rows)
            chunk_keys_values = (round_to_dtype(k, dtype), v) if reads_own_keys else None
            attention = self._attend(i, round_to_dtype(q, dtype), rows, chunk_keys_values)
            o = layer.o(layer.o.quantize(round_to_dtype(attention, dtype)), dtype)
            stream, y = self._add_and_normalize(o, stream, layer.post_norm, rows)
            if config.experts:
                x = self._run_experts(layer, y, rows)
            else:
                x = self._ffn(layer.gate_up, layer.down, layer.gate_up.quantize(y), rows)
        normed = self._normalize(round_to_dtype(x + stream, dtype), self._final_norm, rows)
        normed[rows.position >= self._first_nonfinite[rows.sequence]] = np.nan
        return convert_to_dtype(normed, dtype)

    def _ffn(self, gate_up: Any, down: Any, x: Any, rows: Rows) -> F32:
        """Compute the feed-forward part of quantised rows: f32 [R, H]."""
        activation = reference.ACTIVATIONS.index(self.config.activation)
        gate_up_outputs = self._clear_nonfinite(gate_up(x, self._dtype), rows)
        product: F32 = down(down.quantize_gated(gate_up_outputs, activation, DTYPES.index(self._dtype)), self._dtype)
        return product

    def _run_experts(self, layer: _Layer, y: F32, rows: Rows) -> F32:
        """Add up what the experts of each row of y [R, H] give, f32 [R, H], as the kernels of the family `moe` do."""
        x, k = quant.quantize_activations(y), self.config.chosen_experts
        logits = router_logits(round_to_dtype(y, self._dtype), layer.router)
        chosen_experts, share = reference.top_experts(logits.astype(np.float64), k)
        offsets, place = reference.rows_by_expert(chosen_experts, self.config.experts)
        token, outputs = place.reshape(-1).argsort() // k, np.empty((place.size, y.shape[1]), np.float32)
        for products, (start, stop) in zip(layer.experts, pairwise(offsets.tolist()), strict=True):
            row = token[start:stop]
            inputs = QuantizedActivations(x.q[row], x.scale[row], x.token_sum[row])
            if len(row):
                gate_up, down = products
                outputs[start:stop] = self._ffn(gate_up, down, inputs, Rows(*(part[row] for part in rows)))
        return round_to_dtype(reference.combine_expert_rows(outputs, place, share.astype(np.float32)), self._dtype)

    def _clear_nonfinite(self, x: F32, rows: Rows) -> F32:
        """Set rows of x that are not finite to zeros.

        From there on their sequences have no logits; others go on.
        """
        nonfinite = np.flatnonzero(~np.isfinite(x).all(axis=1))
        np.minimum.at(self._first_nonfinite, rows.sequence[nonfinite], rows.position[nonfinite])
        x[nonfinite] = 0
        return x

    def _normalize(self, stream: F32, gamma: F32, rows: Rows) -> F32:
        return self._clear_nonfinite(normalize_rows(stream, gamma, self.config.eps), rows)

    def _add_and_normalize(self, x: F32, stream: F32, gamma: F32, rows: Rows) -> tuple[F32, F32]:
        """Add x to the stream; return the stream and its RMSNorm."""
        stream = round_to_dtype(x + stream, self._dtype)
        return stream, self._normalize(stream, gamma, rows)

    def _append(self, i: int, k: F32, v: F32, rows: Rows) -> None:
        cache, slots = self.caches[i], self._slots(rows.sequence, rows.position)
        keys, values = cache.quantize_keys(k), cache.quantize_values(v)
        write_slots(cache, keys, values, slots)
        self._keys[i, slots], self._values[i, slots] = keys.dequantize(), values.dequantize()

    def _attend(self, i: int, q: F32, rows: Rows, chunk_keys_values: tuple[F32, F32] | None) -> F32:
        """Compute attention of rotated queries [R, Hq, D] in float64, rounded once: f32 [R, Hq·D].

        `chunk_keys_values` has the rows' keys and values.
        """
        attended, config, q = np.empty_like(q), self.config, self.caches[i].rotate(q)
        options: dict[str, Any] = {"scale": config.head_dim**-0.5, "window": config.window_of(i)}
        for b in np.unique(rows.sequence):
            own_rows = np.flatnonzero(rows.sequence == b)
            slots = self._slots(b, np.arange(rows.position[own_rows[-1]] + 1))
            keys, values = self._keys[i, slots], self._values[i, slots]
            if chunk_keys_values is not None:
                k, v = chunk_keys_values[0][own_rows], chunk_keys_values[1][own_rows]
                keys[-len(own_rows) :], values[-len(own_rows) :] = self.caches[i].rotate(k), v
            attended[own_rows] = reference.attention(q[own_rows], keys, values, **options)[0]
        return attended.reshape(len(q), -1)
