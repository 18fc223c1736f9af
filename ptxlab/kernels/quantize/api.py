"""`quantize_activations`: from the floats of any array library to what `gemm_w4a8` takes, in one launch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxlab import gpu, quant, reference
from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.kernels.operation import CallArray, Operation, Prepared, Results, check_how, dtype_of
from ptxlab.kernels.quantize.specs import DTYPES, QUANTIZE
from ptxlab.layout import PackedActivations
from ptxlab.layout.packed_activations import stored_shape, tile_of
from ptxlab.runtime import run_spec
from ptxlab.runtime.arguments import require_on_host
from ptxlab.runtime.plan import Plan
from ptxlab.sources import of_kernel
from ptxlab.validate import shape_of

NAME = "quantize_activations"


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
    if out is None:
        arrays, like = {"x": x}, None
    elif isinstance(out, PackedActivations):
        arrays = {"x": x, "x_q": out.x_q, "scale": out.scale, "token_sum": out.token_sum}
        like = out.M, out.K, out.layout, out.rows
    else:
        raise ArgumentError(f"{NAME}: out", "must be PackedActivations", type(out).__name__)
    made = _QUANTIZE((layout, rows, backend, like), arrays, lambda: _checked(arrays, layout, rows, like, backend))
    if out is not None:
        return out
    (M, K), (tokens, _) = shape_of(x), tile_of(layout, rows)
    return PackedActivations(layout=layout, M=M, K=K, rows=tokens, **made)


@dataclass(frozen=True, eq=False)
class _QuantizeCall:
    """The arrays given, by argument of the kernel, the order of the results, sizes, and the dtype of x by name."""

    given: dict[str, Any]
    layout: str
    sizes: dict[str, int]
    dtype: str
    backend: str | None
    check = False

    @property
    def key(self) -> tuple[Any, ...]:
        return (*self.sizes.values(), self.dtype)

    @property
    def is_empty(self) -> bool:
        return self.sizes["M"] == 0

    @property
    def operands(self) -> Iterator[CallArray]:
        """Floats, and the arrays of `PackedActivations`."""
        M, K, rows, _ = self.sizes.values()
        yield CallArray("x", f"{NAME}: x", self.given["x"], self.dtype, (M, K))
        for name, dtype, shape in (
            ("x_q", "int8", stored_shape(self.layout, M, K, rows)),
            ("scale", "float32", (M,)),
            ("token_sum", "int32", (M,)),
        ):
            label, lacking = f"{NAME}: out", "must be given in a capture: the result of a call before it"
            if name in self.given:
                yield CallArray(name, f"{label}.{name}", self.given[name], dtype, shape)
            else:
                yield CallArray(name, label, None, dtype, shape, lacking)


def _checked(given: dict[str, Any], layout: Any, rows: Any, like: Any, backend: Any) -> _QuantizeCall:
    """The call; raises ArgumentError for what does not fit together. `like` is what describes `out`."""
    tokens, span = tile_of(layout, rows)
    shape, dtype = shape_of(given["x"]), dtype_of(given["x"])
    if len(shape) != 2:
        raise ArgumentError(f"{NAME}: x", "must be a matrix [M, K]", f"shape {shape}")
    check_how(NAME, backend)
    if like not in (None, (*shape, layout, tokens)):
        said = ("M={}, K={}, layout={}, rows={}".format(*each) for each in ((*shape, layout, tokens), like))
        raise ArgumentError(f"{NAME}: out", f"must have {next(said)}", next(said))
    if dtype not in DTYPES:
        raise ArgumentError(f"{NAME}: x", f"dtype {' or '.join(DTYPES)}", dtype)
    return _QuantizeCall(given, layout, {"M": shape[0], "K": shape[1], "rows": tokens, "span": span}, dtype, backend)


def _prepare(call: _QuantizeCall) -> Prepared:
    sizes, dtype = call.sizes, call.dtype
    QUANTIZE.check_sizes(sizes)
    if reason := gpu.why_not(QUANTIZE.arch):
        raise UnavailableError(f'{NAME}: {reason}; pass backend="emulator" with NumPy arrays')
    config = {**QUANTIZE.config_for(sizes), "IN": DTYPES.index(dtype)}
    return Prepared(QUANTIZE.name, lambda: (Plan(QUANTIZE, config, sizes),))


def _on_host(call: _QuantizeCall) -> Results:
    """NumPy, or PyTorch on the CPU: in the emulator, or copied to the GPU and back."""
    sizes = call.sizes
    x, *results = (operand for operand in call.operands)
    values = gpu.as_array(x.label, x.array)
    require_on_host(x.label, x.array, values.dtype.name, x.shape)
    QUANTIZE.check_sizes(sizes)
    if not call.is_empty:
        quant.token_scales(reference.from_bfloat16_bits(values) if values.dtype == np.uint16 else values)
    out = {}
    for operand in results:
        if operand.array is not None:
            require_on_host(*operand[1:5], written=True)
            out[operand.name] = operand.array
    if out:
        out["x_q"] = out["x_q"].reshape(QUANTIZE.arg("x_q").resolve(sizes))  # contiguous, so the same memory
    source = of_kernel(QUANTIZE.name)[0]
    made = run_spec(QUANTIZE, source, {"x": x.array}, sizes=sizes, out=out, backend=call.backend).outputs
    return {operand.name: made[operand.name].reshape(operand.shape) for operand in results}


_QUANTIZE = Operation(NAME, _prepare, _on_host)
