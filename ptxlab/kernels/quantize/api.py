"""`quantize_activations`: from the floats of any array library to what `gemm_w4a8` takes, in one launch."""

from typing import Any

import numpy as np

from ptxlab import gpu, quant, reference
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.kernels.quantize.specs import DTYPES, QUANTIZE
from ptxlab.layout import PackedActivations
from ptxlab.layout.packed_activations import stored_shape, tile_of
from ptxlab.runtime import run_spec
from ptxlab.runtime.arguments import require_on_host
from ptxlab.runtime.backends import BACKENDS
from ptxlab.runtime.plan import Plan
from ptxlab.sources import of_kernel
from ptxlab.spec.dtypes import storage
from ptxlab.validate import is_one_of, shape_of

_MOST_SHAPES = 4096  # that are remembered
_plans: dict[tuple[Any, ...], Plan] = {}


def quantize_activations(
    x: Any,
    *,
    layout: str = "row_major",
    rows: int | None = None,
    out: PackedActivations | None = None,
    backend: str | None = None,
) -> PackedActivations:
    """Per-token symmetric INT8 (QServe §4.1): scale = max|x| / 127, x_q = x / scale half to even, and the token sums.

    On the GPU a call only enqueues, on the caller's stream, and nothing looks at the values: a token with a NaN or an
    infinity gets a scale that is not finite, and one below 1.5e-36 counts as zeros. On the host both are refused. A
    token of zeros has scale 1.

    Args:
        x: [M, K], K a multiple of 32, of float16, bfloat16 (also as its bits, uint16) or float32; NumPy, CuPy, PyTorch
            or JAX: the results are of the same kind.
        layout: order of x_q: `row_major`, `fragment` (operand B of mma.sync) or `tiles` (swizzled, for wgmma); see
            `layout.activations`.
        rows: tokens of a tile, a multiple of 8 in 8..256; for `tiles` alone.
        out: activations of the same M, K, layout and rows to write into; needed while a CUDA graph is captured.
        backend: `gpu` or `emulator`; by default the GPU where there is one.

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched. On the host also for NaN, infinity,
            or a token whose scale is not a normal float32, with the place of the first.
        UnavailableError: no GPU backend here, or one below sm_80.
    """
    tokens, span = tile_of(layout, rows)
    shape = shape_of(x)
    if len(shape) != 2:
        raise ArgumentError("quantize_activations: x", "must be a matrix [M, K]", f"shape {shape}")
    if not is_one_of(backend, (*BACKENDS, None)):
        raise ArgumentError("backend", f"one of {', '.join(BACKENDS)}", backend)
    M, K = shape
    wanted = (M, K, layout, tokens)
    if out is not None and not isinstance(out, PackedActivations):
        raise ArgumentError("quantize_activations: out", "must be PackedActivations", type(out).__name__)
    if out is not None and (out.M, out.K, out.layout, out.rows) != wanted:
        rule = f"must have M={M}, K={K}, layout={layout}, rows={tokens}"
        got = f"M={out.M}, K={out.K}, layout={out.layout}, rows={out.rows}"
        raise ArgumentError("quantize_activations: out", rule, got)
    sizes = {"M": M, "K": K, "rows": tokens, "span": span}
    if not gpu.is_device_array(x):
        return _on_host(x, sizes, layout, out, backend)
    if backend == "emulator":
        raise ArgumentError("backend", "arrays on the CPU (NumPy) for the emulator", "arrays on a GPU")
    return _on_gpu(x, sizes, layout, out)


def _on_gpu(x: Any, sizes: dict[str, int], layout: str, out: PackedActivations | None) -> PackedActivations:
    M, K, rows = sizes["M"], sizes["K"], sizes["rows"]
    device, stream = gpu.current_device(), gpu.stream_handle()
    view = gpu.view("quantize_activations: x", x)
    dtype = "bfloat16" if view.dtype == "uint16" else view.dtype
    if dtype not in DTYPES:
        raise ArgumentError("quantize_activations: x", f"dtype {' or '.join(DTYPES)}", view.dtype)
    view.require("quantize_activations: x", dtype, (M, K), device)
    plan = _plans.get(key := (*sizes.values(), dtype, device))
    if plan is None:
        QUANTIZE.check_sizes(sizes)
        if reason := gpu.why_not(QUANTIZE.arch):
            raise UnavailableError(f'quantize_activations: {reason}; pass backend="emulator" with NumPy arrays')
    if (plan is None or out is None) and gpu.is_capturing(stream):
        rule = "must be given in a capture" if out is None else "the first call of a shape is made before the capture"
        raise ArgumentError("quantize_activations: out", rule, f"M={M}, K={K}")
    wanted = _results(layout, M, K, rows)
    if out is None:
        made = {name: gpu.new(x, shape, dtype_of) for name, (dtype_of, shape) in wanted.items()}
    else:
        made = {name: getattr(out, name) for name in wanted}
    views = {n: _checked(f"quantize_activations: out.{n}", made[n], *of, device) for n, of in wanted.items()}
    if M:
        if plan is None:
            if len(_plans) >= _MOST_SHAPES:
                _plans.clear()
            plan = _plans[key] = Plan(QUANTIZE, {**QUANTIZE.config_for(sizes), "IN": DTYPES.index(dtype)}, sizes)
        plan(stream, {"x": view, **views})
    if out is not None:
        return out
    handed = {name: gpu.handed(array, x, wanted[name][0]) for name, array in made.items()}
    return PackedActivations(layout=layout, M=M, K=K, rows=rows, **handed)


def _results(layout: str, M: int, K: int, rows: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtypes and shapes of the arrays of `PackedActivations`."""
    return {
        "x_q": ("int8", stored_shape(layout, M, K, rows)),
        "scale": ("float32", (M,)),
        "token_sum": ("int32", (M,)),
    }


def _checked(name: str, array: Any, dtype: str, shape: tuple[int, ...], device: int) -> gpu.View:
    return gpu.view(name, array).require(name, dtype, shape, device)


def _on_host(
    x: Any, sizes: dict[str, int], layout: str, out: PackedActivations | None, backend: str | None
) -> PackedActivations:
    M, K, rows = sizes["M"], sizes["K"], sizes["rows"]
    values = gpu.as_array("quantize_activations: x", x)
    if values.dtype not in map(storage, DTYPES):
        raise ArgumentError("quantize_activations: x", f"dtype {' or '.join(DTYPES)}", values.dtype)
    require_on_host("quantize_activations: x", x, values.dtype.name, (M, K))
    QUANTIZE.check_sizes(sizes)
    if M:
        quant.token_scales(reference.from_bfloat16_bits(values) if values.dtype == np.uint16 else values)
    padded = QUANTIZE.arg("x_q").resolve(sizes)
    given = {}
    for name, (dtype, stored) in _results(layout, M, K, rows).items() if out is not None else ():
        given[name] = getattr(out, name)
        require_on_host(f"quantize_activations: out.{name}", given[name], dtype, stored, written=True)
    if given:
        given["x_q"] = given["x_q"].reshape(padded)  # contiguous, so the same memory
    source = of_kernel(QUANTIZE.name)[0]
    results = run_spec(QUANTIZE, source, {"x": x}, sizes=sizes, out=given, backend=backend).outputs
    if out is not None:
        return out
    results["x_q"] = results["x_q"].reshape(stored_shape(layout, M, K, rows))
    return PackedActivations(layout=layout, M=M, K=K, rows=rows, **results)
