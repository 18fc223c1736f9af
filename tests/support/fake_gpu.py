"""A GPU that isn't one: "device" arrays are NumPy's in disguise, and what is launched runs in the emulator.

So everything between a Python call and the driver runs as it does on a GPU: views, plans, packed parameters, capture.
"""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ptxlab import emulator, gpu
from ptxlab.errors import ArgumentError
from ptxlab.gpu.view import View
from ptxlab.hardware.tensor_map import TENSOR_MAP_BYTES, TensorMap
from ptxlab.runtime import Kernel
from ptxlab.spec import Launch


class DeviceArray:
    """A NumPy array that claims to lie on device `device`; C-contiguous unless it is a view with gaps."""

    def __init__(self, host: Any, device: int = 0, *, has_gaps: bool = False) -> None:
        self.host, self.device = host if has_gaps else np.ascontiguousarray(host), device

    shape = property(lambda self: self.host.shape)
    dtype = property(lambda self: self.host.dtype)
    nbytes = property(lambda self: self.host.nbytes)

    def reshape(self, *shape: int) -> "DeviceArray":
        """View the same memory in another shape."""
        return DeviceArray(self.host.reshape(shape), self.device)


class FakeGpu:
    """Fake of `ptxlab.gpu`, with a log of what was done and the answers to give.

    Attributes:
        launched: (kernel, stream) of every launch.
        geometries: how each was launched.
        loads: how many kernels were loaded; likewise `allocations`, and tensor maps that were `encoded`.
        stream: the caller's.
        capturing: whether that is being captured.
        arch: compute capability times ten.
        sms: how many SMs it has.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[tuple[str, int]] = []
        self.geometries: list[Launch] = []
        self.loads = self.allocations = self.encoded = 0
        self.stream, self.capturing, self.arch, self.runs = 7, False, 90, True
        self.sms = 2
        self._memory: dict[int, DeviceArray] = {}
        self._maps: dict[bytes, TensorMap] = {}
        as_array, self._flat_rows = gpu.as_array, gpu.flat_rows
        replaced = {
            "is_device_array": lambda array: isinstance(array, DeviceArray),
            "why_not": self.why_not,
            "current_device": lambda: 0,
            "stream_handle": lambda: self.stream,
            "is_capturing": lambda stream: stream == self.stream and self.capturing,
            "as_array": lambda name, array: array.host if isinstance(array, DeviceArray) else as_array(name, array),
            "encode": self.encode,
            "view": self.view,
            "flat_rows": self.flat_rows,
            "empty": self.empty,
            "zeros": self.zeros,
            "device_info": lambda: SimpleNamespace(sms=self.sms),
            "new": lambda example, shape, dtype: self.empty(shape, "uint16" if dtype == "bfloat16" else dtype),
            "hand_to_caller": lambda array, example, dtype: array,
            "load": self.load,
            "bind": self.bind,
        }
        for name, function in replaced.items():
            monkeypatch.setattr(gpu, name, function)

    def why_not(self, arch: str | None, *, exact: bool = False) -> str | None:
        needed = int("".join(filter(str.isdigit, arch or "0")))
        works = self.arch == needed if exact else self.arch >= needed
        return None if works else f"it runs on {arch}, and this is sm_{self.arch}"

    def view(self, name: str, array: Any) -> View:
        if not isinstance(array, DeviceArray):
            raise ArgumentError(name, "an array on the GPU", type(array).__name__)
        address = array.host.ctypes.data
        self._memory[address] = array
        return View(address, array.shape, array.dtype.name, array.device, array)

    def flat_rows(self, name: str, array: Any) -> tuple[Any, int]:
        if not isinstance(array, DeviceArray):
            return self._flat_rows(name, array)
        rows, pitch = self._flat_rows(name, array.host)
        return DeviceArray(rows, array.device), pitch

    def empty(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        self.allocations += 1
        return DeviceArray(np.empty(shape, dtype))

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        array = self.empty(shape, dtype)
        array.host[...] = 0
        return array

    def load(self, source: Any, entry: str, *, defines: Any) -> Any:
        self.loads += 1
        return _Loaded(Kernel(source, entry, dict(defines)))

    def encode(self, name: str, tensor_map: TensorMap, address: int) -> bytes:
        assert address == tensor_map.array.ctypes.data, name
        self.encoded += 1
        encoded = self.encoded.to_bytes(TENSOR_MAP_BYTES, "little")
        self._maps[encoded] = tensor_map
        return encoded

    def bind(self, loaded: "_Loaded", geometry: Launch) -> Any:
        kernel = loaded.kernel
        params = kernel.module.entries[kernel.entry].params

        def launch(arguments: int, stream: int) -> None:
            self.launched.append((kernel.entry, stream))
            self.geometries.append(geometry)
            if not self.runs:
                return
            pointers = (ctypes.c_uint64 * len(params)).from_address(arguments)
            raw_values = [ctypes.string_at(p, param.size) for p, param in zip(pointers, params, strict=True)]
            args = [self._argument(raw) for raw in raw_values]
            emulator.run(
                kernel.module,
                kernel.entry,
                args,
                grid=geometry.grid,
                block=geometry.block,
                shared_bytes=geometry.shared_bytes,
                cluster=geometry.cluster,
            )

        return launch

    def _argument(self, raw: bytes) -> Any:
        if raw in self._maps:
            return self._maps[raw]
        array = self._memory.get(int.from_bytes(raw, "little")) if len(raw) == 8 else None
        return raw if array is None else array.host


class _Loaded:
    parameter_bytes = None

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel


def on_device(packed: Any) -> Any:
    """Convert packed weights or activations as if `ptxlab.to_device` had copied them."""
    if isinstance(packed, np.ndarray):
        return DeviceArray(packed)
    import copy

    copied = copy.copy(packed)
    for name, operand in vars(packed).items():
        if isinstance(operand, np.ndarray):
            object.__setattr__(copied, name, DeviceArray(operand))
        elif isinstance(operand, dict):
            object.__setattr__(copied, name, {key: DeviceArray(array) for key, array in operand.items()})
    return copied
