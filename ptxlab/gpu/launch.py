"""The one way to launch: `cuLaunchKernelEx`, with everything checked first, on the caller's stream.

By hand: cuda-core's `launch` refuses structs by value and is for a `CUkernel`, which CuPy lacks (decision 0034).
"""

import ctypes
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError, LaunchError
from ptxlab.gpu.arrays import as_array, caller_stream, is_device_array
from ptxlab.gpu.device import DeviceInfo, device_info, why_not
from ptxlab.gpu.marks import NamedRange
from ptxlab.gpu.module import GpuKernel
from ptxlab.gpu.tensor_map import encode
from ptxlab.hardware.tensor_map import TensorMap
from ptxlab.spec import Launch

_DEFAULT_SHARED_BYTES = 48 * 1024  # shared memory, static included, that every kernel may use
_PORTABLE_CLUSTER = 8
_MAX_SPREAD_BLOCKS = 8  # blocks per SM: larger grids fill the SMs evenly by themselves


def launch(kernel: GpuKernel, args: Sequence[Any], geometry: Launch, *, written: Collection[int] | None = None) -> None:
    """Launch a kernel.

    Device arrays are passed by address, and the call returns at once. NumPy arrays are copied to the device and, when
    the kernel has finished, back; then the call waits.

    Args:
        kernel: from `load`.
        args: in launch order: arrays (CuPy, NumPy, or of any library that shares device memory), tensor maps over such
            arrays, NumPy scalars, `bytes` for a parameter passed by value (a struct).
        geometry: grid, block, cluster, dynamic shared memory.
        written: positions of the NumPy arrays to copy back; by default all that can be written to.

    Raises:
        ArgumentError: arguments or geometry that the kernel or the device cannot take; nothing was launched.
        LaunchError: the driver refused the launch, or the kernel failed.
    """
    import cupy

    with caller_stream() as stream:
        host_arrays = {i: a for i, a in enumerate(args) if isinstance(a, np.ndarray)}
        device_arguments: list[Any] = list(args)
        copies: dict[tuple[Any, ...], Any] = {}

        def copy_to_device(a: np.ndarray) -> Any:
            """Copy an array to the device; an array that is passed twice becomes one buffer, as in the emulator."""
            key = a.ctypes.data, a.shape, a.strides, a.dtype.str
            if key not in copies:
                copies[key] = cupy.asarray(a, order="C")
            return copies[key]

        for i, a in enumerate(args):
            if isinstance(a, np.ndarray):
                device_arguments[i] = copy_to_device(a)
            elif isinstance(a, TensorMap) and isinstance(a.array, np.ndarray):
                device_arguments[i] = replace(a, array=copy_to_device(a.array))
                host_arrays[i] = a.array
        _launch(kernel, pack(kernel, device_arguments), geometry, stream.ptr)
        read_back = [i for i, a in host_arrays.items() if (a.flags.writeable if written is None else i in written)]
        try:
            for i in read_back:
                device_argument = device_arguments[i]
                host_arrays[i][...] = cupy.asnumpy(
                    device_argument.array if isinstance(device_argument, TensorMap) else device_argument
                )
            if copies:
                stream.synchronize()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            hint = 'backend="emulator" names the line'
            raise LaunchError(f"{kernel.name}: failed on the GPU: {error}; {hint}") from None


def prepare(kernel: GpuKernel, args: Sequence[Any], geometry: Launch) -> Callable[[], None]:
    """Pack a launch's arguments once, for calls that are timed or captured.

    Args:
        kernel: from `load`.
        args: device arrays, tensor maps over them, NumPy scalars, `bytes`.
        geometry: grid, block, cluster, dynamic shared memory.

    Returns:
        A function that launches on CuPy's current stream and returns at once.
    """
    import cupy

    packed_arguments = pack(kernel, args)
    return lambda: _launch(kernel, packed_arguments, geometry, cupy.cuda.get_current_stream().ptr)


class PackedArguments:
    """Kernel arguments as the driver takes them: an array of pointers to values, which this object keeps alive."""

    def __init__(self, values: list[bytes], owners: Sequence[Any]) -> None:
        self._values = [ctypes.create_string_buffer(raw, len(raw)) for raw in values]
        self._pointers = (ctypes.c_void_p * max(1, len(values)))(*map(ctypes.addressof, self._values))
        self._owners = owners

    @property
    def address(self) -> int:
        """Address of the array of pointers."""
        return ctypes.addressof(self._pointers)


def pack(kernel: GpuKernel, args: Sequence[Any]) -> PackedArguments:
    """Pack device arrays, tensor maps over them, NumPy scalars and `bytes`.

    `ArgumentError` if number or size are not the parameters'.
    """
    sizes = kernel.parameter_bytes
    if sizes is not None and len(sizes) != len(args):
        raise ArgumentError(f"{kernel.name}: args", f"{len(sizes)} arguments", len(args))
    with NamedRange(f"pack {kernel.name}"):
        values = [_argument_bytes(f"{kernel.name}: args[{i}]", arg) for i, arg in enumerate(args)]
    for i, raw in enumerate(values):
        if sizes is not None and len(raw) != sizes[i]:
            raise ArgumentError(f"{kernel.name}: args[{i}]", f"a parameter of {sizes[i]} bytes", f"{len(raw)} bytes")
    return PackedArguments(values, args)


def bind(kernel: GpuKernel, geometry: Launch) -> Callable[[int, int], None]:
    """Check and prepare a launch for calls that have to be quick: the returned function takes arguments and stream.

    A programmatic launch that asks for no shared memory gets some, so that its blocks spread over the SMs. Otherwise
    they gather on those that the launch before leaves free first, and share them when they run (decision 0029).

    Args:
        kernel: from `load`.
        geometry: grid, block, cluster, dynamic shared memory.

    Returns:
        A function of the address of the array of pointers to the arguments (`PackedArguments`), and a stream's handle.
    """
    from cuda.bindings import driver

    _check_geometry(kernel, geometry)
    if geometry.programmatic and why_not("sm_90"):  # before Hopper a launch follows the one before it in any case
        geometry = replace(geometry, programmatic=False)
    if geometry.programmatic and not geometry.shared_bytes:
        geometry = replace(geometry, shared_bytes=spread_bytes(geometry, kernel.shared_bytes, device_info()))
    attributes = _attributes(kernel, geometry)
    configs: dict[int, Any] = {}  # one per stream, so that two threads do not share one
    enqueue, function = driver.cuLaunchKernelEx, driver.CUfunction(kernel.handle)

    def launch(arguments: int, stream: int) -> None:
        config = configs.get(stream)
        if config is None:
            config = configs[stream] = _config(geometry, attributes, stream)
        status = enqueue(config, function, arguments, 0)
        if status[0]:
            _check(kernel, *status)

    return launch


def spread_bytes(geometry: Launch, static: int, device: DeviceInfo) -> int:
    """Compute the dynamic shared memory with which an SM holds no more than its share of the blocks; 0 for large grids.

    `static` is what a block has already. Clusters lie within a GPC, whose SMs they may not divide evenly: an eighth of
    the SMs is not counted for them.
    """
    sms = device.sms if geometry.cluster == (1, 1, 1) else device.sms * 7 // 8
    share = ceil_div(math.prod(geometry.grid), sms)
    if share > _MAX_SPREAD_BLOCKS:
        return 0
    reserved_bytes = device.shared_bytes_per_sm - device.shared_bytes  # of every block
    return max(0, device.shared_bytes_per_sm // share - reserved_bytes - static) // 128 * 128


def _launch(kernel: GpuKernel, packed: PackedArguments, geometry: Launch, stream: int) -> None:
    with NamedRange(f"launch {kernel.name}"):
        bind(kernel, geometry)(packed.address, stream)


def _config(geometry: Launch, attributes: list[Any], stream: int) -> Any:
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = geometry.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = geometry.block
    config.sharedMemBytes = geometry.shared_bytes
    config.hStream = stream
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


def _attributes(kernel: GpuKernel, geometry: Launch) -> list[Any]:
    from cuda.bindings import driver

    function, identity = driver.CUfunction_attribute, driver.CUlaunchAttributeID
    if geometry.shared_bytes + kernel.shared_bytes > _DEFAULT_SHARED_BYTES:
        attribute = function.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        # for every geometry: a bound launch sets it only once
        max_dynamic_bytes = device_info().shared_bytes - kernel.shared_bytes
        _check(kernel, *driver.cuFuncSetAttribute(kernel.handle, attribute, max_dynamic_bytes))
    attributes = []
    if geometry.cluster != (1, 1, 1):
        if math.prod(geometry.cluster) > _PORTABLE_CLUSTER:
            attribute = function.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            _check(kernel, *driver.cuFuncSetAttribute(kernel.handle, attribute, 1))
        cluster = driver.CUlaunchAttribute()
        cluster.id = identity.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimension = cluster.value.clusterDim
        dimension.x, dimension.y, dimension.z = geometry.cluster
        attributes.append(cluster)
    if geometry.programmatic:
        serialization = driver.CUlaunchAttribute()
        serialization.id = identity.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        serialization.value.programmaticStreamSerializationAllowed = 1
        attributes.append(serialization)
    return attributes


def _check_geometry(kernel: GpuKernel, geometry: Launch) -> None:
    threads = math.prod(geometry.block)
    if not 0 < threads <= kernel.max_threads:
        raise ArgumentError(f"{kernel.name}: block", f"1 to {kernel.max_threads} threads", f"{geometry.block}")
    max_dynamic_bytes = device_info().shared_bytes - kernel.shared_bytes
    if geometry.shared_bytes > max_dynamic_bytes:
        rule = f"at most {max_dynamic_bytes} bytes beside {kernel.shared_bytes} static ones"
        raise ArgumentError(f"{kernel.name}: shared_bytes", rule, geometry.shared_bytes)
    if min(geometry.grid) < 1 or any(g % c for g, c in zip(geometry.grid, geometry.cluster, strict=True)):
        raise ArgumentError(f"{kernel.name}: grid", f"whole clusters of {geometry.cluster}", f"{geometry.grid}")


def _check(kernel: GpuKernel, status: Any, *_: Any) -> None:
    if int(status):
        raise LaunchError(f"{kernel.name}: the driver refused the launch: {getattr(status, 'name', status)}")


def _argument_bytes(name: str, arg: Any) -> bytes:
    if isinstance(arg, bytes | bytearray):
        return bytes(arg)
    if isinstance(arg, np.generic):
        return arg.tobytes()
    if isinstance(arg, TensorMap):
        if not is_device_array(arg.array):
            raise ArgumentError(name, "a tensor map over an array on the GPU", type(arg.array).__name__)
        return encode(name, arg, _address(name, arg.array))
    if is_device_array(arg):
        return np.uint64(_address(name, arg)).tobytes()
    if isinstance(arg, bool | int | float):
        raise ArgumentError(
            name, "a NumPy scalar, whose dtype says how wide the parameter is (np.uint32(5))", repr(arg)
        )
    raise ArgumentError(name, "an array, a tensor map, a NumPy scalar or bytes", type(arg).__name__)


def _address(name: str, array: Any) -> int:
    import cupy

    shared_array = as_array(name, array)
    if not shared_array.flags.c_contiguous:
        raise ArgumentError(name, "C-contiguous", f"strides {shared_array.strides}")
    if shared_array.size and shared_array.device.id != cupy.cuda.Device().id:
        raise ArgumentError(name, f"on the current device {cupy.cuda.Device().id}", f"device {shared_array.device.id}")
    return int(shared_array.data.ptr)
