"""`gemm_w4a8_grouped`, the Python face of the grouped GEMM: the experts of a layer in one call."""

from typing import Any, NamedTuple

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.kernels.gemm.call import check_how, opened, output_dtype
from ptxlab.kernels.gemm.common import DTYPES, sums_agree
from ptxlab.kernels.gemm.device import refuse_in_capture
from ptxlab.kernels.gemm.grouped import GROUPED, LAYOUT
from ptxlab.kernels.gemm.strips import SCHEMES
from ptxlab.layout import ExpertWeights
from ptxlab.quant import PROTECTIVE_RANGE
from ptxlab.runtime import run_spec
from ptxlab.runtime.arguments import require_on_host
from ptxlab.runtime.plan import Plan
from ptxlab.sources import of_kernel

FACE = "gemm_w4a8_grouped"
_MOST_PLANS = 4096  # that are remembered
_plans: dict[tuple[Any, ...], Plan] = {}


def gemm_w4a8_grouped(
    x_q: Any,
    x_scale: Any = None,
    weights: ExpertWeights | None = None,
    offsets: Any = None,
    *,
    x_sum: Any = None,
    bias: Any = None,
    out: Any = None,
    out_dtype: Any = None,
    backend: str | None = None,
    programmatic: bool = False,
) -> Any:
    """Y[o_e : o_{e+1}] = X[o_e : o_{e+1}] W_eᵀ for each expert e, in one launch (mixture of experts); see `gemm_w4a8`.

    Rows of X are sorted by expert. How many each has stays on the device: a call enqueues one kernel on the caller's
    stream, whatever the experts' shares, so that a CUDA graph of it (with `out`) can be replayed on other offsets.

    Args:
        x_q: s8 [M, K], M >= 0: tokens times experts of each; or row-major `PackedActivations`, which bring scale and
            sum along. NumPy, CuPy, PyTorch or JAX: the result is of the same kind.
        x_scale: f32 [M]; may be left out for int32 output.
        weights: E weights in `strips`, from `stack_experts`, where the activations are (`ptxlab.to_device`).
        offsets: s32 [E+1], where each expert's rows begin: 0 first, M last, never falling. Looked at on the host only:
            on a GPU wrong ones leave rows unwritten, or have it read or write beyond the arrays.
        x_sum: s32 [M], sum of x_q over K; with it the kernel needs fewer instructions. Checked on the host alone.
        bias: f32 [E, N] or None.
        out: [M, N] to write into; it is what is returned.
        out_dtype: as of `gemm_w4a8`.
        backend: `gpu` or `emulator`; by default the GPU where one will do. Host arrays are copied there and back.
        programmatic: the call may begin before the kernel before it on the stream has ended, for which it waits before
            it reads activations, scales, sums or offsets or writes the output; no kernel that may still run then may
            write weights or bias. Of no effect on host arrays.

    Returns:
        Y [M, N].

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched.
        UnavailableError: the kernel does not run here.
    """
    call = _checked(x_q, x_scale, weights, offsets, x_sum, bias, out, out_dtype)
    check_how(FACE, backend, programmatic)
    if not gpu.is_device_array(call.given["x"]):
        return _on_host(call, backend)
    if backend == "emulator":
        raise ArgumentError("backend", "arrays on the CPU (NumPy) for the emulator", "arrays on a GPU")
    return _on_gpu(call, programmatic)


class _Call(NamedTuple):
    """The arrays given, by argument of the kernel, the weights, and the output's dtype by name."""

    given: dict[str, Any]
    weights: ExpertWeights
    M: int
    dtype: str

    @property
    def sizes(self) -> dict[str, int]:
        """Of the kernel."""
        weights = self.weights
        return {"M": self.M, "N": weights.N, "K": weights.K, "E": weights.E, "g": weights.group}

    @property
    def config(self) -> dict[str, int]:
        """Constants of the variant."""
        variant = {"OUT": DTYPES.index(self.dtype), "SIGNED": int("x_sum" not in self.given)}
        return {**GROUPED.config_for(self.sizes), **variant}

    def wanted(self) -> dict[str, tuple[str, str, tuple[int, ...]]]:
        """Of every array given beside the weights: the label for messages, dtype and shape."""
        M, N, K, E, _ = self.sizes.values()
        known = {
            "x": ("x_q", "int8", (M, K)),
            "offsets": ("offsets", "int32", (E + 1,)),
            "x_scale": ("x_scale", "float32", (M,)),
            "x_sum": ("x_sum", "int32", (M,)),
            "bias": ("bias", "float32", (E, N)),
            "y": ("out", self.dtype, (M, N)),
        }
        return {name: (f"{FACE}: {known[name][0]}", *known[name][1:]) for name in self.given}


def _checked(
    x_q: Any, x_scale: Any, weights: Any, offsets: Any, x_sum: Any, bias: Any, out: Any, out_dtype: Any
) -> _Call:
    """The call; raises ArgumentError for what does not fit together."""
    if not isinstance(weights, ExpertWeights):
        raise ArgumentError(f"{FACE}: weights", "must be ExpertWeights (stack_experts)", type(weights).__name__)
    if weights.layout != LAYOUT or weights.scheme not in SCHEMES:
        rule = f"must be {' or '.join(SCHEMES)} in {LAYOUT}"
        raise ArgumentError(f"{FACE}: weights", rule, f"{weights.scheme} in {weights.layout}")
    if weights.protective_range > PROTECTIVE_RANGE:
        rule = f"must have a protective_range of at most {PROTECTIVE_RANGE}, beyond which its bytes may overflow"
        raise ArgumentError(f"{FACE}: weights", rule, weights.protective_range)
    x_q, x_scale, x_sum, order, _, shape = opened(FACE, x_q, x_scale, x_sum)
    if order != "row_major" or len(shape) != 2:
        got = order if order != "row_major" else f"shape {shape}"
        raise ArgumentError(f"{FACE}: x_q", "must be an array [M, K] or row-major PackedActivations", got)
    if shape[1] != weights.K:
        raise ArgumentError(f"{FACE}: x_q", f"K must be {weights.K} as the weights'", f"shape {shape}")
    if offsets is None:
        raise ArgumentError(f"{FACE}: offsets", f"must be s32 [{weights.E + 1}]", "nothing")
    dtype = output_dtype(FACE, out_dtype, out, x_scale)
    arrays = {"x": x_q, "offsets": offsets, "x_scale": x_scale, "x_sum": x_sum, "bias": bias, "y": out}
    return _Call({name: a for name, a in arrays.items() if a is not None}, weights, shape[0], dtype)


def _on_host(call: _Call, backend: str | None) -> Any:
    """NumPy, or PyTorch on the CPU: in the emulator, or copied to the GPU and back."""
    arrays = {}
    for name, (label, dtype, shape) in call.wanted().items():
        arrays[name] = require_on_host(label, call.given[name], dtype, shape, written=name == "y")
    sums_agree(FACE, arrays)
    if any(gpu.is_device_array(array) for array in call.weights.buffers.values()):
        raise ArgumentError(f"{FACE}: weights", "must be on the host, as x_q is", "ones on the GPU")
    inputs = {name: array for name, array in call.given.items() if name != "y"} | _buffers(call.weights)
    inputs.setdefault("x_scale", np.ones(call.M, np.float32))  # of int32 output, which does not see it
    out = {"y": call.given["y"]} if "y" in call.given else {}
    source, config = of_kernel(GROUPED.name)[0], call.config
    return run_spec(GROUPED, source, inputs, sizes=call.sizes, out=out, backend=backend, config=config).outputs["y"]


def _on_gpu(call: _Call, programmatic: bool) -> Any:
    """Check what lies on the device, load the kernel if this is the first call of its shape, and launch."""
    if reason := gpu.why_not(GROUPED.arch, exact=GROUPED.exact_arch):
        raise UnavailableError(f"{FACE}: {reason}")
    device, stream, x, out = gpu.current_device(), gpu.stream_handle(), call.given["x"], call.given.get("y")
    views = {}
    for name, (label, dtype, shape) in call.wanted().items():
        views[name] = gpu.view(label, call.given[name]).require(label, dtype, shape, device)
    for name, buffer in _buffers(call.weights).items():  # whose dtypes and shapes are the weights' own concern
        views[name] = view = gpu.view(f"{FACE}: weights", buffer)
        if view.device != device:
            raise ArgumentError(f"{FACE}: weights", f"on the current device {device}", f"device {view.device}")
    shape = call.M, call.weights.N
    if call.M == 0:
        return gpu.handed(gpu.new(x, shape, call.dtype), x, call.dtype) if out is None else out
    key = (*call.sizes.values(), call.dtype, "x_sum" in views, programmatic, device)
    if gpu.is_capturing(stream):
        refuse_in_capture(FACE, out, call.dtype, key in _plans, **call.sizes)
    plan = _plans.get(key) or _planned(call, key, programmatic)
    result = gpu.new(x, shape, call.dtype) if out is None else out
    if out is None:
        views["y"] = gpu.view("out", result)
    plan(stream, views)
    return gpu.handed(result, x, call.dtype) if out is None else out


def _planned(call: _Call, key: tuple[Any, ...], programmatic: bool) -> Plan:
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    plan = _plans[key] = Plan(GROUPED, call.config, call.sizes, programmatic=programmatic)
    return plan


def _buffers(weights: ExpertWeights) -> dict[str, Any]:
    return {"strips": weights.buffers["strips"], "w_scale": weights.buffers["channel_scale"]}
