"""Kernels whose results pin the fragment maps: one per ldmatrix, stmatrix, mma.sync and wgmma form.

Inputs are raw registers and raw shared-memory images, so that nothing here depends on the maps that the vectors are to
judge. ldmatrix and stmatrix move a tile whose b16 elements are numbered; the MMAs multiply random small integers, and
only maps that are right for A, B and D together predict their accumulators.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np

WARP, GROUP = 32, 128
SLOT = 16  # bytes that a thread copies at a time


@dataclass(frozen=True)
class FragmentCase:
    """A kernel of one block: `inputs` in argument order, then a pointer to the result, u32 of shape `out`."""

    name: str
    ptx: str
    threads: int
    inputs: dict[str, np.ndarray]
    out: tuple[int, ...]
    facts: dict[str, object] = field(default_factory=dict)  # what a prediction needs besides the inputs

    def checksum(self) -> int:
        """Compute a checksum of the kernel and its inputs, to tell recordings of others."""
        return zlib.crc32(b"".join(a.tobytes() for a in self.inputs.values()), zlib.crc32(self.ptx.encode()))


def _random(name: str) -> np.random.RandomState:
    return np.random.RandomState(zlib.crc32(name.encode()))  # streams never change


def _module(name: str, inputs: list[str], shared: int, declare: str, body: str) -> str:
    """Write a kernel with a pointer per input and %out.

    %t is the thread, `tile` the shared memory, %tile its address.
    """
    pointers = [*inputs, "out"]
    params = ", ".join(f".param .u64 p_{p}" for p in pointers)
    loads = "\n    ".join(f"ld.param.u64 %{p}, [p_{p}];" for p in pointers)
    return f""".version 8.4
.target sm_90a
.address_size 64
.visible .entry {name}({params})
{{
    .shared .align 1024 .b8 tile[{shared}];
    .reg .b64 {", ".join(f"%{p}" for p in pointers)}, %o, %desc;
    .reg .b32 %t, %tile, %s, %i, %x<4>;
    .reg .pred %p;
    {declare}
    {loads}
    mov.u32 %t, %tid.x;
    mov.u32 %tile, tile;
    {body}
    ret;
}}
"""


def _names(register: str, count: int) -> str:
    return "{" + ", ".join(f"%{register}{i}" for i in range(count)) + "}"


def _load(register: str, pointer: str, count: int) -> str:
    """Write the load of `count` registers of this thread from [threads, count]."""
    lines = [f"mul.wide.u32 %o, %t, {4 * count}; add.s64 %o, %o, %{pointer};"]
    lines += [f"ld.global.b32 %{register}{i}, [%o+{4 * i}];" for i in range(count)]
    return "\n    ".join(lines)


def _store(register: str, count: int) -> str:
    """Write the store of `count` registers of this thread to out [threads, count]."""
    lines = [f"mul.wide.u32 %o, %t, {4 * count}; add.s64 %o, %o, %out;"]
    lines += [f"st.global.b32 [%o+{4 * i}], %{register}{i};" for i in range(count)]
    return "\n    ".join(lines)


def _copy(pointer: str, size: int, threads: int, *, to_shared: bool) -> str:
    """Write a loop in which all threads copy `size` bytes between global and shared memory."""
    x = _names("x", 4)
    move = (f"ld.global.v4.b32 {x}, [%o]; st.shared.v4.b32 [%s], {x};" if to_shared
            else f"ld.shared.v4.b32 {x}, [%s]; st.global.v4.b32 [%o], {x};")  # fmt: skip
    label = f"copy_{pointer}"
    return f"""mul.lo.u32 %i, %t, {SLOT};
    {label}:
    setp.ge.u32 %p, %i, {size};
    @%p bra {label}_done;
    add.u32 %s, %tile, %i; cvt.u64.u32 %o, %i; add.s64 %o, %o, %{pointer};
    {move}
    add.u32 %i, %i, {SLOT * threads};
    bra {label};
    {label}_done:
    bar.sync 0;"""


def _matrix_cases() -> list[FragmentCase]:
    """List the cases of ldmatrix from, and stmatrix to, 32 rows of 16 bytes.

    Lane i gives the address of row i.
    """
    cases = []
    size = WARP * SLOT
    numbered = np.arange(size // 2, dtype=np.uint16).reshape(WARP, 8)
    address = f"mul.lo.u32 %i, %t, {SLOT}; add.u32 %s, %tile, %i;"
    for count in (1, 2, 4):
        for trans in ("", ".trans"):
            opcode = f"matrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
            facts = {"count": count, "trans": bool(trans)}
            declare, r = f".reg .b32 %r<{count}>;", _names("r", count)
            name = f"ldmatrix_x{count}{trans.replace('.', '_')}"
            body = [_copy("source", size, WARP, to_shared=True), address, f"ld{opcode} {r}, [%s];", _store("r", count)]
            ptx = _module(name, ["source"], size, declare, "\n    ".join(body))
            cases.append(FragmentCase(name, ptx, WARP, {"source": numbered}, (WARP, count), facts))
            name = f"stmatrix_x{count}{trans.replace('.', '_')}"
            registers = _random(name).randint(0, 2**32, (WARP, count), np.uint32)
            zeros = np.zeros((WARP, SLOT // 4), np.uint32)
            body = [_copy("zeros", size, WARP, to_shared=True), _load("r", "source", count), address,
                    f"st{opcode} [%s], {r};", "bar.sync 0;", _copy("out", size, WARP, to_shared=False)]  # fmt: skip
            ptx = _module(name, ["source", "zeros"], size, declare, "\n    ".join(body))
            cases.append(FragmentCase(name, ptx, WARP, {"source": registers, "zeros": zeros}, (WARP, SLOT // 4), facts))
    return cases


BITS = {"f16": 16, "bf16": 16, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "tf32": 32, "e4m3": 8, "e5m2": 8}
# k of m16n8k, D, A, B
MMA_TYPES = (
    (16, "f32", "f16", "f16"), (16, "f32", "bf16", "bf16"), (16, "f16", "f16", "f16"),
    (32, "s32", "s8", "s8"), (32, "s32", "u8", "u8"), (32, "s32", "u8", "s8"), (32, "s32", "s8", "u8"),
    (64, "s32", "s4", "s4"), (64, "s32", "u4", "u4"), (64, "s32", "u4", "s4"),
)  # fmt: skip
# The other forms of 4 bits.
S4_TYPES = ((64, "s32", "s4", "u4"), *((32, "s32", a, b) for a in ("s4", "u4") for b in ("s4", "u4")))
NARROW_TYPES = (
    (8, "f32", "tf32", "tf32"), (4, "f32", "tf32", "tf32"),
    *((32, "f32", a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
)  # fmt: skip
# Smaller shapes, and fp8 added up in f16.
MORE_TYPES = (
    (8, "f32", "f16", "f16"), (8, "f16", "f16", "f16"), (8, "f32", "bf16", "bf16"), (16, "s32", "u8", "s8"),
    *((k, "f16", a, b) for k in (16, 32) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
    (16, "f32", "e4m3", "e5m2"),
)  # fmt: skip
_FP8 = {"e4m3": (0, 0x38, 0x40, 0x44, 0x48), "e5m2": (0, 0x3C, 0x40, 0x42, 0x44)}  # 0 to 4


def _operand(stream: np.random.RandomState, dtype: str, shape: tuple[int, int]) -> np.ndarray:
    """Draw registers u32 full of elements: any bits for integers, integers -4..4 for floats.

    So the sums of floats are exact.
    """
    if dtype[0] in "su":
        return stream.randint(0, 2**32, shape, np.uint32)
    small = stream.randint(-4, 5, (*shape, 32 // BITS[dtype]))
    if dtype == "tf32":
        return small.astype(np.float32).view(np.uint32)[..., 0]
    if dtype in _FP8:
        codes = np.array(_FP8[dtype], np.uint8)[np.abs(small)] | np.where(small < 0, 0x80, 0).astype(np.uint8)
        return codes.view(np.uint32)[..., 0]
    halves = small.astype(np.float16).view(np.uint16)
    if dtype == "bf16":
        halves = (small.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return halves.view(np.uint32)[..., 0]


def _spread(stream: np.random.RandomState, dtype: str, shape: tuple[int, int]) -> np.ndarray:
    """Draw registers full of floats of 2^-6 to 2^6 with any significand.

    So sums of their products have to be rounded.
    """
    numbers = stream.uniform(1, 2, (*shape, 1 if dtype == "f32" else 2)) * 2.0 ** stream.randint(-6, 6, (*shape, 1))
    numbers *= stream.choice([-1, 1], numbers.shape)
    if dtype == "bf16":
        return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint32)[..., 0]
    return numbers.astype({"f16": "f2", "f32": "f4"}[dtype]).view(np.uint32)[..., 0]


def _mma_cases(rounded: bool = False, types: tuple[tuple[int, str, str, str], ...] = MMA_TYPES) -> list[FragmentCase]:
    """List the cases of D = A·B + C of one warp."""
    cases = []
    for k, d, a, b in types:
        name = f"{'rounded_' * rounded}mma_m16n8k{k}_{d}_{a}_{b}"
        stream = _random(name)
        count, halves = 2 if d == "f16" else 4, k * BITS[a] // 128
        if rounded and d == "s32":
            continue
        if rounded:
            inputs = {"a": _spread(stream, a, (WARP, 2 * halves)), "b": _spread(stream, b, (WARP, halves))}
            inputs["c"] = _spread(stream, d, (WARP, count))
        else:
            inputs = {"a": _operand(stream, a, (WARP, 2 * halves)), "b": _operand(stream, b, (WARP, halves))}
            c = stream.randint(-1000, 1000, (WARP, count * (2 if d == "f16" else 1)))
            inputs["c"] = c.astype({"s32": "i4", "f32": "f4", "f16": "f2"}[d]).view(np.uint32)
        operands = f"{_names('d', count)}, {_names('a', 2 * halves)}, {_names('b', halves)}, {_names('c', count)}"
        body = [_load("a", "a", 2 * halves), _load("b", "b", halves), _load("c", "c", count),
                f"mma.sync.aligned.m16n8k{k}.row.col.{d}.{a}.{b}.{d} {operands};", _store("d", count)]  # fmt: skip
        declare = f".reg .b32 %a<4>, %b<2>, %c<{count}>, %d<{count}>;"
        ptx = _module(name, list(inputs), 16, declare, "\n    ".join(body))
        if a in _FP8 and (k == 16 or d == "f16"):
            ptx = ptx.replace(".version 8.4", ".version 8.7")
        facts = {"k": k, "d": d, "a": a, "b": b}
        cases.append(FragmentCase(name, ptx, WARP, inputs, (WARP, count), facts))
    return cases


# N, bytes per row of the swizzle atom (16: no swizzle), type of A
WGMMA_FORMS = (
    *((n, span, "s8") for n in (8, 24, 64, 256) for span in (16, 128)),
    (24, 32, "s8"), (24, 64, "s8"), (16, 128, "u8"), (32, 16, "u8"), (48, 128, "s8"),
)  # fmt: skip


def _wgmma_cases() -> list[FragmentCase]:
    """List the cases of D = A·B over K = max(span, 64) bytes, in steps of 32.

    A comes from registers, B by descriptors into a random image.
    """
    cases = []
    for n, span, a in WGMMA_FORMS:
        name = f"wgmma_m64n{n}k32_{a}_span{span}"
        stream = _random(name)
        k = max(span, 64)
        leading, stride = (128, 128 * (k // 16)) if span == 16 else (16, 8 * span)
        step, atoms = (2 * leading, 1) if span == 16 else (32, k // span)  # span 32: two atoms side by side
        starts = [step * i if atoms == 1 else n * span * i for i in range(k // 32)]
        mode = {16: 0, 128: 1, 64: 2, 32: 3}[span] << 62 | stride >> 4 << 32 | leading >> 4 << 16
        count, steps = n // 2, k // 32
        low, high = (-4, 4) if a == "s8" else (0, 256)  # small sums keep the vectors small
        elements = stream.randint(low, high, (GROUP, 16 * steps)).astype(np.uint8)
        inputs = {"a": elements.view(np.uint32), "image": stream.randint(-4, 5, n * k).astype(np.int8)}
        body = [_copy("image", n * k, GROUP, to_shared=True), _load("a", "a", 4 * steps),
                "fence.proxy.async.shared::cta;", "bar.sync 0;", "wgmma.fence.sync.aligned;"]  # fmt: skip
        for i, start in enumerate(starts):
            registers = "{" + ", ".join(f"%a{4 * i + j}" for j in range(4)) + "}"
            body.append(f"add.u32 %s, %tile, {start}; shr.u32 %s, %s, 4; cvt.u64.u32 %desc, %s;")
            body.append(f"or.b64 %desc, %desc, {mode:#x};")
            body.append(f"setp.ne.u32 %p, {i}, 0;")
            operands = f"{_names('d', count)}, {registers}, %desc, %p"
            body.append(f"wgmma.mma_async.sync.aligned.m64n{n}k32.s32.{a}.s8 {operands};")
        body += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", _store("d", count)]
        declare = f".reg .b32 %a<{4 * steps}>, %d<{count}>;"
        ptx = _module(name, list(inputs), n * k, declare, "\n    ".join(body))
        facts = {"n": n, "a": a, "span": span, "leading": leading, "stride": stride, "starts": starts}
        cases.append(FragmentCase(name, ptx, GROUP, inputs, (GROUP, count), facts))
    return cases


def fragment_cases() -> list[FragmentCase]:
    """List all fragment cases."""
    return [*_matrix_cases(), *_mma_cases(), *_wgmma_cases()]


def rounding_cases() -> list[FragmentCase]:
    """List the floating-point MMAs whose results depend on how the hardware adds.

    They bound its distance from exact sums.
    """
    return _mma_cases(rounded=True)


def s4_cases() -> list[FragmentCase]:
    """List the MMAs of 4 bits beyond those in `fragment_cases`."""
    return _mma_cases(types=S4_TYPES)


def narrow_cases() -> list[FragmentCase]:
    """List the MMAs of tf32 and fp8; `mma_m16n8k32` of fp8 needs sm_89 and above."""
    return _mma_cases(types=NARROW_TYPES)


def further_mma_cases() -> list[FragmentCase]:
    """List the MMAs of further shapes and accumulators."""
    return _mma_cases(types=MORE_TYPES)
