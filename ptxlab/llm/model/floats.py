"""`FloatModel`: a whole decoder in floats, run over sequences layer by layer; and its perplexity."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.llm.model.config import Config
from ptxlab.llm.model.decoder import EXACT, ROUTER, Layer, Numerics, decoder_layer, feed_forward
from ptxlab.llm.model.threads import map_streams
from ptxlab.lowbit.reference import rms_norm

Tokens = npt.NDArray[np.integer]
_STRIP = 256  # rows of logits whose exponentials lie in memory at a time
_ELEMENTS = 1 << 26  # of a batch's widest activation on a GPU: half a GB in float64


@dataclass(frozen=True, eq=False, kw_only=True)
class FloatModel:
    """A decoder: its weights in float32 or float64, NumPy's or CuPy's.

    Attributes:
        config: its shape.
        embedding: [V, H].
        layers: each a mapping as `decoder.decoder_layer` takes it. For a model that does not fit into memory, a
            sequence that reads a layer from a file when it is indexed (`MappedLayers`).
        final_norm: [H].
        head: [V, H], or None where it is the embedding.
    """

    config: Config
    embedding: Any = field(repr=False)
    layers: Sequence[Layer] = field(repr=False)
    final_norm: Any = field(repr=False)
    head: Any = field(default=None, repr=False)

    @classmethod
    def random(cls, config: Config, seed: int = 0, dtype: Any = np.float32) -> Self:
        """Make a model of random weights, of standard deviation K^-0.5 (the embedding's is 1)."""
        rng = np.random.default_rng(seed)

        def matrix(N: int, K: int) -> Any:
            return (rng.standard_normal((N, K)) / np.sqrt(K)).astype(dtype)

        def norm() -> Any:
            return rng.uniform(0.5, 1.5, config.hidden).astype(dtype)

        def layer() -> dict[str, Any]:
            weights = {name: matrix(*size) for name, size in config.separate_matrices.items()}
            if config.qkv_bias:
                bias_sizes = {f"{name}_bias": len(weights[name]) for name in ("q", "k", "v")}
                weights |= {name: rng.standard_normal(N).astype(dtype) for name, N in bias_sizes.items()}
            if config.experts:
                weights[ROUTER] = matrix(config.experts, config.hidden)
            return weights | {"input_norm": norm(), "post_norm": norm()}

        V, H = config.vocabulary, config.hidden
        return cls(
            config=config,
            embedding=rng.standard_normal((V, H)).astype(dtype),
            layers=[layer() for _ in range(config.layers)],
            final_norm=norm(),
            head=None if config.tied_head else matrix(V, H),
        )

    def to_device(self) -> Self:
        """Copy the model to the GPU; a layer is copied there each time it is needed."""
        head = None if self.head is None else gpu.to_device(self.head)
        parts = {"embedding": gpu.to_device(self.embedding), "final_norm": gpu.to_device(self.final_norm), "head": head}
        layers = MappedLayers(self.layers, lambda layer: {name: gpu.to_device(w) for name, w in layer.items()})
        return replace(self, layers=layers, **parts)

    def embed(self, tokens: Tokens) -> Any:
        """Look up the embeddings of tokens [B, T], the stream before the first layer: [B, T, H].

        Raises ArgumentError for tokens outside the vocabulary.
        """
        last_token = self.config.vocabulary - 1
        if tokens.dtype.kind not in "iu" or (tokens.size and not 0 <= tokens.min() <= tokens.max() <= last_token):
            got = f"{tokens.min()}..{tokens.max()} of {tokens.dtype}"
            raise ArgumentError("tokens", f"must be integers in 0..{last_token}", got)
        return self.embedding[np.asarray(tokens, like=self.embedding)]

    def batches(self, tokens: Tokens) -> list[Tokens]:
        """Split sequences [S, T] into batches [B, T]: single sequences on a CPU, whose caches hold them.

        On a GPU a batch has as many as memory allows, because a launch costs more than it computes of one sequence.
        """
        is_on_cpu = isinstance(self.embedding, np.ndarray)
        windows_at_once = 1 if is_on_cpu else max(1, _ELEMENTS // (tokens.shape[1] * self.config.ffn))
        return [tokens[i : i + windows_at_once] for i in range(0, len(tokens), windows_at_once)]

    def states(
        self, tokens: Sequence[Tokens], numerics: Numerics = EXACT, progress: Callable[[], None] = lambda: None
    ) -> list[Any]:
        """Compute the stream after the last layer, [B, T, H] for each tokens [B, T].

        Every stream passes through a layer before the next layer is read. `progress` is called after each sequence of a
        layer.
        """
        states = [self.embed(batch) for batch in tokens]
        for index, layer in enumerate(self.layers):
            run = partial(self.run_layer, layer=layer, numerics=numerics, index=index)
            for i, x in enumerate(map_streams(run, states)):
                states[i] = x
                for _ in range(len(x)):
                    progress()
        return states

    def run_layer(self, x: Any, layer: Layer, numerics: Numerics = EXACT, *, index: int | None = None) -> Any:
        """Run one layer on the stream [B, T, H] of sequences from their first token on.

        `index` is its number, which a model needs where only some layers have the window.
        """
        config = self.config
        tables = tuple(np.asarray(table, like=x).astype(x.dtype) for table in config.rope_tables(x.shape[1]))
        return decoder_layer(
            x,
            layer,
            head_dim=config.head_dim,
            eps=config.eps,
            rope_tables=tables,  # type: ignore[arg-type]
            activation=config.activation,
            window=config.window_of(index),
            chosen_experts=config.chosen_experts,
            numerics=numerics,
        )

    def run_feed_forward(self, x: Any, layer: Layer, numerics: Numerics = EXACT, *, only: int | None = None) -> Any:
        """Run the layer's second half on the stream after attention; with `only`, just that expert."""
        config = self.config
        options: dict[str, Any] = {name: getattr(config, name) for name in ("eps", "activation", "chosen_experts")}
        return feed_forward(x, layer, **options, numerics=numerics, only=only)

    def logits(self, state: Any) -> Any:
        """Compute the logits [.., V] of the stream [.., H] after the last layer."""
        y = rms_norm(state, self.final_norm, self.config.eps).astype(state.dtype)
        return y @ (self.embedding if self.head is None else self.head).T


@dataclass(frozen=True)
class MappedLayers(Sequence[Layer]):
    """`function` of each layer, computed each time the layer is indexed."""

    layers: Sequence[Any]
    function: Callable[[Any], Layer]

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return type(self)(self.layers[index], self.function)
        return self.function(self.layers[index])


def perplexity(
    model: FloatModel,
    windows: Tokens,
    numerics: Numerics = EXACT,
    progress: Callable[[], None] = lambda: None,
) -> float:
    """Compute a model's perplexity on windows of tokens [W, T].

    It is exp of the mean negative log likelihood, in nats, of each window's tokens but the first.
    `progress` is called after every window of a layer and of the head. Raises ArgumentError for no window, or windows
    of a single token.
    """
    if windows.ndim != 2 or not len(windows) or windows.shape[1] < 2:
        raise ArgumentError("windows", "must be [W, T] of one window or more, two tokens or more", windows.shape)
    states = model.states(model.batches(windows), numerics, progress)
    losses = []
    for window, state in zip(windows, (state for batch in states for state in batch), strict=True):
        losses.append(negative_log_likelihood(model.logits(state)[:-1], window[1:]))
        progress()
    return float(np.exp(np.mean(losses)))


def negative_log_likelihood(logits: Any, tokens: Tokens) -> float:
    """Compute the mean over tokens [T] of -log softmax(logits [T, V]).

    Exponentials are in the logits' dtype, sums in float64.
    """
    total = 0.0
    for start in range(0, len(tokens), _STRIP):
        strip = logits[start : start + _STRIP]
        targets = np.asarray(tokens[start : start + _STRIP], like=strip)
        strip = strip - strip.max(axis=1, keepdims=True)
        target_logits = strip[np.arange(len(targets), like=targets), targets].astype(np.float64)
        total += float((np.log(np.exp(strip).sum(axis=1, dtype=np.float64)) - target_logits).sum())
    return total / len(tokens)
