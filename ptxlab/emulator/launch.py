"""`run`: check the arguments, lay out memory, run the grid wave by wave, copy results back."""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from typing import Any, Unpack

import numpy as np

from ptxlab import _moved
from ptxlab.emulator import async_, ops, sync  # noqa: F401  (they enter their instructions)
from ptxlab.emulator.chain import Buffers, current
from ptxlab.emulator.checks.bank_conflicts import BankConflicts
from ptxlab.emulator.checks.barrier_generations import BarrierGenerations, counts_threads
from ptxlab.emulator.checks.divergence import Divergence
from ptxlab.emulator.checks.float_values import FloatValues
from ptxlab.emulator.checks.happens_before import HappensBefore
from ptxlab.emulator.checks.in_flight import InFlight
from ptxlab.emulator.checks.initialised import Initialised
from ptxlab.emulator.checks.load_taint import LoadTaint
from ptxlab.emulator.checks.mbarrier_life import MBarrierLife
from ptxlab.emulator.checks.mbarrier_phases import MBarrierPhases
from ptxlab.emulator.checks.narrowing import Narrowing
from ptxlab.emulator.checks.packed_lanes import PackedLanes
from ptxlab.emulator.checks.race import Races
from ptxlab.emulator.checks.race_cluster_exit import RaceClusterExit
from ptxlab.emulator.checks.race_pdl import WAIT, RacePdl
from ptxlab.emulator.checks.race_waves import RaceWaves, Waves
from ptxlab.emulator.checks.sectors import Sectors
from ptxlab.emulator.checks.shared_arrays import SharedArrays
from ptxlab.emulator.checks.step_clock import StepClock
from ptxlab.emulator.checks.wgmma_registers import RegistersInUse
from ptxlab.emulator.checks.whole_blocks import WholeBlocks, is_syncthreads
from ptxlab.emulator.core.findings import Finding, GlobalAccess, SharedAccess
from ptxlab.emulator.core.machine import Machine
from ptxlab.emulator.core.memory import ALIGN, BASE, Memory, Region
from ptxlab.emulator.core.watcher import Watcher
from ptxlab.emulator.core.wave import LaunchState
from ptxlab.emulator.front.control_flow import flow_of
from ptxlab.emulator.front.ir import Entry, Function, Module, Symbol
from ptxlab.emulator.front.parse import parse
from ptxlab.emulator.front.pointer_accesses import shared_arrays_of
from ptxlab.emulator.front.quirks import Note, notes_of
from ptxlab.emulator.front.types import Array
from ptxlab.emulator.options import EmulatorOptions, OptionKeywords
from ptxlab.emulator.unneeded import leave_out
from ptxlab.errors import ArgumentError, EmulationError
from ptxlab.hardware.tensor_map import TENSOR_MAP_BYTES, TensorMap
from ptxlab.spec import MAX_BLOCKS
from ptxlab.validate import is_integer

# Blocks of one wave run side by side, so that they may wait for each other: a block of any size per SM of an H200.
# A grid whose blocks all wait for each other and that has more lanes than this spins for ever.
WAVE_LANES = 132 * 1024
POISON = 0xCD  # what shared and local memory hold before they are written
LARGEST_CLUSTER = 16
FUNCTION = 0xF0F0F0F0F0F0F0F0  # what stands for the address of a function, which no call takes

Argument = np.ndarray | np.generic | bytes | TensorMap
Dim3 = int | Sequence[int]
Extent = tuple[int, int, int]  # a Dim3 written out
Sizes = tuple[Extent, Extent, Extent]  # of grid, block and cluster


@dataclass(frozen=True)
class Result:
    """Findings of a run, and how much it did: instructions dispatched (`steps`), and those times their lanes.

    `shared` and `sectors` tell what every access to shared and to global memory cost, in the order of the lines, if
    `count_banks` was asked for; `variables` what the module's global variables hold at the end; `written` the positions
    of arguments that were stored to; `notes` lines with quirks of ptxas and GPUs, if that check was asked for.
    """

    findings: tuple[Finding, ...]
    lane_instructions: int
    steps: int
    seconds: float
    shared: tuple[SharedAccess, ...] = ()
    sectors: tuple[GlobalAccess, ...] = ()
    variables: Mapping[str, bytes] = field(default_factory=dict)
    written: tuple[int, ...] = ()
    notes: tuple[Note, ...] = ()


Attach = Callable[[Machine], Iterable[Watcher]]
# A context variable and no option: a debugger has to reach launches of any call, also of one that takes no options.
_WATCHED: ContextVar[tuple[Attach, frozenset[str]] | None] = ContextVar("watched", default=None)


@contextmanager
def watch_launches(attach: Attach, checks: Iterable[str] = ()) -> Iterator[None]:
    """Add checks, and the watchers that `attach` makes for each wave, to all emulator launches inside.

    `attach` is asked before the code is bound. Its watchers come last: they see what the checks have reported by then.
    """
    token = _WATCHED.set((attach, frozenset(checks)))
    try:
        yield
    finally:
        _WATCHED.reset(token)


@dataclass(frozen=True)
class _Request:
    """A kernel with arguments and geometry, checked; `EmulatorOptions` say how it runs.

    Attributes:
        sizes: of grid, block and cluster.
        uninitialised, after_wait, programmatic, names: as in `run`.
    """

    module: Module
    kernel: Entry
    args: Sequence[Argument]
    sizes: Sizes
    shared_bytes: int
    uninitialised: Collection[int]
    after_wait: Collection[int]
    programmatic: bool
    names: Sequence[str]


def run(
    module: Module | str,
    entry: str | None,
    args: Sequence[Argument],
    *,
    grid: Dim3,
    block: Dim3,
    shared_bytes: int = 0,
    cluster: Dim3 = (1, 1, 1),
    uninitialised: Collection[int] = (),
    after_wait: Collection[int] = (),
    programmatic: bool = False,
    names: Sequence[str] = (),
    options: EmulatorOptions | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Result:
    """Run a kernel of a parsed module (or of PTX text).

    Args:
        module: the kernel's module, or PTX text.
        entry: the kernel's name; may be None if the module has one kernel.
        args: arguments in launch order. A C-contiguous array is a global buffer, modified in place once the kernel has
            ended; a `TensorMap` is one over such an array; a NumPy scalar is passed by value and has exactly the
            parameter's size; bytes are a struct passed by value.
        grid, block, cluster: sizes in x, y, z.
        shared_bytes: dynamic shared memory.
        uninitialised: positions in `args` of buffers whose contents count as never written.
        after_wait: positions of buffers that the kernel before on the stream may still write when this one begins
            (`race_pdl`).
        programmatic: whether this kernel may begin before the one before it has ended. Of effect only in a `chain`,
            which knows that kernel.
        names: of the arguments, for messages; by default those of the parameters in PTX.
        options: how to run it.
        keywords: fields of `EmulatorOptions`, in place of those of `options`.

    Raises:
        ArgumentError: before anything runs.
        EmulationError: `UnknownInstruction`, `MemoryFault`, `Deadlock` and others, with the place in the source. No
            array is modified then.
    """
    start_seconds = time.perf_counter()
    options = EmulatorOptions.combine(options, keywords)
    module = parse(module) if isinstance(module, str) else module
    kernel = kernel_named(module, entry)
    kernel = leave_out(kernel, options.without) if options.without else kernel
    sizes = size_of("grid", grid), size_of("block", block), cluster_of(kernel, size_of("cluster", cluster))
    chain = current()
    if chain is not None:
        options = chain.apply(options)
    attach_checks, checks = _WATCHED.get() or (None, frozenset())
    options = options.add_checks(checks)
    check_launch(kernel, sizes, shared_bytes)
    check_arguments(kernel, args)
    request = _Request(module, kernel, args, sizes, shared_bytes, uninitialised, after_wait, programmatic, names)

    def attempt(tracked: frozenset[int]) -> tuple[LaunchState, Buffers, EmulationError | None]:
        launch, buffers = _prepare(request, options, tracked)
        if chain is not None:
            if "proxy" in options.checks:
                launch.unfenced = np.zeros(launch.memory.size, np.uint32)
            chain.enter(launch, buffers, uninitialised)
        try:
            _run_waves(launch, attach_checks)
        except EmulationError as error:
            return launch, buffers, error
        return launch, buffers, None

    try:
        launch, buffers, error = attempt(frozenset())
        while not launch.suspects <= launch.tracked:  # their values may not matter: run again and track these
            launch, buffers, error = attempt(launch.tracked | launch.suspects)
    except MemoryError:
        nbytes = sum(array.nbytes for array in map(array_of, args) if array is not None)
        rule = "has to fit this machine; checks take many times the bytes of all arrays, fewer checks less"
        raise ArgumentError("memory", rule, f"{nbytes} bytes of arrays") from None
    sys.stdout.write("".join(launch.output))
    if error is not None:
        first_by_kind = {finding.kind: finding for finding in reversed(launch.findings.by_key.values())}  # of each kind
        if not first_by_kind:
            raise error
        earlier_findings = "".join(f"\n  found before that: {finding}" for finding in first_by_kind.values())
        raise type(error)(f"{error}{earlier_findings}") from error
    if chain is not None:
        chain.leave(launch, buffers)
    for array, region in buffers.values():
        if region.written:
            array.reshape(-1).view(np.uint8)[:] = launch.memory.arena[region.start : region.end]
    seconds = time.perf_counter() - start_seconds
    shared_accesses = tuple(sorted(launch.shared_accesses.values(), key=lambda access: access.line))
    sectors = tuple(sorted(launch.global_accesses.values(), key=lambda access: access.line))
    starts = {v.name: (launch.addresses[id(v)] - BASE, v.size) for v in module.variables if v.space == "global"}
    variables = {name: launch.memory.arena[start : start + size].tobytes() for name, (start, size) in starts.items()}
    findings = tuple(launch.findings.by_key.values())
    written_positions = tuple(position for position, (_, region) in buffers.items() if region.written)
    notes = notes_of(launch.entry) if "quirks" in launch.options.checks else ()
    return Result(
        findings,
        launch.lane_instructions,
        launch.steps,
        seconds,
        shared_accesses,
        sectors,
        variables,
        written_positions,
        notes,
    )


# Arguments, each refused by name where it cannot be


def array_of(argument: Argument) -> Array | None:
    """Return the buffer that an argument points to: an array, or that of a tensor map; None for a number."""
    if isinstance(argument, TensorMap):
        array: Array = argument.array
        return array
    return argument if isinstance(argument, np.ndarray) else None


def kernel_named(module: Module, name: str | None) -> Entry:
    """Return the module's kernel of that name; None stands for its only one."""
    if name is None and len(module.entries) == 1:
        return next(iter(module.entries.values()))
    if not module.entries:
        raise ArgumentError("entry", f"there is no kernel in {module.path} for {module.target or 'its target'}", name)
    if name not in module.entries:
        raise ArgumentError("entry", f"has to be one of {', '.join(module.entries)}", name)
    return module.entries[name]


def size_of(name: str, size: Dim3) -> Extent:
    """Complete one to three positive integers to three."""
    extents = tuple(size) if isinstance(size, tuple | list) else (size,)
    if not 1 <= len(extents) <= 3 or any(not is_integer(size) or size < 1 for size in extents):
        raise ArgumentError(name, "one to three positive integers", repr(size))
    x, y, z = (*map(int, extents), 1, 1)[:3]
    return x, y, z


def cluster_of(kernel: Entry, requested: Extent) -> Extent:
    """Return the cluster's size: the requested one, or the one that the kernel was compiled for."""
    required_cluster = kernel.directives.get("reqnctapercluster")
    if not required_cluster:
        return requested
    x, y, z = (*required_cluster, 1, 1)[:3]
    if requested not in ((1, 1, 1), (x, y, z)):
        raise ArgumentError("cluster", f"has to be {(x, y, z)}, by .reqnctapercluster of {kernel.name}", requested)
    return x, y, z


def check_launch(kernel: Entry, sizes: Sizes, shared_bytes: int) -> None:
    """Refuse a launch that the kernel or any GPU would refuse."""
    grid, block, cluster = sizes
    if any(blocks > limit for blocks, limit in zip(grid, MAX_BLOCKS, strict=True)):
        raise ArgumentError("grid", f"has at most {MAX_BLOCKS} blocks", grid)
    threads = prod(block)
    if threads > 1024 or block[2] > 64:
        raise ArgumentError("block", "has at most 1024 threads, and 64 in z", block)
    required_threads = kernel.directives.get("reqntid")
    if required_threads and (*required_threads, 1, 1)[:3] != block:
        raise ArgumentError("block", f"has to be {required_threads}, by .reqntid of {kernel.name}", block)
    if kernel.max_threads is not None and threads > kernel.max_threads:
        raise ArgumentError("block", f"has at most {kernel.max_threads} threads, by .maxntid of {kernel.name}", block)
    if prod(cluster) > LARGEST_CLUSTER:
        raise ArgumentError("cluster", f"has at most {LARGEST_CLUSTER} blocks", cluster)
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise ArgumentError("cluster", f"has to divide the grid {grid}", cluster)
    if not is_integer(shared_bytes) or shared_bytes < 0 or kernel.dynamic_offset + shared_bytes > 227 * 1024:
        rule = "has to fit 227 KB with the kernel's static shared memory"
        raise ArgumentError("shared_bytes", rule, repr(shared_bytes))


def check_arguments(kernel: Entry, args: Sequence[Argument]) -> None:
    """Raise ArgumentError for arguments whose number, types or sizes do not match the parameters."""
    if len(args) != len(kernel.params):
        raise ArgumentError("args", f"{kernel.name} takes {len(kernel.params)} arguments", len(args))
    for position, (argument, param) in enumerate(zip(args, kernel.params, strict=True)):
        name, array = f"argument {position} ({param.name})", array_of(argument)
        if array is not None:
            _check_array(name, array)
        if array is not None and isinstance(argument, TensorMap) and param.size != TENSOR_MAP_BYTES:
            rule = f"is {param.size} bytes by value, not the {TENSOR_MAP_BYTES} of a tensor map"
            raise ArgumentError(name, rule, f"tensor map of {array.dtype}")
        if isinstance(argument, np.ndarray) and param.size != 8:
            raise ArgumentError(name, f"is {param.size} bytes by value, not a buffer", f"array of {argument.dtype}")
        if isinstance(argument, np.generic | bytes):
            size = len(argument) if isinstance(argument, bytes) else argument.dtype.itemsize
            if size != param.size:
                raise ArgumentError(name, f"has to have {param.size} bytes", f"{type(argument).__name__} of {size}")
        elif array is None:
            rule = "has to be an array, a tensor map, a NumPy scalar or bytes"
            raise ArgumentError(name, rule, type(argument).__name__)


def _check_array(name: str, array: Array) -> None:
    if not isinstance(array, np.ndarray):
        raise ArgumentError(name, "has to be a NumPy array", type(array).__name__)
    if not array.flags.c_contiguous:
        raise ArgumentError(name, "has to be C-contiguous", f"strides {array.strides}")
    if array.dtype.kind not in "biufcV" or array.dtype.hasobject or not array.dtype.isnative:
        raise ArgumentError(name, "has to hold numbers in native byte order", array.dtype.str)


# Waves


def _run_waves(launch: LaunchState, attach: Attach | None) -> None:
    """Run the grid."""
    tracks_waves = "race" in launch.options.checks and prod(launch.grid) > len(launch.shared_windows)
    waves = Waves(launch.memory.size) if tracks_waves else None
    with np.errstate(all="ignore"):  # infinities and NaNs are what kernels compute
        for blocks in _waves(launch):
            machine = Machine(launch, blocks)
            machine.watchers = tuple(_watchers(machine, waves))
            machine.watchers += tuple(attach(machine)) if attach else ()
            machine.run()
            vars(machine).clear()  # its steps refer to it: without that, only the garbage collector would free it


def _watchers(machine: Machine, waves: Waves | None) -> Iterator[Watcher]:
    """Make the watchers that the options ask for, in the order in which they must run.

    Their order is semantics. The machine tells them of every event in this order, which is also the order of findings
    about one event. Of two that wrap an instruction (`wrap_handler`) the later one is outside and sees it first.
    """
    options, checks = machine.launch.options, machine.launch.options.checks
    load_taint = LoadTaint(machine) if machine.launch.tracked else None
    if options.step_clock:
        yield StepClock(machine)
    if options.count_banks:
        yield BankConflicts(machine)
        yield Sectors(machine)
    if "lanes" in checks:
        yield PackedLanes(machine)
    if "narrow" in checks:
        yield Narrowing(machine)
    if "float" in checks:
        yield FloatValues(machine)
    if "init" in checks:
        yield Initialised(machine, load_taint)
    if "overrun" in checks and shared_arrays_of(machine.launch.entry):
        yield SharedArrays(machine)
    if "divergence" in checks and flow_of(machine.launch.entry).aligned:
        yield Divergence(machine)
        if any(map(is_syncthreads, machine.code)):
            yield WholeBlocks(machine)
    is_asynchronous = machine.launch.unfenced is not None or (
        bool(checks & {"async", "proxy"}) and machine.launch.entry.is_asynchronous
    )
    uses_mbarriers = "async" in checks and machine.launch.entry.uses("mbarrier.init")
    needs_order = is_asynchronous or uses_mbarriers
    order = Races(machine, load_taint) if "race" in checks else HappensBefore(machine) if needs_order else None
    in_flight_check = InFlight(machine, order, strict="proxy" in checks) if is_asynchronous and order else None
    if order:
        # Before `order`: it reads what the arrivals of a phase made known, which `order` drops once that is complete.
        if uses_mbarriers:
            yield MBarrierPhases(machine, order)
        if "race" in checks and counts_threads(machine.launch.entry):
            yield BarrierGenerations(machine, order)
        yield order
    if load_taint:
        load_taint.order = order
        yield load_taint
    # What follows asks `order` what lanes know, so `order` has to hear of an event first: an access that acquires is
    # judged by what it has acquired.
    if isinstance(order, Races):
        order.busy = in_flight_check.busy if in_flight_check else None
        if machine.cluster_memory.size > 1:
            yield RaceClusterExit(machine, order)
        if machine.launch.entry.uses(WAIT) or machine.launch.after_wait or machine.launch.programmatic:
            yield RacePdl(machine, order)
        if waves:
            yield RaceWaves(machine, order, waves, load_taint)
    # After `order`, which judges a new copy by the bytes that older ones still move: its own must not be `busy` yet.
    if in_flight_check:
        yield in_flight_check
    if uses_mbarriers:
        yield MBarrierLife(machine)
    if in_flight_check and machine.launch.entry.uses("wgmma"):
        yield RegistersInUse(machine)


def _prepare(request: _Request, options: EmulatorOptions, tracked: frozenset[int]) -> tuple[LaunchState, Buffers]:
    """Lay out memory and fill it."""
    module, kernel, args = request.module, request.kernel, request.args
    memory = Memory()
    buffers: Buffers = {}
    regions: dict[tuple[int, int], Region] = {}  # an array that is passed twice is one buffer
    for position, (argument, param) in enumerate(zip(args, kernel.params, strict=True)):
        array = array_of(argument)
        if array is not None:
            address_and_size = array.ctypes.data, array.nbytes
            if address_and_size not in regions:
                label = request.names[position] if request.names else param.name
                name = f"argument {position} ({label})"
                regions[address_and_size] = memory.reserve(name, array.nbytes, array.flags.writeable)
            buffers[position] = array, regions[address_and_size]
    fixed_variables = [
        (v, memory.reserve(f"{v.space} {v.name}", v.size, v.space == "global")) for v in module.variables
    ]
    params = memory.reserve("the parameters", kernel.param_bytes, writable=False)
    addresses = {id(variable): region.start + BASE for variable, region in fixed_variables}
    addresses.update({id(param): params.start + param.offset + BASE for param in kernel.params})
    launch = LaunchState(
        kernel,
        memory,
        *request.sizes,
        request.shared_bytes,
        addresses,
        args,
        options=options,
        after_wait=[buffers[position][1].start for position in request.after_wait if position in buffers],
        programmatic=request.programmatic,
        tracked=tracked,
    )
    per_cluster = prod(launch.cluster)  # a wave has as many whole clusters as fit
    count = min(max(1, WAVE_LANES // (launch.stride * per_cluster)) * per_cluster, prod(launch.grid))
    windows = [
        memory.reserve(f"shared memory of block {i} of the wave", launch.window_bytes, True, ALIGN, kernel.shared)
        for i in range(count)
    ]
    launch.shared_windows = np.array([window.start for window in windows], np.int64)
    launch.local_window = memory.reserve("local memory", count * launch.stride * launch.local_pitch).start
    memory.allocate()
    for array, region in buffers.values():
        memory.arena[region.start : region.end] = array.reshape(-1).view(np.uint8)
    for variable, region in fixed_variables:
        if variable.initial:
            memory.arena[region.start : region.end] = np.frombuffer(variable.initial, np.uint8)
        for offset, word in variable.pointers.items():
            if isinstance(word, Symbol):
                word = addresses[id(word.variable)] + word.offset
            memory.view[8][(region.start + offset) // 8] = FUNCTION if isinstance(word, Function) else word
    for position, (argument, param) in enumerate(zip(args, kernel.params, strict=True)):
        offset, start = params.start + param.offset, buffers[position][1].start if position in buffers else 0
        if isinstance(argument, TensorMap):  # its bytes are opaque; who asks for it is given the map itself
            launch.tensor_maps[offset] = argument, start
            continue
        address = np.uint64(start + BASE) if isinstance(argument, np.ndarray) else argument
        raw = address if isinstance(address, bytes) else address.tobytes()
        memory.arena[offset : offset + param.size] = np.frombuffer(raw, np.uint8)
    if "init" in options.checks:
        launch.unwritten = np.zeros(memory.size, bool)  # zeros that nobody touches cost no memory
        for position in request.uninitialised:
            region = buffers[position][1]
            launch.unwritten[region.start : region.end] = True
    return launch, buffers


def _waves(launch: LaunchState) -> Iterator[Array]:
    """Yield the block indices [blocks, 3] of each wave, cluster by cluster.

    Shared and local memory are poisoned before each.
    """
    clusters_per_axis = np.array(launch.grid) // launch.cluster
    per_cluster, total_blocks, arena = prod(launch.cluster), prod(launch.grid), launch.memory.arena
    local_region = launch.memory.regions[-1]
    for first in range(0, total_blocks, len(launch.shared_windows)):
        block = np.arange(first, min(first + len(launch.shared_windows), total_blocks))
        corner = np.stack(np.unravel_index(block // per_cluster, clusters_per_axis, order="F"), axis=1)
        rank_in_cluster = np.stack(np.unravel_index(block % per_cluster, launch.cluster, order="F"), axis=1)
        for start in launch.shared_windows if launch.window_bytes else ():
            arena[start : start + launch.window_bytes] = POISON
        arena[local_region.start : local_region.end] = POISON
        yield corner * launch.cluster + rank_in_cluster


def __getattr__(name: str) -> Any:
    """Look up a name that has moved."""
    return _moved.name_in(__name__, name)
