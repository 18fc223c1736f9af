"""Atom's operands in memory: exact inverses, and what lies where by the maps of the MMAs that read it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxlab.arithmetic import ceil_div
from ptxlab.errors import ArgumentError
from ptxlab.hardware.fragments import mma_a
from ptxlab.lowbit import layout, quant
from ptxlab.lowbit.layout import atom
from ptxlab.lowbit.quant import AtomRows
from tests.support.dispatching_array import to_device


def rows_of(R: int, K: int, outliers: int, group: int, seed: int = 0) -> AtomRows:
    """Make rows of any integers, with scales that are all different."""
    rng = np.random.default_rng(seed)
    scales = rng.permutation(R * (K // group + 1)).astype(np.float16).reshape(R, -1) / np.float16(8)
    return AtomRows(
        rng.integers(-8, 8, (R, K), np.int8), scales[:, 1:], rng.integers(-128, 128, (R, outliers), np.int8),
        scales[:, 0].copy() if outliers else np.ones(R, np.float16),
    )  # fmt: skip


def test_pairs_are_operands_of_the_mma() -> None:
    q4 = np.random.default_rng(0).integers(-8, 8, (16, 64), np.int8)
    pairs = layout.pack_pairs(q4)
    np.testing.assert_array_equal(layout.unpack_pairs(pairs), q4, strict=True)
    words = pairs.view(np.uint32)  # [row, eight channels]
    registers = np.stack([words[:8, :4], words[8:, :4], words[:8, 4:], words[8:, 4:]], axis=-1).reshape(32, 4)
    np.testing.assert_array_equal(registers, mma_a(64).scatter(q4))


def test_a_row_of_scales_ends_with_the_outliers_and_ones() -> None:
    rows = rows_of(3, 384, 64, 64)
    scales = atom.scale_rows(rows)
    assert scales.shape == (3, 8) and scales.dtype == np.float16
    np.testing.assert_array_equal(scales[:, :6], rows.scale4)
    np.testing.assert_array_equal(scales[:, 6], rows.scale8)
    assert (scales[:, 7] == 1).all()
    assert atom.scale_rows(rows_of(3, 448, 64, 64)).shape == (3, 8)
    assert atom.scale_rows(rows_of(3, 512, 64, 64)).shape == (3, 16)


@pytest.mark.full
@given(
    N=st.integers(1, 40),
    groups=st.integers(1, 5),
    group=st.sampled_from((64, 128)),
    outliers=st.sampled_from((0, 64, 128)),
    device=st.booleans(),
)
def test_strips_come_back(N: int, groups: int, group: int, outliers: int, device: bool) -> None:
    rows = rows_of(N, groups * group, outliers, group)
    strips = atom.pack_atom_strips(rows)
    assert strips.shape == (ceil_div(N, 16), atom.strip_bytes(groups * group, outliers, group))
    if device:
        fields = {name: to_device(array) for name, array in vars(rows).items()}
        np.testing.assert_array_equal(atom.pack_atom_strips(AtomRows(**fields)).array, strips, strict=True)
    back = layout.unpack_atom_strips(strips, N, groups * group, outliers, group)
    for name, array in vars(rows).items():
        np.testing.assert_array_equal(getattr(back, name), array, strict=True, err_msg=name)


def test_what_a_lane_loads_of_a_strip() -> None:
    """A lane gets sixteen times its weights of two MMAs by one AND, or by one shift and the same AND.

    Outliers are loaded as they are.
    """
    rows = rows_of(16, 128, 128, 64)
    strip = layout.pack_atom_strips(rows)[0]
    mask = np.uint32(0xF0F0F0F0)
    for unit in range(2):
        words = strip[512 * unit : 512 * unit + 512].view(np.uint32).reshape(32, 4)
        for mma in range(2):
            high, low = (w[:, 2 * mma : 2 * mma + 2] & mask for w in (words, words << np.uint32(4)))
            registers = np.concatenate([high, low], axis=1)
            k = 64 * unit + 32 * mma
            np.testing.assert_array_equal(mma_a(32).gather(registers, np.int8), 16 * rows.q4[:, k : k + 32])
    for group in range(2):
        pairs = strip[1024 + 32 * group : 1056 + 32 * group].view(np.float16).reshape(8, 2)
        np.testing.assert_array_equal(pairs.T.reshape(16), rows.scale4[:, group])
    for step in range(4):
        registers = strip[1088 + 512 * step : 1088 + 512 * step + 512].view(np.uint32).reshape(32, 4)
        np.testing.assert_array_equal(mma_a(32).gather(registers, np.int8), rows.q8[:, 32 * step : 32 * step + 32])
    np.testing.assert_array_equal(strip[-32:].view(np.float16).reshape(8, 2).T.reshape(16), rows.scale8)


def test_refuses() -> None:
    with pytest.raises(ArgumentError, match=r"q4: must lie in -8..7 \(got q4\[0, 1\] is 8\)"):
        layout.pack_pairs(np.array([[0, 8, 0, 0, 0, 0, 0, 0]], np.int8))
    with pytest.raises(ArgumentError, match=r"strips: u8 \[2, 1056\] for N=17, K=128 \(got shape \(1, 1056\)\)"):
        layout.unpack_atom_strips(np.zeros((1, 1056), np.uint8), 17, 128, 0, 128)
    with pytest.raises(ArgumentError, match=r"group: must be 64 or 128 \(got 0\)"):
        layout.unpack_atom_strips(np.zeros((1, 1056), np.uint8), 16, 128, 0, 0)
    with pytest.raises(ArgumentError, match=r"weight: group must be 64 or 128 \(got 256\)"):
        layout.pack_atom_strips(quant.quantize_atom_weight(np.ones((8, 256), np.float32), None, 0))
