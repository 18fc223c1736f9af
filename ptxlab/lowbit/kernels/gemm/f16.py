"""FP16 with sums in one order, whatever the batch: the LM head of a batch-invariant decoder."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.io.dynamo import break_graph
from ptxlab.lowbit.kernels.operation import CallArray, Operation
from ptxlab.lowbit.kernels.options import Options, document_options
from ptxlab.lowbit.kernels.spec_call import SpecCall
from ptxlab.spec import Arg, Arrays, KernelSpec, Launch, Sizes, sizes_rows
from ptxlab.validate import shape_of

NAME = "gemm_f16"
_WARPS, _ROWS = 8, 16  # of a block; of a warp
_BMS = (8, 16, 32, 64)
_STEP = 32  # channels
# Channels of a step in the order of its two MMAs.
ORDER = np.arange(_STEP).reshape(4, 2, 4).swapaxes(0, 1).reshape(_STEP)


def _choose(s: Sizes) -> dict[str, int]:
    BM = next((BM for BM in _BMS if s["M"] <= BM), _BMS[-1])
    return {"BM": BM, "UNROLL": max(1, 64 // BM), "WARPS": _WARPS}


def _launch(s: Sizes) -> Launch:
    """Return the launch; tiles of tokens of the same weights follow each other, and find them in the L2."""
    return Launch((ceil_div(s["M"], s["BM"]), ceil_div(s["N"], s["WARPS"] * _ROWS), 1), (32 * s["WARPS"], 1, 1))


def _example(rng: np.random.Generator, *, M: int, N: int, K: int) -> Arrays:
    draw = rng.standard_normal
    return {"w": draw((N, K)).astype(np.float16) / np.float16(8), "x": draw((M, K)).astype(np.float16)}


def _product(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Compute the product, rounded once from float64."""
    y: np.ndarray = (x.astype(np.float64) @ w.astype(np.float64).T).astype(np.float16)
    return y


def _bound(w: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Bound the error: one rounding to f16, and the bits that MMAs cut off.

    Every MMA cuts the sum so far and 16 products off 2^-24 below the largest of them.
    """
    wide_x, wide_w = (np.abs(matrix).astype(np.float64) for matrix in (x, w))
    terms = wide_x @ wide_w.T
    truncation_error = 17 * (x.shape[1] // 16) * 2.0**-24
    bound: np.ndarray = terms * (truncation_error + 2.0**-11) + 2.0**-25
    return bound


def multiply_in_order(w: Any, x: Any, mma: Callable[[Any, Any, Any], Any]) -> Any:
    """Compute the kernel's bits, f16 [M, N], by an `mma` of (a f16 [N, 16], b f16 [16, M], c f32 [N, M])."""
    sums = np.zeros((len(w), len(x)), np.float32, like=w)
    for start in range(0, w.shape[1], _STEP):
        for half_order in (ORDER[:16], ORDER[16:]):
            sums = mma(w[:, start + half_order], x[:, start + half_order].T, sums)
    return sums.T.astype(np.float16)


F16 = KernelSpec(
    name="gemm_f16_sm80",
    summary="FP16 operands straight from memory, sums in one order: the LM head of a batch-invariant decoder",
    args=(
        Arg("w", "float16", ("N", "K")),
        Arg("x", "float16", ("M", "K")),
        Arg("y", "float16", ("M", "N"), "out"),
        *(Arg(size, "int32", role="scalar") for size in ("M", "N", "K")),
    ),
    launch=_launch,
    choose=_choose,
    rules=("K % 32 == 0", "M < 2**22", "1 <= N <= 128*65535", "1 <= K < 2**24"),
    operations="2*M*N*K",
    example=_example,
    pack=dict,
    reference=_product,
    bound=_bound,
    arch="sm_80",
    tolerance_reason="sums in FP32 by tensor cores, which cut off what lies below the largest term; rounded to f16",
    example_sizes=sizes_rows("M N K", (1, 16, 32), (3, 40, 96), (17, 130, 64), (70, 24, 32)),
)

SPECS = (F16,)


@break_graph
@document_options(Options)
def gemm_f16(x: Any, w: Any, *, out: Any = None, backend: str | None = None) -> Any:
    """Compute Y = X Wᵀ in float16 with sums in float32.

    A row's bits depend on that row and W alone.

    On the GPU a call only enqueues, on the caller's stream; after the first call of a shape it allocates nothing but
    the result, if `out` does not provide that.

    Args:
        x: f16 [M, K], M >= 0, K a multiple of 32; NumPy, CuPy, PyTorch or JAX: the result is of the same kind.
        w: f16 [N, K], where x is.
        out: f16 [M, N] to write into; it is what is returned.
        {options}

    Raises:
        ArgumentError: the argument, the rule and the value; nothing was launched.
        UnavailableError: no GPU backend here, or one below sm_80.
    """
    options = Options.of(backend)
    outputs = _GEMM(options, (), {"x": x, "w": w, "y": out})
    return outputs["y"] if out is None else out


def _check(options: Options, arrays: Mapping[str, Any]) -> SpecCall:
    """Build the call; raise ArgumentError for operands that do not fit together."""
    shapes = {name: shape_of(arrays[name]) for name in ("x", "w")}
    for name, shape in shapes.items():
        if len(shape) != 2:
            raise ArgumentError(f"{NAME}: {name}", "must be a matrix", f"shape {list(shape)}")
    (M, K), (N, _) = shapes.values()
    operands = (
        CallArray("w", f"{NAME}: w", arrays["w"], "float16", (N, K)),
        CallArray("x", f"{NAME}: x", arrays["x"], "float16", (M, K)),
        CallArray("y", f"{NAME}: out", arrays["y"], "float16", (M, N)),
    )
    return SpecCall(NAME, (F16,), operands, {"M": M, "N": N, "K": K}, "float16", options)


_GEMM = Operation(NAME, _check, SpecCall.prepare, SpecCall.on_host)
