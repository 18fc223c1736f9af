"""`gemm_w4a8`: any array library, any of the ladder's kernels, in eager calls and in CUDA graphs."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.lowbit.kernels.gemm import ladder
from ptxlab.lowbit.kernels.gemm.common import DTYPES, GemmStep, sums_agree
from ptxlab.lowbit.kernels.gemm.epilogues import OUTPUTS
from ptxlab.lowbit.kernels.operation import (
    CallArray,
    DeviceMemory,
    Operation,
    Prepared,
    Results,
    Scratch,
    check_how,
    dtype_of,
)
from ptxlab.lowbit.kernels.quantize import SUM
from ptxlab.lowbit.layout import PackedActivations, PackedWeight
from ptxlab.lowbit.layout.packed_activations import stored_shape, unpack_activations
from ptxlab.runtime import run_spec
from ptxlab.runtime.arguments import require_on_host
from ptxlab.runtime.plan import Plan
from ptxlab.sources import of_kernel
from ptxlab.spec.dtypes import name_of
from ptxlab.validate import is_one_of, shape_of

NAME = "gemm_w4a8"


@dataclass(frozen=True, eq=False)
class Workspace(DeviceMemory):
    """Device memory that `gemm_w4a8` needs besides its output, for up to `M` tokens; made by `gemm_workspace`.

    Calls on one stream may share it, since they follow each other; so may graphs that are replayed on one stream.
    """

    M: int

    def said_of(self, name: str) -> str:
        """What messages say of it where a buffer is too small."""
        return f"one for M={self.M}"


def gemm_w4a8(
    x_q: Any,
    x_scale: Any = None,
    weight: PackedWeight | None = None,
    *,
    x_sum: Any = None,
    bias: Any = None,
    epilogue: str | None = None,
    residual: Any = None,
    out: Any = None,
    out_dtype: Any = None,
    kernel: str | None = None,
    backend: str | None = None,
    workspace: Workspace | None = None,
    programmatic: bool = False,
) -> Any:
    """Y = X Wᵀ of INT8 activations and 4-bit weights: exact integers, scaled once (QServe §5.2, LiquidGEMM §5).

    On the GPU a call only enqueues, on the caller's stream; after the first call of a shape it allocates nothing but
    the result, if `out` does not provide that. So it can be captured into a CUDA graph: with `out`, and with
    `workspace` for a per-channel weight without `x_sum`.

    Args:
        x_q: s8 [M, K], M >= 0; or `PackedActivations` (from `quantize_activations`), which bring scale and sum along,
            in an order that a kernel for this weight reads: `row_major`, for LQQ in `dual_mma` and for `strips` also
            `tiles` of 8, 16, 32, 64, 128 or 256 tokens, for `strips` also `fragment` of up to 32 tokens. NumPy, CuPy,
            PyTorch or JAX: the result is of the same kind.
        x_scale: f32 [M]; may be left out for int32 output.
        weight: packed; where the activations are, on the host or on the GPU (`ptxlab.to_device`).
        x_sum: s32 [M], sum of x_q over K, for per-channel weights, where it is computed if it is not given; and for
            `strips`, where the kernel needs fewer instructions with it. Another sum is refused on the host; on the GPU
            nobody looks, and the result is wrong.
        bias: f32 [N] or None.
        epilogue: `silu_mul` for gate and up [2·F, K], packed with `interleaved=True`: Y [M, F], float16 or bfloat16, is
            silu(gate) · up in f32, rounded once, as `silu_mul_quantize` computes it. Without bias.
        residual: float16 or bfloat16 [M, N], for weights in `strips`: Y, rounded to that, is added to it in place, as
            `rmsnorm_quantize` adds; it is what is returned.
        out: [M, N] to write into; it is what is returned.
        out_dtype: `float16`, `bfloat16`, `float32`, or `int32` for the accumulators, not scaled and without bias;
            by name, or as a dtype of NumPy, PyTorch or JAX; by default that of `out`, else float16. NumPy and CuPy have
            no bfloat16: they get its bits, uint16.
        kernel: one of the kernels by name; by default, of those that take this weight and run here, the one that suits
            the sizes best.
        backend: `gpu` or `emulator`; by default the GPU where one will do. Host arrays are copied there and back.
        workspace: from `gemm_workspace`. Without one, calls on a stream share what the first of them makes, until
            `ptxlab.release_memory()`.
        programmatic: the call may begin before the kernel before it on the stream has ended (programmatic dependent
            launch): it reads weight and bias at once, so no kernel that may still run then may write these; before it
            reads activations, scales, sums or residual, or writes the output, it waits by itself. Only for kernels that
            do so; of no effect on host arrays.

    Returns:
        Y [M, N]; [M, F] with `silu_mul`.

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched.
        UnavailableError: no kernel for this weight runs here; the message names those that would.
    """
    if not isinstance(weight, PackedWeight):
        raise ArgumentError(f"{NAME}: weight", "must be a PackedWeight (layout.pack)", type(weight).__name__)
    if workspace is not None and not isinstance(workspace, Workspace):
        raise ArgumentError(f"{NAME}: workspace", "must come from gemm_workspace", type(workspace).__name__)
    x_q, x_scale, x_sum, order, rows, shape = opened(NAME, x_q, x_scale, x_sum)
    y = out if residual is None else residual

    def check() -> _GemmCall:
        M_K = shape or shape_of(x_q)
        if len(M_K) != 2:
            raise ArgumentError(f"{NAME}: x_q", "must be an array [M, K] or PackedActivations", f"shape {M_K}")
        if M_K[1] != weight.K:
            raise ArgumentError(f"{NAME}: x_q", f"K must be {weight.K} as the weight's", f"shape {M_K}")
        end = _end(weight, epilogue, residual, bias, out)
        dtype = output_dtype(NAME, out_dtype, y, x_scale)
        if end and dtype not in OUTPUTS:
            raise ArgumentError(f"{NAME}: out_dtype", f"must be {' or '.join(OUTPUTS)} with {end}", dtype)
        check_how(NAME, backend, programmatic=programmatic)
        given = x_q, x_scale, x_sum, order, rows, M_K[0], weight, bias, y
        return _GemmCall(*given, end, dtype, kernel, backend, programmatic)

    packed = weight.scheme, weight.layout, weight.N, weight.K, weight.group, weight.protective_range, weight.interleaved
    end = epilogue, residual is None, out is None
    options = packed, order, rows, shape, end, out_dtype, kernel, backend, programmatic
    arrays = {"x": x_q, "x_scale": x_scale, "x_sum": x_sum, "bias": bias, "y": y, **weight.buffers}
    results = _GEMM(options, arrays, check, workspace)
    return results["y"] if y is None else y


def _end(weight: PackedWeight, epilogue: Any, residual: Any, bias: Any, out: Any) -> str:
    """The epilogue's name, empty for none; raises ArgumentError for one that does not fit the weight or the arrays."""
    if not is_one_of(epilogue, ("silu_mul", None)):
        raise ArgumentError(f"{NAME}: epilogue", "must be silu_mul or None", epilogue)
    if weight.interleaved and epilogue is None:
        raise ArgumentError(f"{NAME}: epilogue", "must be silu_mul for a weight packed with interleaved=True", epilogue)
    if epilogue and not weight.interleaved:
        raise ArgumentError(f"{NAME}: weight", "must be packed with interleaved=True for silu_mul", "rows in order")
    beside = {"residual": residual, "bias": bias} if epilogue else {"out": out} if residual is not None else {}
    for name, array in beside.items():
        if array is not None:
            rule = f"must be None beside {epilogue or 'a residual, which is what is written'}"
            raise ArgumentError(f"{NAME}: {name}", rule, "an array")
    if residual is not None and dtype_of(residual) not in OUTPUTS:
        raise ArgumentError(f"{NAME}: residual", f"dtype must be {' or '.join(OUTPUTS)}", dtype_of(residual))
    return epilogue or ("" if residual is None else "residual")


def gemm_workspace(weight: PackedWeight, M: int, *, kernel: str | None = None) -> Workspace:
    """The memory that `gemm_w4a8` needs for this weight and up to M tokens, on the current device; empty if none.

    Raises ArgumentError for what is no packed weight or no number of tokens, and what choosing the kernel raises.
    """
    if not isinstance(weight, PackedWeight):
        raise ArgumentError("gemm_workspace: weight", "must be a PackedWeight (layout.pack)", type(weight).__name__)
    if not isinstance(M, Integral) or M < 0:
        raise ArgumentError("gemm_workspace: M", "must be an integer, 0 or more", repr(M))
    step = ladder.choose(weight, "row_major", M, kernel=kernel, backend="gpu")
    sizes = step.sizes(M, weight.N, weight.K, weight.group, 1)
    step.spec.check_sizes(sizes)
    return Workspace.of(step.spec.name, _scratch(step, sizes), zeros=False, M=int(M))


def _scratch(step: GemmStep, sizes: dict[str, int]) -> tuple[Scratch, ...]:
    """The spec's scratch arguments, and the token sums where it needs them, which the caller may give instead."""
    known = {**sizes, **step.spec.config_for(sizes)}
    needed = [arg for arg in step.spec.args if arg.role == "scratch" or (arg.name == "x_sum" and step.needs_sum)]
    return tuple(Scratch.of(arg, known) for arg in needed)


def opened(name: str, x_q: Any, x_scale: Any, x_sum: Any) -> tuple[Any, Any, Any, str, int, Any]:
    """What was given as activations: arrays, their order, tokens of a tile, and of PackedActivations (M, K).

    Raises ArgumentError for a scale or sum beside PackedActivations.
    """
    if not isinstance(x_q, PackedActivations):
        return x_q, x_scale, x_sum, "row_major", 1, None
    if x_scale is not None or x_sum is not None:
        given = "x_scale" if x_scale is not None else "x_sum"
        raise ArgumentError(f"{name}: {given}", "must be None: PackedActivations have theirs", "another")
    return x_q.x_q, x_q.scale, x_q.token_sum, x_q.layout, x_q.rows, (x_q.M, x_q.K)


def output_dtype(name: str, out_dtype: Any, out: Any, x_scale: Any) -> str:
    """The output's dtype by name; raises ArgumentError for one that there is not, or that lacks a scale."""
    if out_dtype is not None:
        dtype, source = name_of(out_dtype), "out_dtype"
    else:
        dtype, source = ("float16" if out is None else dtype_of(out)), "out"
    if dtype not in DTYPES:
        rule = f"{'dtype ' if source == 'out' else ''}must be one of {', '.join(DTYPES)}"
        raise ArgumentError(f"{name}: {source}", rule, dtype)
    if x_scale is None and dtype != "int32":
        raise ArgumentError(f"{name}: x_scale", "must be given unless the output is int32", "nothing")
    return dtype


@dataclass(frozen=True, eq=False)
class _GemmCall:
    """One product. `end` is the epilogue's name or empty, `dtype` the output's, `kernel` a step's or None;
    `programmatic` says how to launch it. `out` is the residual, where there is one.
    """

    x_q: Any
    x_scale: Any
    x_sum: Any
    order: str
    rows: int
    M: int
    weight: PackedWeight
    bias: Any
    out: Any
    end: str
    dtype: str
    kernel: str | None
    backend: str | None
    programmatic: bool
    check = False

    @property
    def key(self) -> tuple[Any, ...]:
        weight = self.weight
        shape = self.M, weight.N, weight.K, weight.group, self.rows
        how = self.end, self.dtype, self.kernel, self.programmatic, self.has_sum
        return weight.scheme, weight.layout, self.order, shape, *how

    @property
    def has_sum(self) -> bool:
        return self.x_sum is not None

    @property
    def sizes(self) -> dict[str, int]:
        return {"M": self.M, "N": self.weight.N, "K": self.weight.K}

    @property
    def is_empty(self) -> bool:
        return self.M == 0

    @cached_property
    def step(self) -> GemmStep:
        """The step that does it; raises what choosing it raises."""
        backend = "gpu" if gpu.is_device_array(self.x_q) else self.backend
        how: dict[str, Any] = {"kernel": self.kernel, "programmatic": self.programmatic, "epilogue": self.end}
        return ladder.choose(self.weight, self.order, self.M, backend=backend, **how)

    @cached_property
    def kernel_sizes(self) -> dict[str, int]:
        """As the step knows them; raises ArgumentError for those that it does not take."""
        sizes = self.step.sizes(self.M, self.weight.N, self.weight.K, self.weight.group, self.rows)
        self.step.spec.check_sizes(sizes)
        return sizes

    @property
    def beside_the_weight(self) -> Iterator[CallArray]:
        """Activations and output."""
        M, N = self.M, self.weight.N
        yield CallArray("x", f"{NAME}: x_q", self.x_q, "int8", stored_shape(self.order, M, self.weight.K, self.rows))
        if self.x_scale is not None:
            yield CallArray("x_scale", f"{NAME}: x_scale", self.x_scale, "float32", (M,))
        if self.has_sum and self.step.takes_sum:
            yield CallArray("x_sum", f"{NAME}: x_sum", self.x_sum, "int32", (M,))
        if self.bias is not None:
            yield CallArray("bias", f"{NAME}: bias", self.bias, "float32", (N,))
        label, width = "residual" if self.end == "residual" else "out", N // 2 if self.end == "silu_mul" else N
        yield CallArray("y", f"{NAME}: {label}", self.out, self.dtype, (M, width))

    @property
    def operands(self) -> Iterator[CallArray]:
        """The same, and the weight, whose dtypes and shapes are the PackedWeight's own concern."""
        yield from self.beside_the_weight
        for buffer, array in self.weight.buffers.items():
            yield CallArray(buffer, f"{NAME}: weight", array)


def _prepare(call: _GemmCall) -> Prepared:
    step, sizes = call.step, call.kernel_sizes
    needs_sum = step.needs_sum and not call.has_sum

    def plans() -> tuple[Plan, ...]:
        config = step.config(sizes, DTYPES.index(call.dtype), call.has_sum)
        named = dict(step.buffers)
        product = Plan(step.spec, config, sizes, programmatic=call.programmatic, named=named)
        if not needs_sum:
            return (product,)
        names = {"x_q": "x", "token_sum": "x_sum"}
        sums = {name: sizes[name] for name in ("M", "K")}
        return Plan(SUM, SUM.configs[0], sums, named=names), product  # plainly: they wait for what is before

    maker = f"gemm_workspace(weight, {call.M})"
    said = {"maker": maker, "enough": " or larger", "unless": " unless x_sum is"}
    return Prepared(step.spec.name, plans, memory=_scratch(step, sizes), **said)


def _on_host(call: _GemmCall) -> Results:
    """NumPy, or PyTorch on the CPU: in the emulator, or copied to the GPU and back."""
    step, weight, sizes = call.step, call.weight, call.kernel_sizes
    inputs = {}
    for operand in call.beside_the_weight:
        if operand.array is None:
            continue
        require_on_host(*operand[1:5], written=operand.name == "y")
        inputs[operand.name] = operand.array
    _check_sums(call)
    if any(gpu.is_device_array(array) for array in weight.buffers.values()):
        raise ArgumentError(f"{NAME}: weight", "must be on the host, as x_q is", "one on the GPU")
    out = {} if call.out is None else {"y": inputs.pop("y")}
    inputs |= {name: weight.buffers[buffer] for name, buffer in step.buffers}
    inputs.setdefault("x_scale", np.ones(call.M, np.float32))  # of int32 output, which does not see it
    if step.needs_sum and not call.has_sum:
        inputs["x_sum"] = gpu.as_array("x_q", call.x_q).sum(axis=1, dtype=np.int32)
    config = step.config(sizes, DTYPES.index(call.dtype), "x_sum" in inputs)
    source = of_kernel(step.spec.name)[0]
    how: dict[str, Any] = {"backend": call.backend, "config": config, "programmatic": call.programmatic}
    return run_spec(step.spec, source, inputs, sizes=sizes, out=out, **how).outputs


def _check_sums(call: _GemmCall) -> None:
    """Raise ArgumentError for the first token sum, given on the host, that is not that of its activations."""
    if not call.has_sum:
        return
    sums = require_on_host(f"{NAME}: x_sum", call.x_sum, "int32", (call.M,))
    x_q = gpu.as_array(f"{NAME}: x_q", call.x_q)
    packed = PackedActivations(
        layout=call.order, M=call.M, K=call.weight.K, rows=call.rows, x_q=x_q, scale=sums, token_sum=sums
    )
    sums_agree(NAME, {"x": unpack_activations(packed).q if call.M else x_q, "x_sum": sums})


_GEMM = Operation(NAME, _prepare, _on_host)
