"""The encoder of the demo's checkpoint in NumPy: from text to what the attention of each layer is given."""

import json
import math
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ptxlab import reference
from ptxlab.io.checkpoint import Checkpoint
from ptxlab.io.files import read_text
from ptxlab.reference.attention import F64
from ptxlab.reference.packed import F32

_WORD_OR_MARK = re.compile(r"[^\W_]+|[^\w\s]|_")
_erf = np.vectorize(math.erf, otypes=[np.float64])


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """A layer's input `x` f32 [tokens, hidden] and projections: weights f32 [hidden, hidden], biases f32 [hidden]."""

    x: F32
    head_dim: int
    w_q: F32
    b_q: F32
    w_k: F32
    b_k: F32
    w_v: F32
    b_v: F32

    def queries(self) -> F32:
        """f32 [tokens, heads, D]."""
        return self._heads(self.w_q, self.b_q)

    def keys(self) -> F32:
        """f32 [tokens, heads, D]."""
        return self._heads(self.w_k, self.b_k)

    def values(self) -> F32:
        """f32 [tokens, heads, D]."""
        return self._heads(self.w_v, self.b_v)

    def _heads(self, w: F32, bias: F32) -> F32:
        return (self.x @ w.T + bias).reshape(len(self.x), -1, self.head_dim)


class Bert:
    """A BERT encoder and its uncased vocabulary, from the folder of its `model.safetensors`.

    Raises FileError as `Checkpoint` does, or if the configuration or vocabulary beside it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._checkpoint = Checkpoint(path)
        config = json.loads(read_text(path.parent / "config.json"))
        self.layers: int = config["num_hidden_layers"]
        self.head_dim: int = config["hidden_size"] // config["num_attention_heads"]
        self._epsilon: float = config["layer_norm_eps"]
        words = read_text(path.parent / "vocab.txt").splitlines()
        self._vocabulary = {word: index for index, word in enumerate(words)}

    def tokens(self, text: str) -> list[int]:
        """WordPiece: lower case without accents, words and marks apart, each in the longest pieces that are known."""
        plain = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(c) != "Mn")
        return [piece for word in _WORD_OR_MARK.findall(plain) for piece in self._pieces(word)]

    def attention_inputs(self, tokens: list[int]) -> Iterator[AttentionInputs]:
        """What the attention of each layer is given, the tokens framed by [CLS] and [SEP]."""
        for index, x in zip(range(self.layers), self.hidden_states(tokens), strict=False):
            yield self._attention_inputs(index, x)

    def hidden_states(self, tokens: list[int]) -> Iterator[F32]:
        """The embedded tokens, framed by [CLS] and [SEP], then what each layer makes of them: f32 [tokens, hidden]."""
        framed = [self._vocabulary["[CLS]"], *tokens, self._vocabulary["[SEP]"]]
        read = self._checkpoint.read
        x = read("embeddings.word_embeddings.weight")[framed]
        x = x + read("embeddings.position_embeddings.weight")[: len(framed)]
        x = self._normalised(x + read("embeddings.token_type_embeddings.weight")[0], "embeddings.LayerNorm")
        yield x
        for index in range(self.layers):
            x = self._layer(index, x)
            yield x

    def _layer(self, index: int, x: F32) -> F32:
        prefix = f"encoder.layer.{index}."
        inputs = self._attention_inputs(index, x)
        attended = attend(inputs.queries(), inputs.keys(), inputs.values()).reshape(x.shape).astype(np.float32)
        projected = self._linear(attended, f"{prefix}attention.output.dense")
        x = self._normalised(x + projected, f"{prefix}attention.output.LayerNorm")
        wide = self._linear(x, f"{prefix}intermediate.dense")
        gelu = (wide * (1 + _erf(wide / math.sqrt(2))) / 2).astype(np.float32)
        return self._normalised(x + self._linear(gelu, f"{prefix}output.dense"), f"{prefix}output.LayerNorm")

    def _attention_inputs(self, index: int, x: F32) -> AttentionInputs:
        names = [f"encoder.layer.{index}.attention.self.{name}" for name in ("query", "key", "value")]
        arrays = [self._checkpoint.read(f"{name}.{kind}") for name in names for kind in ("weight", "bias")]
        return AttentionInputs(x, self.head_dim, *arrays)

    def _linear(self, x: F32, name: str) -> F32:
        y: F32 = x @ self._checkpoint.read(f"{name}.weight").T + self._checkpoint.read(f"{name}.bias")
        return y

    def _normalised(self, x: F32, name: str) -> F32:
        centred = x - x.mean(axis=1, keepdims=True)
        unit = centred / np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + np.float32(self._epsilon))
        y: F32 = unit * self._checkpoint.read(f"{name}.weight") + self._checkpoint.read(f"{name}.bias")
        return y

    def _pieces(self, word: str) -> list[int]:
        pieces, begin = [], 0
        while begin < len(word):
            marked = "##" if begin else ""
            ends = range(len(word), begin, -1)
            end = next((end for end in ends if marked + word[begin:end] in self._vocabulary), None)
            if end is None:
                return [self._vocabulary["[UNK]"]]
            pieces.append(self._vocabulary[marked + word[begin:end]])
            begin = end
        return pieces


def attend(q: F32, k: F32, v: F32) -> F64:
    """Attention of an encoder, f64 [tokens, heads, D]: all tokens see each other.

    By the decoder's reference, all tokens being query heads of the last one.
    """
    tokens, heads, D = q.shape
    as_heads = q.transpose(1, 0, 2).reshape(1, heads * tokens, D)
    out, _ = reference.attention(as_heads, k, v, scale=D**-0.5)
    return out.reshape(heads, tokens, D).transpose(1, 0, 2)
