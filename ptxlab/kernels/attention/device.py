"""`attention_kv4` on device arrays: what the first call of a shape prepares, and what every further one does."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.kernels.attention.call import FACE, Call, cache_on_host, check_numbers, copied
from ptxlab.kernels.attention.steps import choose
from ptxlab.kernels.gemm.device import Scratch
from ptxlab.layout import KVCache
from ptxlab.runtime.plan import Plan

_MOST_SHAPES = 4096  # that are remembered


@dataclass(frozen=True, eq=False)
class AttentionWorkspace:
    """Device memory that `attention_kv4` needs besides its result; made by `attention_workspace`.

    Blocks hand parts of results to each other in it, and every call finds and leaves zeros where these come. Calls on
    one stream may share it, since they follow each other; so may graphs that are replayed on one stream. Calls that
    fail leave it empty, so that none takes it any more.
    """

    kernel: str  # whose memory this is: another one leaves other things in it
    views: dict[str, gpu.View] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers; 0 where the kernel needs none."""
        return sum(int(view.owner.nbytes) for view in self.views.values())


class _Prepared:
    """A step at one shape. Its plan is made when it is first asked for: that compiles and loads."""

    def __init__(self, call: Call) -> None:
        self.step = choose(call.kernel, backend="gpu", programmatic=call.programmatic)
        sms = gpu.device_info().sms
        self.sizes, self.memory = self.step.sizes(call, sms), self.step.most_memory(call.cache.head_dim, sms)
        self.needed = {item.name: item.nbytes for item in self.memory}
        self.dtype, self.programmatic = call.dtype, call.programmatic
        named = f", kernel={call.kernel!r}" if call.kernel else ""
        self.workspace = f"attention_workspace(cache{named})"  # what makes it, for messages

    @cached_property
    def plan(self) -> Plan:
        config = self.step.config(self.sizes, self.dtype)
        return Plan(self.step.spec, config, self.sizes, programmatic=self.programmatic)

    @property
    def is_loaded(self) -> bool:
        """Whether there is a plan."""
        return "plan" in vars(self)


_prepared: dict[tuple[Any, ...], _Prepared] = {}
_shared: dict[tuple[int, int, str], AttentionWorkspace] = {}  # by device, stream, kernel: of calls without a workspace


def attention_workspace(cache: KVCache, *, kernel: str | None = None) -> AttentionWorkspace:
    """The memory that `attention_kv4` needs on the current device for any queries of caches with this one's head dim.

    A few MiB, whatever the batch; for teaching steps none. For calls of that kernel alone, as they name it: by default
    of the one that is chosen. It is ready, all zeros, when this returns: the call waits for it, and so has its place
    before a capture. Raises ArgumentError for what is no KVCache, and what choosing the kernel raises.
    """
    if not isinstance(cache, KVCache):
        raise ArgumentError("attention_workspace: cache", "must be a KVCache", type(cache).__name__)
    step = choose(kernel, backend="gpu")
    return _new_workspace(step.spec.name, step.most_memory(cache.head_dim, gpu.device_info().sms))


def _new_workspace(kernel: str, memory: Iterable[Scratch]) -> AttentionWorkspace:
    made = {item.name: gpu.zeros(item.shape, item.dtype) for item in memory}
    return AttentionWorkspace(kernel, {name: gpu.view("attention_workspace", array) for name, array in made.items()})


def on_gpu(call: Call, workspace: AttentionWorkspace | None, check: bool) -> Any:
    """Check what lies on the device, prepare if this is the first call of its shape, and launch."""
    device, stream = gpu.current_device(), gpu.stream_handle()
    prepared = _prepare(call, device)
    views = {}
    for name, label, array, dtype, shape in call.arrays():
        views[name] = gpu.view(label, array).require(label, dtype, shape, device)
    if call.shape[0] == 0:
        return _handed(call, *_results(call))
    lacks_workspace = bool(prepared.memory) and workspace is None
    if check or lacks_workspace or call.lacks_results or not prepared.is_loaded:
        _refuse_in_capture(call, stream, prepared, check=check, lacks_workspace=lacks_workspace)
    plan = prepared.plan
    used = _memory(prepared, (device, stream)) if workspace is None else workspace
    _require_memory(used, prepared, device)
    if check:
        check_numbers(call, cache_on_host(call))
        _check_zeros(used, prepared.step.kept)
    out, lse = _results(call)
    if call.out is None:
        views["out"] = gpu.view("out", out)
    if call.return_lse and call.lse is None:
        views["lse"] = gpu.view("lse", lse)
    _launch(plan, stream, {**views, **used.views}, used)
    return _handed(call, out, lse)


def _results(call: Call) -> tuple[Any, Any]:
    """The arrays to write, made where the caller has given none; no logarithms if they are not asked for."""
    out = gpu.new(call.q, call.shape, call.dtype) if call.out is None else call.out
    lse = gpu.new(call.q, call.shape[:-1], "float32") if call.return_lse and call.lse is None else call.lse
    return out, lse


def _handed(call: Call, out: Any, lse: Any) -> Any:
    """The results as the caller's library has them."""
    out = gpu.handed(out, call.q, call.dtype) if call.out is None else out
    if not call.return_lse:
        return out
    return out, gpu.handed(lse, call.q, "float32") if call.lse is None else lse


def _prepare(call: Call, device: int) -> _Prepared:
    key = (*call.sizes.values(), call.dtype, call.kernel, call.programmatic, call.return_lse, device)
    prepared = _prepared.get(key)
    if prepared is None:
        if len(_prepared) >= _MOST_SHAPES:
            _prepared.clear()
        prepared = _prepared[key] = _Prepared(call)
    return prepared


def _launch(plan: Plan, stream: int, views: dict[str, gpu.View], used: AttentionWorkspace) -> None:
    try:
        plan(stream, views)
    except BaseException:  # nobody knows what is in it now
        used.views.clear()
        raise


def _refuse_in_capture(call: Call, stream: int, prepared: _Prepared, *, check: bool, lacks_workspace: bool) -> None:
    """Nothing can be allocated, loaded or waited for while a CUDA graph is captured: say what to do before."""
    if not gpu.is_capturing(stream):
        return
    if check:
        raise ArgumentError(f"{FACE}: check", "must be False in a capture, where nothing can be waited for", check)
    if lacks_workspace:
        rule = f"must be given in a capture: make {prepared.workspace} before"
        raise ArgumentError(f"{FACE}: workspace", rule, "nothing")
    if call.out is None:
        rule = f"must be given in a capture: make an array {list(call.shape)} of {call.dtype} before"
        raise ArgumentError(f"{FACE}: out", rule, "nothing")
    if call.lacks_results:
        rule = f"must be (out, lse) in a capture: make an array {list(call.shape[:-1])} of float32 before"
        raise ArgumentError(f"{FACE}: out", rule, "one array")
    if not prepared.is_loaded:
        rule = "the first call of a shape loads its kernel: make it before the capture"
        raise ArgumentError(FACE, rule, ", ".join(f"{name}={size}" for name, size in call.sizes.items()))


def _memory(prepared: _Prepared, place: tuple[int, int]) -> AttentionWorkspace:
    """What all calls on this stream share that bring no workspace."""
    key = (*place, prepared.step.spec.name)
    found = _shared.get(key)
    if found is None or _too_small(found, prepared):
        found = _shared[key] = _new_workspace(prepared.step.spec.name, prepared.memory)
    return found


def _too_small(workspace: AttentionWorkspace, prepared: _Prepared) -> str:
    """The name of what is missing, or smaller than the step may need at this head dim."""
    views = workspace.views
    for name, nbytes in prepared.needed.items():
        if name not in views or views[name].owner.nbytes < nbytes:
            return name
    return ""


def _require_memory(workspace: AttentionWorkspace, prepared: _Prepared, device: int) -> None:
    if prepared.memory and workspace.kernel != prepared.step.spec.name:
        raise ArgumentError(f"{FACE}: workspace", f"must be {prepared.workspace}", f"that of {workspace.kernel}")
    if name := _too_small(workspace, prepared):
        rule = f"must be {prepared.workspace} of this head dim or a larger one, used by no call that failed"
        got = workspace.views[name].owner.nbytes if name in workspace.views else 0
        raise ArgumentError(f"{FACE}: workspace", rule, f"{got} bytes for {name}")
    for view in workspace.views.values():
        if view.device != device:
            raise ArgumentError(f"{FACE}: workspace", f"on the current device {device}", f"device {view.device}")


def _check_zeros(workspace: AttentionWorkspace, kept: Iterable[str]) -> None:
    """Raise ArgumentError if a call has left what no other has taken: no later one would be right."""
    left = sum(int((copied(FACE, workspace.views[name].owner) != 0).sum()) for name in kept)
    if left:
        workspace.views.clear()
        rule = "must be all zeros between calls: lengths changed under one, or two ran at a time; make another"
        raise ArgumentError(f"{FACE}: workspace", rule, f"{left} words that are not")
