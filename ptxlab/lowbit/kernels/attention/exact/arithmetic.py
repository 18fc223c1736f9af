"""The float operations of a kernel, as the emulator has them and as Hopper has them: with subnormal numbers, which
CuPy's own operators take for zero."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ptxlab import gpu
from ptxlab.emulator.ops.alu import alu_operation
from ptxlab.emulator.ops.floating import canonical
from ptxlab.emulator.ops.rounding import widen
from ptxlab.lowbit.reference.tensor_cores import hopper_mma


@dataclass(frozen=True)
class Arithmetic:
    """Operations on arrays of float32 that broadcast.

    `mma` alone takes matrices: (a f16 [..., M, 16], b f16 [..., 16, N], c f32 [..., M, N]) -> a·b + c.
    """

    reciprocal: Callable[[Any], Any]
    exact_reciprocal: Callable[[Any], Any]
    exp2: Callable[[Any], Any]
    log2: Callable[[Any], Any]
    fma: Callable[[Any, Any, Any], Any]
    mul: Callable[[Any, Any], Any]
    add: Callable[[Any, Any], Any]
    sub: Callable[[Any, Any], Any]
    mma: Callable[[Any, Any, Any], Any]

    @classmethod
    def of(cls, instruction: Callable[[str], Callable[..., Any]], mma: Callable[[Any, Any, Any], Any]) -> "Arithmetic":
        """Build the arithmetic from a function that makes a function of an opcode, and from an MMA."""
        return cls(
            reciprocal=instruction("rcp.approx.ftz.f32"),
            exact_reciprocal=instruction("rcp.rn.f32"),
            exp2=instruction("ex2.approx.ftz.f32"),
            log2=instruction("lg2.approx.ftz.f32"),
            fma=instruction("fma.rn.f32"),
            mul=instruction("mul.rn.f32"),
            add=instruction("add.rn.f32"),
            sub=instruction("sub.rn.f32"),
            mma=mma,
        )


def _mma_rounded_once(a: Any, b: Any, c: Any) -> Any:
    """Multiply as `emulator.ops.mma` does: sum the products in float64, add c, round once."""
    return canonical((c + widen(a, "f16") @ widen(b, "f16")).astype(np.float32), "f32")


EMULATED = Arithmetic.of(lambda opcode: alu_operation(opcode).compute, _mma_rounded_once)  # of NumPy arrays
TRUNCATING = replace(EMULATED, mma=hopper_mma)  # the same, but for tensor cores that cut off


def hopper() -> Arithmetic:
    """Return an H200's own arithmetic, on CuPy arrays."""
    return Arithmetic.of(gpu.float_instruction, hopper_mma)
