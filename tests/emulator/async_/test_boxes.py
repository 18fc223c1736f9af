"""Tensor copies of one to five axes, there and back; stores and reductions from shared memory."""

import itertools
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import emulator
from ptxlab.errors import ArgumentError, EmulationError, MemoryFault, UnknownInstruction
from ptxlab.lowbit.layout import TensorMap
from tests.support.axes import both_modes, on_every_backend
from tests.support.small_kernels import findings_or_error
from tests.support.tensor_copies import (
    BOXES,
    BULK,
    CHECKED,
    REDUCE,
    REDUCTIONS,
    SHAPES,
    STORE,
    move_box,
    reduce,
    source,
)


@pytest.mark.default_cases(
    "1-cp.async.bulk.tensor.AXES.global.shared::cta.tile.bulk_group-late-emulator",
    "1-cp.reduce.async.bulk.tensor.AXES.global.shared::cta.add.tile.bulk_group-late-emulator",
)
@on_every_backend
@both_modes
@pytest.mark.parametrize("back", [STORE, REDUCE])
@pytest.mark.parametrize("axes", SHAPES)
def test_there_and_back(axes: int, back: str, mode: str, backend: str) -> None:
    """Inside the array and beyond its end on every axis: what lies outside is not written."""
    beyond = tuple(size - 1 for size in SHAPES[axes][:-1])
    for place in ((0,) * axes, (1,) * (axes - 1) + (4 if axes > 1 else 16,), (*beyond, SHAPES[axes][-1] - 4)):
        options = {**CHECKED, "mode": mode} if backend == "emulator" else {}
        untouched_image, y, expected, findings = move_box(axes, place, back, backend, **options)
        np.testing.assert_array_equal(y, expected)
        assert findings == [] and not np.array_equal(y, untouched_image)


@pytest.mark.parametrize("back", [STORE, REDUCE])
@pytest.mark.parametrize("place", [(-1, 0), (0, -4)])
def test_nothing_is_written_from_in_front_of_the_array(place: tuple[int, ...], back: str) -> None:
    """An H200 takes it for an illegal instruction."""
    rule = r"may end behind the array, but not begin in front of it: \("
    with pytest.raises(MemoryFault, match=rule + ", ".join(map(str, reversed(place)))):
        move_box(2, place, back)


@both_modes
def test_a_store_of_what_threads_wrote_needs_a_fence(mode: str) -> None:
    findings = findings_or_error(lambda: move_box(2, (0, 0), STORE, fence="", **CHECKED, mode=mode)[-1])
    assert "async-dirty" in findings and "without a fence.proxy.async" in findings


@both_modes
def test_copies_are_told_to_every_block_that_acquires_in_scope_cta(mode: str) -> None:
    text = source(2, REDUCE, fence="fence.acq_rel.cta; fence.proxy.async.shared::cta;")
    text = text.replace("try_wait.parity.shared", "try_wait.parity.acquire.cta.shared")
    x, y = np.ones(SHAPES[2], np.float32), np.zeros(SHAPES[2], np.float32)
    maps = TensorMap(x, BOXES[2]), TensorMap(y, BOXES[2])
    outcome = ptxlab.load(text, arch="sm_90a")(*maps, *map(np.int32, (256, 0, 0)), grid=3, block=32, mode=mode,
                                               backend="emulator", **CHECKED)  # fmt: skip
    assert not outcome.findings and (y[:4, :16] == 6).all()


def test_a_store_that_nobody_waits_for() -> None:
    findings = findings_or_error(lambda: move_box(2, (0, 0), STORE, wait="wait_group 1", **CHECKED)[-1])
    assert "async" in findings and "ends" in findings


PADDED = """
struct alignas(64) TensorMap {{ unsigned char bytes[128]; }};
extern "C" __global__ void pad(const __grid_constant__ TensorMap to, const float* image, const int* filled, int words,
                               {at}) {{
    __shared__ __align__(1024) float box[1024];
    for (int i = threadIdx.x; i < words; i += blockDim.x)
        if (filled[i]) box[i] = image[i];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {{
        asm volatile("cp.async.bulk.tensor.{axes}d.global.shared::cta.tile.bulk_group [%1, {{{places}}}], [%0];"
                     :: "r"((unsigned)__cvta_generic_to_shared(box)), "l"(&to), {numbers} : "memory");
        asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
    }}
}}
"""
# shape, box, first element, swizzle; a box may end behind the array on any axis, but not begin in front of it
PADDINGS = [
    ((48,), (32,), (36,), 0), ((48,), (64,), (0,), 0), ((6, 16), (8, 24), (1, 4), 0), ((6, 8), (16, 8), (3, 4), 32),
    ((6, 32), (8, 16), (3, 24), 64), ((9, 20), (16, 32), (2, 8), 128), ((3, 4, 12), (4, 5, 16), (1, 2, 4), 0),
    ((3, 4, 8), (2, 8, 16), (2, 3, 4), 64), ((2, 2, 3, 8), (2, 3, 2, 16), (1, 1, 2, 4), 0),
    ((2, 2, 3, 2, 8), (2, 1, 3, 2, 16), (1, 1, 2, 1, 4), 0),
]  # fmt: skip


def pad(
    shape: tuple[int, ...],
    box: tuple[int, ...],
    first: tuple[int, ...],
    span: int,
    backend: str,
    lost: int = 0,
    **how: Any,
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Store a box that lies partly outside an array; return the array, the expected array, and the findings.

    Only the part of the box that lies inside is written beforehand, but for `lost` elements of it.
    """
    rng, axes = np.random.default_rng(len(shape)), len(shape)
    y, tile = rng.random(shape, np.float32), rng.random(box, np.float32)
    expected, image, filled = y.copy(), np.zeros(tile.size, np.float32), np.zeros(tile.size, np.int32)
    for linear, offsets in enumerate(itertools.product(*map(range, box))):
        at = tuple(f + o for f, o in zip(first, offsets, strict=True))
        chunk, word = divmod(linear, 4)  # of 16 bytes; a swizzle exchanges those of a row
        place = 4 * (chunk ^ (chunk // 8 % (span // 16)) if span else chunk) + word
        image[place] = tile[offsets]
        if all(0 <= i < n for i, n in zip(at, shape, strict=True)):
            expected[at] = tile[offsets]
            filled[place] = 1
    filled[np.flatnonzero(filled)[:lost]] = 0
    numbers = range(axes)
    text = PADDED.format(
        axes=axes,
        at=", ".join(f"int at{i}" for i in numbers),
        places=", ".join(f"%{2 + i}" for i in numbers),
        numbers=", ".join(f'"r"(at{i})' for i in numbers),
    )
    outcome = ptxlab.load(text, arch="sm_90a")(TensorMap(y, box, span), image, filled, np.int32(tile.size),
                                               *map(np.int32, reversed(first)), grid=1, block=64, backend=backend,
                                               **how)  # fmt: skip
    return y, expected, [str(finding) for finding in outcome.findings]


@pytest.mark.default_cases(
    "(48,)-(64,)-(0,)-0-emulator",
    "(6, 8)-(16, 8)-(3, 4)-32-emulator",
    "(6, 32)-(8, 16)-(3, 24)-64-emulator",
    "(3, 4, 8)-(2, 8, 16)-(2, 3, 4)-64-emulator",
)
@on_every_backend
@pytest.mark.parametrize(("shape", "box", "first", "span"), PADDINGS, ids=str)
def test_a_padded_store_takes_and_writes_what_lies_inside(
    shape: tuple[int, ...], box: tuple[int, ...], first: tuple[int, ...], span: int, backend: str
) -> None:
    """Whatever of the box lies outside of the array is not written there, and need not be there in shared memory."""
    for options in ({**CHECKED, "mode": mode} for mode in emulator.MODES) if backend == "emulator" else ({},):
        y, expected, findings = pad(shape, box, first, span, backend, **options)
        np.testing.assert_array_equal(y, expected)
        assert findings == []


@pytest.mark.parametrize(("shape", "box", "first", "span"), PADDINGS[::3], ids=str)
def test_an_element_that_is_missing_inside_is_found(
    shape: tuple[int, ...], box: tuple[int, ...], first: tuple[int, ...], span: int
) -> None:
    findings = pad(shape, box, first, span, "emulator", lost=1, **CHECKED)[-1]
    assert len(findings) == 1 and "uninitialised" in findings[0] and "takes byte" in findings[0]


@pytest.mark.parametrize(
    ("row", "column", "in_flight"), [(2, 8, True), (3, 9, True), (4, 8, True), (1, 8, False), (3, 7, False)]
)
def test_rows_of_a_box_are_in_flight(row: int, column: int, in_flight: bool) -> None:
    """A box of three rows from (2, 8) on is stored, and a thread writes an element before it waits for that."""
    text = PADDED.format(
        axes=2, at="int x, int y, float* array, int touched", places="%2, %3", numbers='"r"(x), "r"(y)'
    )
    text = text.replace("commit_group; cp", 'commit_group;" ::: "memory"); array[touched] = 1; asm volatile("cp')
    array, image = np.zeros((6, 16), np.float32), np.zeros(12, np.float32)
    arguments = TensorMap(array, (3, 4)), image, np.ones(12, np.int32), *map(np.int32, (12, 8, 2)), array
    outcome = ptxlab.load(text, arch="sm_90a")(*arguments, np.int32(16 * row + column), grid=1, block=32,
                                               backend="emulator", checks=["async"])  # fmt: skip
    assert [finding.kind for finding in outcome.findings] == ["async"] * in_flight


def test_the_map_has_as_many_axes_as_the_instruction() -> None:
    text = (
        source(3, STORE)
        .replace("tensor.3d.shared::cta", "tensor.2d.shared::cta")
        .replace("[%0], [%1, {%3, %4, %5}], [%2]", "[%0], [%1, {%3, %4}], [%2]")
    )
    x = np.zeros(SHAPES[3], np.float32)
    kernel, maps = ptxlab.load(text, arch="sm_90a"), [TensorMap(x, BOXES[3]), TensorMap(x, BOXES[3])]
    with pytest.raises(EmulationError, match="a box of 2 dimensions of a tensor map of 3"):
        kernel(*maps, *map(np.int32, (0, 0, 0, 0)), grid=1, block=32, backend="emulator")


INTEGERS = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry combine(.param .align 64 .b8 map[128], .param .u64 x) {
    .reg .b32 %r<4>; .reg .b64 %x<4>; .reg .pred %p;
    .shared .align 128 .b8 box[128];
    mov.u32 %r1, box;
    mov.b64 %x1, map;
    cvta.param.u64 %x1, %x1;
    ld.param.u64 %x2, [x];
    cvta.to.global.u64 %x2, %x2;
    mov.u32 %r2, %tid.x;
    mad.wide.u32 %x2, %r2, 4, %x2;
    mad.lo.u32 %r2, %r2, 4, %r1;
    ld.global.b32 %r3, [%x2];
    st.shared.b32 [%r2], %r3;
    fence.proxy.async.shared::cta;
    bar.warp.sync -1;
    elect.sync _|%p, -1;
    @%p cp.reduce.async.bulk.tensor.1d.global.shared::cta.OPERATION.tile.bulk_group [%x1, {0}], [%r1];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
    ret;
}
"""


@on_every_backend
@pytest.mark.parametrize(
    ("operation", "dtype", "combine"),
    [("and", np.uint64, np.bitwise_and), ("xor", np.uint32, np.bitwise_xor), ("or", np.int32, np.bitwise_or),
     ("max", np.int64, np.maximum), ("add", np.uint64, np.add)],
)  # fmt: skip
def test_reductions_of_integers(operation: str, dtype: Any, combine: np.ufunc, backend: str) -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, 256, 128, dtype=np.uint8).view(dtype) for _ in range(2))
    expected = combine(x, y)
    kernel = ptxlab.load(INTEGERS.replace("OPERATION", operation))
    kernel(TensorMap(y, y.shape), x.view(np.uint8), grid=1, block=32, backend=backend)
    np.testing.assert_array_equal(y, expected)


# An H200 takes these for illegal instructions
@pytest.mark.parametrize(
    ("operation", "dtype"),
    [("and", np.int64), ("xor", np.int64), ("add", np.int64), ("inc", np.int32), ("or", np.int16)],
)
def test_integers_that_are_not_combined(operation: str, dtype: Any) -> None:
    kernel, y = ptxlab.load(INTEGERS.replace("OPERATION", operation)), np.zeros(128, np.uint8).view(dtype)
    with pytest.raises(EmulationError, match=rf"\.{operation} of elements of type {y.dtype}"):
        kernel(TensorMap(y, y.shape), np.zeros(128, np.uint8), grid=1, block=32, backend="emulator")


def test_unknown_tensor_reductions_are_refused() -> None:
    with pytest.raises(EmulationError, match=r"\.and of elements of type float32"):
        move_box(2, (0, 0), REDUCE.replace("cta.add", "cta.and"))
    with pytest.raises(UnknownInstruction):
        move_box(2, (0, 0), STORE.replace(".tile.", ".im2col_no_offs."))
    with pytest.raises(ArgumentError, match=r"tensor map: box: 3 sizes, each 1 to 256 \(got \(4, 16\)\)"):
        TensorMap(np.zeros((2, 4, 16), np.float32), (4, 16))


@pytest.mark.default_cases(
    "add.u32-emulator", "min.s32-emulator", "add.u64-emulator", "xor.b32-emulator", "add.f32-emulator"
)
@on_every_backend
@pytest.mark.parametrize(("op", "t", "dtype", "combine"), REDUCTIONS, ids=[r[0] for r in REDUCTIONS])
def test_bulk_reductions(op: str, t: str, dtype: Any, combine: np.ufunc, backend: str) -> None:
    """Three blocks add to the same place, which is no race."""
    out, expected, findings = reduce(op, t, dtype, combine, backend, **CHECKED if backend == "emulator" else {})
    assert findings == () and out.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "op", ["inc.s32", "and.f32", "max.f32", "add.b32", "add.noftz.u32", "add.f16", "and.u32", "add.s64"]
)
def test_unknown_bulk_reductions_are_refused(op: str) -> None:
    x = np.zeros((3, 64), np.float32)
    with pytest.raises((UnknownInstruction, ptxlab.errors.CompileError)):
        ptxlab.load(BULK.format(t="float", op=op), arch="sm_90a")(x[0], x, grid=1, block=64, backend="emulator")
