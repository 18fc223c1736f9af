"""`gemm_w4a8`: any array library, any of the ladder's kernels, in eager calls and in CUDA graphs."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.io.dynamo import break_graph
from ptxlab.lowbit.kernels.gemm import ladder
from ptxlab.lowbit.kernels.gemm.common import DTYPES, GemmStep, check_sums
from ptxlab.lowbit.kernels.gemm.epilogues import OUTPUTS
from ptxlab.lowbit.kernels.gemm.options import GemmOptions, require_scale, resolve_dtype
from ptxlab.lowbit.kernels.operation import (
    CallArray,
    DeviceMemory,
    Operation,
    Prepared,
    Results,
    Scratch,
    WorkspaceRules,
    dtype_of,
)
from ptxlab.lowbit.kernels.options import document_options
from ptxlab.lowbit.kernels.quantize import SUM
from ptxlab.lowbit.layout import PackedActivations, PackedWeight
from ptxlab.lowbit.layout.packed_activations import stored_shape, unpack_activations
from ptxlab.runtime import run_spec
from ptxlab.runtime.arguments import require_on_host
from ptxlab.runtime.plan import Plan
from ptxlab.sources import sources_of_kernel
from ptxlab.validate import shape_of

NAME = "gemm_w4a8"


@dataclass(frozen=True, eq=False)
class Workspace(DeviceMemory):
    """Device memory that `gemm_w4a8` needs besides its output, for up to `M` tokens; made by `gemm_workspace`.

    Calls on one stream may share it, since they follow each other; so may graphs that are replayed on one stream.
    """

    M: int

    def describe_buffer(self, name: str) -> str:
        """Describe a workspace with too small a buffer, for messages."""
        return f"one for M={self.M}"


@break_graph
@document_options(GemmOptions)
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
    """Multiply INT8 activations by 4-bit weights, Y = X Wᵀ: exact integers, scaled once (QServe §5.2, LiquidGEMM §5).

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
        residual: float16 or bfloat16 [M, N], for weights in `strips`: Y, rounded to that, is added to it in place, as
            `rmsnorm_quantize` adds; it is what is returned.
        out: [M, N] to write into; it is what is returned.
        workspace: from `gemm_workspace`. Without one, calls on a stream share what the first of them makes, until
            `ptxlab.release_memory()`.
        {options}

    Returns:
        Y [M, N]; [M, F] with `silu_mul`.

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched.
        UnavailableError: no kernel for this weight runs here; the message names those that would.
    """
    options = GemmOptions.of(backend, programmatic, out_dtype, epilogue, kernel)
    if weight is None and isinstance(x_scale, PackedWeight):
        raise ArgumentError(f"{NAME}: weight", "must be given by name, as weight=w", "a PackedWeight as x_scale")
    if not isinstance(weight, PackedWeight):
        raise ArgumentError(f"{NAME}: weight", "must be a PackedWeight (layout.pack)", type(weight).__name__)
    if workspace is not None and not isinstance(workspace, Workspace):
        raise ArgumentError(f"{NAME}: workspace", "must come from gemm_workspace", type(workspace).__name__)
    x_q, x_scale, x_sum, order, rows, shape = unpack_operand(NAME, x_q, x_scale, x_sum)
    y = out if residual is None else residual
    description = weight.description, order, rows, shape, residual is None, out is None
    arrays = {"x": x_q, "x_scale": x_scale, "x_sum": x_sum, "bias": bias, "y": y, **weight.buffers}
    outputs = _GEMM(options, description, arrays, weight, order, rows, shape, residual, out, workspace=workspace)
    return outputs["y"] if y is None else y


def _check(
    options: GemmOptions,
    arrays: Mapping[str, Any],
    weight: PackedWeight,
    order: str,
    rows: int,
    shape: tuple[int, int] | None,
    residual: Any,
    out: Any,
) -> "_GemmCall":
    """Build the call; raise ArgumentError for operands that do not fit together."""
    M_K = shape or shape_of(arrays["x"])
    if len(M_K) != 2:
        raise ArgumentError(f"{NAME}: x_q", "must be an array [M, K] or PackedActivations", f"shape {M_K}")
    if dtype_of(arrays["x"]) in ("float16", "bfloat16", "float32", "float64"):
        rule = "must be quantised: pass quantize_activations(x) in place of x"
        raise ArgumentError(f"{NAME}: x_q", rule, dtype_of(arrays["x"]))
    if M_K[1] != weight.K:
        raise ArgumentError(f"{NAME}: x_q", f"K must be {weight.K} as the weight's", f"shape {M_K}")
    epilogue = _resolve_epilogue(weight, options.epilogue, residual, arrays["bias"], out)
    dtype = resolve_dtype(NAME, options, arrays["y"])
    require_scale(NAME, arrays["x_scale"], dtype)
    if epilogue and dtype not in OUTPUTS:
        raise ArgumentError(f"{NAME}: out_dtype", f"must be {' or '.join(OUTPUTS)} with {epilogue}", dtype)
    return _GemmCall(arrays, weight, order, rows, M_K[0], replace(options, epilogue=epilogue, out_dtype=dtype))


def _resolve_epilogue(weight: PackedWeight, epilogue: str | None, residual: Any, bias: Any, out: Any) -> str | None:
    """Return the epilogue that is asked for or follows from a residual; raise ArgumentError if it does not fit."""
    if weight.interleaved and epilogue is None:
        raise ArgumentError(f"{NAME}: epilogue", "must be silu_mul for a weight packed with interleaved=True", epilogue)
    if epilogue and not weight.interleaved:
        raise ArgumentError(f"{NAME}: weight", "must be packed with interleaved=True for silu_mul", "rows in order")
    if epilogue:
        for name, array in (("residual", residual), ("bias", bias)):
            if array is not None:
                raise ArgumentError(f"{NAME}: {name}", f"must be None beside {epilogue}", "an array")
    elif residual is not None and out is not None:
        raise ArgumentError(f"{NAME}: out", "must be None beside a residual, which is what is written", "an array")
    if residual is not None and dtype_of(residual) not in OUTPUTS:
        raise ArgumentError(f"{NAME}: residual", f"dtype must be {' or '.join(OUTPUTS)}", dtype_of(residual))
    return epilogue if residual is None else "residual"


@break_graph
def gemm_workspace(weight: PackedWeight, M: int, *, kernel: str | None = None) -> Workspace:
    """Allocate the memory that `gemm_w4a8` needs for this weight and up to M tokens, on the current device.

    The workspace is empty if the kernel needs none.

    Raises ArgumentError for what is no packed weight or no number of tokens, and what choosing the kernel raises.
    """
    if not isinstance(weight, PackedWeight):
        raise ArgumentError("gemm_workspace: weight", "must be a PackedWeight (layout.pack)", type(weight).__name__)
    if not isinstance(M, Integral) or M < 0:
        raise ArgumentError("gemm_workspace: M", "must be an integer, 0 or more", repr(M))
    step = ladder.choose(weight, "row_major", M, GemmOptions(kernel=kernel, backend="gpu"))
    sizes = step.sizes(M, weight.N, weight.K, weight.group, 1)
    step.spec.check_sizes(sizes)
    return Workspace.of(step.spec.name, _scratch_buffers(step, sizes), zeros=False, M=int(M))


def _scratch_buffers(step: GemmStep, sizes: dict[str, int]) -> tuple[Scratch, ...]:
    """List the spec's scratch arguments, and the token sums if the step needs them; callers may give sums instead."""
    sizes_and_constants = {**sizes, **step.spec.config_for(sizes)}
    needed_arguments = [
        arg for arg in step.spec.args if arg.role == "scratch" or (arg.name == "x_sum" and step.needs_sum)
    ]
    return tuple(Scratch.of(arg, sizes_and_constants) for arg in needed_arguments)


def unpack_operand(name: str, x_q: Any, x_scale: Any, x_sum: Any) -> tuple[Any, Any, Any, str, int, Any]:
    """Take activations apart: arrays, their order, tokens of a tile, and of PackedActivations (M, K).

    Raises ArgumentError for a scale or sum beside PackedActivations.
    """
    if not isinstance(x_q, PackedActivations):
        return x_q, x_scale, x_sum, "row_major", 1, None
    if x_scale is not None or x_sum is not None:
        argument = "x_scale" if x_scale is not None else "x_sum"
        raise ArgumentError(f"{name}: {argument}", "must be None: PackedActivations have theirs", "another")
    return x_q.x_q, x_q.scale, x_q.token_sum, x_q.layout, x_q.rows, (x_q.M, x_q.K)


@dataclass(frozen=True, eq=False)
class _GemmCall:
    """Call of one product: `Operation`'s arrays, and options with epilogue and output dtype filled in."""

    arrays: Mapping[str, Any]
    weight: PackedWeight
    order: str
    rows: int
    M: int
    options: GemmOptions

    @property
    def key(self) -> tuple[Any, ...]:
        return self.weight.description, self.order, self.rows, self.M, self.has_sum

    @property
    def has_sum(self) -> bool:
        return self.arrays["x_sum"] is not None

    @property
    def sizes(self) -> dict[str, int]:
        return {"M": self.M, "N": self.weight.N, "K": self.weight.K}

    @property
    def is_empty(self) -> bool:
        return self.M == 0

    @cached_property
    def step(self) -> GemmStep:
        """Step that computes the product; raises what choosing it raises."""
        is_on_gpu = gpu.is_device_array(self.arrays["x"])
        options = replace(self.options, backend="gpu") if is_on_gpu else self.options
        return ladder.choose(self.weight, self.order, self.M, options)

    @cached_property
    def kernel_sizes(self) -> dict[str, int]:
        """Sizes as the step knows them; raises ArgumentError for sizes that it does not take."""
        sizes = self.step.sizes(self.M, self.weight.N, self.weight.K, self.weight.group, self.rows)
        self.step.spec.check_sizes(sizes)
        return sizes

    @property
    def activations_and_output(self) -> Iterator[CallArray]:
        """Activations and output."""
        M, N, options = self.M, self.weight.N, self.options
        shapes = {
            "x": ("x_q", "int8", stored_shape(self.order, M, self.weight.K, self.rows)),
            "x_scale": ("x_scale", "float32", (M,)),
            "x_sum": ("x_sum", "int32", (M,)),
            "bias": ("bias", "float32", (N,)),
        }
        for name, (label, dtype, shape) in shapes.items():
            if self.arrays[name] is not None and (name != "x_sum" or self.step.takes_sum):
                yield CallArray(name, f"{NAME}: {label}", self.arrays[name], dtype, shape)
        label, width = "residual" if options.epilogue == "residual" else "out", N
        if options.epilogue == "silu_mul":
            width = N // 2
        yield CallArray("y", f"{NAME}: {label}", self.arrays["y"], options.out_dtype, (M, width))

    @property
    def operands(self) -> Iterator[CallArray]:
        """Activations, output and weight; dtypes and shapes of the weight are the PackedWeight's own concern."""
        yield from self.activations_and_output
        for buffer, array in self.weight.buffers.items():
            yield CallArray(buffer, f"{NAME}: weight", array)


def _prepare(call: _GemmCall) -> Prepared:
    step, sizes = call.step, call.kernel_sizes
    needs_sum = step.needs_sum and not call.has_sum

    def make_plans() -> tuple[Plan, ...]:
        """Plan the GEMM, after the launch that sums the tokens if it needs sums that are not given."""
        config = step.config(sizes, DTYPES.index(call.options.out_dtype), call.has_sum)
        buffer_names = dict(step.buffers)
        product = Plan(step.spec, config, sizes, programmatic=call.options.programmatic, named=buffer_names)
        if not needs_sum:
            return (product,)
        names = {"x_q": "x", "token_sum": "x_sum"}
        sums = {name: sizes[name] for name in ("M", "K")}
        return Plan(SUM, SUM.configs[0], sums, named=names), product  # plainly: they wait for what is before

    rules = WorkspaceRules(
        in_capture=f"must be given in a capture unless x_sum is: make gemm_workspace(weight, {call.M}) before",
        kernel=f"must be gemm_workspace(weight, {call.M})",
        size=f"must be gemm_workspace(weight, {call.M}) or larger",
    )
    return Prepared(step.spec.name, make_plans, memory=_scratch_buffers(step, sizes), workspace_rules=rules)


def _on_host(call: _GemmCall) -> Results:
    """Run on NumPy arrays, or PyTorch's on the CPU: in the emulator, or copied to the GPU and back."""
    step, weight, sizes = call.step, call.weight, call.kernel_sizes
    inputs = {}
    for operand in call.activations_and_output:
        if operand.array is None:
            continue
        require_on_host(*operand[1:5], written=operand.name == "y")
        inputs[operand.name] = operand.array
    _check_sums(call)
    if any(gpu.is_device_array(array) for array in weight.buffers.values()):
        raise ArgumentError(f"{NAME}: weight", "must be on the host, as x_q is", "one on the GPU")
    out = {"y": inputs.pop("y")} if "y" in inputs else {}
    inputs |= {name: weight.buffers[buffer] for name, buffer in step.buffers}
    inputs.setdefault("x_scale", np.ones(call.M, np.float32))  # of int32 output, which does not see it
    if step.needs_sum and not call.has_sum:
        inputs["x_sum"] = gpu.as_array("x_q", call.arrays["x"]).sum(axis=1, dtype=np.int32)
    return run_spec(
        step.spec,
        sources_of_kernel(step.spec.name)[0],
        inputs,
        sizes=sizes,
        out=out,
        backend=call.options.backend,
        config=step.config(sizes, DTYPES.index(call.options.out_dtype), "x_sum" in inputs),
        programmatic=call.options.programmatic,
    ).outputs


def _check_sums(call: _GemmCall) -> None:
    """Raise ArgumentError for the first token sum, given on the host, that is not that of its activations."""
    if not call.has_sum:
        return
    sums = require_on_host(f"{NAME}: x_sum", call.arrays["x_sum"], "int32", (call.M,))
    x_q = gpu.as_array(f"{NAME}: x_q", call.arrays["x"])
    packed_activations = PackedActivations(
        layout=call.order, M=call.M, K=call.weight.K, rows=call.rows, x_q=x_q, scale=sums, token_sum=sums
    )
    check_sums(NAME, {"x": unpack_activations(packed_activations).q if call.M else x_q, "x_sum": sums})


_GEMM = Operation(NAME, _check, _prepare, _on_host)
