"""Arrays of other libraries as NumPy's, on the same memory; bfloat16, which NumPy and CuPy lack, as its bits, uint16.

DLPack describes an array by a struct in a capsule, and the kind of its elements is one byte of it: exchanging that byte
renames the elements without a copy, in either direction, for every library alike.
"""

import ctypes
from typing import Any

import numpy as np

from ptxlab.errors import ArgumentError

_UNSIGNED, _BFLOAT = 1, 4  # DLDataTypeCode
_CODE = 20  # where DLTensor has dtype.code: behind data (8 bytes), device (4 + 4), ndim (4)
_TENSOR = {b"dltensor": 0, b"dltensor_versioned": 32}  # where the two kinds of capsule have their DLTensor


def is_bfloat16(array: Any) -> bool:
    """Check whether an array of any library holds bfloat16."""
    return str(getattr(array, "dtype", "")).endswith("bfloat16")


def without_subclass(name: str, array: np.ndarray) -> np.ndarray:
    """Return a NumPy array without what a subclass adds, such as np.matrix's fixed two axes.

    Raises ArgumentError if that is a mask.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise ArgumentError(name, "an array without a mask, which would be lost (.filled() has none)", "a masked array")
    return np.asarray(array)


def to_numpy(name: str, array: Any) -> np.ndarray:
    """Convert an array in host memory to NumPy's, bfloat16 as its bits.

    Raises ArgumentError if DLPack does not share it.
    """
    try:
        return np.from_dlpack(Bits(array) if is_bfloat16(array) else array)
    except (BufferError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ArgumentError(name, f"an array that can be shared: {reason}", type(array).__name__) from None


class Bits:
    """An array whose DLPack capsule calls bfloat16 uint16, or with `of_bfloat16` uint16 bfloat16."""

    def __init__(self, array: Any, *, of_bfloat16: bool = False) -> None:
        self._array = array
        self._code = _BFLOAT if of_bfloat16 else _UNSIGNED

    def __dlpack__(self, **options: Any) -> Any:
        """Return the array's own capsule with the byte of its type code changed."""
        capsule = self._array.__dlpack__(**options)
        name = next(name for name in _TENSOR if _is_valid(capsule, name))
        ctypes.c_uint8.from_address(_pointer(capsule, name) + _TENSOR[name] + _CODE).value = self._code
        return capsule

    def __dlpack_device__(self) -> Any:
        """Return the device of the array itself."""
        return self._array.__dlpack_device__()


_pointer, _is_valid = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_IsValid
_pointer.restype, _is_valid.restype = ctypes.c_void_p, ctypes.c_int
_pointer.argtypes = _is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]
