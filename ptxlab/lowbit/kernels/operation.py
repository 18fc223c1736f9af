"""`Operation`: the one way of a public call to the GPU.

options -> check -> choose -> prepare -> views -> capture rules -> workspace -> launch. A family declares what differs:
the options of a call, what it checks (a `Call`), which kernels it takes and what they need (`Prepared`), what it does
on the host. What stays between calls is kept here: prepared kernels, calls that need no checks any more, and the device
memory of every stream.

A call skips the first three where one like it has been launched: with equal options, and arrays of the same dtypes,
shapes and devices. Checks look at nothing else, so they would say the same. Any other call takes every step.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import prod
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.io.dynamo import break_graph
from ptxlab.lowbit.kernels.options import MAX_ENTRIES, Options
from ptxlab.runtime.plan import Plan
from ptxlab.spec import Arg, Sizes
from ptxlab.spec.dtypes import name_of, storage

Results = Mapping[str, Any]  # what a call has made, by the kernels' names


class Scratch(NamedTuple):
    """Memory that a kernel needs besides its operands."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    nbytes: int

    @classmethod
    def of(cls, arg: Arg, sizes: Sizes) -> "Scratch":
        """Build the memory that an argument takes at these sizes."""
        return cls(arg.name, arg.resolve(sizes), storage(str(arg.dtype)), arg.nbytes(sizes))


class CallArray(NamedTuple):
    """An array of a call, by the kernels' name for it; one that is None is a result, which the call has to make.

    `label` is for messages. Without a dtype only the device is looked at: the rest is the concern of whoever packed it.
    In a capture no result can be made: then `capture_rule` (by default that an array must be given) and `capture_value`
    are the rule and the value of the error.
    """

    name: str
    label: str
    array: Any
    dtype: str = ""
    shape: tuple[int, ...] = ()
    capture_rule: str = ""
    capture_value: str = "nothing"

    @property
    def missing_in_capture(self) -> ArgumentError:
        """The error for a result that would have to be made in a capture."""
        rule = f"must be given in a capture: make an array {list(self.shape)} of {self.dtype} before"
        return ArgumentError(self.label, self.capture_rule or rule, self.capture_value)

    def view(self, device: int) -> gpu.View:
        """Return the array's view for a launch.

        Raises ArgumentError unless the array has the operand's dtype and shape and lies on that device.
        """
        view = gpu.view(self.label, self.array)
        if self.dtype:
            return view.require(self.label, self.dtype, self.shape, device)
        if view.device != device:
            raise ArgumentError(self.label, f"on the current device {device}", f"device {view.device}")
        return view


class Call(Protocol):
    """A call whose arguments fit together, as far as that can be told without a GPU."""

    @property
    def options(self) -> Options:
        """The caller's options, defaults that depend on other arguments filled in."""

    @property
    def key(self) -> Hashable:
        """Sizes, layouts and dtypes that its kernels are chosen and compiled by, besides options."""

    @property
    def sizes(self) -> Mapping[str, Any]:
        """Sizes of the problem, for messages."""

    @property
    def operands(self) -> Iterable[CallArray]:
        """Given arrays, and results."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to launch."""


@dataclass(frozen=True, eq=False)
class DeviceMemory:
    """Memory besides operands and results, for calls that follow each other; `kernel` is whose it is."""

    kernel: str
    views: dict[str, gpu.View] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers; 0 where the kernel needs none."""
        return sum(int(view.owner.nbytes) for view in self.views.values())

    @classmethod
    def of(cls, kernel: str, buffers: Iterable[Scratch], *, zeros: bool, **fields: Any) -> Self:
        """Allocate new memory on the current device; zeros are there when this returns."""
        allocate = gpu.zeros if zeros else gpu.empty
        return cls(
            kernel,
            {scratch.name: gpu.view("workspace", allocate(scratch.shape, scratch.dtype)) for scratch in buffers},
            **fields,
        )

    def first_too_small(self, buffers: Iterable[Scratch]) -> str:
        """Return the name of a buffer that is missing or too small; empty if there is none."""
        for name, _, _, nbytes in buffers:
            if name not in self.views or self.views[name].owner.nbytes < nbytes:
                return name
        return ""

    def describe_buffer(self, name: str) -> str:
        """Describe a buffer that is too small, for messages."""
        return f"{self.views[name].owner.nbytes if name in self.views else 0} bytes for {name}"


class WorkspaceRules(NamedTuple):
    """Rules for a caller's workspace as errors state them, each a whole sentence.

    Attributes:
        in_capture: the rule for none in a capture.
        kernel: the rule for one of another kernel.
        size: the rule for one that is too small.
    """

    in_capture: str
    kernel: str
    size: str


class Prepared:
    """Launches of a call at one shape: plans, made when first asked for, which compiles and loads.

    Attributes:
        kernel: the name of the last kernel that is launched.
        memory: buffers that the kernels need, large enough for the other shapes that are to share them.
        zero_buffers: names of the buffers that every call finds and leaves at 0. Only calls of one kernel share them.
        workspace_rules: for errors; None where the kernels need no memory.
    """

    def __init__(
        self,
        kernel: str,
        make: Callable[[], tuple[Plan, ...]],
        *,
        memory: Iterable[Scratch] = (),
        zero_buffers: Iterable[str] = (),
        workspace_rules: WorkspaceRules | None = None,
    ) -> None:
        self.kernel, self._make = kernel, make
        self.memory, self.zero_buffers = tuple(memory), tuple(zero_buffers)
        self.workspace_rules = workspace_rules or WorkspaceRules("", "", "")

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """Plans in the order of their launches."""
        plans = self._make()
        del self._make  # and with it the call that it is made from, and its arrays
        return plans

    @property
    def is_loaded(self) -> bool:
        """True if the plans have been made."""
        return "plans" in vars(self)


class Ready(NamedTuple):
    """Remaining work of a call that needs no checks: memory to take, results to make, kernels to launch."""

    prepared: Prepared
    memory: tuple[Scratch, ...]
    outputs: tuple[CallArray, ...]


_prepared: dict[Hashable, Prepared] = {}
_ready: dict[Hashable, Ready] = {}
# By device, stream and kernel: calls on one stream follow each other, so they can share memory; those on two cannot.
_memory: dict[tuple[int, int, str], DeviceMemory] = {}
_recorded_launches: ContextVar[list[tuple[tuple[Plan, ...], dict[str, gpu.View]]] | None] = ContextVar(
    "recorded_launches", default=None
)


@contextmanager
def record_launches() -> Iterator[list[tuple[tuple[Plan, ...], dict[str, gpu.View]]]]:
    """Record the launches of operations in the block, in order: plans, and their memory by its pointers' names."""
    launches: list[tuple[tuple[Plan, ...], dict[str, gpu.View]]] = []
    reset_token = _recorded_launches.set(launches)
    try:
        yield launches
    finally:
        _recorded_launches.reset(reset_token)


@break_graph
def release_memory() -> int:
    """Give up the device memory that calls without a workspace share, on every stream; returns how many bytes.

    It goes back to CuPy's pool in the order of its stream, so what still runs may finish. Workspaces are their owners'.
    A later call works as the first one of its stream did: it makes its memory anew.
    """
    released_bytes = sum(memory.nbytes for memory in _memory.values())
    _memory.clear()
    return released_bytes


C = TypeVar("C", bound=Call)


@dataclass(frozen=True)
class Operation(Generic[C]):
    """A public call of arrays of any library.

    Attributes:
        name: of the call, for messages.
        check: makes the call of options that keep their rules, the arrays of `__call__` and its operands, or raises
            ArgumentError for what does not fit together.
        prepare: chooses kernels for a call on the current device; raises what that raises.
        on_host: the call on host arrays, checked there.
        check_values: raises ArgumentError for numbers on the device that no kernel may be given, if the option `check`
            is set; takes the kernels' memory too.
        disjoint: arrays of which no two may share memory, as some are written while others are read: by name, what
            messages call them.
        written: those of `disjoint` that are written; empty for all. Two that are only read may share memory.
    """

    name: str
    check: Callable[..., C]
    prepare: Callable[[C], Prepared]
    on_host: Callable[[C], Results]
    check_values: Callable[[C, Prepared, DeviceMemory | None], None] | None = None
    disjoint: Mapping[str, str] = field(default_factory=dict)
    written: tuple[str, ...] = ()

    def __call__(
        self,
        options: Options,
        description: tuple[Any, ...],
        arrays: Mapping[str, Any],
        *operands: Any,
        workspace: DeviceMemory | None = None,
    ) -> Results:
        """Run the operation and return the results that the caller has not given.

        Args:
            options: the caller's, from `Options.of`.
            description: what checks look at besides options and arrays: sizes and layouts of packed operands.
            arrays: those of the call's operands that may be given, by name, None where they are not; the first decides
                whether the call is for the GPU.
            operands: further arguments of `check`; all that it reads of them is in `description` and `arrays`.
            workspace: the caller's.
        """
        example = next(iter(arrays.values()))
        if not gpu.is_device_array(example):
            call = self._check_call(options, arrays, operands)
            self._require_disjoint({name: _host_view(name, arrays[name]) for name in self.disjoint if name in arrays})
            return self.on_host(call)
        device, stream = gpu.current_device(), gpu.stream_handle()
        views: dict[str, gpu.View] = {}
        key_parts: list[Any] = [self.name, device, gpu.target(), options, description]
        addresses, key, ready_launch = 0, None, None
        try:
            for name, array in arrays.items():
                if array is not None:
                    views[name] = view = gpu.view(name, array)
                    address, shape, dtype, array_device, _ = view  # quicker than attributes and slices
                    addresses |= address  # one test for all: an array that is not aligned leaves a low bit set
                    key_parts.append((shape, dtype, array_device))
            key = *key_parts, *views  # the names tell which of the optional arrays are given
            ready_launch = _ready.get(key) if addresses % gpu.ALIGNMENT == 0 else None
        except (ArgumentError, TypeError):  # the checks have better words
            key = None
        if self.disjoint:
            self._require_disjoint(views)
        if ready_launch is not None:
            must_allocate = ready_launch.outputs or (ready_launch.memory and workspace is None)
            if not (must_allocate and gpu.is_capturing(stream)):  # otherwise refused below, with the rule
                memory = (
                    self._provide_memory(ready_launch, (device, stream), workspace, views)
                    if ready_launch.memory
                    else None
                )
                return _launch(ready_launch, stream, views, memory, example)
        call = self._check_call(options, arrays, operands)
        return self._launch_first(
            call, (device, stream), workspace, example, None if addresses % gpu.ALIGNMENT else key
        )

    def _check_call(self, options: Options, arrays: Mapping[str, Any], operands: tuple[Any, ...]) -> C:
        """Check options and operands, and build the call; raise ArgumentError for what does not fit."""
        options.require_valid(self.name)
        return self.check(options, arrays, *operands)

    def _require_disjoint(self, views: Mapping[str, gpu.View]) -> None:
        """Raise ArgumentError for the first two of `disjoint` that have memory in common, if either is written."""
        spans: list[tuple[str, int, int]] = []
        for name in self.disjoint:
            if name in views:
                start, shape, dtype, *_ = views[name]
                stop = start + prod(shape) * _itemsize(dtype)
                for earlier_name, earlier_start, earlier_stop in spans:
                    both_are_read = self.written and not {name, earlier_name} & {*self.written}
                    if not both_are_read and max(earlier_start, start) < min(earlier_stop, stop):
                        rule = f"must not share memory with {self.disjoint[earlier_name]}"
                        raise ArgumentError(f"{self.name}: {self.disjoint[name]}", rule, "some of it")
                spans.append((name, start, stop))

    def _launch_first(
        self, call: C, device_and_stream: tuple[int, int], workspace: DeviceMemory | None, example: Any, key: Hashable
    ) -> Results:
        """Choose, prepare, compile and launch at the first call with a key, and remember the launches."""
        if call.options.backend == "emulator":
            raise ArgumentError("backend", "arrays on the CPU (NumPy) for the emulator", "arrays on a GPU")
        device, stream = device_and_stream
        # Not `key`: layouts of arrays, and options that select no kernel, need no kernels of their own.
        prepared_key = self.name, device, gpu.target(), call.options.kernel_key, call.key
        prepared_launch = _prepared.get(prepared_key) or self.prepare(call)
        views = {operand.name: operand.view(device) for operand in call.operands if operand.array is not None}
        outputs = tuple(operand for operand in call.operands if operand.array is None)
        if call.is_empty:
            return _convert_outputs(
                {output.name: gpu.new(example, output.shape, output.dtype) for output in outputs}, outputs, example
            )
        ready_launch = Ready(
            prepared_launch, tuple(buffer for buffer in prepared_launch.memory if buffer.name not in views), outputs
        )
        if gpu.is_capturing(stream):
            self._refuse_in_capture(call, ready_launch, workspace)
        _ = prepared_launch.plans  # or the reason why there are none, before anything is allocated
        remember(_prepared, prepared_key, prepared_launch)
        memory = (
            self._provide_memory(ready_launch, device_and_stream, workspace, views) if ready_launch.memory else None
        )
        if call.options.check and self.check_values:
            self.check_values(call, prepared_launch, memory)
        arrays = _launch(ready_launch, stream, views, memory, example)
        if key is not None and not call.options.check:  # with `check` every call has its numbers checked
            remember(_ready, key, ready_launch)
        return arrays

    def _refuse_in_capture(self, call: C, ready: Ready, workspace: DeviceMemory | None) -> None:
        """Raise if something must be waited for, allocated or loaded in a CUDA graph capture; say what to do before."""
        if call.options.check:
            rule = "must be False in a capture, where nothing can be waited for"
            raise ArgumentError(f"{self.name}: check", rule, True)
        if ready.memory and workspace is None:
            raise ArgumentError(f"{self.name}: workspace", ready.prepared.workspace_rules.in_capture, "nothing")
        if ready.outputs:
            raise ready.outputs[0].missing_in_capture
        if not ready.prepared.is_loaded:
            rule = "the first call of a shape loads its kernel: make it before the capture"
            raise ArgumentError(self.name, rule, ", ".join(f"{name}={size}" for name, size in call.sizes.items()))

    def _provide_memory(
        self,
        ready: Ready,
        device_and_stream: tuple[int, int],
        workspace: DeviceMemory | None,
        views: dict[str, gpu.View],
    ) -> DeviceMemory:
        """Add the buffers that the kernels need to `views`: from the workspace, or from this stream's shared memory."""
        prepared_launch = ready.prepared
        if workspace is None:
            memory = _memory.get((*device_and_stream, prepared_launch.kernel))
            if memory is None or memory.first_too_small(ready.memory):
                memory = DeviceMemory.of(prepared_launch.kernel, ready.memory, zeros=bool(prepared_launch.zero_buffers))
                _memory[*device_and_stream, prepared_launch.kernel] = memory
        else:
            memory = workspace
            if prepared_launch.zero_buffers and memory.kernel != prepared_launch.kernel:
                rule = prepared_launch.workspace_rules.kernel
                raise ArgumentError(f"{self.name}: workspace", rule, f"that of {memory.kernel}")
            if name := memory.first_too_small(ready.memory):
                raise ArgumentError(
                    f"{self.name}: workspace", prepared_launch.workspace_rules.size, memory.describe_buffer(name)
                )
        for buffer in ready.memory:
            view = views[buffer.name] = memory.views[buffer.name]
            if view.device != device_and_stream[0]:
                rule = f"on the current device {device_and_stream[0]}"
                raise ArgumentError(f"{self.name}: workspace", rule, f"device {view.device}")
        return memory


def _launch(
    ready: Ready, stream: int, views: dict[str, gpu.View], memory: DeviceMemory | None, example: Any
) -> Results:
    """Make the results, and enqueue the kernels."""
    arrays = {}
    for output in ready.outputs:
        array = arrays[output.name] = gpu.new(example, output.shape, output.dtype)
        views[output.name] = gpu.view(output.label, array)
    try:
        for plan in ready.prepared.plans:
            plan(stream, views)
        if (launches := _recorded_launches.get()) is not None:
            launches.append((ready.prepared.plans, views))
    except BaseException:
        if memory is not None and ready.prepared.zero_buffers:  # nobody knows what is in it now
            memory.views.clear()
        raise
    return _convert_outputs(arrays, ready.outputs, example) if arrays else arrays


def _convert_outputs(arrays: dict[str, Any], outputs: Iterable[CallArray], example: Any) -> Results:
    """Convert the results to arrays of the caller's library."""
    return {output.name: gpu.hand_to_caller(arrays[output.name], example, output.dtype) for output in outputs}


@cache
def _itemsize(dtype: str) -> int:
    """Return the bytes of an element; 0 for a dtype that NumPy lacks, for which the checks have better words."""
    try:
        return storage(dtype).itemsize
    except TypeError:
        return 0


def _host_view(name: str, array: Any) -> gpu.View:
    """Build the view of an array on the host, as `gpu.view` does on a device.

    It has no bytes where the checks have better words.
    """
    try:
        shared_array = np.empty(0) if gpu.is_device_array(array) else gpu.as_array(name, array)
    except ArgumentError:
        shared_array = np.empty(0)
    shape = shared_array.shape if shared_array.flags.c_contiguous else (0,)
    return gpu.View(shared_array.__array_interface__["data"][0], shape, shared_array.dtype.name, -1, shared_array)


K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def remember(entries: dict[K, T], key: K, entry: T) -> None:
    """Keep `entry` under `key` for the next call.

    A decoder has few shapes; where there are many, all are forgotten now and then.
    """
    if key not in entries and len(entries) >= MAX_ENTRIES:
        entries.clear()
    entries[key] = entry


def dtype_of(array: Any) -> str:
    """Return the name of an array's dtype in any library; uint16 are bits of bfloat16."""
    return _dtype_name(getattr(array, "dtype", type(array).__name__))


@cache
def _dtype_name(dtype: Any) -> str:
    name = name_of(dtype)
    return "bfloat16" if name == "uint16" else name


def copy_to_host(name: str, array: Any) -> Any:
    """Copy a device array's numbers to the host, or return None for None; `name` is for messages."""
    shared_array = None if array is None else gpu.as_array(name, array)
    return shared_array if shared_array is None or isinstance(shared_array, np.ndarray) else gpu.to_host(shared_array)
