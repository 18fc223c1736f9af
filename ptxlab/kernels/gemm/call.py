"""What `gemm_w4a8` is asked for, after everything that needs no GPU has been checked."""

from functools import cache
from typing import Any, NamedTuple

from ptxlab import gpu
from ptxlab.errors import ArgumentError
from ptxlab.kernels.gemm.common import DTYPES, sums_agree
from ptxlab.layout import PackedActivations, PackedWeight
from ptxlab.layout.packed_activations import unpack_activations
from ptxlab.quant import PROTECTIVE_RANGE
from ptxlab.runtime.arguments import require_on_host
from ptxlab.runtime.backends import BACKENDS
from ptxlab.spec.dtypes import name_of
from ptxlab.validate import is_one_of, shape_of


class Call(NamedTuple):
    """One product. `dtype` is the output's name, `kernel` a step's or None; `programmatic` says how to launch it."""

    x_q: Any
    x_scale: Any
    x_sum: Any
    order: str
    rows: int
    M: int
    weight: PackedWeight
    bias: Any
    out: Any
    dtype: str
    kernel: str | None
    programmatic: bool


def checked(
    x_q: Any,
    x_scale: Any,
    weight: Any,
    *,
    x_sum: Any,
    bias: Any,
    out: Any,
    out_dtype: Any,
    kernel: Any,
    backend: Any,
    programmatic: Any,
) -> Call:
    """The arguments of `gemm_w4a8` as a call; raises ArgumentError for what does not fit together."""
    if not isinstance(weight, PackedWeight):
        raise ArgumentError("gemm_w4a8: weight", "must be a PackedWeight (layout.pack)", type(weight).__name__)
    if weight.protective_range > PROTECTIVE_RANGE:
        rule = f"must have a protective_range of at most {PROTECTIVE_RANGE}, beyond which its bytes may overflow"
        raise ArgumentError("gemm_w4a8: weight", rule, weight.protective_range)
    x_q, x_scale, x_sum, order, rows, shape = opened("gemm_w4a8", x_q, x_scale, x_sum)
    if len(shape) != 2:
        raise ArgumentError("gemm_w4a8: x_q", "must be an array [M, K] or PackedActivations", f"shape {shape}")
    if shape[1] != weight.K:
        raise ArgumentError("gemm_w4a8: x_q", f"K must be {weight.K} as the weight's", f"shape {shape}")
    dtype = output_dtype("gemm_w4a8", out_dtype, out, x_scale)
    check_how("gemm_w4a8", backend, programmatic)
    return Call(x_q, x_scale, x_sum, order, rows, shape[0], weight, bias, out, dtype, kernel, programmatic)


class Opened(NamedTuple):
    """Activations with what comes along with them: arrays or None, their order, tokens of a tile, and shape [M, K]."""

    x_q: Any
    x_scale: Any
    x_sum: Any
    order: str
    rows: int
    shape: tuple[int, ...]


def opened(face: str, x_q: Any, x_scale: Any, x_sum: Any) -> Opened:
    """What was given as activations; raises ArgumentError for a scale or sum beside PackedActivations."""
    if not isinstance(x_q, PackedActivations):
        return Opened(x_q, x_scale, x_sum, "row_major", 1, shape_of(x_q))
    if x_scale is not None or x_sum is not None:
        name = "x_scale" if x_scale is not None else "x_sum"
        raise ArgumentError(f"{face}: {name}", "must be None: PackedActivations have theirs", "another")
    return Opened(x_q.x_q, x_q.scale, x_q.token_sum, x_q.layout, x_q.rows, (x_q.M, x_q.K))


def output_dtype(face: str, out_dtype: Any, out: Any, x_scale: Any) -> str:
    """The output's dtype by name; raises ArgumentError for one that there is not, or that lacks a scale."""
    if out_dtype is not None:
        dtype, source = name_of(out_dtype), "out_dtype"
    else:
        dtype, source = ("float16" if out is None else dtype_of(out)), "out"
    if dtype not in DTYPES:
        rule = f"{'dtype ' if source == 'out' else ''}must be one of {', '.join(DTYPES)}"
        raise ArgumentError(f"{face}: {source}", rule, dtype)
    if x_scale is None and dtype != "int32":
        raise ArgumentError(f"{face}: x_scale", "must be given unless the output is int32", "nothing")
    return dtype


def check_how(face: str, backend: Any, programmatic: Any) -> None:
    """Raise ArgumentError for a backend that there is not, or a flag that is none."""
    if not is_one_of(backend, (*BACKENDS, None)):
        raise ArgumentError("backend", f"one of {', '.join(BACKENDS)}", backend)
    if not isinstance(programmatic, bool):
        raise ArgumentError(f"{face}: programmatic", "must be True or False", repr(programmatic))


def arrays(call: Call, x_shape: tuple[int, ...], takes_sum: bool) -> list[tuple[str, str, Any, str, tuple[int, ...]]]:
    """What was given beside the weight: the kernel's argument, the label for messages, the array, dtype and shape."""
    M, N = call.M, call.weight.N
    wanted = [("x", "gemm_w4a8: x_q", call.x_q, "int8", x_shape)]
    if call.x_scale is not None:
        wanted.append(("x_scale", "gemm_w4a8: x_scale", call.x_scale, "float32", (M,)))
    if call.x_sum is not None and takes_sum:
        wanted.append(("x_sum", "gemm_w4a8: x_sum", call.x_sum, "int32", (M,)))
    if call.bias is not None:
        wanted.append(("bias", "gemm_w4a8: bias", call.bias, "float32", (N,)))
    if call.out is not None:
        wanted.append(("y", "gemm_w4a8: out", call.out, call.dtype, (M, N)))
    return wanted


def check_sums(call: Call) -> None:
    """Raise ArgumentError for the first token sum, given on the host, that is not that of its activations."""
    if call.x_sum is None:
        return
    sums = require_on_host("gemm_w4a8: x_sum", call.x_sum, "int32", (call.M,))
    x_q = gpu.as_array("gemm_w4a8: x_q", call.x_q)
    packed = PackedActivations(
        layout=call.order, M=call.M, K=call.weight.K, rows=call.rows, x_q=x_q, scale=sums, token_sum=sums
    )
    sums_agree("gemm_w4a8", {"x": unpack_activations(packed).q if call.M else x_q, "x_sum": sums})


def dtype_of(array: Any) -> str:
    """The name of an array's dtype in any library; uint16 are bits of bfloat16."""
    return _named(getattr(array, "dtype", type(array).__name__))


@cache
def _named(dtype: Any) -> str:
    name = name_of(dtype)
    return "bfloat16" if name == "uint16" else name
