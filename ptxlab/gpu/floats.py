"""The device's own approximations and fused multiply-add on CuPy arrays of float32, element by element."""

from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def float_instruction(opcode: str) -> Callable[..., Any]:
    """An instruction of f32 operands as a function of CuPy arrays: "ex2.approx.ftz.f32", "fma.rn.f32" ..."""
    import cupy

    names = "abc"[: 3 if opcode.startswith("fma") else 1]
    operands = ", ".join(f"%{i + 1}" for i in range(len(names)))
    inputs = ", ".join(f'"f"({name})' for name in names)
    function: Callable[..., Any] = cupy.ElementwiseKernel(
        ", ".join(f"float32 {name}" for name in names),
        "float32 d",
        f'asm("{opcode} %0, {operands};" : "=f"(d) : {inputs})',
        opcode.replace(".", "_"),
    )
    return function
