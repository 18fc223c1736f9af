"""Tensor maps as the driver encodes them."""

import ctypes

from ptxlab.errors import ArgumentError
from ptxlab.layout.tensor_map import TENSOR_MAP_BYTES, TensorMap


def encode(name: str, tensor_map: TensorMap, address: int) -> bytes:
    """The 128 bytes of a tensor map over a device array at `address`; `ArgumentError` names `name`."""
    from cuda.bindings import driver

    if address % 16:
        raise ArgumentError(name, "a tensor map over an array aligned to 16 bytes", f"address {address:#x}")
    types, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    rows, columns = tensor_map.array.shape
    # As unsigned integers whatever they are: the engine moves bits.
    element = {
        1: types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2: types.CU_TENSOR_MAP_DATA_TYPE_UINT16,
        4: types.CU_TENSOR_MAP_DATA_TYPE_UINT32,
        8: types.CU_TENSOR_MAP_DATA_TYPE_UINT64,
    }[tensor_map.itemsize]
    swizzle = {
        0: swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
        32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
        64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
        128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
    }[tensor_map.swizzle]
    result, encoded = driver.cuTensorMapEncodeTiled(
        element,
        2,
        address,
        [driver.cuuint64_t(int(columns)), driver.cuuint64_t(int(rows))],
        [driver.cuuint64_t(tensor_map.pitch)],
        [driver.cuuint32_t(int(tensor_map.box[1])), driver.cuuint32_t(int(tensor_map.box[0]))],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(result):
        raise ArgumentError(name, "a tensor map that the driver takes", getattr(result, "name", result))
    return ctypes.string_at(encoded.getPtr(), TENSOR_MAP_BYTES)
