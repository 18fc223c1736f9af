"""Operands of wgmma."""

import numpy as np


def cores(matrix: np.ndarray) -> np.ndarray:
    """[rows, 32] bytes as core matrices of 8 rows of 16 bytes, 128 bytes apart along K."""
    return matrix.reshape(-1, 8, 2, 16).transpose(0, 2, 1, 3).reshape(-1)
