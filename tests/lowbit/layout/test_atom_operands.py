"""Atom's packed weights and activations: exact inverses, files, and what is refused."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptxlab.errors import ArgumentError, FileError
from ptxlab.lowbit import layout, quant
from ptxlab.lowbit.layout import AtomActivations, AtomWeight
from ptxlab.lowbit.quant import AtomRows

RNG = np.random.default_rng(0)
ROWS = quant.quantize_atom_weight(RNG.standard_normal((24, 256), dtype=np.float32), 64, 64)
WEIGHT = layout.pack_atom(ROWS, "rows")
X = layout.pack_atom_activations(
    quant.quantize_atom_activations(RNG.standard_normal((3, 256), dtype=np.float32), 64, 64)
)


def assert_same(a: AtomRows, b: AtomRows) -> None:
    for name, array in vars(a).items():
        np.testing.assert_array_equal(getattr(b, name), array, strict=True, err_msg=name)


@pytest.mark.full
@given(
    R=st.integers(1, 5),
    groups=st.integers(1, 9),
    group=st.sampled_from(quant.ATOM_GROUPS),
    outliers=st.sampled_from(quant.ATOM_OUTLIERS),
)
def test_pack_and_unpack_of_operands(R: int, groups: int, group: int, outliers: int) -> None:
    x = RNG.standard_normal((8 * R, groups * group + outliers), dtype=np.float32)
    x = x[:, RNG.permutation(x.shape[1])]  # in another order columns are contiguous
    weight, tokens = quant.quantize_atom_weight(x, group, outliers), quant.quantize_atom_activations(x, group, outliers)
    for name, order in layout.ATOM_ORDERS.items():
        packed = layout.pack_atom(weight, name)
        assert (packed.N, packed.K, packed.outliers, packed.group) == (8 * R, groups * group, outliers, group)
        assert packed.nbytes == sum(array.nbytes for array in packed.buffers.values())
        assert_same(weight, layout.unpack_atom(packed))
        assert all(array.flags.c_contiguous for array in packed.buffers.values())
        activations = layout.pack_atom_activations(tokens, order)
        assert all(array.flags.c_contiguous for array in activations.arrays.values())
        assert_same(tokens, layout.unpack_atom_activations(activations))


@pytest.mark.parametrize("name", layout.ATOM_LAYOUTS)
def test_weights_in_files(tmp_path: Path, name: str) -> None:
    packed, path = layout.pack_atom(ROWS, name), tmp_path / "w.safetensors"
    layout.save(packed, path, "layers.0.up")
    loaded = layout.load_atom(path)
    assert (loaded.layout, loaded.arch) == (name, layout.ATOM_LAYOUTS[name])
    assert_same(ROWS, layout.unpack_atom(loaded))
    with pytest.raises(ArgumentError, match=r"name: must be one of the 1 packed weights of .*: layers.0.up \(got up\)"):
        layout.load_atom(path, "up")
    with pytest.raises(FileError, match=r"holds no packed weights .* nothing of ptxlab.packed_weight"):
        layout.load(path)
    layout.save(layout.pack(quant.quantize_lqq(np.ones((8, 64), np.float32))), path)
    with pytest.raises(FileError, match=r"holds no packed weights .* nothing of ptxlab.atom_weight"):
        layout.load_atom(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "dual_mma"}, "layout: must be one of strips, rows (got dual_mma)"),
        ({"N": 12}, "weight: N must be a positive multiple of 8 (got N=12)"),
        ({"K": 96}, "K: must be a positive multiple of the group 64 (got 96)"),
        ({"K": 0}, "K: must be a positive multiple of the group 64 (got 0)"),
        ({"outliers": 32}, "outliers: must be one of 0, 64, 128 (got 32)"),
        ({"group": 32}, "group: must be one of 64, 128 (got 32)"),
        ({"version": 2}, "version: must be 1 (got 2)"),
        ({"buffers": 3}, "buffers: must be arrays by name (got int)"),
        ({"buffers": {}}, "buffers: must be w4, w8, w_scale (got none)"),
        ({"N": 32}, "buffers[w4]: must be uint8 [32, 96] for rows, N=32, K=192 (got uint8 [24, 96])"),
        (
            {"buffers": {**WEIGHT.buffers, "w8": 3}},
            "buffers[w8]: must be int8 [24, 64] for rows, N=24, K=192 (got int)",
        ),
    ],
)
def test_a_weight_that_does_not_fit_together(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        replace(WEIGHT, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "rows"}, "layout: must be one of bytes, pairs (got rows)"),
        ({"M": -1}, "M: must be an integer, 0 or more (got -1)"),
        ({"M": 4}, "x: shape [4, 256] for bytes, M=4, K=192, outliers=64, group=64 (got [3, 256])"),
        ({"scale": X.scale[:, :4]}, "scale: shape [3, 8] for bytes, M=3, K=192, outliers=64, group=64 (got [3, 4])"),
        ({"x8": X.x}, "x8: must be None: x has the outliers too (got ndarray)"),
        ({"layout": "pairs"}, "x: shape [3, 96] for pairs, M=3, K=192, outliers=64, group=64 (got [3, 256])"),
        ({"outliers": 128}, "x: shape [3, 320] for bytes"),
    ],
)
def test_activations_that_do_not_fit_together(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        replace(X, **change)


def test_other_operands_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"weight: must be AtomRows .*\(got ndarray\)"):
        layout.pack_atom(np.ones((8, 128)))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"x: must be AtomRows .*\(got AtomWeight\)"):
        layout.pack_atom_activations(WEIGHT)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"packed: must be an AtomWeight \(got AtomActivations\)"):
        layout.unpack_atom(X)  # type: ignore[arg-type]
    assert isinstance(WEIGHT, AtomWeight) and isinstance(X, AtomActivations)
    whole = quant.quantize_atom_weight(np.ones((8, 256), np.float32), None, 0)  # one group: no kernel's
    for name in layout.ATOM_LAYOUTS:
        with pytest.raises(ArgumentError, match=r"group: must be one of 64, 128 \(got 256\)"):
            layout.pack_atom(whole, name)
