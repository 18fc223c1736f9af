"""`Plan`: a spec's kernel at fixed sizes, compiled, loaded and checked once; a call only fills in addresses.

What a decoder does some hundred times per token has no time for looking anything up twice. A call allocates nothing on
the device and waits for nothing, so that it can be captured into a CUDA graph.
"""

import ctypes
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.layout.tensor_map import TENSOR_MAP_BYTES
from ptxlab.sources import of_kernel
from ptxlab.spec import Arg, KernelSpec

_MOST_MAPS = 256  # tensor maps that a plan remembers


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
        with gpu.Marked(f"plan {spec.name}"):
            self._prepare(config, sizes, programmatic, named or {})
        self._launching = gpu.Marked(f"launch {spec.name}")
        self._encoded: dict[tuple[str, int], Any] = {}
        self._idle: deque[Any] = deque()  # buffers for parameters that no launch uses

    def _prepare(
        self, config: Mapping[str, int], sizes: Mapping[str, int], programmatic: bool, named: Mapping[str, str]
    ) -> None:
        spec = self.spec
        kernel = gpu.load(of_kernel(spec.name)[0], spec.name, defines=config)
        scalars = {arg.name: spec.scalar(arg, sizes).tobytes() for arg in spec.args if not arg.shape}
        passed = {arg.name: TENSOR_MAP_BYTES if arg.role == "tma" else 8 for arg in spec.args}
        wanted = tuple({**passed, **{name: len(value) for name, value in scalars.items()}}.values())
        if kernel.parameter_bytes not in (None, wanted):
            raise ArgumentError(f"{spec.name}: args", f"parameters of {kernel.parameter_bytes} bytes", wanted)
        self._launch = gpu.bind(kernel, replace(spec.launch(self.sizes), programmatic=programmatic))
        # Every parameter but a tensor map fits 8 bytes, of which the driver copies as many as it has.
        numbers = [int.from_bytes(scalars.get(arg.name, b""), "little") for arg in spec.args]
        names = [named.get(arg.name, arg.name) for arg in spec.args]
        self._values = list(zip(names, numbers, strict=True))
        self._maps = [(i, names[i], arg) for i, arg in enumerate(spec.args) if arg.role == "tma"]

    def __call__(self, stream: int, arrays: Mapping[str, gpu.View]) -> None:
        """Launch on `arrays` by name, which the caller has checked; what is missing is a null pointer."""
        try:
            words = self._idle.pop()
        except IndexError:
            words = self._new_words()
        count = len(self._values)
        words[:count] = [arrays[name][0] if name in arrays else number for name, number in self._values]
        maps = [self._map(arg, arrays[name]) for _, name, arg in self._maps]  # kept until the driver has read them
        for (position, _, _), encoded in zip(self._maps, maps, strict=True):
            words[count + position] = ctypes.addressof(encoded)
        with self._launching:
            self._launch(ctypes.addressof(words) + 8 * count, stream)
        self._idle.append(words)

    def _new_words(self) -> Any:
        """Room for the values of all parameters, and behind it pointers to them, which the driver takes."""
        count = len(self._values)
        words = (ctypes.c_uint64 * (2 * count))()
        base = ctypes.addressof(words)
        words[count:] = list(range(base, base + 8 * count, 8))
        return words

    def _map(self, arg: Arg, view: gpu.View) -> Any:
        """The tensor map over an array, remembered by its address: at fixed sizes nothing else tells maps apart."""
        key = arg.name, view.address
        if key not in self._encoded:
            if len(self._encoded) == _MOST_MAPS:
                self._encoded.clear()
            label = f"{self.spec.name}: {arg.name}"
            tensor_map = self.spec.tensor_map(arg, gpu.as_array(label, view.owner), self.sizes)
            encoded = gpu.encode(label, tensor_map, view.address)
            self._encoded[key] = ctypes.create_string_buffer(encoded, TENSOR_MAP_BYTES)
        return self._encoded[key]
