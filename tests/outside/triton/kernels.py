"""Triton's first tutorials in short. `python kernels.py` writes the .ptx beside it, which tests run without Triton."""

import re
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    """Compute out = x + y, of n numbers."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(out + i, tl.load(x + i, mask=mask) + tl.load(y + i, mask=mask), mask=mask)


@triton.jit
def softmax(x, out, stride, n, BLOCK: tl.constexpr):
    """Compute the softmax of each row of x, n numbers; a row per program."""
    at = tl.program_id(0) * stride + tl.arange(0, BLOCK)
    mask = tl.arange(0, BLOCK) < n
    row = tl.load(x + at, mask=mask, other=-float("inf"))
    e = tl.exp(row - tl.max(row, axis=0))
    tl.store(out + at, e / tl.sum(e, axis=0), mask=mask)


@triton.jit
def matmul(a, b, c, M, N, K, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr):
    """Compute c [M, N] = a [M, K] b [K, N], row-major."""
    m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)[:, None]
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)[None, :]
    k = tl.arange(0, TILE_K)
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for first in range(0, K, TILE_K):
        left = tl.load(a + m * K + first + k[None, :], mask=(m < M) & (first + k[None, :] < K), other=0.0)
        right = tl.load(b + (first + k[:, None]) * N + n, mask=(first + k[:, None] < K) & (n < N), other=0.0)
        total = tl.dot(left, right, total)
    tl.store(c + m * N + n, total.to(tl.float16), mask=(m < M) & (n < N))


@triton.jit
def scale(x, s, half: tl.bfloat16, BLOCK: tl.constexpr):
    """Compute x *= s * half: numbers of 2, 4 or 8 bytes."""
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i) * s * half)


@triton.jit
def dot(a, b, c, TILE: tl.constexpr, OUT: tl.constexpr):
    """Compute c = a b, square tiles."""
    i = tl.arange(0, TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    tl.store(c + i, tl.dot(tl.load(a + i), tl.load(b + i), out_dtype=OUT))


@triton.jit
def described(a, b, TILE: tl.constexpr):
    """Copy b = a, a square tile, by a tensor descriptor that the kernel makes."""
    i = tl.arange(0, TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    rows = tl.make_tensor_descriptor(a, shape=[TILE, TILE], strides=[TILE, 1], block_shape=[TILE, TILE])
    tl.store(b + i, rows.load([0, 0]))


@triton.jit
def matmul_tma(a, b, c, K, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr):
    """Compute c = a b by tensor descriptors, which the host makes."""
    m, n = tl.program_id(0) * TILE_M, tl.program_id(1) * TILE_N
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for k in range(0, K, TILE_K):
        total = tl.dot(a.load([m, k]), b.load([k, n]), total)
    c.store([m, n], total.to(tl.float16))


FLOATS, HALVES = ("*fp32", "*fp32"), ("*fp16", "*fp16", "*fp16")
WHOLE = 16  # pointers and sizes that Triton may take for multiples of this
KERNELS = {  # types of the arguments, constants, which arguments are such multiples
    "add": (add, (*FLOATS, "*fp32", "i32"), {"BLOCK": 512}, (0, 1, 2)),
    "softmax": (softmax, (*FLOATS, "i32", "i32"), {"BLOCK": 256}, (0, 1)),
    "matmul": (matmul, (*HALVES, "i32", "i32", "i32"), {"TILE_M": 64, "TILE_N": 128, "TILE_K": 32}, range(6)),
    "matmul_tma": (
        matmul_tma,
        (*(f"tensordesc<fp16[{box}]>" for box in ("64,64", "64,64", "64,64")), "i32"),
        {"TILE_M": 64, "TILE_N": 64, "TILE_K": 64},
        (),
    ),
}


def ptx_of(name: str, arch: int) -> str:
    """Compile one of the kernels to PTX, and remove what names the machine that compiled it."""
    function, types, constants, whole = KERNELS[name]
    signature = dict(zip(function.arg_names, (*types, *("constexpr" for _ in constants)), strict=True))
    attributes = {(i,): [["tt.divisibility", WHOLE]] for i in whole}
    source = ASTSource(function, signature, constants, attributes)
    text = triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["ptx"]
    text = re.sub(r'(\.file\s+\d+ ")[^"]*/', r"\1", text)
    return re.sub(r"\n\t\.section\t\.debug_.*", "\n", text, flags=re.DOTALL)


if __name__ == "__main__":
    for name in KERNELS:
        for arch in (90,) if name == "matmul_tma" else (80, 90):
            Path(__file__).with_name(f"{name}_sm{arch}.ptx").write_text(ptx_of(name, arch))
