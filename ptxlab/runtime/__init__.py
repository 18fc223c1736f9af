"""Runs kernels: any PTX or CUDA file by `load`, a spec's by `run_spec`, on the GPU or in the emulator."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np

from ptxlab import emulator, gpu, mangled, toolchain
from ptxlab.emulator import EmulatorOptions, OptionKeywords
from ptxlab.errors import ArgumentError, UnavailableError, UnnamedKernel
from ptxlab.io.dynamo import break_graph
from ptxlab.runtime import arguments, signature
from ptxlab.runtime.arguments import (
    accept,
    accept_for_parameter,
    check_variant,
    is_on_device,
    positions,
    variant_constants,
)
from ptxlab.runtime.backends import choose_backend
from ptxlab.runtime.signature import Parameter
from ptxlab.sources import Source, cuda_entries, split_target
from ptxlab.spec import KernelSpec, Launch, Sizes
from ptxlab.spec.dtypes import dtype_in, storage
from ptxlab.toolchain.kernels import declared_kernels, find_kernel, targets

_EMULATED_ARCH, _WAITING_ARCH = "sm_80", "sm_90"  # the lowest that have what CUDA sources use, and griddepcontrol


@dataclass(frozen=True)
class Outcome:
    """Outputs, findings and costs of one launch.

    Attributes:
        backend: `"gpu"` or `"emulator"`.
        outputs: arrays that the kernel wrote, by argument name, of the caller's own kind (NumPy, CuPy, PyTorch ...).
        findings: what the emulator's checks report; empty on the GPU.
        lane_instructions: executed by the emulator; 0 on the GPU.
        shared, sectors: what accesses to shared and global memory cost, if the emulator was asked to `count_banks`.
        written: those of `outputs` that the kernel stored to; on the GPU those that are no pointers to const.
        notes: lines that ptxas or a GPU treats otherwise than the PTX manual says, by the emulator's check `quirks`.
    """

    backend: str
    outputs: dict[str, Any]
    findings: tuple[emulator.Finding, ...] = ()
    lane_instructions: int = 0
    shared: tuple[emulator.SharedAccess, ...] = ()
    sectors: tuple[emulator.GlobalAccess, ...] = ()
    written: tuple[str, ...] = ()
    notes: tuple[emulator.Note, ...] = ()


@dataclass(frozen=True)
class Kernel:
    """An entry of a PTX or CUDA source, ready to launch on either backend. Made by `load`.

    `arch` is the lowest architecture that it runs on, or with a letter (`sm_90a`) the only one; None: on any.
    `checks` are the emulator's for every call that does not ask for others. What `waits` for the kernel before it is
    emulated as on Hopper, the first that can, unless `gpu.compiling_for` says otherwise. `origin` is the file whose
    lines PTX of another compiler names. `entry` is the symbol; `name` is what people call it.
    """

    source: Source
    entry: str
    defines: Mapping[str, int] = field(default_factory=dict)
    arch: str | None = None
    checks: frozenset[str] = frozenset()
    waits: bool = False
    origin: str = ""

    @classmethod
    def of(cls, spec: KernelSpec, source: Source, config: Mapping[str, int]) -> "Kernel":
        """Make the kernel of a spec, compiled with these constants."""
        return cls(source, spec.name, dict(config), spec.arch, waits=bool(spec.after_wait))

    @cached_property
    def name(self) -> str:
        """The name as C++ has it, `ns::add<float, 3>`; of `extern "C"` the symbol."""
        return mangled.name_of(self.entry)

    @cached_property
    def module(self) -> emulator.Module:
        """The PTX as the emulator parses it: the file itself, or what NVRTC makes of a `.cu`.

        An architecture that is stated has to have all instructions; without one, a `.cu` is for one that has them.
        """
        if self.source.language == "ptx":
            module = _parse_cached(self.source.text, self.source.path, self.origin or _origin_of(self.source.text))
            emulator.require_target(module)
            return module
        if reason := gpu.why_not_compiled(self.arch, exact=(self.arch or "0")[-1].isalpha()):
            raise UnavailableError(f"{self.name}: {reason}")
        arch = self.compiled_arch
        image = toolchain.compile_cuda(self.source, arch, output="ptx", defines=self.defines)
        module = _parse_cached(image.data.decode(), f"PTX of {self.source.path}", self.source.path)
        if self.arch:
            emulator.require_target(module)
        return module

    @property
    def compiled_arch(self) -> str:
        """The architecture that a `.cu` is compiled for when it is emulated."""
        return gpu.target() or max(self.arch or "", _WAITING_ARCH if self.waits else _EMULATED_ARCH, key=_arch_number)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters in launch order; for CUDA C++ read off the signature."""
        return tuple(parameter.name for parameter in self._declared_parameters)

    def parameter(self, name: str) -> str:
        """Return the short name of a PTX parameter: `param_0` for `_Z3addPf_param_0` or `add_param_0`.

        Any other name stays as it is.
        """
        short_names = [name.removeprefix(f"{kernel}_") for kernel in (self.entry, self.name)]
        is_longer = self.source.language == "ptx" and name not in self.parameters
        return (
            next((short_name for short_name in short_names if short_name in self.parameters), name)
            if is_longer
            else name
        )

    @cached_property
    def signature(self) -> tuple[Parameter, ...]:
        """Type of each parameter as the source declares it; where the source does not, as its PTX does."""
        if any(parameter.is_pointer is None for parameter in self._declared_parameters):
            return signature.add_struct_sizes(self._declared_parameters, self.module.entries[self.entry])
        return self._declared_parameters

    @cached_property
    def _declared_parameters(self) -> tuple[Parameter, ...]:
        if self.source.language == "ptx":
            return signature.ptx_parameters(self.module.entries[self.entry])
        if mangled.parameters_of(self.entry) is not None:
            declarations = declared_kernels(self.source, self.compiled_arch, self.defines)
            return signature.mangled_parameters(self.entry, declarations)
        return signature.cuda_parameters(self.source.text, self.entry, self._names_of_extern_c(), self.defines)

    def _names_of_extern_c(self) -> tuple[str, ...]:
        written_names = cuda_entries(self.source.text)
        if self.entry in written_names:
            return written_names[self.entry]
        declared = declared_kernels(self.source, self.compiled_arch, self.defines)  # made by a macro, or in a header
        parameter_names = [kernel.parameter_names for kernel in declared if kernel.name == self.entry]
        params = self.module.entries[self.entry].params
        return parameter_names[0] if parameter_names else tuple(f"arg{position}" for position in range(len(params)))

    @cached_property
    def varies(self) -> bool:
        """True if the schedule can change the result: an operation is asynchronous, relaxed, volatile or a release."""
        entry = self.module.entries[self.entry]
        strong_orders = {"relaxed", "volatile", "release"}
        return entry.is_asynchronous or any(strong_orders & {*i.opcode.split(".")} for i in entry.instructions)

    def arguments(self, args: Sequence[Any]) -> list[Any]:
        """Convert arguments to what `launch` takes: NumPy or CuPy arrays on the same memory, numbers as NumPy scalars.

        Raises ArgumentError for another number of arguments, or for one that its parameter does not take.
        """
        names = self.parameters
        if len(args) != len(names):
            raise ArgumentError(f"{self.name}: args", f"{len(names)} arguments ({', '.join(names)})", len(args))
        return [
            accept_for_parameter(f"{self.name}: {p.name}", p, arg) for p, arg in zip(self.signature, args, strict=True)
        ]

    @break_graph
    def launch(
        self,
        args: Sequence[Any],
        launch: Launch,
        *,
        backend: str,
        written: Collection[int] | None = None,
        uninitialised: Collection[int] = (),
        after_wait: Collection[int] = (),
        programmatic: bool = False,
        options: EmulatorOptions | None = None,
        **keywords: Unpack[OptionKeywords],
    ) -> emulator.Result | None:
        """Launch with arguments in order (arrays, tensor maps over arrays, NumPy scalars); arrays are written in place.

        `written` are positions of the NumPy arrays that the GPU has to give back (None: all). All that follows it is
        for the emulator alone, as in `emulator.run`.
        """
        options = EmulatorOptions.combine(options, keywords)
        if 0 in launch.grid:
            return None
        if backend == "gpu":
            gpu.launch(gpu.load(self.source, self.entry, defines=self.defines), args, launch, written=written)
            return None
        if gpu.why_not_compiled("sm_90"):  # before Hopper a launch follows the one before it in any case
            after_wait, programmatic = (), False
        return emulator.run(
            self.module,
            self.entry,
            args,
            grid=launch.grid,
            block=launch.block,
            shared_bytes=launch.shared_bytes,
            cluster=launch.cluster,
            uninitialised=uninitialised,
            after_wait=after_wait,
            programmatic=programmatic,
            names=self.parameters,
            options=options,
        )

    @break_graph
    def __call__(
        self,
        *args: Any,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        shared_bytes: int = 0,
        cluster: int | tuple[int, ...] = 1,
        backend: str | None = None,
        after_wait: Collection[str] = (),
        uninitialised: Collection[str] = (),
        options: EmulatorOptions | None = None,
        **keywords: Unpack[OptionKeywords],
    ) -> Outcome:
        """Launch on arrays (of any library), tensor maps and numbers in the order of the parameters.

        `kernel[grid, block](*args)` and `kernel[grid, block, shared_bytes](*args)` are the same. Arrays are written in
        place; the outcome's `outputs` are these, by parameter name. Where the source tells a parameter's type
        (`signature`), an array of other elements is refused, and a Python number becomes what the parameter is; else
        numbers are NumPy scalars, as wide as the parameter.

        Args:
            args: the kernel's arguments.
            grid, block, cluster: sizes, in up to three axes.
            shared_bytes: dynamic shared memory.
            backend: `"gpu"`, `"emulator"`, or None: the GPU if there is one, else the emulator if that is quick enough.
            after_wait: names of parameters that the kernel may read only once it has waited for the one before it on
                the stream (griddepcontrol.wait), which the check for races looks at then.
            uninitialised: names of arrays whose contents count as never written, for the check `init`.
            options: how the emulator runs it; by default with the kernel's own `checks`.
            keywords: fields of `EmulatorOptions` (`checks`, `mode`, `seed`, `max_steps` ...), in place of those of
                `options`.
        """
        if options is None and self.checks and not (isinstance(backend, str) and backend == "gpu"):
            options = EmulatorOptions(checks=self.checks)
        options = EmulatorOptions.combine(options, keywords)
        names = self.parameters
        launch_arguments = self.arguments(args)
        positions_after_wait = positions(f"{self.name}: after_wait", after_wait, names)
        uninitialised_positions = positions(f"{self.name}: uninitialised", uninitialised, names)
        geometry = arguments.geometry(grid, block, shared_bytes, cluster)
        any_on_device = any(map(is_on_device, launch_arguments))
        backend = choose_backend(backend, self, geometry, on_device=any_on_device, checks=options.checks)
        emulation = self.launch(
            launch_arguments,
            geometry,
            backend=backend,
            after_wait=positions_after_wait,
            uninitialised=uninitialised_positions,
            options=options,
        )
        passed_arguments = zip(names, args, launch_arguments, strict=True)
        arrays = {
            n: a for n, a, placed in passed_arguments if hasattr(placed, "shape") and not isinstance(placed, np.generic)
        }
        if emulation is not None:
            written_names = [names[position] for position in emulation.written]
        else:
            written_names = [p.name for p in self.signature if not p.is_const]
        return _outcome(backend, arrays, emulation, [name for name in written_names if name in arrays])

    @break_graph
    def __getitem__(self, launch: tuple[Any, ...]) -> Callable[..., Outcome]:
        """Bind a geometry: `kernel[grid, block]` returns a callable that takes the arguments.

        Write `kernel[grid, block]` or `kernel[grid, block, shared_bytes]`.
        """
        if not isinstance(launch, tuple) or len(launch) not in (2, 3):
            raise ArgumentError(f"{self.name}: []", "kernel[grid, block] or kernel[grid, block, shared_bytes]", launch)
        return partial(self, **dict(zip(("grid", "block", "shared_bytes"), launch, strict=False)))


@break_graph
def load(
    source: str | Path | Source,
    entry: str | None = None,
    *,
    defines: Mapping[str, int] | None = None,
    arch: str | None = None,
    include: Sequence[str | Path] = (),
    std: str | None = None,
) -> Kernel:
    """Load any PTX or CUDA kernel, without a spec.

    Args:
        source: path of a `.ptx` or `.cu` file (`FILE:kernel` names the kernel too), the text itself, or a `Source`.
        entry: the kernel, as in C++ (`add`, `ns::add<float, 3>`, of overloads `scale(float*)`) or by its symbol; may be
            left out where the source has only one.
        defines: `-D` constants (CUDA C++ only).
        arch: the lowest architecture that the kernel runs on, or with a letter (`sm_90a`, for wgmma) the only one; the
            emulator runs what is compiled for it (CUDA C++ only: PTX names its own).
        include: further folders for `#include` (CUDA C++ only).
        std: the language, by default `c++17` (CUDA C++ only).

    Raises:
        FileError, SourceError, CompileError: the source cannot be read, parsed or compiled.
        ArgumentError: no such entry.
        UnavailableError: a source needs a compiler that is not here.
    """
    if isinstance(source, str) and entry is None and not arguments.is_text(source):
        source, entry = split_target(source)
    source = with_build(arguments.source_of(source), include, std)
    arguments.check_defines({} if defines is None else defines, arch)
    for name, setting in (("defines", defines), ("arch", arch)):
        if setting and source.language == "ptx":
            raise ArgumentError(name, "only for CUDA C++ sources", setting)
    if entry is not None and not isinstance(entry, str):
        raise ArgumentError(f"{source.path}: entry", "a kernel's name", repr(entry))
    arch = arch and toolchain.check_arch(arch)
    if source.language == "cu":
        source, symbol = find_kernel(source, entry or None, arch, defines or {})
        return Kernel(source, symbol, dict(defines or {}), arch)
    return Kernel(source, _ptx_entry(source, entry or None))


def with_build(source: Source, include: Sequence[str | Path] = (), std: str | None = None) -> Source:
    """Return the source with further folders for `#include` and another language standard.

    Raises ArgumentError if either is given for PTX.
    """
    if isinstance(include, str | Path) or not all(isinstance(folder, str | Path) for folder in include):
        raise ArgumentError("include", "a list of folders", repr(include))
    for name, setting in (("include", [*include]), ("std", std)):
        if setting and source.language == "ptx":
            raise ArgumentError(name, "only for CUDA C++ sources", setting)
    if not include and std is None:
        return source
    build = source.build
    return replace(source, build=replace(build, include=(*build.include, *map(str, include)), std=std or build.std))


def _ptx_entry(source: Source, name: str | None) -> str:
    """Find the symbol of a kernel of PTX."""
    entries = list(emulator.parse(source.text, source.path).entries)
    symbols = entries if name is None else [name] if name in entries else mangled.find_symbols(entries, name)
    if len(symbols) == 1:
        return symbols[0]
    names = mangled.distinct_names(symbols or entries)
    if name is None and names:
        raise UnnamedKernel(source.path, ", ".join(targets(source, names)))
    entry_names = ", ".join(names)
    raise ArgumentError(
        f"{source.path}: entry",
        f"one of {entry_names}" if entry_names else "a kernel (.visible .entry)",
        name or "nothing",
    )


@dataclass(frozen=True, eq=False)
class SpecLaunch:
    """A launch of a spec's kernel, with all that its arrays and sizes decide. Made by `solve_launch`.

    Attributes:
        kernel: the kernel, with its constants.
        geometry: grid, block, shared memory and cluster.
        sizes: every size of the spec.
        inputs, out: the caller's arrays by argument name.
        arrays: the same arrays as NumPy's or CuPy's, on the same memory.
    """

    spec: KernelSpec
    kernel: Kernel
    geometry: Launch
    sizes: Sizes
    inputs: Mapping[str, Any]
    out: Mapping[str, Any]
    arrays: Mapping[str, Any]

    @property
    def bfloat16_names(self) -> Set[str]:
        """Names of the arrays whose elements, uint16, are bits of bfloat16."""
        return {arg.name for arg in self.spec.args if dtype_in(arg.dtype, self.kernel.defines) == "bfloat16"}

    def copy_arrays(self) -> Self:
        """Return the same launch on copies of all arrays, so that a run leaves these as they are."""
        copies = {name: array.copy() for name, array in self.arrays.items()}
        inputs, out = ({name: copies[name] for name in group} for group in (self.inputs, self.out))
        return replace(self, inputs=inputs, out=out, arrays=copies)

    def run(
        self, *, backend: str | None = None, programmatic: bool = False, options: EmulatorOptions | None = None
    ) -> Outcome:
        """Choose the backend, allocate the outputs that were left out, and launch (`run_spec`)."""
        spec, kernel, arrays = self.spec, self.kernel, dict(self.arrays)
        options = EmulatorOptions.combine(options, {})
        any_on_device = any(map(is_on_device, arrays.values()))
        backend = choose_backend(backend, kernel, self.geometry, on_device=any_on_device, checks=options.checks)
        for arg in spec.args:
            if arg.role in ("out", "scratch") and arg.name not in arrays:
                dtype = storage(dtype_in(arg.dtype, kernel.defines))
                arrays[arg.name] = (gpu.empty if any_on_device else np.zeros)(arg.resolve(self.sizes), dtype)
        # Of nothing there is no tensor map, nor anything to launch.
        args = [] if 0 in self.geometry.grid else spec.arguments(arrays, {**self.sizes, **kernel.defines})
        emulation = kernel.launch(
            args,
            self.geometry,
            backend=backend,
            written=[i for i, a in enumerate(spec.args) if a.role in ("out", "inout")],
            uninitialised=[i for i, a in enumerate(spec.args) if a.role in ("out", "scratch")],
            after_wait=[i for i, a in enumerate(spec.args) if a.name in spec.after_wait],
            programmatic=programmatic,
            options=options,
        )
        first_input = next(iter(self.inputs.values()))
        dtypes = {a.name: dtype_in(a.dtype, kernel.defines) for a in spec.outputs}
        callers = {**self.inputs, **self.out}
        outputs = {
            n: callers[n] if n in callers else gpu.like(arrays[n], first_input, dtype) for n, dtype in dtypes.items()
        }
        return _outcome(backend, outputs, emulation)


def solve_launch(
    spec: KernelSpec,
    source: Source,
    inputs: Mapping[str, Any],
    *,
    sizes: Sizes | None = None,
    out: Mapping[str, Any] | None = None,
    unchecked: bool = False,
    config: Mapping[str, int] | None = None,
    overrides: Mapping[str, int] | None = None,
) -> SpecLaunch:
    """Check a spec's arrays, and solve for its sizes, constants and geometry. Nothing is compiled or launched.

    The arguments are those of `run_spec`.
    """
    out = out or {}
    written_names = [a.name for a in spec.args if a.role in ("out", "inout", "scratch")]
    for label, names, passed_arrays in (
        ("arguments", [a.name for a in spec.inputs], inputs),
        ("out", written_names, out),
    ):
        if unknown_names := sorted(set(passed_arrays) - set(names)):
            raise ArgumentError(f"{spec.name}: {label}", ", ".join(sorted(names)), unknown_names[0])
    callers = {**inputs, **out}
    if missing_names := sorted(a.name for a in spec.inputs if a.name not in callers and not a.optional):
        raise ArgumentError(f"{spec.name}: {missing_names[0]}", "must be given", "nothing")
    arrays = {n: accept(spec, spec.arg(n), a) for n, a in callers.items()}
    all_sizes = spec.sizes_of({n: tuple(a.shape) for n, a in arrays.items()}, sizes)
    if not unchecked and not any(is_on_device(arrays[n]) for n in inputs):
        spec.check_values({n: arrays[n] for n in inputs}, all_sizes)
    kernel = Kernel.of(spec, source, config or variant_constants(spec, all_sizes, arrays, overrides or {}))
    check_variant(spec, kernel.defines, arrays)
    geometry = spec.launch({**all_sizes, **kernel.defines})
    return SpecLaunch(spec, kernel, geometry, all_sizes, inputs, out, arrays)


@break_graph
def run_spec(
    spec: KernelSpec,
    source: Source,
    inputs: Mapping[str, Any],
    *,
    sizes: Sizes | None = None,
    out: Mapping[str, Any] | None = None,
    backend: str | None = None,
    unchecked: bool = False,
    config: Mapping[str, int] | None = None,
    wanted: Mapping[str, int] | None = None,
    programmatic: bool = False,
    options: EmulatorOptions | None = None,
    **keywords: Unpack[OptionKeywords],
) -> Outcome:
    """Run a spec's kernel from one of its sources. Everything is checked before anything is launched, but for the
    values of arrays on a device: looking at them would wait for it.

    Args:
        spec: the kernel.
        source: which of its sources.
        inputs: arrays by argument name: NumPy, CuPy, or anything with DLPack. NumPy and CuPy have no bfloat16: their
            arrays hold its bits as uint16.
        sizes: sizes that no shape tells.
        out: arrays to write into, by argument name; by default allocated; what is read and written may be here.
        backend: `"gpu"`, `"emulator"`, or None: the GPU if there is one, else the emulator if that is quick enough.
        unchecked: admit values that break the value rules (to look at overflow).
        config: `-D` constants; by default those that the spec chooses for the sizes, dtypes as the arrays have them.
        wanted: some of the constants, in the place of what the spec chooses.
        programmatic: whether it may begin before the launch before it has ended, in a chain of the emulator
            (`emulator.chain`); of no effect elsewhere.
        options: how the emulator runs it.
        keywords: fields of `EmulatorOptions` (`checks`, `mode`, `seed`, `max_steps` ...), in place of those of
            `options`.
    """
    options = EmulatorOptions.combine(options, keywords)
    launch = solve_launch(
        spec, source, inputs, sizes=sizes, out=out, unchecked=unchecked, config=config, overrides=wanted
    )
    return launch.run(backend=backend, programmatic=programmatic, options=options)


def _outcome(
    backend: str, outputs: dict[str, Any], emulation: emulator.Result | None, written: Sequence[str] | None = None
) -> Outcome:
    names = tuple(outputs if written is None else written)
    if emulation is None:
        return Outcome(backend, outputs, written=names)
    return Outcome(
        backend,
        outputs,
        emulation.findings,
        emulation.lane_instructions,
        emulation.shared,
        emulation.sectors,
        names,
        emulation.notes,
    )


def _origin_of(ptx: str) -> str:
    """Return the source whose lines a compiler's PTX names, relative to the present folder if it lies below it."""
    path = signature.origin_of(ptx)
    return path.removeprefix(f"{os.getcwd()}/")


_parse_cached = lru_cache(maxsize=32)(emulator.parse)  # a module is the same for every launch of it


def _arch_number(arch: str) -> int:
    return int("".join(filter(str.isdigit, arch)) or 0)
