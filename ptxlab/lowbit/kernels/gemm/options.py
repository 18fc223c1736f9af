"""Options of the matrix products."""

from dataclasses import dataclass
from typing import Any

from ptxlab.errors import ArgumentError
from ptxlab.lowbit.kernels.gemm.common import DTYPES, FLOATS
from ptxlab.lowbit.kernels.operation import dtype_of
from ptxlab.lowbit.kernels.options import LaunchOptions, Rule, early_launch, option
from ptxlab.spec.dtypes import name_of
from ptxlab.validate import is_one_of


def output_dtype(names: str) -> Any:
    """Declare the option `out_dtype` of a call with these dtypes of its output."""
    text = (
        f"{names}; by name, or as a dtype of NumPy, PyTorch or JAX; by default that of `out`, else float16. NumPy and"
        " CuPy have no bfloat16: they get its bits, uint16."
    )
    return option(text, default=None)


_FLOATS = "`float16`, `bfloat16` or `float32`"
_ACCUMULATORS = "`float16`, `bfloat16`, `float32`, or `int32` for the accumulators, not scaled and without bias"
_AT_ONCE = (
    ": it reads weight and bias at once, so no kernel that may still run then may write these; before it reads"
    " activations{more} or writes the output, it waits by itself."
)


@dataclass(frozen=True, kw_only=True, eq=False)
class ProductOptions(LaunchOptions):
    """Options of `gemm_w4a4` and `gemm_w4ax`; `out_dtype` is a name once the output is known."""

    out_dtype: Any = output_dtype(_FLOATS)  # noqa: RUF009, a field
    programmatic: bool = early_launch(_AT_ONCE.format(more="") + " Only for weights in strips.")


@dataclass(frozen=True, kw_only=True, eq=False)
class IntegerProductOptions(ProductOptions):
    """Options of `gemm_w8a8`, whose output may be the accumulators."""

    out_dtype: Any = output_dtype(_ACCUMULATORS)  # noqa: RUF009, a field
    programmatic: bool = early_launch(_AT_ONCE.format(more=""))


@dataclass(frozen=True, kw_only=True, eq=False)
class GroupedOptions(IntegerProductOptions):
    """Options of `gemm_w4a8_grouped`."""

    programmatic: bool = early_launch(_AT_ONCE.format(more=", scales, sums or offsets"))


@dataclass(frozen=True, kw_only=True, eq=False)
class GemmOptions(IntegerProductOptions):
    """Options of `gemm_w4a8`; once arrays are checked, `epilogue` may also be `residual`."""

    epilogue: str | None = option(
        "`silu_mul` for gate and up [2·F, K], packed with `interleaved=True`: Y [M, F], float16 or bfloat16, is"
        " silu(gate) · up in f32, rounded once, as `silu_mul_quantize` computes it. Without bias.",
        Rule("must be silu_mul or None", lambda epilogue: is_one_of(epilogue, ("silu_mul", None)), show=str),
        default=None,
    )
    kernel: str | None = option(
        "one of the kernels by name; by default, of those that take this weight and run here, the one that suits the"
        " sizes best.",
        default=None,
    )
    programmatic: bool = early_launch(
        _AT_ONCE.format(more=", scales, sums or residual,") + " Only for kernels that do so."
    )


def resolve_dtype(call: str, options: ProductOptions, out: Any) -> str:
    """Return the name of the output's dtype; ArgumentError, in the name of a call, for one that it does not have."""
    dtypes = DTYPES if isinstance(options, IntegerProductOptions) else FLOATS
    names = ", ".join(dtypes)
    if options.out_dtype is not None:
        argument, rule, dtype = "out_dtype", f"must be one of {names}", name_of(options.out_dtype)
    else:
        argument, rule, dtype = "out", f"dtype must be one of {names}", "float16" if out is None else dtype_of(out)
    if dtype not in dtypes:
        raise ArgumentError(f"{call}: {argument}", rule, dtype)
    return dtype


def require_scale(call: str, x_scale: Any, dtype: str) -> None:
    """Raise ArgumentError where the output is scaled and there is no scale."""
    if x_scale is None and dtype != "int32":
        raise ArgumentError(f"{call}: x_scale", "must be given unless the output is int32", "nothing")
