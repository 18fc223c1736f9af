"""Kernels of tensor copies, there and back, and of bulk reductions; and what they should make."""

import itertools
from typing import Any

import ml_dtypes
import numpy as np

import ptxlab
from ptxlab import emulator
from ptxlab.lowbit.layout import TensorMap
from ptxlab.sources import Source

SHAPES = {1: (48,), 2: (6, 32), 3: (5, 4, 16), 4: (3, 2, 4, 16), 5: (2, 3, 2, 3, 16)}


BOXES = {1: (32,), 2: (4, 16), 3: (2, 4, 16), 4: (2, 2, 2, 8), 5: (2, 2, 1, 2, 16)}


def source(axes: int, back: str, fence: str = "fence.proxy.async.shared::cta;", wait: str = "wait_group 0") -> str:
    """Write a kernel that brings the box at (x, ...) of one map to shared memory and doubles it there.

    The box goes to the same place of another map.
    """
    places = ", ".join(f"%{i}" for i in range(3, 3 + axes))
    numbers = ", ".join(f'"r"(at{i})' for i in range(axes))
    return f"""
struct alignas(64) TensorMap {{ unsigned char bytes[128]; }};
__device__ unsigned shared(const void* p) {{ return (unsigned)__cvta_generic_to_shared(p); }}
extern "C" __global__ void move(const __grid_constant__ TensorMap from, const __grid_constant__ TensorMap to, int bytes,
                                {", ".join(f"int at{i}" for i in range(axes))}) {{
    __shared__ __align__(1024) float box[1024];
    __shared__ unsigned long long full;
    if (threadIdx.x == 0) {{
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster;"
                     :: "r"(shared(&full)));
        asm volatile("fence.proxy.async; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     :: "r"(shared(&full)), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.prefetch.tensor.{axes}d.L2.global.tile [%1, {{{places}}}];"
                     "cp.async.bulk.tensor.{axes}d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {{{places}}}], [%2];"
                     :: "r"(shared(box)), "l"(&from), "r"(shared(&full)), {numbers} : "memory");
    }}
    __syncthreads();
    asm volatile("{{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;"
                 "@!done bra AGAIN; }}" :: "r"(shared(&full)) : "memory");
    for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) box[i] *= 2;
    asm volatile("{fence}" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {{
        asm volatile("{back.replace("AXES", f"{axes}d")} [%1, {{{places}}}], [%0];"
                     :: "r"(shared(box)), "l"(&to), "r"(0), {numbers} : "memory");
        asm volatile("cp.async.bulk.commit_group; cp.async.bulk.{wait};" ::: "memory");
    }}
}}
"""


STORE = "cp.async.bulk.tensor.AXES.global.shared::cta.tile.bulk_group"


REDUCE = "cp.reduce.async.bulk.tensor.AXES.global.shared::cta.add.tile.bulk_group"


CHECKED = {"checks": emulator.CHECKS | {"proxy"}}


def move_box(
    axes: int, place: tuple[int, ...], back: str, backend: str = "emulator", **options: Any
) -> tuple[Any, ...]:
    """Move a box; return the array `to` before and after, the expected one, and the findings.

    `place` is in the order of the axes.
    """
    rng, source_options = np.random.default_rng(axes), {k: options.pop(k) for k in ("fence", "wait") if k in options}
    x, y = (rng.integers(-99, 99, SHAPES[axes]).astype(np.float32) for _ in range(2))
    box, initial = BOXES[axes], y.copy()
    kernel = ptxlab.load(source(axes, back, **source_options), arch="sm_90a")
    size = int(np.prod(box)) * 4
    scalars = map(np.int32, (size, *reversed(place)))
    outcome = kernel(TensorMap(x, box), TensorMap(y, box), *scalars, grid=1, block=32, backend=backend, **options)
    expected = initial.copy()
    for offsets in itertools.product(*map(range, box)):
        index = tuple(p + o for p, o in zip(place, offsets, strict=True))
        if all(0 <= i < n for i, n in zip(index, x.shape, strict=True)):
            expected[index] = 2 * x[index] + (initial[index] if "reduce" in back else 0)
    return initial, y, expected, [str(finding) for finding in outcome.findings]


BULK = """
__device__ unsigned shared(const void* p) {{ return (unsigned)__cvta_generic_to_shared(p); }}
extern "C" __global__ void add({t}* out, const {t}* x) {{
    __shared__ __align__(16) {t} mine[64];
    mine[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {{
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.{op} [%0], [%1], %2;"
                     :: "l"(out), "r"(shared(mine)), "r"((int)(64 * sizeof({t}))) : "memory");
        asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
    }}
}}
"""


BF16 = ml_dtypes.bfloat16


REDUCTIONS = [
    ("add.u32", "unsigned", np.uint32, np.add), ("min.s32", "int", np.int32, np.minimum),
    ("add.u64", "unsigned long long", np.uint64, np.add), ("xor.b32", "unsigned", np.uint32, np.bitwise_xor),
    ("add.f32", "float", np.float32, np.add), ("add.f64", "double", np.float64, np.add),
    ("add.noftz.f16", "unsigned short", np.float16, np.add), ("max.f16", "unsigned short", np.float16, np.maximum),
    ("add.noftz.bf16", "unsigned short", BF16, np.add), ("min.bf16", "unsigned short", BF16, np.minimum),
    ("max.s64", "long long", np.int64, np.maximum), ("or.b64", "long long", np.int64, np.bitwise_or),
    ("inc.u32", "unsigned", np.uint32, lambda a, b: np.where(a >= b, 0, a + 1).astype(np.uint32)),
    ("dec.u32", "unsigned", np.uint32, lambda a, b: np.where((a == 0) | (a > b), b, a - 1).astype(np.uint32)),
]  # fmt: skip


def reduce(op: str, t: str, dtype: Any, combine: Any, backend: str, **options: Any) -> tuple[Any, Any, Any]:
    """Reduce in bulk from three blocks into 64 numbers; return these, the expected ones, and the findings."""
    x = np.random.default_rng(0).integers(0, 99, (1 if op[:3] in ("inc", "dec") else 3, 64)).astype(dtype)
    x = np.broadcast_to(x, (3, 64)).copy()  # of those two, the order of different numbers would matter
    raw = np.uint16 if np.dtype(dtype).itemsize == 2 else dtype
    out = np.full(64, 7, dtype)
    kernel = ptxlab.load(BULK.format(t=t, op=op), arch="sm_90a")
    outcome = kernel(out.view(raw), x.view(raw), grid=3, block=64, backend=backend, **options)
    return out, combine(combine(combine(np.full(64, 7, dtype), x[0]), x[1]), x[2]), outcome.findings


# Boxes of a matrix, one or two

IMAGE = 32768  # bytes of shared memory that the kernel shows


SOURCE = r"""
struct alignas(64) TensorMap { unsigned char bytes[128]; };
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// Shared memory, 0xAA at first, after a box each at (row, column) and (row + 1, column - 16) has landed in it.
extern "C" __global__ void __launch_bounds__(128)
boxes(const __grid_constant__ TensorMap map, unsigned* image, int row, int column, int bytes, int place, int more) {
    extern __shared__ __align__(1024) unsigned tile[];
    __shared__ __align__(8) unsigned long long full;
    for (int i = threadIdx.x; i < 8192; i += 128) tile[i] = 0xAAAAAAAA;
    if (threadIdx.x == 0) {
        asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at(&full)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     :: "r"(at(&full)), "r"(bytes * (more + 1)) : "memory");
        for (int i = 0; i <= more; i++)
            asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                         ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;"
                         :: "r"(at(tile) + place + i * 16384), "l"(&map), "r"(column - 16 * i), "r"(row + i),
                            "r"(at(&full)), "l"(0x12F0000000000000ull) : "memory");  // EVICT_FIRST
    }
    /* WAIT */ asm volatile("{ .reg .pred P1; LAB_WAIT: mbarrier.try_wait.parity.shared::cta.b64 P1, [%0], 0;"
                 "@P1 bra DONE; bra LAB_WAIT; DONE: }" :: "r"(at(&full)) : "memory");
    for (int i = threadIdx.x; i < 8192; i += 128) image[i] = tile[i];
}
"""


def load_boxes(
    array: np.ndarray,
    box: tuple[int, int],
    swizzle: int,
    row: int,
    column: int,
    place: int,
    further_boxes: int,
    backend: str = "emulator",
    source: str = SOURCE,
    **options: Any,
) -> tuple[np.ndarray, list[str]]:
    """Bring boxes to shared memory; return the kernel's picture of shared memory, and the findings."""
    image = np.zeros(IMAGE, np.uint8)
    tensor_map = TensorMap(array, box, swizzle)
    scalars = map(np.int32, (row, column, tensor_map.box_bytes, place, further_boxes))
    kernel = ptxlab.load(Source.from_text(source, "<boxes>"), arch="sm_90a")
    content = array.tobytes()
    outcome = kernel(
        tensor_map, image.view(np.uint32), *scalars, grid=1, block=128, shared_bytes=IMAGE, backend=backend, **options
    )
    assert array.tobytes() == content
    return image, [str(finding) for finding in outcome.findings]


ARRAY = np.arange(64 * 256, dtype=np.uint32).astype(np.uint8).reshape(64, 256)
