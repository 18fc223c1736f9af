"""Suite `load`: fragments streaming from device memory, fragments resident in shared memory, rings of stages."""

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from ptxlab import gpu, sass, toolchain
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row, row_of
from ptxlab.bench.suite import Keep, Suite, measure_section
from ptxlab.errors import BenchmarkError, UnavailableError
from ptxlab.io.files import save_arrays
from ptxlab.lowbit.kernels.load import SPECS, TILE
from ptxlab.profile import nsight
from ptxlab.runtime import run_spec
from ptxlab.runtime.launching import allocate_poisoned
from ptxlab.runtime.timing import Measured, copies_beyond_l2, measure
from ptxlab.sass import dataflow, harness
from ptxlab.sources import Source, sources_of_kernel
from ptxlab.spec import Arrays, KernelSpec

TILES = 1 << 17  # 268 MB of u4, 537 MB of s8
STAGES = 1 << 17  # 2.1 GB
_DISTINCT = 128  # tiles or stages made once and repeated
_BLOCKS_PER_SM = {"ring": 3, "resident": 8}
_REPEATS = 4001  # odd: see harness.repeating_harness
_SHARED_BYTES_PER_CLOCK = 128
BANK_TILES = 24  # tiles over which wavefronts are counted
_COUNTERS = {
    "load_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "store_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "load_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
}
_CHECKED = "every result equal to the reference"

_RUN_ALL = """
import json, sys
from ptxlab.cli.app import run_command_line
for line in json.loads(sys.argv[1]):
    try:
        run_command_line(line)
    except SystemExit as done:
        if done.code:
            raise
"""


def rows(
    names: list[str], ceilings: Ceilings, progress: Callable[[str], None], keep: Keep = measure_section
) -> Iterator[Row]:
    """Measure kernels of the family by name; a kernel is a section."""
    for spec in (spec for spec in SPECS if spec.name in names):
        yield from keep(spec.name, partial(kernel_rows, spec, ceilings, progress))


def kernel_rows(spec: KernelSpec, ceilings: Ceilings, progress: Callable[[str], None]) -> Iterator[Row]:
    """Measure one kernel in its ring, or from device memory and from shared memory."""
    source = sources_of_kernel(spec.name)[0]
    progress(f"{spec.name}: streaming")
    if "B" in spec.example_sizes[0]:
        yield ring(spec, source, ceilings)
    else:
        yield streaming(spec, source, ceilings)
        progress(f"{spec.name}: resident")
        yield resident(spec, source)


def streaming(spec: KernelSpec, source: Source, ceilings: Ceilings) -> Row:
    """Measure tiles from device memory to fragments in device memory."""
    sizes = {"T": TILES}
    measured = _time_load(spec, source, sizes, {"T": _DISTINCT})
    floor = spec.bytes_moved(sizes) / ceilings.copy_tbps / 1e6, "copy"
    return row_of(spec, "streaming", sizes, measured, floor=floor, checked=_CHECKED)


def ring(spec: KernelSpec, source: Source, ceilings: Ceilings) -> Row:
    """Measure stages from device memory through the ring into registers; next to nothing is written."""
    blocks = gpu.device_info().sms * _BLOCKS_PER_SM["ring"]
    sizes = {"P": STAGES, "B": blocks}
    measured = _time_load(spec, source, sizes, {"P": _DISTINCT, "B": blocks})
    floor = spec.bytes_moved(sizes) / ceilings.read_tbps / 1e6, "read"
    return row_of(spec, "streaming", sizes, measured, floor=floor, checked=_CHECKED)


def resident(spec: KernelSpec, source: Source) -> Row:
    """Measure the fragment's loads alone, again and again from the same tile in shared memory."""
    device = gpu.device_info()
    repeated_source = harness.repeating_harness(source)
    if repeated_source is None:
        raise BenchmarkError(f"{source.label}: no fragment is marked (`// @begin fragment`)")
    image = toolchain.assemble(source, device.arch)
    cost = dataflow.fragment_cost(sass.parse(toolchain.disassemble(image))[spec.name])
    sizes = {"T": device.sms * _BLOCKS_PER_SM["resident"]}
    kernel = gpu.load(repeated_source, spec.name)
    logical = spec.example(np.random.default_rng(0), **sizes)
    arrays = {name: gpu.to_device(array) for name, array in spec.pack(logical).items()}
    out = gpu.empty(spec.outputs[0].resolve(sizes), spec.outputs[0].dtype)
    call = gpu.prepare(kernel, [*arrays.values(), out, np.uint32(_REPEATS)], spec.launch(sizes))
    measured = measure([call])
    _require_equal(spec, source, gpu.to_host(out), spec.reference(**logical))
    weights = sizes["T"] * TILE * TILE * _REPEATS
    useful = spec.inputs[0].nbytes(sizes) * _REPEATS
    per_clock = weights / (measured.us * measured.sm_mhz * device.sms)
    return row_of(
        spec,
        "resident",
        sizes,
        measured,
        floor=(useful / (_SHARED_BYTES_PER_CLOCK * device.sms * measured.sm_mhz), "128 B/clock/SM"),
        checked=_CHECKED,
        nbytes=useful,
        rate=(per_clock, "w/clk/SM"),
        more={
            "loads_per_32": cost.loads,
            "address_per_32": cost.address,
            "unpack_per_32": cost.unpack,
            "shared_gbps": useful / measured.us / 1e3,
            "weights_per_clock_and_sm": per_clock,
            **_bank_figures(spec, source),
        },
    )


def modelled_banks(spec: KernelSpec, source: Source) -> dict[str, float]:
    """Count wavefronts and bank conflicts of `BANK_TILES` tiles by the bank model, on the emulator's addresses."""
    inputs = spec.pack(spec.example(np.random.default_rng(0), T=BANK_TILES))
    counts = dict.fromkeys(_COUNTERS, 0.0)
    for access in run_spec(spec, source, inputs, backend="emulator", count_banks=True).shared:
        stores = access.text.startswith("st")
        counts["store_wavefronts" if stores else "load_wavefronts"] += access.wavefronts
        counts["load_conflicts"] += 0 if stores else access.conflicts
        counts["conflicts"] += access.conflicts
    return counts


def counted_banks(*specs: KernelSpec) -> list[dict[str, float]]:
    """Count the same tiles on the GPU, of every spec, under one ncu; `UnavailableError` where it cannot."""
    with tempfile.TemporaryDirectory() as folder:
        command_lines = []
        for spec in specs:
            file = Path(folder) / f"{spec.name}.npz"
            save_arrays(file, spec.pack(spec.example(np.random.default_rng(0), T=BANK_TILES)))
            command_lines.append(["run", spec.name, "--in", str(file), "--backend", "gpu"])
        command = [sys.executable, "-c", _RUN_ALL, json.dumps(command_lines)]
        launch_metrics = nsight.launches(command, [spec.name for spec in specs], list(_COUNTERS.values()))
    return [{name: spec_metrics[metric] for name, metric in _COUNTERS.items()} for spec_metrics in launch_metrics]


def _bank_figures(spec: KernelSpec, source: Source) -> dict[str, float]:
    """Return wavefronts and bank conflicts per warp and tile: by the bank model and, where it may count, by ncu."""
    warps = 4 * BANK_TILES
    figures = {f"{name}_per_warp_model": count / warps for name, count in modelled_banks(spec, source).items()}
    with contextlib.suppress(UnavailableError):  # the record then holds the model's figures alone
        figures |= {f"{name}_per_warp_ncu": count / warps for name, count in counted_banks(spec)[0].items()}
    return figures


def _time_load(spec: KernelSpec, source: Source, sizes: dict[str, int], distinct: dict[str, int]) -> Measured:
    """Time one launch over inputs that repeat `distinct` ones, and check what it wrote."""
    logical = spec.example(np.random.default_rng(0), **distinct)
    arg = spec.inputs[0]
    one_copy = gpu.to_device(spec.pack(logical)[arg.name])
    large = gpu.empty(arg.resolve(sizes), arg.dtype)
    for first_tile in range(0, len(large), len(one_copy)):
        gpu.copy_bytes(large[first_tile : first_tile + len(one_copy)], one_copy)
    calls, outputs = [], []
    for _ in range(copies_beyond_l2(spec.bytes_moved(sizes))):
        outputs.append(out := allocate_poisoned(spec.outputs[0].resolve(sizes), spec.outputs[0].dtype))
        scalars = [spec.scalar(a, sizes) for a in spec.args if not a.shape]
        calls.append(gpu.prepare(gpu.load(source, spec.name), [large, out, *scalars], spec.launch(sizes)))
    measured = measure(calls)
    for out in outputs:
        _require_equal(spec, source, gpu.to_host(out), _expected_words(spec, logical, sizes, len(one_copy)))
    return measured


def _expected_words(spec: KernelSpec, logical: Arrays, sizes: dict[str, int], distinct: int) -> np.ndarray:
    """Compute the reference over all repetitions of the distinct inputs."""
    if "P" not in sizes:
        return np.asarray(spec.reference(**logical))
    words = logical["words"]
    return np.asarray(spec.reference(words=words[np.arange(sizes["P"]) % distinct], B=sizes["B"]))


def _require_equal(spec: KernelSpec, source: Source, got: np.ndarray, expected: np.ndarray) -> None:
    if not (got.reshape(-1, *expected.shape) == expected).all():
        raise BenchmarkError(f"{source.label}: the timed launches gave wrong results")


SUITE = Suite("load", rows, keeps=True)
