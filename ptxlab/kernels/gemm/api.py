"""`gemm_w4a8`, the Python face of the kernels: any array library, any of them, in eager calls and in CUDA graphs."""

from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.kernels.gemm import ladder
from ptxlab.kernels.gemm.call import Call, arrays, check_sums, checked
from ptxlab.kernels.gemm.common import DTYPES
from ptxlab.kernels.gemm.device import Workspace, on_gpu
from ptxlab.layout import PackedWeight
from ptxlab.layout.packed_activations import stored_shape
from ptxlab.runtime import run_spec
from ptxlab.runtime.arguments import require_on_host
from ptxlab.sources import of_kernel


def gemm_w4a8(
    x_q: Any,
    x_scale: Any = None,
    weight: PackedWeight | None = None,
    *,
    x_sum: Any = None,
    bias: Any = None,
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
        out: [M, N] to write into; it is what is returned.
        out_dtype: `float16`, `bfloat16`, `float32`, or `int32` for the accumulators, not scaled and without bias;
            by name, or as a dtype of NumPy, PyTorch or JAX; by default that of `out`, else float16. NumPy and CuPy have
            no bfloat16: they get its bits, uint16.
        kernel: one of the kernels by name; by default, of those that take this weight and run here, the one that suits
            the sizes best.
        backend: `gpu` or `emulator`; by default the GPU where one will do. Host arrays are copied there and back.
        workspace: from `gemm_workspace`.
        programmatic: the call may begin before the kernel before it on the stream has ended (programmatic dependent
            launch): it reads weight and bias at once, so no kernel that may still run then may write these; before it
            reads activations, scales or sums, or writes the output, it waits by itself. Only for kernels that do so;
            of no effect on host arrays.

    Returns:
        Y [M, N].

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched.
        UnavailableError: no kernel for this weight runs here; the message names those that would.
    """
    call = checked(
        x_q,
        x_scale,
        weight,
        x_sum=x_sum,
        bias=bias,
        out=out,
        out_dtype=out_dtype,
        kernel=kernel,
        backend=backend,
        programmatic=programmatic,
    )
    if workspace is not None and not isinstance(workspace, Workspace):
        raise ArgumentError("gemm_w4a8: workspace", "must come from gemm_workspace", type(workspace).__name__)
    if not gpu.is_device_array(call.x_q):
        return _on_host(call, backend)
    if backend == "emulator":
        raise ArgumentError("backend", "arrays on the CPU (NumPy) for the emulator", "arrays on a GPU")
    return on_gpu(call, workspace)


def _on_host(call: Call, backend: str | None) -> Any:
    """NumPy, or PyTorch on the CPU: in the emulator, or copied to the GPU and back."""
    weight, M = call.weight, call.M
    step = ladder.choose(weight, call.order, M, kernel=call.kernel, backend=backend, programmatic=call.programmatic)
    spec, sizes = step.spec, step.sizes(M, weight.N, weight.K, weight.group, call.rows)
    spec.check_sizes(sizes)
    given = {}
    for name, label, array, dtype, shape in arrays(
        call, stored_shape(call.order, M, weight.K, call.rows), step.takes_sum
    ):
        require_on_host(label, array, dtype, shape, written=name == "y")
        given[name] = array
    check_sums(call)
    out = {"y": given.pop("y")} if "y" in given else {}
    inputs = given | {name: weight.buffers[buffer] for name, buffer in step.buffers}
    if any(gpu.is_device_array(array) for array in weight.buffers.values()):
        raise ArgumentError("gemm_w4a8: weight", "must be on the host, as x_q is", "one on the GPU")
    inputs.setdefault("x_scale", np.ones(M, np.float32))  # of int32 output, which does not see it
    if step.needs_sum and "x_sum" not in inputs:
        inputs["x_sum"] = gpu.as_array("x_q", call.x_q).sum(axis=1, dtype=np.int32)
    config = step.config(sizes, DTYPES.index(call.dtype), "x_sum" in inputs)
    source = of_kernel(spec.name)[0]
    return run_spec(spec, source, inputs, sizes=sizes, out=out, backend=backend, config=config).outputs["y"]
