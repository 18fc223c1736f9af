"""`Operation`: the one way of a public call to the GPU.

options -> check -> choose -> prepare -> views -> capture rules -> workspace -> launch. A family declares what differs:
the options of a call, what it checks (a `Call`), which kernels it takes and what they need (`Prepared`), what it does
on the host. What stays between calls is kept here: prepared kernels, calls that need no checks any more, and the device
memory of every stream.

A call skips the first three where one like it has been launched: with equal options, and arrays of the same dtypes,
shapes and devices. Checks look at nothing else, so they would say the same. Whatever differs goes the whole way.
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
from ptxlab.lowbit.kernels.options import MOST, Options
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
    def of(cls, kernel: str, items: Iterable[Scratch], *, zeros: bool, **more: Any) -> Self:
        """Allocate new memory on the current device; zeros are there when this returns."""
        make = gpu.zeros if zeros else gpu.empty
        return cls(kernel, {item.name: gpu.view("workspace", make(item.shape, item.dtype)) for item in items}, **more)

    def too_small(self, items: Iterable[Scratch]) -> str:
        """Return the name of a buffer that is missing or too small; empty if there is none."""
        for name, _, _, nbytes in items:
            if name not in self.views or self.views[name].owner.nbytes < nbytes:
                return name
        return ""

    def said_of(self, name: str) -> str:
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
        kernel: the name of the last one.
        memory: what the kernels need; enough of it for other shapes too, if they shall share it.
        kept: names of that which every call finds and leaves at 0. Such memory is of one kernel alone.
        workspace_rules: for errors; None where the kernels need no memory.
    """

    def __init__(
        self,
        kernel: str,
        make: Callable[[], tuple[Plan, ...]],
        *,
        memory: Iterable[Scratch] = (),
        kept: Iterable[str] = (),
        workspace_rules: WorkspaceRules | None = None,
    ) -> None:
        self.kernel, self._make = kernel, make
        self.memory, self.kept = tuple(memory), tuple(kept)
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
    results: tuple[CallArray, ...]


_prepared: dict[Hashable, Prepared] = {}
_ready: dict[Hashable, Ready] = {}
_memory: dict[tuple[int, int, str], DeviceMemory] = {}  # by device, stream and kernel
_noted: ContextVar[list[tuple[tuple[Plan, ...], dict[str, gpu.View]]] | None] = ContextVar("noted", default=None)


@contextmanager
def launches_within() -> Iterator[list[tuple[tuple[Plan, ...], dict[str, gpu.View]]]]:
    """Record the launches of operations in the block, in order: plans, and their memory by its pointers' names."""
    noted: list[tuple[tuple[Plan, ...], dict[str, gpu.View]]] = []
    before = _noted.set(noted)
    try:
        yield noted
    finally:
        _noted.reset(before)


@break_graph
def release_memory() -> int:
    """Give up the device memory that calls without a workspace share, on every stream; returns how many bytes.

    It goes back to CuPy's pool in the order of its stream, so what still runs may finish. Workspaces are their owners'.
    A later call works as the first one of its stream did: it makes its memory anew.
    """
    released = sum(held.nbytes for held in _memory.values())
    _memory.clear()
    return released


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
        look: raises ArgumentError for numbers on the device that `check` finds wrong; takes the kernels' memory too.
        apart: arrays of which no two may share memory, as some are written while others are read: by name, what
            messages call them.
        written: those of `apart` that are written; empty for all. Two that are only read may share memory.
    """

    name: str
    check: Callable[..., C]
    prepare: Callable[[C], Prepared]
    on_host: Callable[[C], Results]
    look: Callable[[C, Prepared, DeviceMemory | None], None] | None = None
    apart: Mapping[str, str] = field(default_factory=dict)
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
            self._require_apart({name: _host_view(name, arrays[name]) for name in self.apart if name in arrays})
            return self.on_host(call)
        device, stream = gpu.current_device(), gpu.stream_handle()
        views: dict[str, gpu.View] = {}
        kinds: list[Any] = [self.name, device, gpu.target(), options, description]
        addresses, key, ready = 0, None, None
        try:
            for name, array in arrays.items():
                if array is not None:
                    views[name] = view = gpu.view(name, array)
                    address, shape, dtype, place, _ = view  # quicker than attributes and slices
                    addresses |= address
                    kinds.append((shape, dtype, place))
            key = *kinds, *views
            ready = _ready.get(key) if addresses % gpu.ALIGNMENT == 0 else None
        except (ArgumentError, TypeError):  # the checks have better words
            key = None
        if self.apart:
            self._require_apart(views)
        if ready is not None:
            lacks = ready.results or (ready.memory and workspace is None)
            if not (lacks and gpu.is_capturing(stream)):
                used = self._take(ready, (device, stream), workspace, views) if ready.memory else None
                return _launch(ready, stream, views, used, example)
        call = self._check_call(options, arrays, operands)
        return self._launch_first(
            call, (device, stream), workspace, example, None if addresses % gpu.ALIGNMENT else key
        )

    def _check_call(self, options: Options, arrays: Mapping[str, Any], operands: tuple[Any, ...]) -> C:
        """Build the call; raise ArgumentError for operands that it must not be given."""
        options.require_valid(self.name)
        return self.check(options, arrays, *operands)

    def _require_apart(self, views: Mapping[str, gpu.View]) -> None:
        """Raise ArgumentError for the first two of `apart` that have memory in common, if either is written."""
        spans: list[tuple[str, int, int]] = []
        for name in self.apart:
            if name in views:
                start, shape, dtype, *_ = views[name]
                stop = start + prod(shape) * _itemsize(dtype)
                for other, begin, end in spans:
                    is_read = self.written and not {name, other} & {*self.written}
                    if not is_read and max(begin, start) < min(end, stop):
                        rule = f"must not share memory with {self.apart[other]}"
                        raise ArgumentError(f"{self.name}: {self.apart[name]}", rule, "some of it")
                spans.append((name, start, stop))

    def _launch_first(
        self, call: C, place: tuple[int, int], workspace: DeviceMemory | None, example: Any, key: Hashable
    ) -> Results:
        """Choose, prepare, compile and launch at the first call with a key, and remember the launches."""
        if call.options.backend == "emulator":
            raise ArgumentError("backend", "arrays on the CPU (NumPy) for the emulator", "arrays on a GPU")
        device, stream = place
        slot = self.name, device, gpu.target(), call.options.kernel_key, call.key
        prepared = _prepared.get(slot) or self.prepare(call)
        views = {operand.name: operand.view(device) for operand in call.operands if operand.array is not None}
        results = tuple(operand for operand in call.operands if operand.array is None)
        if call.is_empty:
            return _handed({each.name: gpu.new(example, each.shape, each.dtype) for each in results}, results, example)
        ready = Ready(prepared, tuple(item for item in prepared.memory if item.name not in views), results)
        if gpu.is_capturing(stream):
            self._refuse_in_capture(call, ready, workspace)
        _ = prepared.plans  # or the reason why there are none, before anything is allocated
        remember(_prepared, slot, prepared)
        used = self._take(ready, place, workspace, views) if ready.memory else None
        if call.options.check and self.look:
            self.look(call, prepared, used)
        made = _launch(ready, stream, views, used, example)
        if key is not None and not call.options.check:
            remember(_ready, key, ready)
        return made

    def _refuse_in_capture(self, call: C, ready: Ready, workspace: DeviceMemory | None) -> None:
        """Raise if something must be waited for, allocated or loaded in a CUDA graph capture; say what to do before."""
        if call.options.check:
            rule = "must be False in a capture, where nothing can be waited for"
            raise ArgumentError(f"{self.name}: check", rule, True)
        if ready.memory and workspace is None:
            raise ArgumentError(f"{self.name}: workspace", ready.prepared.workspace_rules.in_capture, "nothing")
        if ready.results:
            raise ready.results[0].missing_in_capture
        if not ready.prepared.is_loaded:
            rule = "the first call of a shape loads its kernel: make it before the capture"
            raise ArgumentError(self.name, rule, ", ".join(f"{name}={size}" for name, size in call.sizes.items()))

    def _take(
        self, ready: Ready, place: tuple[int, int], workspace: DeviceMemory | None, views: dict[str, gpu.View]
    ) -> DeviceMemory:
        """Add to `views` what the kernels need of the caller's workspace, or of what all calls on this stream share."""
        prepared = ready.prepared
        if workspace is None:
            used = _memory.get((*place, prepared.kernel))
            if used is None or used.too_small(ready.memory):
                used = DeviceMemory.of(prepared.kernel, ready.memory, zeros=bool(prepared.kept))
                _memory[*place, prepared.kernel] = used
        else:
            used = workspace
            if prepared.kept and used.kernel != prepared.kernel:
                rule = prepared.workspace_rules.kernel
                raise ArgumentError(f"{self.name}: workspace", rule, f"that of {used.kernel}")
            if name := used.too_small(ready.memory):
                raise ArgumentError(f"{self.name}: workspace", prepared.workspace_rules.size, used.said_of(name))
        for item in ready.memory:
            view = views[item.name] = used.views[item.name]
            if view.device != place[0]:
                rule = f"on the current device {place[0]}"
                raise ArgumentError(f"{self.name}: workspace", rule, f"device {view.device}")
        return used


def _launch(ready: Ready, stream: int, views: dict[str, gpu.View], used: DeviceMemory | None, example: Any) -> Results:
    """Make the results, and enqueue the kernels."""
    made = {}
    for result in ready.results:
        array = made[result.name] = gpu.new(example, result.shape, result.dtype)
        views[result.name] = gpu.view(result.label, array)
    try:
        for plan in ready.prepared.plans:
            plan(stream, views)
        if (noted := _noted.get()) is not None:
            noted.append((ready.prepared.plans, views))
    except BaseException:
        if used is not None and ready.prepared.kept:  # nobody knows what is in it now
            used.views.clear()
        raise
    return _handed(made, ready.results, example) if made else made


def _handed(made: dict[str, Any], results: Iterable[CallArray], example: Any) -> Results:
    """Convert the results to arrays of the caller's library."""
    return {result.name: gpu.handed(made[result.name], example, result.dtype) for result in results}


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
        shared = np.empty(0) if gpu.is_device_array(array) else gpu.as_array(name, array)
    except ArgumentError:
        shared = np.empty(0)
    shape = shared.shape if shared.flags.c_contiguous else (0,)
    return gpu.View(shared.__array_interface__["data"][0], shape, shared.dtype.name, -1, shared)


K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def remember(known: dict[K, T], key: K, value: T) -> None:
    """Keep `value` under `key` for the next call.

    A decoder has few shapes; where there are many, all are forgotten now and then.
    """
    if key not in known and len(known) >= MOST:
        known.clear()
    known[key] = value


def dtype_of(array: Any) -> str:
    """Return the name of an array's dtype in any library; uint16 are bits of bfloat16."""
    return _named(getattr(array, "dtype", type(array).__name__))


@cache
def _named(dtype: Any) -> str:
    name = name_of(dtype)
    return "bfloat16" if name == "uint16" else name


def copied(name: str, array: Any) -> Any:
    """Copy a device array's numbers to the host, or return None for None; `name` is for messages."""
    shared = None if array is None else gpu.as_array(name, array)
    return shared if shared is None or isinstance(shared, np.ndarray) else gpu.to_host(shared)
