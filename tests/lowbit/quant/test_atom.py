"""Atom's quantiser: floats in, INT4 groups and INT8 outliers out, as the paper has it and as its code does."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ptxlab.errors import ArgumentError
from ptxlab.lowbit import quant
from ptxlab.lowbit.quant import ATOM_CODE, ATOM_PAPER, AtomRows
from tests.support.dispatching_array import DispatchingArray

BOTH = pytest.mark.parametrize("rules", [ATOM_PAPER, ATOM_CODE], ids=["paper", "code"])
FLOATS = st.floats(-1000, 1000, width=32) | st.sampled_from((0.0, -8.0, 7.0, 7.5, -7.5, 1e-9, 60000.0))


@st.composite
def matrices(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Draw (x, group, outliers): rows of one to three groups and their outliers.

    The number of rows is even.
    """
    group, outliers = draw(st.sampled_from((64, 128))), draw(st.sampled_from((0, 64, 128)))
    shape = 2 * draw(st.integers(1, 3)), group * draw(st.integers(1, 3)) + outliers
    return draw(hnp.arrays(np.float32, shape, elements=FLOATS, fill=FLOATS)), group, outliers


def parts(rows: AtomRows, x: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, int]]:
    """Split rows into groups and outliers, each as (integers, scales, floats, bits of an integer).

    The arrays are [R, G, g].
    """
    R, K = rows.q4.shape
    four = rows.q4.reshape(R, -1, rows.group), rows.scale4, x[:, :K].reshape(R, -1, rows.group), 4
    return [four, *([(rows.q8[:, None], rows.scale8[:, None], x[:, None, K:], 8)] if rows.q8.size else [])]


@pytest.mark.full
@BOTH
@given(case=matrices(), clip=st.sampled_from((1.0, 0.9, 0.85)))
def test_activations_follow_their_formula_exactly(rules: Any, case: Any, clip: float) -> None:
    """Number by number, in exact fractions of the FP32 operations that the rules name."""
    x, group, outliers = case
    rows = quant.quantize_atom_activations(x, group, outliers, clip=clip, rules=rules)
    assert rows.shape == x.shape and rows.group == group
    for q, scale, floats, bits in parts(rows, x):
        steps = (2**bits - 1) / 2 if rules is ATOM_PAPER else 2 ** (bits - 1) - 1
        largest = np.abs(floats).max(axis=2) * np.float32(clip if bits == 4 else 1)
        expected = np.maximum((largest / np.float32(steps)).astype(np.float16), np.float16(2.0**-24))
        np.testing.assert_array_equal(scale, np.where(largest == 0, np.float16(1), expected), strict=True)
        seen = {(r, g, floats[r, g, k]): k for r, g, k in np.ndindex(q.shape)}  # of equal numbers one
        for (r, g, _), k in seen.items():
            if largest[r, g] == 0:
                exact = 0
            elif rules is ATOM_PAPER:
                exact = round(Fraction(float(floats[r, g, k] / scale[r, g].astype(np.float32))))  # ties to even
            else:
                lower_bound = np.float32(steps * 2.0**-24)  # of the smallest scale
                product = Fraction(float(floats[r, g, k] * (np.float32(steps) / max(largest[r, g], lower_bound))))
                exact = math.floor(abs(product) + Fraction(1, 2)) * (1 if product > 0 else -1)
            assert q[r, g, k] == min(max(exact, -(2 ** (bits - 1))), 2 ** (bits - 1) - 1), (r, g, k)


@pytest.mark.full
@BOTH
@given(case=matrices())
def test_weights_are_within_half_a_step_where_nothing_is_clipped(rules: Any, case: Any) -> None:
    w, group, outliers = case
    rows = quant.quantize_atom_weight(w, group, outliers, clip=1.0, rules=rules)
    for q, scale, floats, bits in parts(rows, w):
        step, highest = scale[:, :, None].astype(np.float64), 2 ** (bits - 1) - 1
        inside = np.clip(floats, -(highest + 1) * step, highest * step)  # half a step beyond, the paper cuts off
        assert (np.abs(q * step - inside) <= step / 2 * (1 + 1e-6)).all()


def test_the_range_of_four_bits_is_used_to_its_ends() -> None:
    """The paper's scale puts -max on -8 and max beyond 7, where it is cut off; the code's on -7 and 7."""
    x = np.zeros((2, 64), np.float32)
    x[:, 0], x[:, 1] = 15, -15
    paper = quant.quantize_atom_activations(x, 64, 0, clip=1.0)
    code = quant.quantize_atom_activations(x, 64, 0, clip=1.0, rules=ATOM_CODE)
    assert paper.q4[0, :2].tolist() == [7, -8] and paper.scale4[0, 0] == 2
    assert code.q4[0, :2].tolist() == [7, -7] and code.scale4[0, 0] == np.float16(15 / 7)


def test_ties_and_reciprocals_tell_paper_and_code_apart() -> None:
    """2.5 steps are 2 to the paper, to whose code they are 3; of a weight both say 2."""
    x = np.zeros((2, 64), np.float32)
    x[:, 0], x[:, 1], x[:, 2] = 7, 2.5, -2.5
    x_paper = x.copy()
    x_paper[:, 0] = 7.5
    assert quant.quantize_atom_activations(x_paper, 64, 0, clip=1.0).q4[0, 1:3].tolist() == [2, -2]
    assert quant.quantize_atom_activations(x, 64, 0, clip=1.0, rules=ATOM_CODE).q4[0, 1:3].tolist() == [3, -3]
    assert quant.quantize_atom_weight(x, 64, 0, clip=1.0, rules=ATOM_CODE).q4[0, 1:3].tolist() == [2, -2]


def test_neighbouring_rows_of_a_weight_share_their_scales_in_the_code_alone() -> None:
    w = np.arange(1, 5, dtype=np.float32)[:, None] * np.ones((4, 128 + 64), np.float32)
    code, paper = (quant.quantize_atom_weight(w, 128, 64, rules=rules) for rules in (ATOM_CODE, ATOM_PAPER))
    assert code.scale4[0] == code.scale4[1] < code.scale4[2] == code.scale4[3]
    assert code.scale8[0] == code.scale8[1] < code.scale8[2] == code.scale8[3]
    assert len(np.unique(paper.scale4)) == len(np.unique(paper.scale8)) == 4
    tokens = quant.quantize_atom_activations(w, 128, 64, rules=ATOM_CODE)
    assert len(np.unique(tokens.scale4)) == 4, "tokens share nothing"


def test_outliers_are_not_clipped() -> None:
    x = np.ones((1, 128), np.float32)
    half, whole = (quant.quantize_atom_activations(x, 64, 64, clip=clip) for clip in (0.5, 1.0))
    assert half.scale4[0, 0] == whole.scale4[0, 0] / 2
    assert half.scale8 == whole.scale8 and (half.q8 == 127).all() and (half.q4 == 7).all()


def test_zeros_have_scale_1_and_almost_nothing_the_smallest() -> None:
    x = np.zeros((1, 192), np.float32)
    x[0, 70] = 1e-30
    for rules in (ATOM_PAPER, ATOM_CODE):
        rows = quant.quantize_atom_activations(x, 64, 64, rules=rules)
        assert rows.scale4.tolist() == [[1, 2**-24]] and rows.scale8.tolist() == [1]
        assert not rows.dequantize()[:, :64].any()


def test_without_a_group_a_row_is_one() -> None:
    rows = quant.quantize_atom_weight(np.ones((2, 192), np.float32), None, 64)
    assert rows.scale4.shape == (2, 1) and rows.group == 128


def test_dequantised_is_what_stands_in_atoms_order() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 256), dtype=np.float32)
    x[:, 3::4] *= 50  # outliers, one channel in four
    order = quant.outlier_order(quant.channel_sizes(x), 64)
    rows = quant.quantize_atom_activations(x[:, order], 64, 64, clip=1.0)
    error = np.linalg.norm(rows.dequantize() - x[:, order], axis=0) / np.linalg.norm(x[:, order], axis=0)
    assert sorted(order[-64:].tolist()) == list(range(3, 256, 4))
    assert error[-64:].max() < 0.02 and 0.02 < error[:-64].max() < 0.25


def test_orders_of_paper_and_code() -> None:
    """The later of two equally large channels counts as the larger one."""
    sizes = np.ones(130)
    sizes[[5, 2, 9]] = 7, 3, 0.5
    paper, code = (quant.outlier_order(sizes, 64, rules=rules) for rules in (ATOM_PAPER, ATOM_CODE))
    assert sorted(paper[-64:].tolist()) == [2, 5, *range(68, 130)]
    assert paper[:66].tolist() == sorted(paper[:66].tolist()) and paper[-64:].tolist() == sorted(paper[-64:].tolist())
    assert code[0] == 9 and code[-2:].tolist() == [2, 5]
    assert set(code[-64:]) == set(paper[-64:])
    assert quant.outlier_order(sizes, 0).tolist() == list(range(130))


def test_sizes_of_channels() -> None:
    x = np.array([[1, -5], [2, 3]], np.float16)
    assert quant.channel_sizes(x).tolist() == [5, 34] and quant.channel_sizes(x, "max").tolist() == [2, 5]
    large = np.random.default_rng(0).standard_normal((5000, 512), dtype=np.float32)  # more than one strip
    np.testing.assert_allclose(quant.channel_sizes(large), (large.astype(np.float64) ** 2).sum(axis=0), rtol=1e-12)
    np.testing.assert_array_equal(quant.channel_sizes(large, "max"), np.abs(large).max(axis=0))


@BOTH
def test_arrays_that_are_not_numpys(rules: Any) -> None:
    x = np.random.default_rng(0).standard_normal((6, 320), dtype=np.float32)
    x[0] = 0
    order = quant.outlier_order(quant.channel_sizes(x), 64, rules=rules)
    order_on_device = quant.outlier_order(quant.channel_sizes(DispatchingArray(x)), 64, rules=rules)
    np.testing.assert_array_equal(order_on_device.array, order, strict=True)
    for quantise in (quant.quantize_atom_weight, quant.quantize_atom_activations):
        on_device, on_host = (quantise(a, 128, 64, rules=rules) for a in (DispatchingArray(x), x))
        for name, array in vars(on_host).items():
            np.testing.assert_array_equal(getattr(on_device, name).array, array, strict=True, err_msg=name)
        np.testing.assert_array_equal(on_device.dequantize().array, on_host.dequantize(), strict=True)


X = np.ones((3, 256), np.float32)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (X, {"group": 32}, r"group: must be 64, 128 or None \(got 32\)"),
        (X, {"outliers": 32}, r"outliers: must be one of 0, 64, 128 \(got 32\)"),
        (X[:, :192], {}, r"x: channels but the outliers .* multiple of the group \(got 192 channels, 128 outliers, g"),
        (X[:, :128], {"group": None}, r"\(got 128 channels, 128 outliers, group=1\)"),
        (X, {"clip": 0.0}, r"clip: must lie in \(0, 1\] \(got 0.0\)"),
        (X, {"clip": float("nan")}, r"clip: must lie in"),
        (X * np.float32(np.nan), {}, r"x: must be finite in float32 \(got x\[0, 0\] is nan\)"),
        (
            X * np.float32(1e6),
            {},
            r"x: a group's largest magnitude over 7.5 must be an FP16 number .got 900000 in row 0",
        ),
        (X.astype(int), {}, "x: dtype must be one of float16"),
    ],
)
def test_refuses(x: np.ndarray, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as raised:
        quant.quantize_atom_activations(x, **options)
    assert "\n" not in str(raised.value)


def test_refuses_odd_rows_sizes_and_metrics() -> None:
    with pytest.raises(ArgumentError, match=r"w: rows must be a multiple of 2, which share a scale \(got 3\)"):
        quant.quantize_atom_weight(X, rules=ATOM_CODE)
    with pytest.raises(ArgumentError, match=r"metric: must be one of square_sum, max \(got hessian\)"):
        quant.channel_sizes(X, "hessian")
    with pytest.raises(
        ArgumentError, match=r"sizes: must be a vector of more than 128 channels \(got shape \(128,\)\)"
    ):
        quant.outlier_order(np.ones(128))
    with pytest.raises(ArgumentError, match=r"sizes: must be finite \(got channel 7\)"):
        quant.outlier_order(np.where(np.arange(200) == 7, np.inf, 1))
    for outliers in (-1, 64.0):
        with pytest.raises(ArgumentError, match=rf"outliers: must be an integer of 0 or more \(got {outliers}\)"):
            quant.outlier_order(np.ones(200), outliers)
