"""Operands of wgmma, and kernels of one."""

from typing import Any

import ml_dtypes
import numpy as np

import ptxlab
from ptxlab.arithmetic import ceil_div
from ptxlab.hardware.descriptors import MatrixDescriptor
from ptxlab.hardware.fragments import mma_a, wgmma_d
from tests.support.small_kernels import HEADER


def cores(matrix: np.ndarray) -> np.ndarray:
    """Reorder [rows, 32] bytes to core matrices of 8 rows of 16 bytes, 128 bytes apart along K."""
    return matrix.reshape(-1, 8, 2, 16).transpose(0, 2, 1, 3).reshape(-1)


# Floating operands

TO_BITS = {
    "tf32": lambda x: x.view(np.uint32),
    "e4m3": lambda x: x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8),
    "e5m2": lambda x: x.astype(ml_dtypes.float8_e5m2).view(np.uint8),
    "f16": lambda x: x.astype(np.float16).view(np.uint16),
    "bf16": lambda x: (x.view(np.uint32) >> 16).astype("u2"),
}


def draw_operand(rng: np.random.Generator, rows: int, type_name: str) -> tuple[np.ndarray, np.ndarray]:
    """Draw [rows, 32 bytes] small multiples of 1/8, and return them in float32 and as bits.

    Every sum of them is exact.
    """
    largest, columns = (2, 32) if type_name in ("e4m3", "e5m2") else (64, 8 if type_name == "tf32" else 16)
    values = (rng.integers(-largest, largest + 1, (rows, columns)) / 8).astype(np.float32)
    return values, TO_BITS[type_name](values)


def k_major(bits: np.ndarray) -> np.ndarray:
    return cores(np.ascontiguousarray(bits).view(np.uint8))


def mn_major(bits: np.ndarray, span: int) -> tuple[np.ndarray, int, int]:
    """Lay out [rows, 16] by PTX ISA's picture, atoms along the rows first.

    Return the image, and leading and stride in bytes.
    """
    rows, rows_per_atom = bits.shape[0], span // 2
    stride = span * 8  # to the next 8 of K
    leading = 2 * stride  # to the next atom of rows
    image = np.zeros(leading * ceil_div(rows, rows_per_atom), np.uint8)
    for row, k in np.ndindex(bits.shape):
        address = row // rows_per_atom * leading + k // 8 * stride + k % 8 * span + row % rows_per_atom * 2
        address ^= address >> 3 & (span - 16)
        image[address : address + 2] = bits[row, k : k + 1].view(np.uint8)
    return image, leading, stride


def kernel_text(a: tuple[str, str], b: str, size: int, n: int, form: str, constants: str, adds: int = 0) -> str:
    """Write a kernel that computes D = A·B [+ 1] with the image of both in `tile`.

    `a` is code and operand, `b` a descriptor, from its start.
    """
    one, count = ("0x3C003C00", n // 4) if ".f16." in form.removesuffix("f16.f16") else ("0f3F800000", n // 2)
    d = "{" + ", ".join(f"%d{i}" for i in range(count)) + "}"
    store = "\n".join(f"st.global.b32 [%o+{4 * i}], %d{i};" for i in range(count))
    start = " ".join(f"mov.b32 %d{i}, {one};" for i in range(count)) if adds else ""
    return f"""{HEADER.replace("sm_90", "sm_90a")}
    .visible .entry k(.param .u64 image, .param .u64 registers, .param .u64 out) {{
    .shared .align 1024 .b8 tile[{size}];
    .reg .b32 %t, %s, %x<4>, %a<4>, %d<{n // 2}>; .reg .b64 %o, %r, %da, %db, %base; .reg .pred %p;
    mov.u32 %t, %tid.x; ld.param.u64 %o, [image]; ld.param.u64 %r, [registers]; mov.u32 %s, tile;
    mad.lo.u32 %s, %t, 16, %s; mad.wide.u32 %o, %t, 16, %o; mad.wide.u32 %r, %t, 16, %r;
    mov.u32 %x0, tile; add.u32 %t, %x0, {size}; cvt.u64.u32 %base, %x0; shr.u64 %base, %base, 4;
    L: ld.global.v4.b32 {{%x0, %x1, %x2, %x3}}, [%o]; st.shared.v4.b32 [%s], {{%x0, %x1, %x2, %x3}};
    add.u32 %s, %s, 2048; add.u64 %o, %o, 2048; setp.lt.u32 %p, %s, %t; @%p bra L; mov.u32 %t, %tid.x;
    ld.global.v4.b32 {{%a0, %a1, %a2, %a3}}, [%r]; {a[0]} mov.b64 %db, {b}; {start}
    add.u64 %da, %da, %base; add.u64 %db, %db, %base;
    fence.proxy.async; bar.sync 0; wgmma.fence.sync.aligned; setp.ne.u32 %p, {adds}, 0;
    wgmma.mma_async.sync.aligned.{form} {d}, {a[1]}, %db, %p, {constants};
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
    ld.param.u64 %o, [out]; mad.wide.u32 %o, %t, {2 * n}, %o; {store} ret; }}"""


CASES = ["shared", "registers", "b 64", "b 128", "a 128", "a 32 b 32"]


def problem(case: str, type_name: str, n: int, d: str = "f32") -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
    """Make text, image, registers and the right result of 1 - A·Bᵀ.

    Operands are from registers and shared memory, K-major and MN-major (`b 64`: of B, with a swizzle of 64 bytes).
    """
    rng = np.random.default_rng(len(case))
    (a, a_bits), (b, b_bits) = draw_operand(rng, 64, type_name), draw_operand(rng, n, type_name)
    spans = dict(zip(case.split()[::2], case.split()[1::2], strict=False)) if " " in case else {}
    images: list[np.ndarray] = []
    descriptors, offset = [], 0
    for name, bits in (("a", a_bits), ("b", b_bits)):
        if name in spans:
            operand_image, leading, stride = mn_major(bits, span := int(spans[name]))
        else:
            operand_image, leading, stride, span = k_major(bits), 128, 256, 16
        images.append(np.concatenate([operand_image, np.zeros(-len(operand_image) % 1024, np.uint8)]))
        descriptors.append(MatrixDescriptor(offset, stride, leading, span).encode())
        offset += len(images[-1])
    width, depth = 8 * a_bits.itemsize, a_bits.shape[1]
    fragments = mma_a(depth, width).scatter(a_bits.reshape(4, 16, depth)).reshape(128, 4)
    operand_a = (
        ("mov.b64 %da, 0;", "{%a0, %a1, %a2, %a3}")
        if case == "registers"
        else (f"mov.b64 %da, {descriptors[0]};", "%da")
    )
    layouts = ", 0" if case == "registers" else f", {int('a' in spans)}, {int('b' in spans)}"
    constants = "-1, 1" + layouts * (width == 16)
    form = f"m64n{n}k{depth}.{d}.{type_name}.{type_name}"
    text = kernel_text(operand_a, str(descriptors[1]), offset, n, form, constants, adds=1)
    return text, np.concatenate([*images, np.zeros(2048, np.uint8)]), fragments, 1 - a @ b.T


NARROW = [(t, d) for t in ("tf32", "e4m3", "e5m2", "f16") for d in ("f32", "f16") if (t, d) not in (("tf32", "f16"),)]


def run_narrow(case: str, type_name: str, d: str, b_type: str = "", **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Compute D by the kernel, and return it with the expected one.

    If `b_type` is given, B is read as that other type of fp8, which makes another D.
    """
    text, image, fragments, right = problem(case, type_name, 64, d)
    text = text.replace(f"{type_name}.{type_name}", f"{type_name}.{b_type or type_name}")
    fragment = wgmma_d(64, True, 16 if d == "f16" else 32)
    out = np.zeros((128, 32), np.uint32)
    outcome = ptxlab.load(text)(image, fragments, out, grid=1, block=128, **options)
    assert not outcome.findings
    d_fragments = np.ascontiguousarray(out.reshape(128, -1)[:, : fragment.registers])
    return fragment.gather(d_fragments, np.dtype(d.replace("f", "float"))).astype(np.float32), right
