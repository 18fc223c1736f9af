"""Tensor maps as the driver encodes them.

By hand: only cuda-core's own `launch` can read the bytes of its `TensorMapDescriptor` (decision 0034).
"""

import ctypes

from ptxlab.errors import ArgumentError
from ptxlab.hardware.tensor_map import TENSOR_MAP_BYTES, TensorMap


def encode(name: str, tensor_map: TensorMap, address: int) -> bytes:
    """Encode a tensor map over a device array at `address` as its 128 bytes; `ArgumentError` names `name`."""
    from cuda.bindings import driver

    if address % 16:
        raise ArgumentError(name, "a tensor map over an array aligned to 16 bytes", f"address {address:#x}")
    types, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    array = tensor_map.array
    # Copies move bits; reductions add numbers of this type.
    kind = array.dtype.kind if array.dtype.str[1:] in ("f2", "f4", "f8", "i4", "i8") else "u"
    name_prefix = {"f": "FLOAT", "i": "INT", "u": "UINT"}[kind]
    element = getattr(types, f"CU_TENSOR_MAP_DATA_TYPE_{name_prefix}{8 * tensor_map.itemsize}")
    swizzle = {
        0: swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
        32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
        64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
        128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
    }[tensor_map.swizzle]
    strides = [int(stride) for stride in reversed(array.strides[:-1])]
    status, encoded_map = driver.cuTensorMapEncodeTiled(
        element,
        array.ndim,
        address,
        [driver.cuuint64_t(int(size)) for size in reversed(array.shape)],
        [driver.cuuint64_t(stride) for stride in strides or [16]],  # of one axis it has none, but refuses an empty list
        [driver.cuuint32_t(int(size)) for size in reversed(tensor_map.box)],
        [driver.cuuint32_t(1)] * array.ndim,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status):
        raise ArgumentError(name, "a tensor map that the driver takes", getattr(status, "name", status))
    return ctypes.string_at(encoded_map.getPtr(), TENSOR_MAP_BYTES)
