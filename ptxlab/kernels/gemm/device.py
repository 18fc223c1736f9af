"""`gemm_w4a8` on device arrays: what the first call of a shape prepares, and what every further one does."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.kernels.gemm import ladder
from ptxlab.kernels.gemm.call import Call, arrays
from ptxlab.kernels.gemm.common import DTYPES, Step
from ptxlab.kernels.quantize import SUM
from ptxlab.layout import PackedWeight
from ptxlab.layout.packed_activations import stored_shape
from ptxlab.runtime.plan import Plan
from ptxlab.spec.dtypes import storage

_MOST_SHAPES = 4096  # that are remembered


class Scratch(NamedTuple):
    """Memory that a step needs besides its operands and its output."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Workspace:
    """Device memory that `gemm_w4a8` needs besides its output, for up to `M` tokens; made by `gemm_workspace`.

    Calls on one stream may share it, since they follow each other; so may graphs that are replayed on one stream.
    """

    M: int
    buffers: Mapping[str, Any] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers; 0 where the kernel needs none."""
        return sum(int(buffer.nbytes) for buffer in self.buffers.values())


class _Prepared:
    """A step at one shape. Its plans are made when they are first asked for: that compiles and loads."""

    def __init__(self, call: Call) -> None:
        weight = call.weight
        self.step = ladder.choose(
            weight, call.order, call.M, kernel=call.kernel, backend="gpu", programmatic=call.programmatic
        )
        self.programmatic = call.programmatic
        self.sizes = self.step.sizes(call.M, weight.N, weight.K, weight.group, call.rows)
        self.step.spec.check_sizes(self.sizes)
        self.scratch = scratch(self.step, weight, call.M, call.rows)
        self.x_shape = stored_shape(call.order, call.M, weight.K, call.rows)
        self.out, self.has_sum = DTYPES.index(call.dtype), call.x_sum is not None

    @cached_property
    def plans(self) -> tuple[Plan, Plan | None]:
        """The product, and the token sums where the step needs them: these wait for what is before, and it for them."""
        spec, sizes = self.step.spec, self.sizes
        gemm = Plan(spec, self.step.config(sizes, self.out, self.has_sum), sizes, programmatic=self.programmatic)
        sums = {name: sizes[name] for name in ("M", "K")}
        return gemm, Plan(SUM, SUM.configs[0], sums) if self.step.needs_sum else None

    @property
    def is_loaded(self) -> bool:
        """Whether there are plans."""
        return "plans" in vars(self)


_prepared: dict[tuple[Any, ...], _Prepared] = {}
_shared: dict[tuple[int, int, str], Any] = {}  # by device, stream and name: what calls without a workspace share


def gemm_workspace(weight: PackedWeight, M: int, *, kernel: str | None = None) -> Workspace:
    """The memory that `gemm_w4a8` needs for this weight and up to M tokens, on the current device; empty if none.

    Raises ArgumentError for what is no packed weight or no number of tokens, and what choosing the kernel raises.
    """
    if not isinstance(weight, PackedWeight):
        raise ArgumentError("gemm_workspace: weight", "must be a PackedWeight (layout.pack)", type(weight).__name__)
    if not isinstance(M, Integral) or M < 0:
        raise ArgumentError("gemm_workspace: M", "must be an integer, 0 or more", repr(M))
    step = ladder.choose(weight, "row_major", M, kernel=kernel, backend="gpu")
    step.spec.check_sizes(step.sizes(M, weight.N, weight.K, weight.group, 1))
    return Workspace(M, {s.name: gpu.empty(s.shape, s.dtype) for s in scratch(step, weight, M)})


def scratch(step: Step, weight: PackedWeight, M: int, rows: int = 1) -> tuple[Scratch, ...]:
    """The spec's scratch arguments, and the token sums, which the caller may give instead."""
    sizes = step.sizes(M, weight.N, weight.K, weight.group, rows)
    sizes = {**sizes, **step.spec.config_for(sizes)}
    own = [Scratch(a.name, a.resolve(sizes), storage(str(a.dtype))) for a in step.spec.args if a.role == "scratch"]
    return (*([Scratch("x_sum", (M,), storage("int32"))] if step.needs_sum else []), *own)


def on_gpu(call: Call, workspace: Workspace | None) -> Any:
    """Check what lies on the device, prepare if this is the first call of its shape, and launch."""
    device, stream, N = gpu.current_device(), gpu.stream_handle(), call.weight.N
    prepared = _prepare(call, device)
    views = _views(call, prepared, device)
    if call.M == 0:
        return _handed(call, gpu.new(call.x_q, (0, N), call.dtype)) if call.out is None else call.out
    missing = [item for item in prepared.scratch if item.name not in views]
    if not prepared.is_loaded or call.out is None or (missing and workspace is None):
        _refuse_in_capture(call, stream, prepared.is_loaded, bool(missing) and workspace is None)
    memory = {item.name: _memory(item, workspace, call.M, (device, stream)) for item in missing}
    gemm, token_sums = prepared.plans
    out = gpu.new(call.x_q, (call.M, N), call.dtype) if call.out is None else call.out
    if call.out is None:
        views["y"] = gpu.view("out", out)
    views.update(memory)
    if "x_sum" in memory and token_sums is not None:
        token_sums(stream, {"x_q": views["x"], "token_sum": views["x_sum"]})
    gemm(stream, views)
    return _handed(call, out) if call.out is None else out


def _prepare(call: Call, device: int) -> _Prepared:
    weight = call.weight
    shape = call.M, weight.N, weight.K, weight.group, call.rows
    asked = call.dtype, call.kernel, call.programmatic, call.x_sum is None
    key = weight.scheme, weight.layout, call.order, shape, *asked, device
    prepared = _prepared.get(key)
    if prepared is None:
        if len(_prepared) >= _MOST_SHAPES:
            _prepared.clear()
        prepared = _prepared[key] = _Prepared(call)
    return prepared


def _views(call: Call, prepared: _Prepared, device: int) -> dict[str, gpu.View]:
    """Every array of the call by argument name, checked."""
    views = {}
    for name, label, array, dtype, shape in arrays(call, prepared.x_shape, prepared.step.takes_sum):
        views[name] = gpu.view(label, array).require(label, dtype, shape, device)
    for name, buffer in prepared.step.buffers:  # whose dtypes and shapes are the PackedWeight's own concern
        views[name] = view = gpu.view("gemm_w4a8: weight", call.weight.buffers[buffer])
        if view.device != device:
            raise ArgumentError("gemm_w4a8: weight", f"on the current device {device}", f"device {view.device}")
    return views


def _handed(call: Call, out: Any) -> Any:
    return gpu.handed(out, call.x_q, call.dtype)


def _refuse_in_capture(call: Call, stream: int, is_loaded: bool, lacks_workspace: bool) -> None:
    """Nothing can be allocated or loaded while a CUDA graph is captured: say what to do before."""
    if not gpu.is_capturing(stream):
        return
    M, N, K = call.M, call.weight.N, call.weight.K
    if lacks_workspace:
        rule = f"must be given in a capture unless x_sum is: make gemm_workspace(weight, {M}) before"
        raise ArgumentError("gemm_w4a8: workspace", rule, "nothing")
    refuse_in_capture("gemm_w4a8", call.out, call.dtype, is_loaded, M=M, N=N, K=K)


def refuse_in_capture(face: str, out: Any, dtype: str, is_loaded: bool, **sizes: int) -> None:
    """Say what a capture needs before it begins: an output, and a kernel that has been loaded."""
    if out is None:
        rule = f"must be given in a capture: make an array [{sizes['M']}, {sizes['N']}] of {dtype} before"
        raise ArgumentError(f"{face}: out", rule, "nothing")
    if not is_loaded:
        rule = "the first call of a shape loads its kernel: make it before the capture"
        raise ArgumentError(face, rule, ", ".join(f"{name}={size}" for name, size in sizes.items()))


def _memory(item: Scratch, workspace: Workspace | None, M: int, place: tuple[int, int]) -> gpu.View:
    """Scratch memory: the caller's workspace, or what all calls on this stream share."""
    buffer = _shared.get((*place, item.name)) if workspace is None else workspace.buffers.get(item.name)
    if buffer is None or buffer.nbytes < item.nbytes:
        if workspace is not None:
            rule = f"must be gemm_workspace(weight, {M}) or larger"
            raise ArgumentError("gemm_w4a8: workspace", rule, f"one for M={workspace.M}")
        buffer = _shared[*place, item.name] = gpu.empty((item.nbytes,), np.uint8)
    view = gpu.view("gemm_w4a8: workspace", buffer)
    if view.device != place[0]:
        raise ArgumentError("gemm_w4a8: workspace", f"on the current device {place[0]}", f"device {view.device}")
    return view
