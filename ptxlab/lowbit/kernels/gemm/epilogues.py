"""The kernels for weights in strips that do more at the end: SiLU of the gate times up, or add to a residual stream.

Variants by the constant `FUSED` (output.cuh), with 2-byte outputs, for every order of activations and every scheme.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit import reference
from ptxlab.lowbit.kernels.gemm import strips
from ptxlab.lowbit.kernels.gemm.common import DTYPES, F16
from ptxlab.lowbit.layout.packed_weight import interleave
from ptxlab.lowbit.quant.tiled import with_arrays
from ptxlab.spec import Arg, Arrays, KernelSpec
from ptxlab.spec.dtypes import ByVariant, convert_to_dtype, floats, numbers

OUTPUTS = DTYPES[:2]
_OUT, _F32 = ByVariant("OUT", OUTPUTS), DTYPES.index("float32")


def _variant(spec: KernelSpec, form: str, FUSED: int, y: Arg, **fields: Any) -> KernelSpec:
    """Build the same kernel with another epilogue; `y` is the argument that it writes."""
    choose: Any = spec.choose
    return replace(
        spec,
        args=tuple(y if arg.name == "y" else arg for arg in spec.args),
        choose=lambda s: {**choose(s), "OUT": F16, "FUSED": FUSED},
        form="_".join(filter(None, (spec.form, form))),
        **fields,
    )


def _round_to_output(values: np.ndarray, OUT: int) -> np.ndarray:
    with np.errstate(over="ignore"):  # beyond 65504 float16 is infinite, as on the GPU
        return convert_to_dtype(values.astype(np.float32), OUTPUTS[OUT])


def _round_to_f64(values: np.ndarray, OUT: int) -> np.ndarray:
    """Round values to the output dtype and return them as f64."""
    return numbers(_round_to_output(values, OUT), OUTPUTS[OUT])


def silu_mul(gate_up: np.ndarray, OUT: int) -> np.ndarray:
    """Compute SiLU(gate) · up of f32 [M, 2·F], gate beside up, rounded to the output dtype, as f64 [M, F]."""
    return _round_to_f64(reference.apply_gate(gate_up), OUT)


def silu_mul_error(gate_up: np.ndarray, OUT: int) -> np.ndarray:
    """Bound the kernel's distance from `silu_mul`.

    The bound is one step where the exact result is as near to a tie as the error that SiLU may have; otherwise it is 0.
    """
    gated = reference.apply_gate(gate_up)
    exponents = reference.exponent(gate_up[:, : gated.shape[1]].astype(np.float64), "silu")
    error = np.abs(gated) * (2.0**-20 + 2.0**-22 * np.maximum(exponents, 0) + 2.0**-23) + 2.0**-100
    lower_bound, upper_bound = _round_to_f64(gated - error, OUT), _round_to_f64(gated + error, OUT)
    with np.errstate(invalid="ignore"):  # an infinity less itself
        return np.where(lower_bound == upper_bound, 0, upper_bound - lower_bound)


def _silu_mul(spec: KernelSpec) -> KernelSpec:
    """Build the kernel with SiLU and the multiplication in its epilogue.

    Logical inputs are gate above up; the example's sizes have whole strips of both.
    """

    def pack(logical: Arrays) -> Arrays:
        arrays_by_row = {name: logical[name] for name in ("weight", "bias") if name in logical}
        return spec.pack({**logical, **{name: with_arrays(part, interleave) for name, part in arrays_by_row.items()}})

    def compute_silu_mul(OUT: int = F16, **logical: Any) -> np.ndarray:
        return silu_mul(spec.reference(**logical, OUT=_F32), OUT)

    def bound_error(OUT: int = F16, **logical: Any) -> np.ndarray:
        return silu_mul_error(spec.reference(**logical, OUT=_F32), OUT)

    return _variant(
        spec,
        "silu_mul",
        1,
        Arg("y", _OUT, ("M", "N/2"), "out"),
        summary=f"{spec.name} of gate and up in turns of eight rows: SiLU of the gate times up, half the output",
        rules=(*spec.rules, "N % 16 == 0"),
        pack=pack,
        reference=compute_silu_mul,
        bound=bound_error,
        tolerance_reason="exp and reciprocal are approximate: before it is rounded a result has a relative error of "
        "2^-20 and 2^-22 per unit of a positive exponent, which may change it by one step near a tie alone",
        example_sizes=tuple({**sizes, "N": ceil_div(sizes["N"], 16) * 16} for sizes in spec.example_sizes),
    )


def _residual(spec: KernelSpec) -> KernelSpec:
    """Build the kernel that adds its product to a residual.

    Logical inputs have `residual` f32 [M, N] too, which the output's dtype is to hold. The product is rounded before it
    is added, as where `rmsnorm_quantize` adds it: the same bits.
    """

    def example(rng: np.random.Generator, **sizes: int) -> Arrays:
        residual = rng.standard_normal((sizes["M"], sizes["N"]), dtype=np.float32)
        return {**spec.example(rng, **sizes), "residual": residual * np.float32(4)}

    def add_residual(residual: np.ndarray, OUT: int = F16, **logical: Any) -> np.ndarray:
        product = floats(spec.reference(**logical, OUT=OUT))
        return _round_to_output(product + floats(_round_to_output(residual, OUT)), OUT)

    return _variant(
        spec,
        "residual",
        2,
        Arg("y", _OUT, ("M", "N"), "inout"),
        summary=f"{spec.name} added to a residual stream, in place",
        example=example,
        pack=lambda logical: {**spec.pack(logical), "y": logical["residual"]},
        reference=add_residual,
        after_wait=(*spec.after_wait, "y"),
    )


EPILOGUES: dict[str, Callable[[KernelSpec], KernelSpec]] = {"silu_mul": _silu_mul, "residual": _residual}
_KERNELS = {
    name: tuple(
        kernel._replace(with_groups=add_epilogue(kernel.with_groups), channel=add_epilogue(kernel.channel))
        for kernel in strips.STRIP_KERNELS
    )
    for name, add_epilogue in EPILOGUES.items()
}
STEPS = {name: strips.build_steps(kernels) for name, kernels in _KERNELS.items()}
# `NAME:FORM`: those on row-major activations, with groups and per channel.
FORMS = tuple(
    spec
    for kernels in _KERNELS.values()
    for kernel in kernels
    if kernel.order == "row_major"
    for spec in (kernel.with_groups, kernel.channel)
)
