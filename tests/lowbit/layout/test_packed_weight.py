"""Packing is invisible: what is unpacked equals what was packed, whatever N, K and group; and what packing refuses."""

import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxlab.errors import ArgumentError
from ptxlab.lowbit import quant
from ptxlab.lowbit.layout import LAYOUTS, SCHEMES, PackedWeight, buffer_shapes, pack, unpack
from ptxlab.lowbit.layout.packed_weight import VERSION
from tests.support import strategies
from tests.support.random_weights import KINDS, assert_equal, random_weight, weights


@pytest.mark.smoke
@pytest.mark.parametrize("layout", LAYOUTS)
@given(weight=weights)
def test_round_trip(layout: str, weight) -> None:
    packed = pack(weight, layout)
    assert weight.shape == (packed.N, packed.K) and packed.version == VERSION
    assert packed.group == getattr(weight, "group", packed.K)
    unpacked = unpack(packed)
    assert_equal(unpacked, weight)
    arrays = [*packed.buffers.values(), *(a for a in vars(unpacked).values() if isinstance(a, np.ndarray))]
    assert all(array.flags.c_contiguous for array in arrays)  # as kernels take them


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@given(case=strategies.weight_groups(), scheme=st.sampled_from(["lqq", "qoq"]))
def test_round_trip_of_quantised_boundary_values(layout: str, case, scheme: str) -> None:
    w = np.tile(case.w, (8, 1))
    weight = (quant.quantize_lqq if scheme == "lqq" else quant.quantize_qoq)(w, case.group)
    unpacked = unpack(pack(weight, layout))
    assert_equal(unpacked, weight)
    np.testing.assert_array_equal(unpacked.dequantize(), weight.dequantize(), strict=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_widest_protective_range_round_trips(layout: str) -> None:
    """QoQ's group scale reaches 17 there, and zero·scale no longer fits s8."""
    w = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    w[:, 0], w[:, 1] = 9, -9
    w[1] = -np.abs(w[1])
    weight = quant.quantize_qoq(w, 32, protective_range=127)
    assert weight.group_scale.max() == 17
    assert_equal(unpack(pack(weight, layout)), weight)


def test_a_group_that_overflows_is_refused_with_its_place() -> None:
    """Range 120 of QoQ is the smallest that overflows: 120 comes back as 128. LQQ has room up to 120."""
    w = np.zeros((16, 256), np.float32)
    w[9, 128:130] = -113, 120
    w[10, 128:130] = -113, 120
    weight = quant.quantize_qoq(w, 128, protective_range=120)
    message = r"-128..127, unless unchecked \(got -112..128 in row 9, group 1, scale 16; 2 of 32 groups\)"
    with pytest.raises(ArgumentError, match=message):
        pack(weight)
    assert_equal(unpack(pack(weight, unchecked=True)), weight)
    lqq = quant.quantize_lqq(w, 128, protective_range=120)
    assert_equal(unpack(pack(lqq)), lqq)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_weight_shares_no_memory_with_its_source(layout: str, kind: type) -> None:
    weight = random_weight(kind, 64, 128, 64, 0)
    packed = pack(weight, layout)
    sources = [field for field in vars(weight).values() if isinstance(field, np.ndarray)]
    assert not any(np.shares_memory(a, b) for a in packed.buffers.values() for b in sources)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_is_bounded(layout: str) -> None:
    """The packed weight (0.53 times q4) and all temporaries together stay below twice the input."""
    weight = random_weight(quant.LQQWeight, 1024, 2048, 64, 0)
    tracemalloc.start()
    packed = pack(weight, layout)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert packed.nbytes <= peak < 2 * weight.q4.nbytes


@pytest.mark.default_cases("qserve")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_speed_on_the_cpu(layout: str) -> None:
    """An eighth of LLaMA-2-70B's gate and up, 57344 x 8192, which is to pack in 20 seconds."""
    weight = random_weight(quant.LQQWeight, 57344 // 8, 8192, 64, 0)
    start = time.perf_counter()
    pack(weight, layout)
    assert time.perf_counter() - start < 20 / 8


def test_bytes_and_arch() -> None:
    weight = random_weight(quant.LQQWeight, 128, 512, 64, 0)
    packed = {layout: pack(weight, layout) for layout in LAYOUTS}
    assert {p.nbytes for p in packed.values()} == {128 * 512 // 2 + 2 * 128 * 8 + 4 * 128}  # no padding: all alike
    assert {name: p.arch for name, p in packed.items()} == {
        "row_major": "sm_80", "qserve": "sm_80", "dual_mma": "sm_90a", "comet": "sm_80", "strips": "sm_90a"
    }  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_shapes_are_known_before_packing(layout: str, kind: type) -> None:
    packed = pack(random_weight(kind, 72, 192, 32, 0), layout)
    announced = buffer_shapes(layout, packed.scheme, 72, 192, packed.group)
    assert {name: (str(a.dtype), a.shape) for name, a in packed.buffers.items()} == announced


LQQ = random_weight(quant.LQQWeight, 8, 128, 64, 0)
QOQ = random_weight(quant.QoQWeight, 8, 128, 64, 0)
CHANNEL = random_weight(quant.QoQChannelWeight, 8, 128, 128, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack(LQQ, "zigzag"), r"layout: must be one of row_major, .*, comet, strips \(got zigzag\)"),
        (lambda: pack(LQQ.q4), r"weight: must be an LQQWeight, QoQWeight or QoQChannelWeight \(got ndarray\)"),
        (lambda: pack(replace(LQQ, q4=LQQ.q4[0])), r"weight.q4: must be a matrix \[N, K\] \(got shape \(128,\)\)"),
        (lambda: pack(replace(LQQ, q4=[1])), r"weight.q4: must be a matrix \[N, K\] \(got shape list\)"),
        (lambda: pack(replace(LQQ, q4=LQQ.q4 + np.uint8(1))), r"q4: must be at most 15 \(got q4\[\d, \d+\] is 16\)"),
        (lambda: pack(replace(LQQ, q4=LQQ.q4.view(np.int8))), r"q4: dtype must be uint8 \(got int8\)"),
        (lambda: pack(replace(LQQ, q4=LQQ.q4[:, :101])), r"group_scale: .*K a multiple of the group .*\(8, 101\)"),
        (lambda: pack(replace(LQQ, q4=LQQ.q4[:, :96])), r"group: must be one of 32, 64, 128 \(got 48\)"),
        (lambda: pack(replace(LQQ, group_scale=LQQ.group_scale[0])), r"weight.group_scale: must be \[N, K/g\]"),
        (lambda: pack(replace(LQQ, group_scale=LQQ.group_scale[:4])), r"group_scale: must be uint8 \[8, 2\] .*\[4"),
        (lambda: pack(replace(LQQ, minimum=LQQ.offset)), r"weight.minimum: must be int8 \[8, 2\] \(got uint8 \[8, 2\]"),
        (lambda: pack(replace(LQQ, channel_scale=LQQ.channel_scale[:3])), r"channel_scale: must be float32 \[8\]"),
        (lambda: pack(replace(QOQ, zero=QOQ.zero + np.uint8(8))), r"weight.zero: must lie in 0..15 \(got \d+..2\d\)"),
        (lambda: pack(replace(QOQ, group_scale=QOQ.group_scale * 0)), r"weight.group_scale: must lie in 1..17"),
        (lambda: pack(replace(LQQ, group_scale=[1])), r"weight.group_scale: must be \[N, K/g\]"),
        (lambda: pack(replace(CHANNEL, scale=[1.0] * 8)), r"weight.scale: must be float32 \[8\] \(got list\)"),
        (lambda: pack(replace(CHANNEL, zero=CHANNEL.zero | np.uint8(16))), r"weight.zero: must lie in 0..15 \(got 1"),
        (lambda: pack(replace(CHANNEL, scale=CHANNEL.zero)), r"weight.scale: must be float32 \[8\] \(got uint8"),
        (lambda: pack(replace(CHANNEL, zero=CHANNEL.zero[:7])), r"weight.zero: must be uint8 \[8\] \(got uint8 \[7\]"),
        (lambda: pack(random_weight(quant.QoQWeight, 0, 64, 64, 0)), r"N must be a positive multiple of 8 \(got N=0\)"),
        (lambda: pack(random_weight(quant.LQQWeight, 12, 64, 64, 0)), r"N must be a positive multiple of 8 \(got N=12"),
        (lambda: pack(random_weight(quant.QoQChannelWeight, 8, 40, 40, 0)), r"K must be a positive multiple of 32"),
        (lambda: buffer_shapes("comet", "awq", 8, 64, 64), rf"scheme: must be one of {', '.join(SCHEMES)} \(got awq"),
        (lambda: buffer_shapes("comet", "lqq", 8, 96, 64), r"K must be a multiple of the group \(got K=96, group=64"),
        (lambda: buffer_shapes("comet", "lqq", 8, 0, 64), r"K must be a positive multiple of 32 \(got K=0\)"),
        (lambda: buffer_shapes("comet", "qoq_channel", 8, 96, 32), r"group: qoq_channel has none: must be K .*=32"),
    ],
)  # fmt: skip
def test_refuses(call, message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_refuses_buffers_that_do_not_fit() -> None:
    packed = pack(LQQ, "dual_mma")
    fields = {name: field for name, field in vars(packed).items() if name != "buffers"}
    blocks, scale = packed.buffers["blocks"], packed.buffers["channel_scale"]
    for buffers, message in [
        ({"blocks": blocks}, r"buffers: must be blocks, channel_scale \(got blocks\)"),
        ({}, r"buffers: must be blocks, channel_scale \(got none\)"),
        ({"blocks": blocks[:, :, 1:], "channel_scale": scale}, r"buffers\[blocks\]: must be uint8 \[1, 2, 2176\]"),
        ({"blocks": blocks.tolist(), "channel_scale": scale}, r"buffers\[blocks\]: .* \(got list\)"),
        ({"blocks": blocks.view(np.int8), "channel_scale": scale}, r"buffers\[blocks\]: .* \(got int8 "),
    ]:  # fmt: skip
        with pytest.raises(ArgumentError, match=message):
            PackedWeight(**fields, buffers=buffers)
    with pytest.raises(ArgumentError, match=r"protective_range: must be an integer in 1..127 \(got 128\)"):
        PackedWeight(**(fields | {"protective_range": 128}), buffers=packed.buffers)
    with pytest.raises(ArgumentError, match=r"protective_range: qoq_channel has none: must be 0 \(got 119\)"):
        replace(pack(CHANNEL), protective_range=119)
    with pytest.raises(ArgumentError, match=rf"version: must be {VERSION} \(got 7\)"):
        PackedWeight(**(fields | {"version": 7}), buffers=packed.buffers)
