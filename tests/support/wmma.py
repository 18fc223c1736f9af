"""A kernel that loads, multiplies and stores by wmma, its operands, and what it should make."""

from typing import Any

import ml_dtypes
import numpy as np

import ptxlab
from tests.support.small_kernels import HEADER

SHAPES = {"m16n16k16": (16, 16, 16), "m8n32k16": (8, 32, 16), "m32n8k16": (32, 8, 16), "m16n16k8": (16, 16, 8),
          "m8n8k4": (8, 8, 4)}  # fmt: skip


FORMS = [
    *((s, t, d) for s in list(SHAPES)[:3] for t, d in (("f16", "f32"), ("f16", "f16"), ("bf16", "f32"), ("s8", "s32"),
                                                       ("u8", "s32"))),
    ("m16n16k8", "tf32", "f32"), ("m8n8k4", "f64", "f64"),
]  # fmt: skip


DTYPES: dict[str, Any] = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "s8": np.int8,
                          "u8": np.uint8, "f32": np.float32, "s32": np.int32, "f64": np.float64}  # fmt: skip


GAP = 8  # elements between the rows, or columns


def registers(shape: str, t: str, operand: str, prefix: str) -> tuple[str, str]:
    """Return the list and the declaration of an operand's registers, counted as the ISA does."""
    m, n, k = SHAPES[shape]
    size = {"a": m * k, "b": k * n}.get(operand, m * n)
    kind = t if t in ("f32", "s32", "f64") else "b32"
    count = (
        8
        if t == "f16" and operand in "ab"
        else max(1, size * np.dtype(DTYPES[t]).itemsize // (32 * (8 if kind == "f64" else 4)))
    )
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(count)) + "}", f".reg .{kind} %{prefix}<{count}>;"


def kernel(shape: str, t: str, d: str, layouts: tuple[str, str, str], strides: tuple[int, int, int]) -> str:
    operands = {x: registers(shape, t if x in "ab" else d, x, x) for x in "abcd"}
    types = f"{d}.{d}" if t == "f16" else f"{d}.{t}.{t}.{d}"
    a, b, c = layouts
    return f"""{HEADER}.visible .entry k(.param .u64 pa, .param .u64 pb, .param .u64 pc, .param .u64 pd) {{
    .reg .b64 %x<4>; {" ".join(declared for _, declared in operands.values())}
    ld.param.u64 %x0, [pa]; ld.param.u64 %x1, [pb]; ld.param.u64 %x2, [pc]; ld.param.u64 %x3, [pd];
    wmma.load.a.sync.aligned.{a}.{shape}.global.{t} {operands["a"][0]}, [%x0], {strides[0]};
    wmma.load.b.sync.aligned.{b}.{shape}.{t} {operands["b"][0]}, [%x1], {strides[1]};
    wmma.load.c.sync.aligned.{c}.{shape}.global.{d} {operands["c"][0]}, [%x2], {strides[2]};
    wmma.mma.sync.aligned.{a}.{b}.{shape}.{types}{".rn" * (t == "f64")} {", ".join(operands[x][0] for x in "dabc")};
    wmma.store.d.sync.aligned.{c}.{shape}.global.{d} [%x3], {operands["d"][0]}, {strides[2]};
    ret; }}"""


def lay_out(matrix: np.ndarray, layout: str) -> tuple[np.ndarray, int]:
    """Lay a matrix out in memory, with a gap behind each row or column; return it and the stride."""
    lines = matrix if layout == "row" else matrix.T
    padded = np.zeros((lines.shape[0], lines.shape[1] + GAP), matrix.dtype)
    padded[:, : lines.shape[1]] = lines
    return padded, padded.shape[1]


LAYOUTS = [("row", "col", "row"), ("col", "row", "col")]


def run_wmma(
    shape: str, t: str, d: str, layouts: tuple[str, str, str], backend: str, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Multiply by wmma; return what it stores and the expected image, gaps between the lines included."""
    rng, (m, n, k) = np.random.default_rng(0), SHAPES[shape]
    lowest = 0 if t == "u8" else -4
    a, b, c = (rng.integers(lowest, 5, s) for s in ((m, k), (k, n), (m, n)))
    images, strides = zip(
        *(lay_out(x.astype(DTYPES[e]), layout) for x, e, layout in zip((a, b, c), (t, t, d), layouts, strict=True)),
        strict=True,
    )
    out = np.zeros_like(images[2])
    raw = [x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x for x in images]
    text = kernel(shape, t, d, layouts, strides)
    assert not ptxlab.load(text)(*raw, out, grid=1, block=32, backend=backend, **options).findings
    return out, lay_out((a @ b + c).astype(DTYPES[d]), layouts[2])[0]
