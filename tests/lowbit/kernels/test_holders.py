"""Who holds what, read off the running kernels, against the fragment maps and the papers."""

import numpy as np
import pytest

from ptxlab.errors import ArgumentError
from ptxlab.hardware import fragments
from ptxlab.lowbit.kernels import holders
from ptxlab.lowbit.kernels.plot import load_picture

RIGHT = ("load_ldmatrix_s8", "load_lds32_u4", "load_dual_mma", "load_comet_interleave")


@pytest.mark.parametrize("name", RIGHT)
def test_every_element_is_where_the_wgmma_wants_it(name: str) -> None:
    operand = fragments.wgmma_a()
    steps = [64 * operand.rows + operand.cols + 32 * step for step in range(2)]
    expected = np.concatenate(steps, axis=1).reshape(128, 32)
    assert np.array_equal(holders.arrivals(name), expected)
    assert not holders.map_registers(name).wrong.any()


def test_qserve_feeds_two_mma_below_each_other() -> None:
    operand = fragments.mma_a(32)
    for warp, (row, column) in enumerate(((0, 0), (0, 32), (32, 0), (32, 32))):
        halves = [64 * (operand.rows + row + below) + operand.cols + column for below in (0, 16)]
        expected = np.concatenate(halves, axis=1).reshape(32, 32)
        assert np.array_equal(holders.arrivals("load_qserve_reorder")[32 * warp : 32 * warp + 32], expected)


def test_ldmatrix_on_u4_is_right_in_a_quarter() -> None:
    register_map = holders.map_registers("load_ldmatrix_u4")
    assert register_map.wrong.mean() == 0.75
    assert sorted(np.unique(register_map.thread)) == list(range(128)), (
        "every thread gets something, most of it not its own"
    )
    assert register_map.thread[0, 4] == 0, "channels 4..7 of row 0 are lane 1's, and land with lane 0"


def test_text_names_lane_and_register_and_marks_what_is_wrong() -> None:
    right, wrong = holders.as_text("load_dual_mma").splitlines(), holders.as_text("load_ldmatrix_u4").splitlines()
    assert right[2].split() == ["0", "0.a0", "1.a0", "2.a0", "3.a0", "0.a2", "1.a2", "2.a2", "3.a2"]
    assert max(map(len, right)) <= 100 and not any("!" in line for line in right)
    assert wrong[2].split()[2] == "0.a2!" and wrong[-1].startswith("! 75% of the tile")


@pytest.mark.parametrize("name", (*RIGHT, "load_qserve_reorder", "load_ldmatrix_u4"))
def test_four_channels_are_bytes_0_to_3_of_one_register(name: str) -> None:
    """The pictures and the text have one label for the four."""
    register_map = holders.map_registers(name)
    assert np.array_equal(register_map.byte, np.broadcast_to(np.arange(64) % 4, (64, 64)))
    for places in (register_map.thread, register_map.register, register_map.wrong):
        assert np.array_equal(places, np.repeat(places[:, ::4], 4, axis=1))


def test_only_loads_have_holders() -> None:
    for name in ("dequant_lqq", "load_cp_async"):
        with pytest.raises(ArgumentError, match=rf"kernel: a load_.* that writes the fragments of a tile \(got {name}"):
            holders.arrivals(name)


@pytest.mark.parametrize(
    ("name", "loads", "wavefronts", "fewest"),
    [
        ("load_ldmatrix_s8", 2, 8, 8),
        ("load_lds32_u4", 8, 16, 8),
        ("load_qserve_reorder", 1, 4, 4),
        ("load_dual_mma", 1, 4, 4),
        ("load_comet_interleave", 1, 4, 4),
    ],
)
def test_wavefronts_of_one_warp(name: str, loads: int, wavefronts: int, fewest: int) -> None:
    accesses = holders.shared_accesses(name)
    assert sum(a.requests for a in accesses) == loads
    assert sum(a.wavefronts for a in accesses) == wavefronts
    assert sum(a.min_wavefronts for a in accesses) == fewest
    for access in accesses:
        assert len(access.fronts) == access.wavefronts
        served = [(bank, lane) for front in access.fronts for bank, lanes in front.items() for lane in lanes]
        assert {lane for _, lane in served} == set(range(32)) and all(0 <= bank < 32 for bank, _ in served)


@pytest.mark.full
def test_the_pictures_have_a_panel_for_the_right_kernel_beside_a_wrong_one() -> None:
    assert len(load_picture("load_dual_mma").axes) == 2
    assert len(load_picture("load_ldmatrix_u4").axes) == 3


@pytest.mark.parametrize("name", [*RIGHT, "load_ldmatrix_u4", "load_qserve_reorder"])
def test_four_neighbours_share_a_register(name: str) -> None:
    """So a single label serves four channels, in the text and in the pictures."""
    register_map = holders.map_registers(name)
    for places in (register_map.thread, register_map.register):
        runs = places.reshape(64, 16, 4)
        assert (runs == runs[..., :1]).all()
    assert np.array_equal(register_map.byte, np.tile(np.arange(4), (64, 16)))
