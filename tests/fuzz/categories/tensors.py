"""Tensor copies of one to five axes, with every swizzle, to shared memory and back, and tensor reductions."""

from math import prod

import numpy as np

from ptxlab.hardware.tensor_map import TensorMap
from tests.fuzz.program import How, Program

CROSSES = How(crosses=True)
THREADS, ROOM = 128, 8192  # bytes of shared memory
REDUCED = {  # types of elements, and how they are combined
    "int32": ("add", "min", "max", "and", "or", "xor"),
    "uint32": ("add", "min", "max", "inc", "dec", "xor"),
    "uint64": ("add", "min", "max", "or"),
    "int64": ("min", "max"),
    "float16": ("add", "min", "max"),
    "float32": ("add",),
    "float64": ("add",),
}
DTYPES = (*REDUCED, "uint8", "uint16")


def generate(rng: np.random.Generator, category: str) -> Program:
    """Make a program: a box comes to shared memory, perhaps from beyond the array, and goes to another array."""
    program = Program(rng, category, THREADS)
    program.is_asynchronous = True
    dtype = np.dtype(program.pick(*DTYPES))
    axes, swizzle = 1 + program.below(5), program.pick(0, 0, 32, 64, 128)
    box = draw_box_shape(program, axes, swizzle, dtype.itemsize)
    shape = (*(max(1, side + program.below(5) - 1) for side in box[:-1]), box[-1] * program.pick(1, 2))
    if len(shape) > 1 and shape[-1] * dtype.itemsize % 16:
        shape = (*shape[:-1], box[-1])
    program.arrays = [draw_elements(rng, dtype, shape) for _ in range(2)]
    program.make_arguments = lambda arrays: [
        TensorMap(arrays[0], box, swizzle),
        TensorMap(arrays[1], box, swizzle),
        arrays[1],
    ]
    program.parameters += [".param .align 64 .b8 from[128]", ".param .align 64 .b8 to[128]", ".param .u64 array"]
    program.shared += [f".shared .align 1024 .b8 tile[{ROOM}];", ".shared .align 8 .b64 barrier;"]
    copy_to_shared(program, box, prod(box) * dtype.itemsize)
    copy_to_global(program, shape, dtype)
    return program


def draw_box_shape(program: Program, axes: int, swizzle: int, itemsize: int) -> tuple[int, ...]:
    """Draw a box that fits into the room; its rows fill the swizzle, or are a multiple of 16 bytes."""
    row = swizzle or 16 * (1 + program.below(8))
    sides, left = [row // itemsize], ROOM // row
    while sides[-1] > 256:
        sides[-1] //= 2
    for _ in range(axes - 1):
        sides.append(min(1 + program.below(5), left))
        left //= sides[-1]
    return tuple(reversed(sides))


def draw_elements(rng: np.random.Generator, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Draw an array: small numbers where they are floats, any where they are integers."""
    if dtype.kind == "f":
        return rng.integers(-64, 65, shape).astype(dtype)
    return rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8).view(dtype)[..., 0]


def load_coordinates(program: Program, low: int) -> list[str]:
    """Load registers with the first place of a box, that of the last axis first, which is a multiple of 16 bytes."""
    array, units = program.arrays[0], 16 // program.arrays[0].itemsize
    drawn = [low + program.below(side - low) for side in reversed(array.shape)]
    drawn[0] = drawn[0] // units * units
    registers = [program.register(32) for _ in drawn]
    program.lines(*(f"mov.b32 {register}, {place};" for register, place in zip(registers, drawn, strict=True)))
    return registers


def copy_to_shared(program: Program, box: tuple[int, ...], size: int) -> None:
    """Copy a box to shared memory and show it, with what was there before around it."""
    corner = load_coordinates(program, program.pick(0, 0, -3))
    tile, barrier, place, map_, pattern, one, state = (program.register(bits) for bits in (32, 32, 32, 64, 64, 1, 64))
    (wait,) = program.labels(1)
    to = program.pick("shared::cluster", "shared::cta")
    copy = f"cp.async.bulk.tensor.{len(box)}d.{to}.global.tile.mbarrier::complete_tx::bytes"
    rows = ROOM // (8 * THREADS)
    d = [program.register(64) for _ in range(rows)]
    offsets = [8 * THREADS * row for row in range(rows)]
    lines = [
        f"mov.u32 {tile}, tile;",
        f"mov.u32 {barrier}, barrier;",
        f"mov.b64 {map_}, from;",
        f"cvta.param.u64 {map_}, {map_};",
        f"mad.lo.u32 {place}, %t, 8, {tile};",
        f"mov.b64 {pattern}, 0x5a5a5a5a5a5a5a5a;",
        *(f"st.shared.b64 [{place}+{a}], {pattern};" for a in offsets),
        f"setp.eq.u32 {one}, %t, 0;",
        f"@{one} mbarrier.init.shared.b64 [{barrier}], 1;",
        f"@{one} fence.mbarrier_init.release.cluster;",
        "fence.proxy.async;",
        "bar.sync 0;",
        f"@{one} mbarrier.arrive.expect_tx.shared.b64 {state}, [{barrier}], {size};",
        f"@{one} {copy} [{tile}], [{map_}, {{{', '.join(corner)}}}], [{barrier}];",
        f"{wait}:",
        f"mbarrier.try_wait.parity.shared.b64 %is, [{barrier}], 0;",
        f"@!%is bra {wait};",
        *(f"ld.shared.b64 {register}, [{place}+{a}];" for register, a in zip(d, offsets, strict=True)),
    ]
    program.sequence(lines, copy, [(register, "b64") for register in d], how=CROSSES)


def copy_to_global(program: Program, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Copy or reduce the box from shared memory into another array, and show that."""
    corner = load_coordinates(program, 0)
    tile, map_, one, array, place = (program.register(bits) for bits in (32, 64, 1, 64, 64))
    reduction = program.pick(*REDUCED.get(str(dtype), ("",))) if program.chance(0.6) else ""
    name = (
        f"cp.reduce.async.bulk.tensor.{len(shape)}d.global.shared::cta.{reduction}"
        if reduction
        else (f"cp.async.bulk.tensor.{len(shape)}d.global.shared::cta")
    )
    opcode = f"{name}.tile.bulk_group"
    words = prod(shape) * dtype.itemsize // 4
    rounds = -(-words // THREADS)
    index, inside = program.register(32), program.register(1)
    d = [program.register(32) for _ in range(rounds)]
    lines = [
        f"mov.u32 {tile}, tile;",
        f"mov.b64 {map_}, to;",
        f"cvta.param.u64 {map_}, {map_};",
        f"setp.eq.u32 {one}, %t, 0;",
        "fence.proxy.async.shared::cta;",
        "bar.sync 0;",
        f"@{one} {opcode} [{map_}, {{{', '.join(corner)}}}], [{tile}];",
        f"@{one} cp.async.bulk.commit_group;",
        f"@{one} cp.async.bulk.wait_group 0;",
        f"@{one} fence.proxy.async;",
        "bar.sync 0;",
        f"ld.param.u64 {array}, [array];",
        f"cvta.to.global.u64 {array}, {array};",
    ]
    for i, register in enumerate(d):
        lines += [
            f"add.u32 {index}, %t, {i * THREADS};",
            f"setp.lt.u32 {inside}, {index}, {words};",
            f"mov.b32 {register}, 0;",
            f"mad.wide.u32 {place}, {index}, 4, {array};",
            f"@{inside} ld.global.b32 {register}, [{place}];",
        ]
    program.sequence(lines, f"{opcode} of {dtype}", [(register, "b32") for register in d], how=CROSSES)
