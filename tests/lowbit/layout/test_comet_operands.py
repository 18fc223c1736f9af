"""COMET's packed weights and activations: exact inverses, files, and what is refused."""

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
from ptxlab.lowbit.quant import BlockRows

RNG = np.random.default_rng(0)
ROWS = quant.quantize_block_weight(RNG.standard_normal((24, 384), dtype=np.float32))
WEIGHT = layout.pack_block_weight(ROWS, 1, "rows")
X = layout.pack_block_activations(quant.quantize_blocks(RNG.standard_normal((3, 384), dtype=np.float32), 1))


def assert_same(a: BlockRows, b: BlockRows) -> None:
    for name in ("q", "scale"):
        np.testing.assert_array_equal(getattr(b, name), getattr(a, name), strict=True, err_msg=name)
    assert a.int8 == b.int8


@pytest.mark.full
@given(R=st.integers(1, 5), blocks=st.integers(1, 9), data=st.data())
def test_pack_and_unpack_of_operands(R: int, blocks: int, data: st.DataObject) -> None:
    int8 = data.draw(st.integers(0, blocks))
    x = RNG.standard_normal((8 * R, blocks * 128), dtype=np.float32)
    x = x[:, RNG.permutation(x.shape[1])]  # in another order columns are contiguous
    weight, tokens = quant.quantize_block_weight(x), quant.quantize_blocks(x, int8)
    for name, order in layout.BLOCK_ORDERS.items():
        packed = layout.pack_block_weight(weight, int8, name)
        sizes = packed.N, packed.K4, packed.K8
        assert sizes == (8 * R, (blocks - int8) * 128, int8 * 128)
        assert packed.nbytes == sum(array.nbytes for array in packed.buffers.values())
        activations = layout.pack_block_activations(tokens, order)
        assert all(a.flags.c_contiguous for a in (*packed.buffers.values(), *activations.arrays.values()))
        assert_same(weight, layout.unpack_block_weight(packed))
        assert_same(tokens, layout.unpack_block_activations(activations))


@pytest.mark.parametrize("name", layout.BLOCK_ORDERS)
def test_weights_in_files(tmp_path: Path, name: str) -> None:
    packed, path = layout.pack_block_weight(ROWS, 2, name), tmp_path / "w.safetensors"
    layout.save(packed, path, "layers.0.up")
    loaded = layout.load_blocks(path)
    assert (loaded.layout, loaded.arch, loaded.K8) == (name, packed.arch, 256)
    assert_same(ROWS, layout.unpack_block_weight(loaded))
    with pytest.raises(FileError, match=r"holds no packed weights .* nothing of ptxlab.atom_weight"):
        layout.load_atom(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "dual_mma"}, "layout: must be one of strips, rows (got dual_mma)"),
        ({"N": 12}, "weight: N must be a positive multiple of 8 (got N=12)"),
        ({"K4": 64}, "K4: must be a multiple of 128, 0 or more (got 64)"),
        ({"K8": -128}, "K8: must be a multiple of 128, 0 or more (got -128)"),
        ({"K4": 0, "K8": 0}, "K4 + K8: must be positive (got 0)"),
        ({"version": 2}, "version: must be 1 (got 2)"),
        ({"buffers": {}}, "buffers: must be w, w_scale (got none)"),
        ({"N": 32}, "buffers[w]: must be uint8 [32, 192] for rows, N=32, K4=256, K8=128 (got uint8 [24, 192])"),
    ],
)
def test_a_weight_that_does_not_fit_together(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        replace(WEIGHT, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "bytes"}, "layout: must be one of joined, pairs (got bytes)"),
        ({"M": -1}, "M: must be an integer, 0 or more (got -1)"),
        ({"M": 4}, "x: shape [4, 256] for joined, M=4, K4=256, K8=128 (got [3, 256])"),
        ({"scale": X.scale[:, :4]}, "scale: shape [3, 8] for joined, M=3, K4=256, K8=128 (got [3, 4])"),
        ({"x8": X.x}, "x8: must be None: x has these channels too (got ndarray)"),
        ({"layout": "pairs"}, "x: shape [3, 128] for pairs, M=3, K4=256, K8=128 (got [3, 256])"),
    ],
)
def test_activations_that_do_not_fit_together(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        replace(X, **change)


def test_other_operands_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"weight: must be BlockRows .*\(got ndarray\)"):
        layout.pack_block_weight(np.ones((8, 128)), 0)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"weight: must be INT4 throughout .*\(got int8=1\)"):
        layout.pack_block_weight(replace(ROWS, int8=1), 1)
    with pytest.raises(ArgumentError, match=r"int8: must be 0..3 blocks \(got 4\)"):
        layout.pack_block_weight(ROWS, 4)
    with pytest.raises(ArgumentError, match=r"x: must be BlockRows .*\(got BlockWeight\)"):
        layout.pack_block_activations(WEIGHT)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"packed: must be a BlockWeight \(got BlockActivations\)"):
        layout.unpack_block_weight(X)  # type: ignore[arg-type]


def test_blocks_of_64_are_not_what_kernels_take() -> None:
    x = np.ones((8, 256), np.float32)
    with pytest.raises(ArgumentError, match=r"^weight: must have blocks of 128 channels \(got 64\)$"):
        layout.pack_block_weight(quant.quantize_block_weight(x, block=64), 1)
    with pytest.raises(ArgumentError, match=r"^x: must have blocks of 128 channels \(got 64\)$"):
        layout.pack_block_activations(quant.quantize_blocks(x, 2, 64))
