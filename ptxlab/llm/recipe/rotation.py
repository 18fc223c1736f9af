"""Rotations that do not change a decoder's function: of the residual stream, and of every head's values.

RMSNorm commutes with a rotation Q once its gamma is folded into the matrices after it. Matrices that read the stream
become W diag(gamma) Q, those that write to it Qᵀ W, the embedding E Q (QServe §4.3.1). A second rotation per head lies
between the values and the output projection: Qᵀ V and O Q. QServe's code has it, its paper does not.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.llm.model.decoder import Layer

READERS = {"input_norm": ("q", "k", "v"), "post_norm": ("gate", "up")}  # matrices after each norm
WRITERS = ("o", "down")


def random_orthogonal(n: int, seed: int = 0) -> npt.NDArray[np.float64]:
    """An orthogonal matrix [n, n], uniformly distributed."""
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))
    rotation: npt.NDArray[np.float64] = q * np.sign(np.diagonal(r))
    return rotation


def fold_norms(layer: Layer) -> dict[str, Any]:
    """The layer with its norms' gamma folded into the matrices after them, and norms of ones."""
    folded = dict(layer)
    for norm, readers in READERS.items():
        folded |= {name: as_before(layer[name], wide(layer[name]) * wide(layer[norm])) for name in readers}
        folded[norm] = np.ones_like(layer[norm])
    return folded


def rotate_stream(layer: Layer, rotation: Any) -> dict[str, Any]:
    """The layer on the stream x Q, Q = `rotation` f64 [H, H]. Raises ArgumentError for a norm that is not folded."""
    turned = dict(layer)
    for norm, readers in READERS.items():
        if not bool((layer[norm] == 1).all()):
            raise ArgumentError(norm, "must be folded before the stream is rotated (fold_norms)", "other than ones")
        turned |= {name: as_before(layer[name], wide(layer[name]) @ rotation) for name in readers}
    return turned | {name: as_before(layer[name], rotation.T @ wide(layer[name])) for name in WRITERS}


def rotate_ends(embedding: Any, final_norm: Any, head: Any, rotation: Any) -> tuple[Any, Any, Any]:
    """(embedding [V, H], final norm of ones [H], head [V, H]) on the rotated stream.

    A tied head (None) is untied, because the final norm's gamma is folded into the head alone.
    """
    head = embedding if head is None else head
    turned_head = (wide(head) * wide(final_norm)) @ rotation
    return (
        as_before(embedding, wide(embedding) @ rotation),
        np.ones_like(final_norm),
        as_before(head, turned_head),
    )


def rotate_heads(layer: Layer, rotation: Any) -> dict[str, Any]:
    """The layer with every head's values rotated by `rotation` f64 [D, D], and rotated back by the projection o."""
    D = len(rotation)

    def of_values(v: Any) -> Any:  # [Hkv·D, ..]
        return as_before(v, (rotation.T @ wide(v).reshape(-1, D, v.size // len(v))).reshape(v.shape))

    o = layer["o"]
    turned = {
        **layer,
        "v": of_values(layer["v"]),
        "o": as_before(o, (wide(o).reshape(len(o), -1, D) @ rotation).reshape(o.shape)),
    }
    return turned | ({"v_bias": of_values(layer["v_bias"])} if "v_bias" in layer else {})


def wide(x: Any) -> Any:
    """x in float64."""
    return x.astype(np.float64)


def as_before(x: Any, result: Any) -> Any:
    """A result that replaces x, in x's dtype."""
    return result.astype(x.dtype)
