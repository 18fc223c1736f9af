"""A decoder layer of the Llama family over whole sequences, in the dtype of its input.

float32 is for measuring, float64 for comparing. A `Numerics` says what is quantised where.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ptxlab.lowbit.reference.activations import apply_gate, rms_norm
from ptxlab.lowbit.reference.attention import rope
from ptxlab.lowbit.reference.experts import top_experts

Floats: TypeAlias = npt.NDArray[np.floating]
Layer: TypeAlias = Mapping[str, Floats]

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
NORMS = ("input_norm", "post_norm")
BIASES = ("q_bias", "k_bias", "v_bias")
EXPERT_MATRICES = ("gate", "up", "down")  # of a model with experts each of them has its own
ROUTER = "router"
_QUERIES = 128  # per block of attention


def expert_part(part: str, expert: int | None) -> str:
    """Name a part of an expert, `gate.3`; None stands for the only one of a dense layer, `gate`."""
    return part if expert is None else f"{part}.{expert}"


def expert_of(name: str) -> int | None:
    """Return the expert of a part by its name: 3 of `gate.3`, None of `gate`."""
    _, _, number = name.partition(".")
    return int(number) if number else None


class Numerics:
    """Products of a layer and contents of its cache; exact unless a subclass overrides them.

    `FloatModel.states` and calibration call it from several threads, one batch in each.
    """

    def product(self, name: str, x: Floats, layer: Layer) -> Floats:
        """Multiply x [.., K] by the layer's matrix `name` [N, K] and add its bias where it has one: [.., N]."""
        y = x @ layer[name].T
        bias = layer.get(f"{name}_bias")
        return y if bias is None else y + bias

    def router_logits(self, y: Floats, layer: Layer) -> Floats:
        """Multiply y [M, H], what a layer's experts read, by its router: [M, E]."""
        return y @ layer[ROUTER].T

    def round_to_cache(self, keys: Floats, values: Floats, layer: Layer) -> tuple[Floats, Floats]:
        """Return keys after RoPE and values [B, T, Hkv, D] as attention finds them in the layer's cache."""
        return keys, values


EXACT = Numerics()


def decoder_layer(
    x: Floats,
    layer: Layer,
    *,
    head_dim: int,
    eps: float,
    rope_tables: tuple[Floats, Floats],
    activation: str = "silu",
    window: int | None = None,
    chosen_experts: int = 0,
    numerics: Numerics = EXACT,
) -> Floats:
    """Compute one layer on whole sequences, from their first token on.

    Args:
        x: residual stream, float [B, T, H].
        layer: matrices [N, K] by their name in `MATRICES`, norms [H], and `q_bias`, `k_bias`, `v_bias` [N] where it has
            them, all of x's dtype. The numbers of heads follow from the shapes. With experts it has `gate.0`, `up.0`,
            `down.0` and so on instead of one of each, and the `router` [E, H].
        head_dim: D.
        eps: what RMSNorm adds to the mean square.
        rope_tables: (cos, sin) [T, D/2] of x's dtype.
        activation: one of `ACTIVATIONS`.
        window: most tokens that a query sees, or None.
        chosen_experts: how many of its experts a token takes; 0 for a dense layer.
        numerics: of the products and the cache.

    Returns:
        The stream after the layer, [B, T, H] of the same dtype.
    """
    B, T, _ = x.shape
    y = rms_norm(x, layer["input_norm"], eps).astype(x.dtype)
    q, k, v = (numerics.product(name, y, layer).reshape(B, T, -1, head_dim) for name in ("q", "k", "v"))
    q, k = (rope(head, *rope_tables) for head in (q, k))
    k, v = numerics.round_to_cache(k, v, layer)
    x = x + numerics.product("o", causal_attention(q, k, v, window).reshape(B, T, -1), layer)
    options = {"eps": eps, "activation": activation, "chosen_experts": chosen_experts, "numerics": numerics}
    return feed_forward(x, layer, **options)  # type: ignore[arg-type]


def feed_forward(
    x: Floats,
    layer: Layer,
    *,
    eps: float,
    activation: str = "silu",
    chosen_experts: int = 0,
    numerics: Numerics = EXACT,
    only: int | None = None,
) -> Floats:
    """Compute the second half of `decoder_layer`, from the residual stream after attention on.

    With `only`, add just that expert's output.
    """
    y = rms_norm(x, layer["post_norm"], eps).astype(x.dtype)

    def run(y: Floats, expert: int | None = None) -> Floats:
        gate, up, down = (expert_part(part, expert) for part in EXPERT_MATRICES)
        gate_up = np.concatenate([numerics.product(name, y, layer) for name in (gate, up)], axis=-1)
        return numerics.product(down, apply_gate(gate_up, activation).astype(x.dtype), layer)

    if not chosen_experts:
        return x + run(y)
    rows = y.reshape(-1, y.shape[-1])
    total = np.zeros_like(rows)
    for routed in route(numerics.router_logits(rows, layer), chosen_experts):
        if len(routed.row) and only in (None, routed.expert):
            total[routed.row] += routed.share[:, None] * run(rows[routed.row], routed.expert)
    return x + total.reshape(x.shape)


class RoutedRows(NamedTuple):
    """The rows [R] that take an expert, ascending, and its share of each, [R]."""

    expert: int
    row: npt.NDArray[np.integer]
    share: Floats


def route(logits: Floats, chosen_experts: int) -> Iterator[RoutedRows]:
    """Give each expert its rows of M tokens, by the router's logits [M, E], as Mixtral has it."""
    chosen, share = top_experts(logits, chosen_experts)
    for expert in range(logits.shape[1]):
        row, place = np.nonzero(chosen == expert)
        yield RoutedRows(expert, row, share[row, place])


def causal_attention(q: Floats, k: Floats, v: Floats, window: int | None = None) -> Floats:
    """Compute softmax(q kᵀ / √D) v, where each token sees itself and what precedes it.

    Shapes: q [B, T, Hq, D], k and v [B, L, Hkv, D]. The queries are those of the last T of L tokens. In q's dtype;
    `attention` computes the same for one sequence in float64. A block of queries is multiplied only with the keys that
    one of them sees, which halves the work and bounds the memory of the scores.
    """
    (B, T, Hq, D), (L, Hkv) = q.shape, k.shape[1:3]
    visible_score, hidden_score = (q.dtype.type(number) for number in (0, -np.inf))
    token = np.arange(L, like=q)
    scaled_queries = q * q.dtype.type(D**-0.5)
    queries = scaled_queries.reshape(B, T, Hkv, Hq // Hkv, D).transpose(0, 2, 3, 1, 4)  # [B, Hkv, ratio, T, D]
    keys, values = k.transpose(0, 2, 3, 1)[:, :, None], v.transpose(0, 2, 1, 3)[:, :, None]
    attended = np.empty_like(q)
    for first in range(0, T, _QUERIES):
        query_block = slice(first, min(first + _QUERIES, T))
        positions = slice(query_block.start + L - T, query_block.stop + L - T)
        key_block = slice(0 if window is None else max(0, positions.start - window + 1), positions.stop)
        age = token[positions, None] - token[key_block]
        is_hidden = age < 0 if window is None else (age < 0) | (age >= window)
        scores = queries[..., query_block, :] @ keys[..., key_block]
        scores += np.where(is_hidden, hidden_score, visible_score)
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        mean = scores @ values[..., key_block, :] / scores.sum(axis=-1, keepdims=True)
        attended[:, query_block] = mean.transpose(0, 3, 1, 2, 4).reshape(B, -1, Hq, D)
    return attended
