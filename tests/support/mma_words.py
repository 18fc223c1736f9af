"""Kernels of one mma of f64 or bits, their operands, and what they should make."""

from typing import Any

import numpy as np

import ptxlab
from tests.support.small_kernels import HEADER

F64 = ["m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"]


BITS = [(shape, op) for shape in ("m8n8k128", "m16n8k128", "m16n8k256") for op in ("xor", "and")]


def kernel(form: str, registers: tuple[int, ...], word: str, d: str) -> str:
    """Write a kernel of one warp around an MMA.

    Each lane loads its registers of A, B and C, one behind the other, and stores those of D.
    """
    a, b, c = registers
    named = {"a": (a, word), "b": (b, word), "c": (c, d), "d": (c, d)}
    lists = {name: "{" + ", ".join(f"%{name}{i}" for i in range(count)) + "}" for name, (count, _) in named.items()}
    size = 8 if word == "f64" else 4
    loads, loaded = "", 0
    for name in "abc":
        for i in range(named[name][0]):
            loads += f"ld.global.{named[name][1]} %{name}{i}, [%x0+{loaded * 32 * size}];\n"
            loaded += 1
    stores = "\n".join(f"st.global.{d} [%x1+{i * 32 * size}], %d{i};" for i in range(c))
    return f"""{HEADER}.visible .entry k(.param .u64 in, .param .u64 out) {{
    .reg .b64 %x<3>; .reg .b32 %t<2>;
    {" ".join(f".reg .{kind} %{name}<{count}>;" for name, (count, kind) in named.items())}
    ld.param.u64 %x0, [in]; ld.param.u64 %x1, [out]; mov.u32 %t0, %tid.x;
    mul.wide.u32 %x2, %t0, {size}; add.u64 %x0, %x0, %x2; add.u64 %x1, %x1, %x2;
    {loads} mma.sync.aligned.{form} {lists["d"]}, {lists["a"]}, {lists["b"]}, {lists["c"]};
    {stores} ret; }}"""


def fragment_places(m: int, words: int) -> tuple[list, list, list]:
    """List each register's places, lane by lane: (row, word) of A, (word, column) of B, (row, column) of C."""
    lanes, halves = range(32), m // 8
    a = [
        [(lane // 4 + 8 * (i % halves), lane % 4 + 4 * (i // halves)) for lane in lanes]
        for i in range(words // 4 * halves)
    ]
    b = [[(lane % 4 + 4 * i, lane // 4) for lane in lanes] for i in range(words // 4)]
    c = [[(lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2) for lane in lanes] for i in range(2 * halves)]
    return a, b, c


def registers(matrix: np.ndarray, places: list) -> np.ndarray:
    return np.array([[matrix[place] for place in register] for register in places])


def run_mma(text: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, backend: str) -> np.ndarray:
    """Run the kernel on matrices of words, and return D."""
    in_a, in_b, in_c = fragment_places(*a.shape)
    operands = np.concatenate([registers(x, places).view(a.dtype) for x, places in ((a, in_a), (b, in_b), (c, in_c))])
    out = np.zeros((len(in_c), 32), c.dtype)
    options: dict[str, Any] = {"checks": "all"} if backend == "emulator" else {}
    outcome = ptxlab.load(text)(np.ascontiguousarray(operands), out, grid=1, block=32, backend=backend, **options)
    assert not outcome.findings
    d = np.zeros_like(c)
    for register, places in zip(out, in_c, strict=True):
        for number, place in zip(register, places, strict=True):
            d[place] = number
    return d


def run_f64(shape: str, backend: str) -> tuple[np.ndarray, np.ndarray]:
    """Multiply matrices of f64 by the instruction; return the result and the expected one."""
    m, k = int(shape[1:].split("n")[0]), int(shape.split("k")[1])
    rng = np.random.default_rng(k)
    a, b, c = (rng.integers(-99, 100, s) / 8 for s in ((m, k), (k, 8), (m, 8)))
    counts = tuple(map(len, fragment_places(m, k)))
    text = kernel(f"{shape}.row.col.f64.f64.f64.f64", counts, "f64", "f64")
    return run_mma(text, a, b, c, backend), a @ b + c


def run_bits(shape: str, op: str, backend: str) -> tuple[np.ndarray, np.ndarray]:
    """Multiply matrices of bits by the instruction; return the result and the expected one."""
    m, k = int(shape[1:].split("n")[0]), int(shape.split("k")[1])
    rng = np.random.default_rng(k)
    a, b = (rng.integers(0, 2**32, s, np.uint32) for s in ((m, k // 32), (k // 32, 8)))
    c = rng.integers(-999, 999, (m, 8)).astype(np.int32)
    text = kernel(
        f"{shape}.row.col.s32.b1.b1.s32.{op}.popc", tuple(map(len, fragment_places(m, k // 32))), "b32", "s32"
    )
    both = (np.bitwise_xor if op == "xor" else np.bitwise_and)(a[:, :, None], b[None])
    expected = sum(both >> np.uint32(bit) & 1 for bit in range(32)).sum(axis=1) + c
    return run_mma(text, a, b, c, backend), expected
