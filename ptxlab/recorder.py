"""Records timelines: runs one of the project's kernels, compiled with its stamps, on the GPU or in the emulator."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from ptxlab import gpu, timeline
from ptxlab.bench.record import commit
from ptxlab.bench.timing import copies_beyond_l2, in_turn, measure
from ptxlab.dtypes import dtype_in, storage, stored
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.kernels.attention.steps import STEPS
from ptxlab.runtime import Kernel, choose_backend
from ptxlab.sources import Source
from ptxlab.spec import Arrays, KernelSpec
from ptxlab.timeline import SWITCH, VARIABLE, Timeline

SMS = 2  # recorded on a GPU
_COUNTER = 8  # bytes: the tracks given out, which a launch counts up from zero
# Where no sizes are given: as much as shows a steady state; beside these those of the spec's last example.
_HEAD = {"T": 1, "D": 128, "page": 64, "bits": 4, "channel": 0, "window": 0, "softmax_scale": 128**-0.5}
_SHOWN: dict[str, dict[str, dict[str, Any]]] = {
    "gpu": {
        "gemm": {"M": 64, "N": 22016, "K": 4096, "g": 128},
        "attention": {"B": 64, "Hq": 32, "Hkv": 8, "P": 16, "pages": 1024, **_HEAD},
    },
    "emulator": {
        "gemm": {"M": 64, "N": 256, "K": 2048, "g": 128},
        "attention": {"B": 2, "Hq": 8, "Hkv": 2, "P": 16, "pages": 24, "blocks": 2, **_HEAD},
    },
}
_BLOCKS = {step.spec.name: step.blocks for step in STEPS if step.blocks}  # of kernels that share their work out


def record(
    spec: KernelSpec,
    source: Source,
    sizes: Mapping[str, Any] | None = None,
    *,
    backend: str | None = None,
    sms: int = SMS,
    seed: int = 0,
) -> Timeline:
    """Run a kernel once with its stamps, on an example.

    Args:
        spec: the kernel.
        source: its CUDA C++.
        sizes: of the example; those left out are such that a steady state shows, and that it does not take long.
        backend: `"gpu"`, `"emulator"`, or None: the GPU where there is one that runs it.
        sms: of how many SMs (from number 0 on) there shall be stamps; of the emulator's, all that have a block.
        seed: of the example.

    Raises:
        ArgumentError: sizes that the kernel does not take, or a kernel that stamps nothing.
        UnavailableError: no such backend here.
    """
    if "timeline.cuh" not in source.text:
        raise ArgumentError(
            "--timeline", f"a kernel with PHASE(...) (timeline.cuh); {source.label} has none", spec.name
        )
    if backend is None:
        backend = "emulator" if gpu.why_not(spec.arch, exact=spec.exact_arch) else "gpu"
    sizes = sizes_of(spec, sizes or {}, backend)
    config = {**spec.config_for(sizes), **dict.fromkeys(spec.by_variant, 0)}
    everything = {**sizes, **config}
    geometry = spec.launch(everything)
    kernel = Kernel.of(spec, source, config)
    choose_backend(backend, kernel, geometry, on_device=False)
    arrays = _arrays(spec, spec.example(np.random.default_rng(seed), **sizes), everything)
    about = Timeline(spec.name, source.language, backend, "steps", sizes, config, ())
    if backend == "gpu":
        return _on_gpu(about, spec, kernel, arrays, sms)
    stamping = replace(kernel, defines={**config, SWITCH: 1 << 30})
    result = stamping.launch(spec.arguments(arrays, everything), geometry, backend="emulator", step_clock=True)
    assert result is not None
    tracks, _ = timeline.read_tracks(np.frombuffer(result.variables[VARIABLE], np.uint8))
    return replace(about, tracks=tracks)


def sizes_of(spec: KernelSpec, given: Mapping[str, Any], backend: str) -> dict[str, Any]:
    """All sizes of the example; ArgumentError for one that the kernel does not have."""
    known = {**spec.example_sizes[-1], **_SHOWN[backend].get(spec.family, {})}
    known = {name: size for name, size in known.items() if name in spec.example_sizes[-1]}
    if unknown := sorted(set(given) - set(known)):
        raise ArgumentError("--shape", f"some of {', '.join(known)}", unknown[0])
    sizes = {**known, **given}
    if backend == "gpu" and "blocks" not in given and spec.name in _BLOCKS:
        sizes["blocks"] = _BLOCKS[spec.name](sizes, gpu.device_info().sms)
    spec.check_sizes(sizes)
    return sizes


def _arrays(spec: KernelSpec, logical: Arrays, everything: Mapping[str, Any]) -> Arrays:
    """Every array argument on the host: inputs packed, the others zero."""
    packed = spec.pack(logical)
    found = {}
    for arg in spec.args:
        if not arg.shape:
            continue
        dtype = dtype_in(arg.dtype, everything)
        if arg.name in packed:
            found[arg.name] = np.ascontiguousarray(stored(packed[arg.name], dtype))
        elif arg.role in ("out", "scratch"):
            found[arg.name] = np.zeros(arg.resolve(everything), storage(dtype))
    return found


def _on_gpu(about: Timeline, spec: KernelSpec, kernel: Kernel, arrays: Arrays, sms: int) -> Timeline:
    """Launches with and without stamps, timed over rotating inputs; then one whose stamps are kept."""
    everything = {**about.sizes, **about.variant}
    geometry = spec.launch(everything)
    plain = gpu.load(kernel.source, kernel.entry, defines=kernel.defines)
    stamping = gpu.load(kernel.source, kernel.entry, defines={**kernel.defines, SWITCH: sms})
    inputs = {arg.name for arg in spec.inputs if arg.role != "inout"}
    first = {name: gpu.to_device(array) for name, array in arrays.items()}
    copies = copies_beyond_l2(sum(first[name].nbytes for name in inputs & set(first)))
    rotating = [first]
    rotating += [{n: a.copy() if n in inputs else a for n, a in first.items()} for _ in range(copies - 1)]
    buffer = stamping.variable(VARIABLE)

    def restart() -> None:
        gpu.fill_bytes(buffer[:_COUNTER], 0)

    def launches(of: gpu.GpuKernel) -> list[Callable[[], None]]:
        return [gpu.prepare(of, spec.arguments(copy, everything), geometry) for copy in rotating]

    def restarted(calls: list[Callable[[], None]]) -> list[Callable[[], None]]:
        return [in_turn([restart, call]) for call in calls]

    alone, without, stamped = map(measure, (launches(plain), restarted(launches(plain)), restarted(launches(stamping))))
    for call in restarted(launches(stamping)):  # the last one's stamps are those that are read
        call()
    tracks, _ = timeline.read_tracks(gpu.to_host(buffer))
    if not tracks:
        raise UnavailableError(f"{spec.name}: no block ran on an SM below {sms}")
    device = gpu.device_info()
    return replace(
        about,
        unit="clocks",
        tracks=tracks,
        mhz=round(stamped.sm_mhz),
        time_us=round(alone.us, 2),
        recording_us=round(alone.us + stamped.us - without.us, 2),
        device={"name": device.name, "slug": device.slug, "driver": device.driver},
        commit=commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
