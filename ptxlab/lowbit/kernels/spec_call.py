"""`SpecCall`: a public call that launches one or more specs once each, on a GPU or on host arrays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.lowbit.kernels.operation import CallArray, Prepared, Results, Scratch, WorkspaceRules
from ptxlab.lowbit.kernels.options import Options
from ptxlab.runtime import run_spec
from ptxlab.runtime.arguments import require_on_host
from ptxlab.runtime.plan import Plan
from ptxlab.sources import sources_of_kernel
from ptxlab.spec import KernelSpec
from ptxlab.spec.dtypes import storage


def why_not(spec: KernelSpec, backend: str | None) -> str | None:
    """Say why a kernel cannot run on a GPU here, or in the emulator as it is compiled there; None if it can."""
    ask = gpu.why_not_compiled if backend == "emulator" else gpu.why_not
    return ask(spec.arch, exact=spec.exact_arch)


def choose_spec(specs: Sequence[KernelSpec], sizes: Mapping[str, Any], backend: str | None) -> KernelSpec:
    """Choose the first, the fastest, that takes the sizes and runs on the GPU here, or without one in the emulator.

    Where none does, one whose own refusal says why: the last that runs but does not take the sizes, which names its
    limit; else one that takes the sizes but does not run.
    """
    accepting = [spec for spec in specs if _accepts_sizes(spec, sizes)] or specs[:1]
    is_for_gpu = backend != "emulator" and gpu.why_not(None) is None
    backends = ("gpu",) if is_for_gpu else tuple(name for name in ("gpu", "emulator") if backend in (None, name))
    running_specs = [spec for name in backends for spec in specs if why_not(spec, name) is None]
    if usable_specs := [spec for spec in running_specs if spec in accepting]:
        return usable_specs[0]
    # An older GPU is told the least that it would have to be.
    return running_specs[-1] if running_specs else accepting[-1 if is_for_gpu else 0]


def _accepts_sizes(spec: KernelSpec, sizes: Mapping[str, Any]) -> bool:
    try:
        spec.check_sizes(sizes)
    except ArgumentError:
        return False
    return True


@dataclass(frozen=True, eq=False)
class SpecCall:
    """Call that launches the kernels of given specs.

    Attributes:
        name: the public call's name, for errors.
        specs: the kernels that it launches, in order.
        operands: inputs and results under the specs' argument names; the call allocates results that are None.
        sizes: the sizes of all specs.
        dtype: dtype of the floats, selected by the specs' constants (IN, OUT).
        options: the caller's; a `programmatic` launch of a kernel that does not wait follows the one before it.
        check_values: raises ArgumentError for values of host arrays (by name, NumPy) that the call must not be given.
        memory: what the kernels need on a GPU besides operands and results.
        zero_buffers: names of the buffers that every call finds and leaves at 0.
        workspace_rules: for errors; None where the kernels need no memory.

    Raises ArgumentError for sizes that a spec does not take.
    """

    name: str
    specs: tuple[KernelSpec, ...]
    operands: tuple[CallArray, ...]
    sizes: dict[str, Any]
    dtype: str
    options: Options
    check_values: Callable[[dict[str, np.ndarray]], None] | None = None
    memory: tuple[Scratch, ...] = ()
    zero_buffers: tuple[str, ...] = ()
    workspace_rules: WorkspaceRules | None = None

    def __post_init__(self) -> None:
        for spec in self.specs:
            try:
                spec.check_sizes(self.sizes)
            except ArgumentError as error:
                raise ArgumentError(self.name, error.rule, error.value) from None
        for operand in self.operands:
            if operand.array is None and operand.name not in self.written:
                raise ArgumentError(operand.label, f"an array {list(operand.shape)} of {operand.dtype}", "NoneType")

    @cached_property
    def written(self) -> set[str]:
        """Names of the arrays that the specs write."""
        return {arg.name for spec in self.specs for arg in spec.outputs}

    @property
    def key(self) -> tuple[Any, ...]:
        """Names, sizes and dtype that select the compiled kernels, besides options."""
        return (*(spec.name for spec in self.specs), *self.sizes.values(), self.dtype)

    @property
    def is_empty(self) -> bool:
        """True if nothing would be written: without tokens there may still be offsets."""
        return not any(prod(operand.shape) for operand in self.operands if operand.name in self.written)

    def config(self, spec: KernelSpec) -> dict[str, int]:
        """Return the constants of the variant of a spec."""
        floats = {name: dtypes.index(self.dtype) for name, dtypes in spec.by_variant.items() if self.dtype in dtypes}
        return {**spec.config_for(self.sizes), **floats}

    def prepare(self) -> Prepared:
        """Prepare the kernels for the current device; the plans compile them."""
        for spec in self.specs:
            if reason := why_not(spec, "gpu"):
                kernel = "" if spec.name == self.name else f"{spec.name}: "
                raise UnavailableError(f'{self.name}: {kernel}{reason}; pass backend="emulator" with NumPy arrays')
        configs = [(spec, self.config(spec)) for spec in self.specs]
        sizes, programmatic = self.sizes, self.options.programmatic  # the call itself would keep its arrays alive

        def make_plans() -> tuple[Plan, ...]:
            return tuple(
                Plan(spec, config, sizes, programmatic=programmatic and bool(spec.after_wait))
                for spec, config in configs
            )

        return Prepared(
            self.specs[-1].name,
            make_plans,
            memory=self.memory,
            zero_buffers=self.zero_buffers,
            workspace_rules=self.workspace_rules,
        )

    def on_host(self) -> Results:
        """Run on host arrays (NumPy, or PyTorch on the CPU): in the emulator, or copied to the GPU and back."""
        arrays, host_arrays = {}, {}
        for operand in self.operands:
            if operand.array is not None:
                host_arrays[operand.name] = self._host_array(operand)
                arrays[operand.name] = host_arrays[operand.name] if operand.name in self.written else operand.array
        if self.check_values and not self.is_empty:
            self.check_values(host_arrays)
        for spec in self.specs:
            arrays |= self._run(spec, arrays)
        return {
            operand.name: arrays[operand.name].reshape(operand.shape)
            for operand in self.operands
            if operand.array is None
        }

    def _host_array(self, operand: CallArray) -> Any:
        """Return the operand's array; raise ArgumentError unless it is on the host with its dtype and shape."""
        if operand.dtype:
            return require_on_host(*operand[1:5], written=operand.name in self.written)
        if gpu.is_device_array(operand.array):
            raise ArgumentError(operand.label, "must be on the host, as the other arrays are", "one on the GPU")
        return gpu.as_array(operand.label, operand.array)

    def _run(self, spec: KernelSpec, arrays: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run one spec; outputs go into `arrays` where it has them. Returns the outputs."""
        out: dict[str, Any] = {}
        for arg in spec.outputs:
            shape = arg.resolve(self.sizes)
            if arg.name in arrays:
                out[arg.name] = arrays[arg.name].reshape(shape)  # contiguous, so the same memory
            elif arg.name in self.zero_buffers:
                out[arg.name] = np.zeros(shape, storage(str(arg.dtype)))
            elif arg.role == "inout":  # an inout array that is left out has no rows
                out[arg.name] = np.empty(shape, storage(self.dtype))
        return run_spec(
            spec,
            sources_of_kernel(spec.name)[0],
            {arg.name: arrays[arg.name] for arg in spec.inputs if arg.role != "inout" and arg.name in arrays},
            sizes={name: size for name, size in self.sizes.items() if name in spec.symbols},
            out=out,
            backend=self.options.backend,
            config=self.config(spec),
            programmatic=self.options.programmatic and bool(spec.after_wait),
        ).outputs
