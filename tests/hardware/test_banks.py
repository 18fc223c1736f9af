"""The bank model against cases worked out by hand, and against its definition spelled out lane by lane."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ptxlab.errors import ArgumentError
from ptxlab.hardware.banks import WIDTHS, Collision, bank_use, collisions, ldmatrix_use, wavefronts

LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


@pytest.mark.parametrize(
    ("description", "addresses", "width", "wavefronts", "minimum"),
    [
        ("LDS.32, neighbours", 4 * LANE, 4, 1, 1),
        ("LDS.U8, neighbours: four lanes share a word", LANE, 1, 1, 1),
        ("LDS.32, one word for all", 0 * LANE, 4, 1, 1),
        ("LDS.32, stride of two words", 8 * LANE, 4, 2, 1),
        ("LDS.32, a column of a 32 x 32 matrix", 128 * LANE, 4, 32, 1),
        ("LDS.32, the same padded by a word", 132 * LANE, 4, 1, 1),
        ("LDS.64, neighbours", 8 * LANE, 8, 2, 2),
        ("LDS.64, stride of 16 bytes", 16 * LANE, 8, 4, 2),
        ("LDS.64, four lanes on one address: phases taken together", 8 * G, 8, 1, 1),
        ("LDS.128, dual_mma and strips: a warp's 512 bytes in order", 16 * LANE, 16, 4, 4),
        ("LDS.128, the same from another warp's slice", 3 * 512 + 16 * LANE, 16, 4, 4),
        ("LDS.128, stride of 32 bytes", 32 * LANE, 16, 8, 4),
        ("LDS.128, a column of 128-byte rows", 128 * LANE, 16, 32, 4),
        ("LDS.128, pairs of lanes on one address", 16 * (LANE // 2), 16, 2, 2),
        ("LDS.128, lanes i and i+2 on one address", 16 * (LANE % 2 + LANE // 4 * 2), 16, 2, 2),
        ("dual_mma constants, group 64, and those of strips: 8 words for 32 lanes", 4 * G, 4, 1, 1),
        ("dual_mma constants, group 32: 8 pairs of words", 8 * G, 8, 1, 1),
        ("a lane's 4-bit weights straight from 64-byte rows: LDS.U16", 64 * G + 2 * T, 2, 4, 1),
    ],
)
def test_by_hand(description: str, addresses: np.ndarray, width: int, wavefronts: int, minimum: int) -> None:
    use = bank_use(addresses, width)
    assert (int(use.wavefronts), int(use.minimum), int(use.conflicts)) == (
        wavefronts, minimum, wavefronts - minimum
    ), description  # fmt: skip


def test_stores_on_one_word_share_it_but_phases_stay_apart() -> None:
    assert bank_use(0 * LANE, 4, store=True).wavefronts == 1
    assert bank_use(8 * G, 8, store=True).wavefronts == 2
    assert bank_use(8 * LANE, 4, store=True).wavefronts == 2


@pytest.mark.parametrize(
    ("description", "addresses", "wavefronts", "minimum"),
    [
        ("x4, 16-byte rows in a line (comet)", 16 * LANE, 4, 4),
        ("x4, 128-byte rows: all in one bank group", 128 * LANE, 32, 4),
        ("x4, 64-byte rows: two bank groups for eight rows", 64 * LANE, 16, 4),
        ("x4, 64-byte rows padded to 80", 80 * LANE, 4, 4),
        ("x4, 128-byte rows swizzled", 128 * LANE + 16 * (LANE % 8), 4, 4),
        ("x2, 32-byte rows", 32 * LANE[:16], 4, 2),
        ("x1, 16-byte rows", 16 * LANE[:8], 1, 1),
        ("x4, one row for all", 0 * LANE, 4, 4),
    ],
)
def test_ldmatrix_by_hand(description: str, addresses: np.ndarray, wavefronts: int, minimum: int) -> None:
    use = ldmatrix_use(addresses)
    assert (int(use.wavefronts), int(use.minimum)) == (wavefronts, minimum), description


def by_definition(addresses: list[int], width: int, active: list[bool], store: bool) -> tuple[int, int]:
    """Compute (wavefronts, minimum) of one warp, one lane after the other."""
    lanes_per_phase = {8: 16, 16: 8}.get(width, 32)
    if width >= 8 and not store:
        for distance in (1, 2):
            if all(
                not (active[i] and active[i ^ distance]) or addresses[i] == addresses[i ^ distance] for i in range(32)
            ):
                lanes_per_phase *= 2
                break
    wavefronts = minimum = 0
    for first_lane in range(0, 32, lanes_per_phase):
        banks: dict[int, set[int]] = {}
        for lane in range(first_lane, first_lane + lanes_per_phase):
            for byte in range(0, width, 4) if active[lane] else ():
                word = (addresses[lane] + byte) // 4
                banks.setdefault(word % 32, set()).add(word)
        if banks:
            wavefronts += max(len(words) for words in banks.values())
            minimum += 1
    return wavefronts, minimum


@pytest.mark.full
@given(
    st.sampled_from(WIDTHS),
    hnp.arrays(np.int64, (3, 32), elements=st.integers(0, 70) | st.integers(0, 1000)),
    hnp.arrays(bool, (3, 32)) | st.just(np.ones((3, 32), bool)),
    st.booleans(),
    st.sampled_from([1, 2, 4]),
)
def test_by_definition(width: int, units: np.ndarray, active: np.ndarray, store: bool, shared_by: int) -> None:
    addresses = np.repeat(units[:, ::shared_by], shared_by, axis=1) * width
    use = bank_use(addresses, width, active=active, store=store)
    for warp in range(3):
        expected = by_definition(addresses[warp].tolist(), width, active[warp].tolist(), store)
        assert (int(use.wavefronts[warp]), int(use.minimum[warp])) == expected
        clash = collisions(addresses[warp], width, active=active[warp], store=store)
        assert bool(clash) == (expected[0] > expected[1])


def test_any_number_of_warps() -> None:
    addresses = np.random.default_rng(0).integers(0, 1000, (2, 3, 32)) * 16
    use = bank_use(addresses, 16)
    assert use.words.shape == (2, 3, 4, 32) and use.wavefronts.shape == (2, 3)
    assert use.wavefronts[1, 2] == bank_use(addresses[1, 2], 16).wavefronts
    assert bank_use(addresses[:0], 16).wavefronts.shape == (0, 3)


def test_a_warp_without_active_lanes_takes_none() -> None:
    use = bank_use(4 * LANE, 4, active=False)
    assert use.wavefronts == use.minimum == 0


def test_colliding_lanes_are_named() -> None:
    addresses = 4 * LANE
    addresses[5], addresses[6] = 128, 128  # bank 0, where lane 0 wants word 0
    assert collisions(addresses, 4) == [Collision(phase=0, bank=0, words={0: (0,), 128: (5, 6)})]
    second_phase = 16 * LANE
    second_phase[9] = 16 * 8 + 128  # lane 9 wants the banks of lane 8
    assert [c.bank for c in collisions(second_phase, 16)] == [0, 1, 2, 3]
    assert collisions(second_phase, 16)[0] == Collision(phase=1, bank=0, words={128: (8,), 256: (9,)})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bank_use(LANE, 12), r"width: must be one of 1, 2, 4, 8, 16 \(got 12\)"),
        (lambda: bank_use(LANE[:8], 4), r"addresses: must be \[..., 32\], one per lane \(got shape \(8,\)\)"),
        (lambda: bank_use(0, 4), r"addresses: must be \[..., 32\]"),
        (lambda: bank_use(2 * LANE, 4), r"addresses: must be multiples of 4 \(got addresses\[1\] is 2\)"),
        (lambda: bank_use(-4 * LANE, 4), r"addresses: must be multiples of 4 \(got addresses\[1\] is -4\)"),
        (lambda: ldmatrix_use(16 * LANE[:9]), r"addresses: must be 8, 16 or 32 rows \(got shape \(9,\)\)"),
        (lambda: ldmatrix_use(8 * LANE), r"addresses: must be multiples of 16 \(got addresses\[1\] is 8\)"),
        (lambda: collisions(4 * np.stack([LANE, LANE]), 4), r"addresses: must be those of one warp .*\(2, 32\)"),
    ],
)
def test_refuses(call, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


def test_inactive_lanes_may_hold_anything() -> None:
    assert bank_use(np.where(LANE < 16, 4 * LANE, -1), 4, active=LANE < 16).wavefronts == 1


def test_wavefronts_say_whom_each_bank_serves():
    broadcast = wavefronts(np.zeros(32, int), 4)
    assert broadcast == [{0: tuple(range(32))}]
    two_way = wavefronts(np.arange(32) * 8, 4)
    assert [len(front) for front in two_way] == [16, 16]
    assert two_way[0][2] == (1,) and two_way[1][2] == (17,)
    wide = wavefronts(np.arange(32) * 16, 16)
    assert [sorted({lane for lanes in front.values() for lane in lanes}) for front in wide] == [
        list(range(8 * phase, 8 * phase + 8)) for phase in range(4)
    ]
