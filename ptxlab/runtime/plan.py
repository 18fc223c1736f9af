"""`Plan`: a spec's kernel at fixed sizes, compiled, loaded and checked once; a call only fills in addresses.

What a decoder does some hundred times per token has no time for looking anything up twice. A call allocates nothing on
the device and waits for nothing, so that it can be captured into a CUDA graph.
"""

import ctypes
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.hardware.tensor_map import TENSOR_MAP_BYTES
from ptxlab.sources import sources_of_kernel
from ptxlab.spec import Arg, KernelSpec

_MAX_MAPS = 256  # tensor maps that a plan remembers


class Plan:
    """Launches one variant of a kernel at one set of sizes, on the device that is current when it is made.

    With `programmatic` the kernel may begin before the one before it on the stream has ended, for which it has to wait
    by itself (`KernelSpec.after_wait`). Arguments that a call's arrays are `named` otherwise for are looked up so.

    Raises ArgumentError for sizes that break a rule, CompileError or UnavailableError as `gpu.load` does.
    """

    def __init__(
        self,
        spec: KernelSpec,
        config: Mapping[str, int],
        sizes: Mapping[str, int],
        *,
        programmatic: bool = False,
        named: Mapping[str, str] | None = None,
    ) -> None:
        spec.check_sizes(sizes)
        self.spec, self.sizes = spec, {**sizes, **config}
        with gpu.NamedRange(f"plan {spec.name}"):
            self._prepare(config, sizes, programmatic, named or {})
        self._launching = gpu.NamedRange(f"launch {spec.name}")
        self._encoded: dict[tuple[str, int], Any] = {}
        self._idle: deque[Any] = deque()  # buffers for parameters that no launch uses

    def _prepare(
        self, config: Mapping[str, int], sizes: Mapping[str, int], programmatic: bool, named: Mapping[str, str]
    ) -> None:
        spec = self.spec
        kernel = gpu.load(sources_of_kernel(spec.name)[0], spec.name, defines=config)
        scalars = {arg.name: spec.scalar(arg, sizes).tobytes() for arg in spec.args if not arg.shape}
        pointer_bytes = {arg.name: TENSOR_MAP_BYTES if arg.role == "tma" else 8 for arg in spec.args}
        parameter_bytes = tuple({**pointer_bytes, **{name: len(scalar) for name, scalar in scalars.items()}}.values())
        if kernel.parameter_bytes not in (None, parameter_bytes):
            raise ArgumentError(f"{spec.name}: args", f"parameters of {kernel.parameter_bytes} bytes", parameter_bytes)
        self._launch = gpu.bind(kernel, replace(spec.launch(self.sizes), programmatic=programmatic))
        # Every parameter but a tensor map fits 8 bytes, of which the driver copies as many as it has.
        self._numbers = [int.from_bytes(scalars.get(arg.name, b""), "little") for arg in spec.args]
        arrays = [(i, arg) for i, arg in enumerate(spec.args) if arg.shape]
        pointers = [(i, arg) for i, arg in arrays if arg.role != "tma"]
        maps = [(i, arg) for i, arg in arrays if arg.role == "tma"]
        self.names = tuple(named.get(arg.name, arg.name) for _, arg in (*pointers, *maps))
        self.mapped = self.names[len(pointers) :]
        self._pointers = [i for i, _ in pointers]
        self._maps = [(len(self._numbers) + i, arg) for i, arg in maps]

    def __call__(self, stream: int, arrays: Mapping[str, gpu.View]) -> None:
        """Launch on `arrays` by name, which the caller has checked; a missing array is a null pointer."""
        addresses = []  # in a loop: until Python 3.12 a comprehension is a call
        for name in self.names:
            addresses.append(arrays[name][0] if name in arrays else 0)
        self.launch_at(stream, addresses, [arrays[name].owner for name in self.mapped] if self.mapped else ())

    def launch_at(self, stream: int, addresses: Sequence[int], owners: Sequence[Any]) -> None:
        """Launch on arrays at these addresses, in the order of `names`; `owners` are the arrays of `mapped`."""
        try:
            words = self._idle.pop()
        except IndexError:
            words = self._new_words()
        for position, address in zip(self._pointers, addresses, strict=False):
            words[position] = address
        maps = []  # so that they are there until the driver has read them
        for i, ((position, arg), owner) in enumerate(zip(self._maps, owners, strict=True), len(self._pointers)):
            encoded_map = self._map(arg, addresses[i], owner)
            maps.append(encoded_map)
            words[position] = ctypes.addressof(encoded_map)
        with self._launching:
            self._launch(ctypes.addressof(words) + 8 * len(self._numbers), stream)
        self._idle.append(words)

    def _new_words(self) -> Any:
        """Allocate the values of every parameter, followed by pointers to them, which the driver takes."""
        count = len(self._numbers)
        words = (ctypes.c_uint64 * (2 * count))(*self._numbers)
        base = ctypes.addressof(words)
        words[count:] = list(range(base, base + 8 * count, 8))
        return words

    def _map(self, arg: Arg, address: int, array: Any) -> Any:
        """Return the tensor map over an array.

        It is remembered by its address: at fixed sizes nothing else tells maps apart.
        """
        key = arg.name, address
        if key not in self._encoded:
            if len(self._encoded) == _MAX_MAPS:
                self._encoded.clear()
            label = f"{self.spec.name}: {arg.name}"
            tensor_map = self.spec.tensor_map(arg, gpu.as_array(label, array), self.sizes)
            encoded_map = gpu.encode(label, tensor_map, address)
            self._encoded[key] = ctypes.create_string_buffer(encoded_map, TENSOR_MAP_BYTES)
        return self._encoded[key]
