"""Endurance: thousands of calls beside a busy stream, every result checked on the GPU.

The host waits for the device only at the beginning and at the end.
"""

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.arithmetic import ceil_div
from ptxlab.runtime import Kernel, verify
from ptxlab.runtime.launching import allocate_poisoned
from ptxlab.sources import Source, sources_of_kernel
from ptxlab.spec import KernelSpec, Launch
from ptxlab.spec.dtypes import convert_to_dtype, dtype_in, storage

CALLS, SECONDS = 20_000, 300
COPY_BYTES, COPIES, BATCHES = 128 << 20, 16, 2  # of the busy stream: what a batch copies, and batches in flight
POISON = 0x7FC0FFEE

COMPARE = Source.from_text(
    """
extern "C" __global__ void compare(int* y, const int* expected, unsigned size, unsigned long long* wrong) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    if (y[i] != expected[i]) atomicAdd(wrong, 1ull);
    y[i] = 0x7fc0ffee;  // or what a later call does not write would still be right
}
""",
    "<compare>",
)


class Case(Protocol):
    """Problem on the device whose calls are repeated."""

    expected: Any  # what a call returns, in int32
    wrong: Any  # uint64 [1]: elements that were not as expected, so far

    def call(self) -> Any:
        """Return the result in int32, on the current stream; the 20,000 calls are calls of this."""


@dataclass(frozen=True)
class SpecLaunch:
    """A kernel on one problem, launched by its spec: for those that no public call launches, as for all others.

    Its outputs lie in one array, 16 bytes and more apart, which is what a call returns. What a kernel has to find at 0,
    and leave so, is one of them.
    """

    spec: KernelSpec
    sizes: Mapping[str, Any]
    config: Mapping[str, int]
    kernel: Any
    inputs: Mapping[str, Any]
    expected: Any = None
    wrong: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, spec: KernelSpec, sizes: Mapping[str, Any], rng: np.random.Generator) -> "SpecLaunch":
        """Make a case from an example of the spec at these sizes.

        The bits of a first call, which are verified, are the expected result.
        """
        config, logical = spec.config_for(sizes), spec.example(rng, **sizes)
        kernel = gpu.load(sources_of_kernel(spec.name)[0], spec.name, defines=config)
        dtypes = {arg.name: dtype_in(arg.dtype, config) for arg in spec.args}
        read = [arg.name for arg in spec.inputs if arg.role != "inout"]
        inputs = {n: gpu.to_device(convert_to_dtype(x, dtypes[n])) for n, x in spec.pack(logical).items() if n in read}
        case = cls(spec, sizes, config, kernel, inputs)
        first = gpu.to_host(case.call())
        verify.compare(spec, case.outputs(first), logical, config)
        return replace(case, expected=gpu.to_device(first), wrong=gpu.to_device(np.zeros(1, np.uint64)))

    def call(self) -> Any:
        """Return all outputs in int32, on the current stream."""
        everything = {**self.sizes, **self.config}
        shapes = {arg.name: arg.resolve(everything) for arg in self.spec.args if arg.role == "scratch"}
        scratch = {name: gpu.empty(shape, str(self.spec.arg(name).dtype)) for name, shape in shapes.items()}
        whole = allocate_poisoned((sum(nbytes for *_, nbytes in self._places()) // 4,), np.int32)
        outputs = self.outputs(whole)
        for arg in self.spec.outputs:
            if arg.role == "inout" and outputs[arg.name].size:
                gpu.fill_bytes(outputs[arg.name], 0)
        buffers = {**self.inputs, **scratch, **outputs}
        gpu.launch(self.kernel, self.spec.arguments(buffers, everything), self.spec.launch(everything))
        return whole

    def outputs(self, whole: Any) -> dict[str, Any]:
        """Return views of the outputs, by name, in the array that holds them all."""
        views, offset = {}, 0
        for name, shape, dtype, nbytes in self._places():
            size = int(np.prod(shape)) * dtype.itemsize
            views[name] = whole.view(np.uint8)[offset : offset + size].view(dtype).reshape(shape)
            offset += nbytes
        return views

    def _places(self) -> list[tuple[str, tuple[int, ...], np.dtype[Any], int]]:
        """List name, shape, dtype and bytes of the outputs.

        The bytes include the gap up to the next output.
        """
        everything = {**self.sizes, **self.config}
        places = []
        for arg in self.spec.outputs:
            nbytes = arg.nbytes(everything)
            dtype = storage(dtype_in(arg.dtype, self.config))
            places.append((arg.name, arg.resolve(everything), dtype, nbytes // 16 * 16 + 16))
        return places

    def __str__(self) -> str:
        return f"{self.spec.name}({', '.join(f'{name}={size}' for name, size in self.sizes.items())})"


def emulate_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the functions of `ptxlab.gpu` that `SpecLaunch` calls by stand-ins on the CPU."""
    stand_ins = {
        "load": lambda source, entry, defines: Kernel(source, entry, dict(defines)),
        "launch": lambda kernel, args, geometry: kernel.launch(args, geometry, backend="emulator"),
        "to_device": lambda array: np.array(array, order="C"),
        "to_host": np.array,
        "empty": np.empty,
        "fill_bytes": lambda array, byte: array.view(np.uint8).fill(byte),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(gpu, name, stand_in)


def check(case: Case, y: Any) -> None:
    """Count wrong elements on the device."""
    blocks = (ceil_div(y.size, 256), 1, 1)
    arguments = [y, case.expected, np.uint32(y.size), case.wrong]
    gpu.launch(gpu.load(COMPARE, "compare"), arguments, Launch(blocks, (256, 1, 1)))


class BusyStream:
    """A second stream: large copies, and a checked call after each batch of them."""

    def __init__(self, cases: Sequence[Case]) -> None:
        import cupy

        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.target, self.source = (gpu.to_device(np.zeros(COPY_BYTES, np.uint8)) for _ in range(2))
        self.cases = cases
        self.batches: deque[Any] = deque()
        self.calls = 0

    def feed(self, rng: np.random.Generator) -> None:
        """Enqueue another batch if fewer than `BATCHES` are on their way."""
        while self.batches and self.batches[0].done:
            self.batches.popleft()
        if len(self.batches) == BATCHES:
            return
        with self.stream:
            for _ in range(COPIES):
                gpu.copy_bytes(self.target, self.source)
            case = self.cases[int(rng.integers(len(self.cases)))]
            check(case, case.call())
            self.batches.append(self.stream.record())
        self.calls += 1


def memory() -> dict[str, int]:
    """Return the bytes in use by arrays, held by CuPy's pool, and free on the device; waits for the device."""
    import cupy

    cupy.cuda.Device().synchronize()
    pool = cupy.get_default_memory_pool()
    return {"used": pool.used_bytes(), "held": pool.total_bytes(), "free": cupy.cuda.runtime.memGetInfo()[0]}


def endure(cases: Sequence[Case], rng: np.random.Generator) -> None:
    """Run `CALLS` random calls of the cases, and check that each is right and no memory is lost."""
    import cupy

    busy, stream = BusyStream(cases), cupy.cuda.Stream(non_blocking=True)

    first = cases[0]
    check(first, cupy.zeros_like(first.expected) + POISON)
    assert int(first.wrong[0]) == first.expected.size, "the check itself notices"
    first.wrong.fill(0)
    cupy.cuda.Device().synchronize()
    for active in (stream, busy.stream):  # compiles, loads, and fills the pool of each stream
        with active:
            for case in cases:
                check(case, case.call())
    memory_before, start = memory(), time.monotonic()

    for done in range(CALLS):
        assert time.monotonic() - start < SECONDS, f"only {done} calls in {SECONDS} s"
        busy.feed(rng)
        with stream:
            case = cases[int(rng.integers(len(cases)))]
            check(case, case.call())

    memory_after = memory()
    assert {str(case): int(case.wrong[0]) for case in cases if int(case.wrong[0])} == {}
    assert busy.calls > CALLS // 1000, "the other stream was busy"
    assert memory_after["used"] == memory_before["used"]
    largest = max(case.expected.nbytes for case in cases)  # the pool may split blocks in another way
    assert memory_after["held"] - memory_before["held"] <= 2 * largest
    if os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") == "1":  # or other workers allocate on the device as well
        assert memory_before["free"] - memory_after["free"] <= memory_after["held"] - memory_before["held"]
    seconds = time.monotonic() - start
    print(f"{CALLS} calls of {len(cases)} cases, {busy.calls} more beside them, in {seconds:.0f} s; {memory_after}")
