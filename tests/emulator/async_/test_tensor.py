"""Tensor maps: boxes of a matrix by cp.async.bulk.tensor, on every backend, and what is refused or found."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ptxlab
from ptxlab import emulator
from ptxlab.errors import ArgumentError, EmulationError, MemoryFault
from ptxlab.lowbit.layout import TensorMap
from ptxlab.runtime import run_spec
from ptxlab.sources import Source
from ptxlab.spec import Arg, KernelSpec, Launch
from tests.support.axes import both_modes, on_every_backend
from tests.support.small_kernels import findings_or_error
from tests.support.tensor_copies import ARRAY, IMAGE, SOURCE, load_boxes


def expected_image(
    array: np.ndarray, box: tuple[int, int], swizzle: int, row: int, column: int, place: int, last_box: int
):
    """Compute the same by the definition, byte by byte.

    Bytes outside are zeros; 16-byte columns of a line are XORed with its number.
    """
    image = np.full(IMAGE, 0xAA, np.uint8)
    for i in range(last_box + 1):
        rows, columns = row + i + np.arange(box[0])[:, None], column - 16 * i + np.arange(box[1])
        inside = (rows >= 0) & (rows < array.shape[0]) & (columns >= 0) & (columns < array.shape[1])
        values = np.where(inside, array[rows % array.shape[0], columns % array.shape[1]], array.dtype.type(0))
        linear = np.arange(values.nbytes) + place + 16384 * i  # the window begins at a multiple of 1024
        line, chunk, byte = linear // 128, linear // 16 % 8, linear % 16
        chunk = chunk ^ (line % 8 & (max(swizzle, 16) // 16 - 1))
        image[line * 128 + chunk * 16 + byte] = values.reshape(-1).view(np.uint8)
    return image


@st.composite
def copies(draw: st.DrawFn) -> tuple:
    """Draw a matrix of any element size, and a box that may lie partly or wholly outside."""
    dtype = np.dtype(draw(st.sampled_from(["u1", "i1", "u2", "f2", "u4", "f4", "u8"])))
    swizzle = draw(st.sampled_from([0, 32, 64, 128]))
    unit = 16 // dtype.itemsize
    columns = unit * draw(st.integers(1, 20))
    width = swizzle // dtype.itemsize if swizzle else unit * draw(st.integers(1, 256 // unit))
    array = np.random.default_rng(draw(st.integers(0, 99))).integers(
        0, 256, (draw(st.integers(1, 40)), columns * dtype.itemsize)
    )
    array = array.astype(np.uint8).view(dtype)
    rows = draw(st.integers(1, min(256, 12288 // (width * dtype.itemsize))))
    row = draw(st.integers(-rows - 2, 42))
    column = unit * draw(st.integers(-(width // unit) - 2, columns // unit + 2))  # of whole 16 bytes
    return array, (rows, width), swizzle, row, column, 128 * draw(st.integers(0, 8)), draw(st.integers(0, 1))


@pytest.mark.full
@on_every_backend
@given(copies(), st.sampled_from(emulator.MODES))
@settings(max_examples=60, deadline=None)
def test_boxes_land_where_the_definition_says(backend: str, copy: tuple, mode: str) -> None:
    options = {"checks": emulator.CHECKS, "mode": mode} if backend == "emulator" else {}
    image, findings = load_boxes(*copy, backend=backend, **options)
    assert findings == [] and np.array_equal(image, expected_image(*copy))


PLAIN = (ARRAY, (16, 128), 128, 3, 0, 0, 0)


@pytest.mark.default_cases("late")
@both_modes
def test_a_box_that_nobody_waits_for_is_found(mode: str) -> None:
    wait = SOURCE[SOURCE.index("/* WAIT */") : SOURCE.index("    for (int i = threadIdx.x; i < 8192; i += 128) image")]
    image, findings = load_boxes(*PLAIN, source=SOURCE.replace(wait, "\n"), checks=emulator.CHECKS, mode=mode)
    assert any("async" in line and "still being written by line" in line and "tensor.2d" in line for line in findings)
    assert mode == "early" or not np.array_equal(image, expected_image(*PLAIN))


@both_modes
def test_a_box_over_what_threads_have_written_needs_a_fence(mode: str) -> None:
    source = SOURCE.replace('asm volatile("fence.proxy.async;" ::: "memory");', "")
    findings = "\n".join(load_boxes(*PLAIN, source=source, checks=emulator.CHECKS, mode=mode)[1])
    assert re.search(
        r"async-dirty: .*tensor\.2d.* copies over byte \d+ .* `st\.shared.*, wrote without a fence", findings
    )


def test_overlapping_boxes_are_found() -> None:
    _, findings = load_boxes(*PLAIN[:-1], 1, source=SOURCE.replace("i * 16384", "i * 1024"), checks=["async"])
    assert any("copies to byte 2048" in line and "still being written" in line for line in findings)


@pytest.mark.default_cases(
    "change2-31744-MemoryFault-2048 bytes at shared address .* out of bounds",
    "change1-64-MemoryFault-not a multiple of the 128 bytes",
    "change4-0-EmulationError-gathers .* are not emulated",
)
@pytest.mark.parametrize(
    ("change", "place", "error", "message"),
    [
        (
            ('"r"(column - 16 * i)', '"r"(column + 8)'),
            0,
            MemoryFault,
            "column has to be a multiple of 16, 16 bytes, not 8",
        ),
        (("", ""), 64, MemoryFault, "not a multiple of the 128 bytes"),
        (("", ""), 32768 - 1024, MemoryFault, "2048 bytes at shared address .* out of bounds"),
        (('"l"(&map), "r"(column', '"l"(image), "r"(column'), 0, MemoryFault, "no argument that is a tensor map"),
        (("tile.mbarrier", "tile::gather4.mbarrier"), 0, EmulationError, "gathers .* are not emulated"),
        (('"r"(bytes * (more', '"r"(16 + bytes * (more'), 0, EmulationError, "deadlock"),
    ],
)
def test_invalid_tensor_copies_are_refused(change: tuple, place: int, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        load_boxes(*PLAIN[:5], place, 0, source=SOURCE.replace(*change))


@pytest.mark.parametrize(
    ("array", "box", "swizzle", "message"),
    [
        (ARRAY[None, None, None, None], (1, 16), 0, r"one to five axes, none empty \(got shape \(1, 1, 1, 1, 64,"),
        (ARRAY[:0], (1, 16), 0, "axes, none empty"),
        (ARRAY[:, :128], (1, 16), 0, "C-contiguous"),
        (ARRAY.view("V16"), (1, 16), 0, "integers or floats of 1, 2, 4 or 8 bytes"),
        (ARRAY[:, :24].copy(), (1, 16), 0, r"rows of a multiple of 16 bytes \(got 24 bytes\)"),
        (ARRAY, (0, 16), 0, r"each 1 to 256 \(got \(0, 16\)\)"),
        (ARRAY, (257, 16), 0, "each 1 to 256"),
        (ARRAY, (1, 24), 0, "rows of a multiple of 16 bytes"),
        (ARRAY, (1, 32), 16, r"swizzle: one of 0, 32, 64, 128 \(got 16\)"),
        (ARRAY, (1, 128), 64, r"rows as wide as the swizzle of 64 bytes \(got 128 bytes\)"),
    ],
)
def test_maps_that_the_driver_would_refuse(array: Any, box: tuple, swizzle: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^tensor map: .*{message}"):
        TensorMap(array, box, swizzle)


PARAM = """.version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k(.param .align 64 .b8 m[{}]) {{ ret; }}"""


def test_a_map_is_for_a_parameter_of_128_bytes_and_no_other() -> None:
    tensor_map = TensorMap(ARRAY, (1, 16))
    emulator.run(PARAM.format(128), None, [tensor_map], grid=1, block=32)
    with pytest.raises(ArgumentError, match=r"argument 0 \(m\): is 64 bytes by value, not the 128 of a tensor map"):
        emulator.run(PARAM.format(64), None, [tensor_map], grid=1, block=32)
    with pytest.raises(ArgumentError, match="is 128 bytes by value, not a buffer"):
        emulator.run(PARAM.format(128), None, [ARRAY], grid=1, block=32)


SHARE = r"""
struct alignas(64) TensorMap { unsigned char bytes[128]; };
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// Each of four blocks brings eight rows, for the blocks in the mask; all show what they have.
extern "C" __global__ void __cluster_dims__(4, 1, 1) __launch_bounds__(64)
share(const __grid_constant__ TensorMap map, unsigned* image, int mask) {
    __shared__ __align__(1024) unsigned tile[1024];
    __shared__ __align__(8) unsigned long long full;
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    for (int i = threadIdx.x; i < 1024; i += 64) tile[i] = 0xAAAAAAAA;
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(at(&full)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     :: "r"(at(&full)), "r"(mask >> rank & 1 ? 4096 : 0) : "memory");
    }
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
    if (threadIdx.x == 0)
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                     ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
                     :: "r"(at(tile) + rank * 1024), "l"(&map), "r"(64), "r"(rank * 8),
                        "r"(at(&full)), "h"((short)mask) : "memory");
    asm volatile("{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;"
                 "@!done bra AGAIN; }" :: "r"(at(&full)) : "memory");
    for (int i = threadIdx.x; i < 1024; i += 64) image[rank * 1024 + i] = tile[i];
    /* END */ asm volatile("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" ::: "memory");
}
"""


@on_every_backend
@both_modes
@pytest.mark.parametrize("mask", [0b1111, 0b1010, 0b0001])
def test_boxes_for_several_blocks(mask: int, mode: str, backend: str) -> None:
    image = np.zeros((4, 4096), np.uint8)
    kernel = ptxlab.load(SHARE, arch="sm_90a")
    options = {"checks": emulator.CHECKS, "mode": mode} if backend == "emulator" else {}
    outcome = kernel(TensorMap(ARRAY, (8, 128), 128), image.view(np.uint32), np.int32(mask), grid=4, block=64,
                     cluster=4, backend=backend, **options)  # fmt: skip
    whole = expected_image(ARRAY, (32, 128), 128, 0, 64, 0, 0)[:4096]
    assert not outcome.findings
    assert [(block == whole).all() for block in image] == [bool(mask >> rank & 1) for rank in range(4)]


@both_modes
def test_a_block_may_not_end_before_its_boxes_have_come(mode: str) -> None:
    """A block that does not wait for a box may have ended when it comes."""
    source = SHARE[: SHARE.index("/* END */")] + "}\n"
    source = source.replace('asm volatile("{ .reg', 'if (rank) asm volatile("{ .reg')
    kernel = ptxlab.load(source, arch="sm_90a")
    image = np.zeros((4, 4096), np.uint8)

    def findings() -> list[str]:
        outcome = kernel(TensorMap(ARRAY, (8, 128), 128), image.view(np.uint32), np.int32(15), grid=4, block=64,
                         cluster=4, backend="emulator", mode=mode, checks=["race", "async"])  # fmt: skip
        return [str(finding) for finding in outcome.findings]

    assert re.search(r"shared memory of block \(0,0,0\), which (may have|has) ended", findings_or_error(findings))


SPEC = KernelSpec(
    name="boxes",
    summary="one box",
    args=(
        Arg("x", "uint8", ("M", "K"), "tma", box=("BM", "2 * 64"), swizzle=128),
        Arg("image", "uint32", ("8192",), "out"),
        *(Arg(name, "int32", role="scalar", value=value) for name, value in
          (("row", "M // 2"), ("column", "0"), ("bytes", "2048"), ("place", "0"), ("more", "0"))),
    ),
    launch=lambda sizes: Launch((1, 1, 1), (128, 1, 1), IMAGE),
    example=dict,
    pack=dict,
    reference=expected_image,
    configs=({"BM": 16},),
    arch="sm_90a",
    exact_arch=True,
)  # fmt: skip


@on_every_backend
def test_a_specs_argument_becomes_a_tensor_map(backend: str) -> None:
    outcome = run_spec(SPEC, Source.from_text(SOURCE, "<boxes>"), {"x": ARRAY}, backend=backend)
    assert np.array_equal(outcome.outputs["image"].view(np.uint8), expected_image(ARRAY, (16, 128), 128, 32, 0, 0, 0))
    assert SPEC.bytes_moved({"M": 64, "K": 256}) == ARRAY.nbytes + IMAGE
    wrong = dataclasses.replace(SPEC, configs=({"BM": 512},))
    with pytest.raises(ArgumentError, match=r"^boxes: x: tensor map: box: \(rows, columns\), each 1 to 256"):
        run_spec(wrong, Source.from_text(SOURCE, "<boxes>"), {"x": ARRAY}, backend="emulator")
