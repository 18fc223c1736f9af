"""Hadamard matrices: rotations of ones and minus ones, which spread an outlier over all channels."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxlab.errors import ArgumentError
from ptxlab.validate import is_integer


def hadamard(n: int) -> npt.NDArray[np.float64]:
    """The scaled Hadamard matrix [n, n]: orthogonal, every element ±n^-0.5.

    A Kronecker product of orders 2 and p + 1 or 2 (p + 1), p a prime, by Paley's constructions: 576 = 12·12·4,
    1536 = 12·128, 3584 = 28·128. Raises ArgumentError for an order that is no such product.
    """
    orders = _factors(n) if is_integer(n) and n > 0 else None
    if orders is None:
        raise ArgumentError("n", "must be a product of known orders of Hadamard matrices: 2, 12, 20, 28, ...", n)
    product: Any = np.ones((1, 1))
    for order in orders:
        product = np.kron(product, _signs(order))
    scaled: npt.NDArray[np.float64] = product / np.sqrt(n)
    return scaled


@cache
def _factors(n: int) -> tuple[int, ...] | None:
    """Orders whose product is n: Paley's and a power of two; None if there are none."""
    if n & (n - 1) == 0:
        return (2,) * (n.bit_length() - 1)
    for order in _paley_orders(n):
        rest = _factors(n // order) if n % order == 0 else None
        if rest is not None:
            return (order, *rest)
    return None


def _paley_orders(n: int) -> Iterator[int]:
    return (order for order in range(12, n + 1, 4) if order & (order - 1) and _paley_prime(order))


def _paley_prime(order: int) -> int:
    """The prime p of the construction of that order: p = order - 1 = 3 mod 4, or order / 2 - 1 = 1 mod 4; or 0."""
    for p, residue in ((order - 1, 3), (order // 2 - 1, 1)):
        if p % 4 == residue and all(p % d for d in range(2, int(p**0.5) + 1)):
            return p
    return 0


def _signs(order: int) -> npt.NDArray[np.float64]:
    """The Hadamard matrix of that order, of ±1."""
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
    identity = np.eye(p + 1)
    if p % 4 == 3:
        return identity + core
    return np.kron(core, [[1.0, 1.0], [1.0, -1.0]]) + np.kron(identity, [[1.0, -1.0], [-1.0, -1.0]])
