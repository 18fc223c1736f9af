"""Records timelines: runs one of the project's kernels, compiled with its stamps, on the GPU or in the emulator."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.profile import launch_target, timeline
from ptxlab.profile.timeline import SWITCH, VARIABLE, Timeline
from ptxlab.runtime import Kernel
from ptxlab.runtime.backends import choose_backend
from ptxlab.runtime.problems import problems_of
from ptxlab.runtime.timing import combine_calls, copies_beyond_l2, measure
from ptxlab.sources import Source, commit
from ptxlab.spec import Arrays, KernelSpec

_SMS = 2  # that have stamps on a GPU, from number 0 on; of the emulator's, all that have a block
_COUNTER = 8  # bytes: the tracks given out, which a launch counts up from zero


def record(
    spec: KernelSpec,
    source: Source,
    sizes: Mapping[str, Any] | None = None,
    *,
    backend: str | None = None,
) -> Timeline:
    """Run a kernel with its stamps on an example; on a GPU, time it with and without them first.

    Args:
        spec: the kernel.
        source: its CUDA C++.
        sizes: of the problem; those left out are as in `launch_target.usual_sizes`.
        backend: `"gpu"`, `"emulator"`, or None: the GPU where there is one that runs it.

    Raises:
        ArgumentError: sizes that the kernel does not take, or a kernel that stamps nothing.
        UnavailableError: no such backend here.
    """
    if "timeline.cuh" not in source.text:
        raise ArgumentError("kernel", "must stamp its phases (timeline.cuh)", source.label)
    requested_backend, backend = (
        backend,
        backend or ("emulator" if gpu.why_not(spec.arch, exact=spec.exact_arch) else "gpu"),
    )
    shape = launch_target.sizes_of(spec, sizes or {}, backend)
    problems = problems_of(spec)
    sizes = problems.spec_sizes(spec, shape, backend)
    config = {**spec.config_for(sizes), **dict.fromkeys(spec.by_variant, 0)}
    sizes_and_constants = {**sizes, **config}
    geometry = spec.launch(sizes_and_constants)
    kernel = Kernel.of(spec, source, config)
    choose_backend(requested_backend, kernel, geometry, on_device=False)  # or why it cannot, or would take too long
    arrays = launch_target.arrays_of(
        spec, problems.example(spec, np.random.default_rng(0), shape, sizes), sizes_and_constants
    )
    empty_timeline = Timeline(spec.name, source.language, backend, "steps", shape, config, ())
    if backend == "gpu":
        return _on_gpu(empty_timeline, spec, kernel, arrays, sizes_and_constants)
    stamping_kernel = replace(kernel, defines={**config, SWITCH: 1 << 30})
    emulation = stamping_kernel.launch(
        spec.arguments(arrays, sizes_and_constants), geometry, backend="emulator", step_clock=True
    )
    assert emulation is not None
    tracks = timeline.read_tracks(np.frombuffer(emulation.variables[VARIABLE], np.uint8))
    return replace(empty_timeline, tracks=tracks)


def _on_gpu(
    empty_timeline: Timeline, spec: KernelSpec, kernel: Kernel, arrays: Arrays, sizes_and_constants: Mapping[str, Any]
) -> Timeline:
    """Time launches with and without stamps over rotating inputs, then launch once more and keep the stamps."""
    geometry = spec.launch(sizes_and_constants)
    plain_kernel = gpu.load(kernel.source, kernel.entry, defines=kernel.defines)
    stamping_kernel = gpu.load(kernel.source, kernel.entry, defines={**kernel.defines, SWITCH: _SMS})
    inputs = {arg.name for arg in spec.inputs if arg.role != "inout"}
    first = {name: gpu.to_device(array) for name, array in arrays.items()}
    copies = copies_beyond_l2(sum(first[name].nbytes for name in inputs & set(first)))
    argument_copies = [first]
    argument_copies += [{n: a.copy() if n in inputs else a for n, a in first.items()} for _ in range(copies - 1)]
    buffer = stamping_kernel.variable(VARIABLE)

    def restart() -> None:
        gpu.fill_bytes(buffer[:_COUNTER], 0)

    def launches(gpu_kernel: gpu.GpuKernel) -> list[Callable[[], None]]:
        return [
            gpu.prepare(gpu_kernel, spec.arguments(copy, sizes_and_constants), geometry) for copy in argument_copies
        ]

    def with_restart(calls: list[Callable[[], None]]) -> list[Callable[[], None]]:
        return [combine_calls([restart, call]) for call in calls]

    plain_times, restart_times, stamped_times = map(
        measure, (launches(plain_kernel), with_restart(launches(plain_kernel)), with_restart(launches(stamping_kernel)))
    )
    for call in with_restart(launches(stamping_kernel)):  # the last one's stamps are those that are read
        call()
    tracks = timeline.read_tracks(gpu.to_host(buffer))
    if not tracks:
        raise UnavailableError(f"{spec.name}: no block ran on an SM below {_SMS}")
    device = gpu.device_info()
    return replace(
        empty_timeline,
        unit="clocks",
        tracks=tracks,
        mhz=round(stamped_times.sm_mhz),
        time_us=round(plain_times.us, 2),
        recording_us=round(plain_times.us + stamped_times.us - restart_times.us, 2),
        device={"name": device.name, "slug": device.slug, "driver": device.driver},
        commit=commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
