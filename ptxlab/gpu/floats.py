"""The device's own instructions on CuPy arrays of float32, element by element.

CuPy compiles its own arithmetic to take subnormal numbers for zero (`-ftz=true`); these do what their opcodes say.
"""

from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def float_instruction(opcode: str) -> Callable[..., Any]:
    """Make a function of CuPy arrays from an instruction of f32 operands.

    Examples are "ex2.approx.ftz.f32", "fma.rn.f32" ...
    """
    import cupy

    names = "abc"[: {"fma": 3, "mul": 2, "add": 2, "sub": 2}.get(opcode.partition(".")[0], 1)]
    operands = ", ".join(f"%{i + 1}" for i in range(len(names)))
    inputs = ", ".join(f'"f"({name})' for name in names)
    function: Callable[..., Any] = cupy.ElementwiseKernel(
        ", ".join(f"float32 {name}" for name in names),
        "float32 d",
        f'asm("{opcode} %0, {operands};" : "=f"(d) : {inputs})',
        opcode.replace(".", "_"),
    )
    return function
