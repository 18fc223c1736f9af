"""GPTQ against a solver that inverts what is left after every column, and against rounding; the grids' formats."""

from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError
from ptxlab.llm import recipe
from ptxlab.llm.recipe import ChannelGrid, Grid, LQQGrid, QoQGrid, SymmetricGrid
from ptxlab.llm.recipe.gptq import BLOCK
from ptxlab.lowbit import quant


def problem(N: int, K: int, dtype: Any = np.float64, alike: float = 0.3) -> tuple[Any, Any]:
    """Make weights, and H of inputs that are alike: without that no error can be compensated."""
    rng = np.random.default_rng(N)
    x = rng.standard_normal((3 * K, K)) @ (np.eye(K) + alike * rng.standard_normal((K, K))) * rng.uniform(0.2, 3, K)
    return rng.standard_normal((N, K)).astype(dtype), x.T @ x


GRIDS = {
    "lqq": lambda w, clip=False: LQQGrid(w, 32, clip=clip),
    "qoq": lambda w, clip=False: QoQGrid(w, 32, clip=clip),
    "channel": lambda w, clip=False: ChannelGrid(w, clip=clip),
    "int4": lambda w, clip=False: SymmetricGrid(w, 32, kept=32, clip=clip),
    "int8": lambda w, clip=False: SymmetricGrid(w, None, bits=8, clip=clip),
}


def solve_directly(w: Any, hessian: Any, grid: Grid, damping: float) -> Any:
    """Compute GPTQ as it is derived, without factors or blocks.

    After each column the remainder of H is inverted.
    """
    K = len(hessian)
    H = hessian + damping * np.diagonal(hessian).mean() * np.eye(K)
    w, values = w.copy(), np.empty_like(w)
    importance = np.diagonal(hessian)
    groups = sorted(range(len(grid.bounds)), key=lambda g: -importance[slice(*grid.bounds[g])].mean())
    left = [start + i for g in groups for start, stop in [grid.bounds[g]]
            for i in np.argsort(-importance[start:stop], kind="stable")]  # fmt: skip
    levels: Any = None
    for group in groups:
        start, stop = grid.bounds[group]
        for i in range(stop - start):
            inverse = np.linalg.inv(H[np.ix_(left, left)])
            if i == 0:
                columns = left[: stop - start]
                remainder, metric = inverse, []
                for _ in columns:  # what an error of each column costs once those before it are rounded
                    metric.append(1 / remainder[0, 0])
                    remainder = (remainder - np.outer(remainder[0], remainder[0]) / remainder[0, 0])[1:, 1:]
                levels, _ = grid.choose(group, w[:, columns].T, np.array(metric))
            j, *left = left
            values[:, j] = levels.values(levels.nearest(w[:, j]))
            w[:, left] -= np.outer((w[:, j] - values[:, j]) / inverse[0, 0], inverse[0, 1:])
    return values


@pytest.mark.smoke
@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("clip", [False, True])
def test_gptq_equals_a_direct_solver(name: str, clip: bool) -> None:
    w, H = problem(8, 96)
    grid = GRIDS[name](w, clip)
    expected = solve_directly(w, H, grid, 0.01)
    solution = recipe.gptq(w, H, grid)
    nearest = recipe.round_to_nearest(w, H, grid)
    rounding_wins = recipe.objective(w, expected, H) > recipe.objective(w, nearest.values, H)
    assert not rounding_wins.all()
    np.testing.assert_allclose(solution.values[~rounding_wins], expected[~rounding_wins], atol=1e-12)
    np.testing.assert_array_equal(solution.values[rounding_wins], nearest.values[rounding_wins])


def test_rows_that_gptq_makes_worse_keep_rounding() -> None:
    """The inputs are not alike, so that levels that follow the errors cost more than compensation gains."""
    w, H = problem(32, 96, alike=0)
    grid = LQQGrid(w, 32)
    expected, plain, solution = (
        solve_directly(w, H, grid, 0.01),
        recipe.round_to_nearest(w, H, grid),
        recipe.gptq(w, H, grid),
    )
    rounding_wins = recipe.objective(w, expected, H) > recipe.objective(w, plain.values, H)
    assert rounding_wins.any() and not rounding_wins.all()
    np.testing.assert_array_equal(solution.values[rounding_wins], plain.values[rounding_wins])
    np.testing.assert_allclose(solution.values[~rounding_wins], expected[~rounding_wins], atol=1e-12)


@pytest.mark.parametrize("name", ["channel", "int8"])
def test_blocks_change_nothing(name: str) -> None:
    """Groups of more columns than a block are rounded as one by one."""
    w, H = problem(4, BLOCK + 32)
    grid = GRIDS[name](w)
    expected, nearest = solve_directly(w, H, grid, 0.01), recipe.round_to_nearest(w, H, grid).values
    better = recipe.objective(w, expected, H) < recipe.objective(w, nearest, H)
    assert better.all()
    np.testing.assert_allclose(recipe.gptq(w, H, grid).values, expected, atol=1e-12)


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("clip", [False, True])
def test_gptq_is_never_worse_than_rounding_nor_clipping_than_none(name: str, clip: bool) -> None:
    for dtype in (np.float32, np.float64):
        w, H = problem(16, 96, dtype)
        grid = GRIDS[name](w, clip)
        nearest, solution = recipe.round_to_nearest(w, H, grid), recipe.gptq(w, H, grid)
        assert solution.values.dtype == dtype
        rounding_errors, gptq_errors = (recipe.objective(w, each_way.values, H) for each_way in (nearest, solution))
        assert (gptq_errors <= rounding_errors).all() and gptq_errors.sum() < 0.9 * rounding_errors.sum()
    grid = GRIDS[name](w, True)
    of_output, of_weights = (
        recipe.objective(w, recipe.round_to_nearest(w, h, grid).values, H).sum() for h in (H, None)
    )
    assert of_output < of_weights or name == "int8"  # whose levels need no clipping
    error = ((recipe.round_to_nearest(w, None, grid).values - w) ** 2).sum()
    assert error <= ((recipe.round_to_nearest(w, None, GRIDS[name](w)).values - w) ** 2).sum()


@pytest.mark.parametrize("name", ["lqq", "qoq", "channel"])
def test_the_format_holds_the_values_and_fits_s8(name: str) -> None:
    """The weights have outliers, and groups on one side of zero.

    QoQ cannot hold such a group's zero point.
    """
    w, H = problem(16, 96, np.float32)
    w[0] += 4
    w[1, :32] *= 40
    w[2] = np.where(np.arange(96) % 2, 1, -1)
    w[3] = 0
    for clip in (False, True):
        grid = GRIDS[name](w, clip)
        for solution in (recipe.round_to_nearest(w, H, grid), recipe.gptq(w, H, grid)):
            weight = grid.weight(solution.q, solution.constants)
            np.testing.assert_array_equal(weight.dequantize(), solution.values)
            assert solution.q.min() >= 0 and solution.q.max() <= 15
            if isinstance(weight, quant.TwoLevelWeight):
                assert not weight.overflows().any()


@pytest.mark.parametrize("outliers", [0, 32])
def test_atoms_rows_hold_the_values(outliers: int) -> None:
    w, _ = problem(4, 96, np.float32)
    grid = SymmetricGrid(w, 32, kept=outliers)
    rounded = recipe.round_to_nearest(w, None, grid)
    rows = grid.weight(rounded.q, rounded.constants)
    assert rows is not None and (rows.q4.shape, rows.q8.shape) == ((4, 96 - outliers), (4, outliers))
    np.testing.assert_array_equal(rows.dequantize(), rounded.values)


@pytest.mark.parametrize("how", [{"group": None, "bits": 8}, {"group": 32, "kept": 32, "kept_bits": 16}])
def test_what_atoms_kernels_do_not_take_is_no_weight(how: dict[str, Any]) -> None:
    w, _ = problem(4, 96, np.float32)
    grid = SymmetricGrid(w, **how)
    rounded = recipe.round_to_nearest(w, None, grid)
    assert grid.weight(rounded.q, rounded.constants) is None


@pytest.mark.parametrize(("group", "outliers"), [(64, 0), (32, 16), (32, 96), (None, 96)])
def test_columns_that_make_no_whole_groups_are_refused(group: int | None, outliers: int) -> None:
    with pytest.raises(ArgumentError, match=rf"w: K less {outliers} must be a multiple of the group \(got K=96, "):
        SymmetricGrid(problem(4, 96)[0], group, kept=outliers)


@pytest.mark.parametrize("name", ["lqq", "qoq", "channel"])
def test_plain_rounding_has_the_librarys_constants(name: str) -> None:
    w, _ = problem(16, 96, np.float32)
    quantise = {"lqq": quant.quantize_lqq, "qoq": quant.quantize_qoq, "channel": None}[name]
    grid = GRIDS[name](w)
    rounded = recipe.round_to_nearest(w, None, grid)
    weight: Any = grid.weight(rounded.q, rounded.constants)
    expected: Any = quantise(w, 32) if quantise else quant.quantize_qoq_channel(w)
    for field in ("group_scale", "minimum", "zero", "channel_scale", "scale"):
        if hasattr(expected, field):
            np.testing.assert_array_equal(getattr(weight, field), getattr(expected, field), strict=True)
    assert np.abs(weight.q4.astype(int) - expected.q4).max() <= 1  # it rounds twice


@pytest.mark.parametrize(("bits", "low", "high"), [(4, -8, 7), (8, -127, 127), (3, -3, 3)])
def test_symmetric_levels_end_where_the_format_does(bits: int, low: int, high: int) -> None:
    w, _ = problem(2, 32)
    levels, (scale,) = SymmetricGrid(w, 32, bits=bits).choose(0, w.T, np.ones(32))
    np.testing.assert_array_equal(
        levels.nearest(np.array([[-2.0, -2], [2, 2]]) * 2**bits * scale), [[low] * 2, [high] * 2]
    )
    np.testing.assert_allclose(scale, np.abs(w).max(axis=1) / high, rtol=2**-10)


def test_inputs_that_were_never_seen_are_damped() -> None:
    w, H = problem(4, 96)
    H[:, 5] = H[5] = 0
    assert np.isfinite(recipe.gptq(w, H, LQQGrid(w, 32)).values).all()
    solution = recipe.gptq(w, np.zeros_like(H), LQQGrid(w, 32))
    np.testing.assert_array_equal(solution.values, recipe.round_to_nearest(w, None, LQQGrid(w, 32)).values)


@pytest.mark.parametrize(("lacking", "damping"), [(0.005, 0.01), (0.05, 0.1), (0.5, 1), (5, 10)])
def test_more_damping_where_h_has_no_inverse(lacking: float, damping: float) -> None:
    """Tenfold each time, in units of the mean of H's diagonal."""
    _, H = problem(4, 96)
    low, mean = np.linalg.eigvalsh(H)[0], np.diagonal(H).mean()
    H -= (low + lacking * (mean - low) / (1 + lacking)) * np.eye(96)
    mean = np.diagonal(H).mean()
    assert np.linalg.eigvalsh(H)[0] == pytest.approx(-lacking * mean)
    factor = recipe.inverse_factor(H)
    np.testing.assert_allclose(np.linalg.inv(factor.T @ factor) - H, damping * mean * np.eye(96), atol=1e-6 * mean)
    with pytest.raises(ArgumentError, match="hessian: must be positive semidefinite"):
        recipe.inverse_factor(-H)


def test_a_factor_that_is_cut_short_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's Cholesky does not raise for a matrix that is not positive definite: what it returns is no factor."""
    factor = np.linalg.cholesky
    factors: list[Any] = []

    def silent(matrix: Any) -> Any:
        factor_of_matrix = factor(matrix)
        if not factors:
            factor_of_matrix[50:, 50:] = np.tril(matrix[50:, 50:])
        factors.append(factor_of_matrix)
        return factor_of_matrix

    _, H = problem(4, 96)
    monkeypatch.setattr(np.linalg, "cholesky", silent)
    np.testing.assert_array_equal(recipe.inverse_factor(H), factors[1].T)


@pytest.mark.parametrize(
    ("hessian", "rule"),
    [(np.eye(5), r"must be \[96, 96\]"), (np.full((96, 96), np.nan), "must be finite")],
)
def test_a_hessian_of_wrong_shape_or_nan_is_refused(hessian: Any, rule: str) -> None:
    w, _ = problem(4, 96)
    with pytest.raises(ArgumentError, match=f"hessian: {rule}"):
        recipe.gptq(w, hessian, LQQGrid(w, 32))


@pytest.mark.parametrize("low", [-127, -68])
def test_levels_of_qoq_that_would_leave_s8_are_left_out(low: int) -> None:
    """A group of 196 integers has steps of 13.

    With the zero 10 the lowest level is -130, with 5 the highest 130.
    """
    w = np.linspace(low, low + 195, 32, dtype=np.float32)[None]
    w[0, np.abs(w[0]).argmax()] = 127 * np.sign(w[0, np.abs(w[0]).argmax()])
    grid = QoQGrid(w, 32, protective_range=127)
    rounded = recipe.round_to_nearest(w, None, grid)
    weight = grid.weight(rounded.q, rounded.constants)
    assert weight.group_scale.tolist() == [[13]] and not weight.overflows().any()


def test_levels_of_qoq_begin_where_s8_does() -> None:
    """Steps of 16 below the zero 8."""
    w = np.zeros((1, 32), np.float32)
    w[0, :2] = -127, 113
    rounded = recipe.round_to_nearest(w, None, QoQGrid(w, 32, protective_range=127))
    assert [constant.tolist() for constant in rounded.constants] == [[[16]], [[8]]]
    assert rounded.values[0, :2].tolist() == [-128, 112]


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("clip", [False, True])
def test_a_row_on_one_side_of_zero_has_all_levels_there(sign: int, clip: bool) -> None:
    w = sign * np.arange(16, dtype=np.float32)[None]
    rounded = recipe.round_to_nearest(w, None, ChannelGrid(w, clip=clip))
    np.testing.assert_array_equal(rounded.values, w)


@pytest.mark.parametrize(
    ("name", "end"), [*((name, end) for name in ("lqq", "qoq", "channel") for end in (-9, 10)), ("int4", 10)]
)
def test_clipping_cuts_off_an_outlier_at_either_end(name: str, end: int) -> None:
    """Levels could hold all weights of a group but one; plain rounding spreads them over the group's range."""
    w = np.concatenate([np.zeros(128), np.arange(128) % 15 - (6 if end < 0 else 7)]).astype(np.float32)[None]
    w[0, 0], w[0, 200] = 119 / 4, end  # the first group sets the row's scale to 1/4
    w = w[:, 128:] if name == "channel" else w
    grids = {"lqq": LQQGrid, "qoq": QoQGrid, "int4": SymmetricGrid}
    errors = []
    for clip in (False, True):
        grid = ChannelGrid(w, clip=clip) if name == "channel" else grids[name](w, 128, clip=clip)
        errors.append(np.abs(recipe.round_to_nearest(w, None, grid).values - w)[0, -128:])
    plain, clipped = errors
    assert (clipped**2).sum() < 0.5 * (plain**2).sum() and clipped[72] > 1 > plain[72]


def test_a_wider_scale_than_the_nearest_is_tried_too() -> None:
    """A group that spans 21 of LQQ's integers: a scale of 21/15 rounds to 1, which loses 6 at the top; 2 loses 1."""
    w = np.zeros((1, 64), np.float32)
    w[0, 0], w[0, 32:] = 119, np.arange(32) % 22
    nearest, clipped = (
        recipe.round_to_nearest(w, None, LQQGrid(w, 32, clip=clip)).values - w for clip in (False, True)
    )
    assert np.abs(nearest[0, 32:]).max() == 6 and np.abs(clipped[0, 32:]).max() == 1
