"""Rotations that do not change a decoder's function: of the residual stream, and of every head's values.

RMSNorm commutes with a rotation Q once its gamma is folded into the matrices after it. Matrices that read the stream
become W diag(gamma) Q, those that write to it Qᵀ W, the embedding E Q (QServe §4.3.1). A second rotation per head lies
between the values and the output projection: Qᵀ V and O Q. QServe's code has it, its paper does not.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.llm.model.decoder import ROUTER, Layer
from ptxlab.validate import is_integer


def stream_readers(layer: Layer) -> dict[str, tuple[str, ...]]:
    """Return the matrices after each norm: after attention gate and up, of every expert, and the router."""
    readers = tuple(name for name in layer if name == ROUTER or name.partition(".")[0] in ("gate", "up"))
    return {"input_norm": ("q", "k", "v"), "post_norm": readers}


def stream_writers(layer: Layer) -> tuple[str, ...]:
    """Return the matrices whose outputs go to the residual stream: o, and down of every expert."""
    return ("o", *(name for name in layer if name.partition(".")[0] == "down"))


def hadamard(n: int) -> npt.NDArray[np.float64]:
    """Build the scaled Hadamard matrix [n, n]: orthogonal, every element ±n^-0.5.

    A Kronecker product of orders 2 and p + 1 or 2 (p + 1), p a prime, by Paley's constructions: 576 = 12·12·4,
    1536 = 12·128, 3584 = 28·128. Raises ArgumentError for an order that is no such product.
    """
    orders = _factors(n) if is_integer(n) and n > 0 else None
    if orders is None:
        raise ArgumentError("n", "must be a product of known orders of Hadamard matrices: 2, 12, 20, 28, ...", n)
    product: Any = np.ones((1, 1))
    for order in orders:
        product = np.kron(product, _hadamard_signs(order))
    scaled_matrix: npt.NDArray[np.float64] = product / np.sqrt(n)
    return scaled_matrix


def random_orthogonal(n: int, seed: int = 0) -> npt.NDArray[np.float64]:
    """Draw an orthogonal matrix [n, n] from the uniform distribution."""
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))
    rotation: npt.NDArray[np.float64] = q * np.sign(np.diagonal(r))
    return rotation


def fold_norms(layer: Layer) -> dict[str, Any]:
    """Fold the gamma of a layer's norms into the matrices after them; the norms become ones."""
    folded_layer = dict(layer)
    for norm, readers in stream_readers(layer).items():
        folded_layer |= {
            name: cast_like(layer[name], to_float64(layer[name]) * to_float64(layer[norm])) for name in readers
        }
        folded_layer[norm] = np.ones_like(layer[norm])
    return folded_layer


def rotate_stream(layer: Layer, rotation: Any) -> dict[str, Any]:
    """Rotate a layer of folded norms to the stream x Q, Q = `rotation` f64 [H, H].

    Raises ArgumentError for a norm that is not folded.
    """
    rotated_layer = dict(layer)
    for norm, readers in stream_readers(layer).items():
        if not bool((layer[norm] == 1).all()):
            raise ArgumentError(norm, "must be folded before the stream is rotated (fold_norms)", "other than ones")
        rotated_layer |= {name: cast_like(layer[name], to_float64(layer[name]) @ rotation) for name in readers}
    writers = stream_writers(layer)
    return rotated_layer | {name: cast_like(layer[name], rotation.T @ to_float64(layer[name])) for name in writers}


def rotate_ends(embedding: Any, final_norm: Any, head: Any, rotation: Any) -> tuple[Any, Any, Any]:
    """Rotate both ends: return embedding [V, H], final norm of ones [H] and head [V, H] on the rotated stream.

    A tied head (None) is untied, because the final norm's gamma is folded into the head alone.
    """
    head = embedding if head is None else head
    rotated_head = (to_float64(head) * to_float64(final_norm)) @ rotation
    return (
        cast_like(embedding, to_float64(embedding) @ rotation),
        np.ones_like(final_norm),
        cast_like(head, rotated_head),
    )


def rotate_heads(layer: Layer, rotation: Any) -> dict[str, Any]:
    """Rotate every head's values by `rotation` f64 [D, D], and back in the projection o."""
    D = len(rotation)

    def rotate_values(v: Any) -> Any:  # [Hkv·D, ..]
        return cast_like(v, (rotation.T @ to_float64(v).reshape(-1, D, v.size // len(v))).reshape(v.shape))

    o = layer["o"]
    rotated_layer = {
        **layer,
        "v": rotate_values(layer["v"]),
        "o": cast_like(o, (to_float64(o).reshape(len(o), -1, D) @ rotation).reshape(o.shape)),
    }
    return rotated_layer | ({"v_bias": rotate_values(layer["v_bias"])} if "v_bias" in layer else {})


def to_float64(x: Any) -> Any:
    """Convert x to float64."""
    return x.astype(np.float64)


def cast_like(x: Any, replacement: Any) -> Any:
    """Cast an array that replaces x to x's dtype."""
    return replacement.astype(x.dtype)


@cache
def _factors(n: int) -> tuple[int, ...] | None:
    """Factor n into the orders of Paley's matrices and a power of two; None if it has no such factors."""
    if n & (n - 1) == 0:
        return (2,) * (n.bit_length() - 1)
    for order in _paley_orders(n):
        remaining_factors = _factors(n // order) if n % order == 0 else None
        if remaining_factors is not None:
            return (order, *remaining_factors)
    return None


def _paley_orders(limit: int) -> Iterator[int]:
    """Yield the orders of Paley's matrices up to `limit`, ascending, without the powers of two."""
    return (order for order in range(12, limit + 1, 4) if order & (order - 1) and _paley_prime(order))


def _paley_prime(order: int) -> int:
    """Return the prime p of Paley's construction of that order, or 0 if there is none.

    p is order - 1 = 3 mod 4, or order / 2 - 1 = 1 mod 4.
    """
    for p, residue in ((order - 1, 3), (order // 2 - 1, 1)):
        if p % 4 == residue and all(p % d for d in range(2, int(p**0.5) + 1)):
            return p
    return 0


def _hadamard_signs(order: int) -> npt.NDArray[np.float64]:
    """Build the Hadamard matrix of that order, of ±1."""
    if order == 2:
        return np.array([[1.0, 1.0], [1.0, -1.0]])
    p = _paley_prime(order)
    square = np.zeros(p)
    square[np.arange(1, p) ** 2 % p] = 1
    character = 2 * square - 1
    character[0] = 0
    core = np.zeros((p + 1, p + 1))
    core[0, 1:], core[1:, 0] = 1, 1 if p % 4 == 1 else -1
    core[1:, 1:] = character[(np.arange(p)[:, None] - np.arange(p)) % p]
    identity_matrix = np.eye(p + 1)
    if p % 4 == 3:
        return identity_matrix + core
    return np.kron(core, [[1.0, 1.0], [1.0, -1.0]]) + np.kron(identity_matrix, [[1.0, -1.0], [-1.0, -1.0]])
