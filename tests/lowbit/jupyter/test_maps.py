"""Who holds what: the maps say what fragments, packed bytes and running kernels say."""

import numpy as np
import pytest

import ptxlab
from ptxlab.errors import ArgumentError
from ptxlab.hardware import fragments
from ptxlab.lowbit.jupyter import maps, who_holds
from ptxlab.lowbit.kernels import holders
from ptxlab.lowbit.quant import QoQChannelWeight

FRAGMENTS = [fragments.mma_a(32), fragments.mma_b(64), fragments.mma_c(), fragments.ldmatrix(4, True),
             fragments.wgmma_a(), fragments.wgmma_d(64)]  # fmt: skip


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda f: f.name)
def test_fragments(fragment: fragments.Fragment) -> None:
    holder_map = maps.find(fragment.name)
    assert holder_map.lanes == fragment.lanes
    for lane in (0, 5, fragment.lanes - 1):
        for register, places in enumerate(holder_map.held_by(lane)):
            assert places == [fragment.index(lane, register, i) for i in range(len(places))]


@pytest.mark.parametrize("layout", ["row_major", "qserve", "dual_mma", "strips"])
def test_packings_by_their_bytes(layout: str) -> None:
    """Lane i loads bytes 16 i to 16 i + 15, and what its registers hold is what the map says."""
    holder_map = maps.find(layout)
    q4 = np.random.default_rng(0).integers(0, 16, holder_map.lane.shape, dtype=np.uint8)
    rows = holder_map.lane.shape[0]
    weight = QoQChannelWeight(q4, np.ones(rows, np.float32), np.zeros(rows, np.uint8))
    stored = next(iter(ptxlab.pack(weight, layout).buffers.values())).reshape(-1).view(np.uint32)
    loaded = stored.reshape(-1, holder_map.lanes, 4)
    for lane in range(holder_map.lanes):
        for register, places in enumerate(holder_map.held_by(lane)):
            word = int(loaded[register // 4, lane, register % 4])
            bits = [int(holder_map.bit[place]) for place in places]
            assert [word >> bit & 15 for bit in bits] == [q4[place] for place in places] and bits == sorted(bits)


def test_comet_gives_the_lanes_what_dual_mma_gives_a_warp() -> None:
    comet, dual = maps.find("comet"), maps.find("dual_mma")
    np.testing.assert_array_equal(comet.lane, dual.lane[:16])
    np.testing.assert_array_equal(comet.register, dual.register[:16])
    np.testing.assert_array_equal(comet.bit ^ 4, dual.bit[:16])  # the nibbles of every byte exchanged


def test_dual_mma_feeds_two_wgmmas() -> None:
    dual, operand = maps.find("dual_mma"), maps.find("wgmma.m64k32.a")
    for first in (0, 32):
        np.testing.assert_array_equal(dual.lane[:, first : first + 32], operand.lane)


def test_kernels_are_read_off_the_running_kernel() -> None:
    right, wrong = maps.find("load_dual_mma"), maps.find("load_ldmatrix_u4")
    np.testing.assert_array_equal(right.lane[:, :32], maps.find("wgmma.m64k32.a").lane)
    assert not right.wrong.any() and wrong.wrong.mean() == 0.75 and "75% of it" in wrong.description
    np.testing.assert_array_equal(wrong.lane, holders.map_registers("load_ldmatrix_u4").thread)


@pytest.mark.parametrize("name", maps.maps_by_name())
def test_every_map_can_be_drawn(name: str) -> None:
    page = who_holds(name, 5)._repr_html_()
    assert page.count('class="mine') >= 1 and "Lane 5 holds" in page and len(page) < 100_000
    boxes = who_holds(name)._repr_html_()
    assert 'class="mine' not in boxes and boxes.count("<rect") == page.count("<rect")


def test_what_is_drawn_is_around_the_lane() -> None:
    page = who_holds("wgmma.m64k32.a", 127)._repr_html_()
    assert "rows 32-63 of 64" in page and ">127.r0</text>" in page


def test_a_map_is_printed_in_words() -> None:
    assert repr(who_holds("mma.m16n8k32.b", 5)).splitlines()[1:] == [
        "lane 5, r0: (7, 1) (6, 1) (5, 1) (4, 1)",
        "lane 5, r1: (23, 1) (22, 1) (21, 1) (20, 1)",
    ]


def test_bad_names_and_lanes() -> None:
    with pytest.raises(ArgumentError, match="dual_mma"):
        who_holds("dualmma")
    with pytest.raises(ArgumentError, match=r"0\.\.31 for qserve \(got 32\)"):
        who_holds("qserve", 32)
