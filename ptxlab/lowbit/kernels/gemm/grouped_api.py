"""`gemm_w4a8_grouped`: the experts of a layer in one call."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.io.dynamo import break_graph
from ptxlab.lowbit.kernels.gemm.api import unpack_operand
from ptxlab.lowbit.kernels.gemm.common import DTYPES, GemmStep, check_sums
from ptxlab.lowbit.kernels.gemm.grouped import STEPS
from ptxlab.lowbit.kernels.gemm.options import GroupedOptions, require_scale, resolve_dtype
from ptxlab.lowbit.kernels.gemm.strips import LAYOUT
from ptxlab.lowbit.kernels.operation import CallArray, Operation, Prepared, Results
from ptxlab.lowbit.kernels.options import document_options
from ptxlab.lowbit.layout import ExpertWeights
from ptxlab.runtime import run_spec
from ptxlab.runtime.arguments import require_on_host
from ptxlab.runtime.plan import Plan
from ptxlab.sources import sources_of_kernel
from ptxlab.validate import shape_of

NAME = "gemm_w4a8_grouped"


@break_graph
@document_options(GroupedOptions)
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
    """Compute Y[o_e : o_{e+1}] = X[o_e : o_{e+1}] W_eᵀ for each expert e in one launch (mixture of experts).

    For a single weight see `gemm_w4a8`.

    Rows of X are sorted by expert. How many each has stays on the device: a call enqueues one kernel on the caller's
    stream, whatever the experts' shares, so that a CUDA graph of it (with `out`) can be replayed on other offsets.

    Args:
        x_q: s8 [M, K], M >= 0: tokens times experts of each; or row-major `PackedActivations`, which bring scale and
            sum along. NumPy, CuPy, PyTorch or JAX: the result is of the same kind.
        x_scale: f32 [M]; may be left out for int32 output.
        weights: E weights in `strips`, from `stack_experts`, where the activations are (`ptxlab.to_device`).
        offsets: s32 [E+1], where each expert's rows begin: 0 first, M last, never falling. Looked at on the host only:
            on a GPU wrong ones leave rows unwritten, or have it read or write beyond the arrays.
        x_sum: s32 [M], sum of x_q over K: weights per channel need it, for others the kernel then has fewer
            instructions. Checked on the host alone.
        bias: f32 [E, N] or None.
        out: [M, N] to write into; it is what is returned.
        {options}

    Returns:
        Y [M, N].

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched.
        UnavailableError: the kernel does not run here.
    """
    options = GroupedOptions.of(backend, programmatic, out_dtype)
    if not isinstance(weights, ExpertWeights):
        raise ArgumentError(f"{NAME}: weights", "must be ExpertWeights (stack_experts)", type(weights).__name__)
    x_q, x_scale, x_sum, order, _, shape = unpack_operand(NAME, x_q, x_scale, x_sum)
    activations = {"x": x_q, "x_scale": x_scale, "x_sum": x_sum, "offsets": offsets, "bias": bias, "y": out}
    arrays = {**activations, **weights.buffers}
    outputs = _GROUPED(options, (weights.description, order, shape), arrays, weights, order, shape)
    return outputs["y"] if out is None else out


def _check(
    options: GroupedOptions,
    arrays: Mapping[str, Any],
    weights: ExpertWeights,
    order: str,
    shape: tuple[int, int] | None,
) -> "_GroupedCall":
    """Build the call; raise ArgumentError for operands that do not fit together."""
    _check_weights(weights)
    M_K = shape or shape_of(arrays["x"])
    if order != "row_major" or len(M_K) != 2:
        got = order if order != "row_major" else f"shape {M_K}"
        raise ArgumentError(f"{NAME}: x_q", "must be an array [M, K] or row-major PackedActivations", got)
    if M_K[1] != weights.K:
        raise ArgumentError(f"{NAME}: x_q", f"K must be {weights.K} as the weights'", f"shape {M_K}")
    if arrays["offsets"] is None:
        raise ArgumentError(f"{NAME}: offsets", f"must be s32 [{weights.E + 1}]", "nothing")
    if arrays["x_sum"] is None and weights.scheme == "qoq_channel":
        raise ArgumentError(f"{NAME}: x_sum", "must be given for weights per channel", "nothing")
    dtype = resolve_dtype(NAME, options, arrays["y"])
    require_scale(NAME, arrays["x_scale"], dtype)
    return _GroupedCall(arrays, weights, M_K[0], replace(options, out_dtype=dtype))


@dataclass(frozen=True, eq=False)
class _GroupedCall:
    """The arrays of `Operation`, the weights, tokens times experts of each, and options with the output's dtype."""

    arrays: Mapping[str, Any]
    weights: ExpertWeights
    M: int
    options: GroupedOptions

    @property
    def step(self) -> GemmStep:
        """The kernel in the form that these weights take."""
        return STEPS[self.weights.scheme]

    @property
    def sizes(self) -> dict[str, int]:
        weights = self.weights
        return self.step.sizes(self.M, weights.N, weights.K, weights.group, E=weights.E)

    @property
    def config(self) -> dict[str, int]:
        return self.step.config(self.sizes, DTYPES.index(self.options.out_dtype), self.has_sum)

    @property
    def key(self) -> tuple[Any, ...]:
        return self.weights.description, self.M, self.has_sum

    @property
    def has_sum(self) -> bool:
        return self.arrays["x_sum"] is not None

    @property
    def is_empty(self) -> bool:
        return self.M == 0

    @property
    def activations_and_output(self) -> Iterator[CallArray]:
        """Activations, where each expert's begin, and output."""
        M, N, K, E = self.M, self.weights.N, self.weights.K, self.weights.E
        shapes = (
            ("x", "x_q", "int8", (M, K)),
            ("offsets", "offsets", "int32", (E + 1,)),
            ("x_scale", "x_scale", "float32", (M,)),
            ("x_sum", "x_sum", "int32", (M,)),
            ("bias", "bias", "float32", (E, N)),
        )
        for name, label, dtype, shape in shapes:
            if self.arrays[name] is not None:
                yield CallArray(name, f"{NAME}: {label}", self.arrays[name], dtype, shape)
        yield CallArray("y", f"{NAME}: out", self.arrays["y"], self.options.out_dtype, (M, N))

    @property
    def operands(self) -> Iterator[CallArray]:
        """Activations, offsets, output and weights; dtypes and shapes of the weights are their own concern."""
        yield from self.activations_and_output
        for _, buffer in self.step.buffers:
            yield CallArray(buffer, f"{NAME}: weights", self.weights.buffers[buffer])


def _check_weights(weights: ExpertWeights) -> None:
    if weights.layout != LAYOUT or weights.scheme not in STEPS:
        rule = f"must be {' or '.join(STEPS)} in {LAYOUT}"
        raise ArgumentError(f"{NAME}: weights", rule, f"{weights.scheme} in {weights.layout}")


def _prepare(call: _GroupedCall) -> Prepared:
    spec, buffer_names = call.step.spec, dict(call.step.buffers)
    if reason := gpu.why_not(spec.arch, exact=spec.exact_arch):
        raise UnavailableError(f"{NAME}: {spec.name}: {reason}")

    def make_plans() -> tuple[Plan, ...]:
        return (Plan(spec, call.config, call.sizes, programmatic=call.options.programmatic, named=buffer_names),)

    return Prepared(spec.name, make_plans)


def _on_host(call: _GroupedCall) -> Results:
    """Run on NumPy arrays, or PyTorch's on the CPU: in the emulator, or copied to the GPU and back."""
    arrays = {}
    for operand in call.activations_and_output:
        if operand.array is not None:
            arrays[operand.name] = require_on_host(*operand[1:5], written=operand.name == "y")
    check_sums(NAME, arrays)
    if any(gpu.is_device_array(array) for array in call.weights.buffers.values()):
        raise ArgumentError(f"{NAME}: weights", "must be on the host, as x_q is", "ones on the GPU")
    inputs = {name: call.arrays[name] for name in arrays if name != "y"}
    inputs |= {name: call.weights.buffers[buffer] for name, buffer in call.step.buffers}
    inputs.setdefault("x_scale", np.ones(call.M, np.float32))  # of int32 output, which does not see it
    out = {"y": call.arrays["y"]} if "y" in arrays else {}
    spec = call.step.spec
    return run_spec(
        spec,
        sources_of_kernel(spec.name)[0],
        inputs,
        sizes=call.sizes,
        out=out,
        backend=call.options.backend,
        config=call.config,
        programmatic=call.options.programmatic,
    ).outputs


_GROUPED = Operation(NAME, _check, _prepare, _on_host)
