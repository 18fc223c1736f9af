"""bfloat16, which NumPy does not have, as its 16 bits."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ptxlab.reference.packed import F32, require_dtype

U16: TypeAlias = npt.NDArray[np.uint16]


def bfloat16_bits(values: F32) -> U16:
    """f32 rounded to the nearest bfloat16, ties to even: the upper half of its bits. A NaN stays one (0x7fff)."""
    require_dtype("values", values, np.float32)
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def from_bfloat16_bits(bits: U16) -> F32:
    """The f32 that these bits of a bfloat16 stand for, exactly."""
    require_dtype("bits", bits, np.uint16)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
