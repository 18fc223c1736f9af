"""GPTQ: columns are rounded one after the other; the columns still to come compensate each error.

The objective is ||(W - W') Xᵀ||², which is the trace of (W - W') H (W - W')ᵀ with H = Xᵀ X. With H⁻¹ = Uᵀ U, U upper
triangular, the error e of column j is compensated by subtracting e U[j, k] / U[j, j] from every later column k.
"""

from contextlib import suppress
from typing import NamedTuple

import numpy as np

from ptxlab.errors import ArgumentError
from ptxlab.llm.recipe.grids import Array, Constants, Grid, Levels

DAMPING = 0.01  # of the mean of H's diagonal, added to it
BLOCK = 128  # columns of a group whose errors are applied to its later columns in one product
_TRIES = 8  # each with ten times the damping of the one before


class Rounded(NamedTuple):
    """A matrix on a grid: integers q and their values [N, K], constants [N, groups] each; all in the matrix's dtype."""

    q: Array
    values: Array
    constants: Constants


def round_to_nearest(w: Array, hessian: Array | None, grid: Grid) -> Rounded:
    """Round every weight of w float [N, K] to the nearest level of the grid.

    A grid with `clip` chooses the levels of least d H dᵀ per group; without a Hessian, of least squared error.
    """
    w = w.T.copy()
    H = None if hessian is None else hessian.astype(w.dtype)
    q, values, chosen_constants = np.empty_like(w), np.empty_like(w), []
    for group, (start, stop) in enumerate(grid.bounds):
        metric = np.ones_like(w[start:stop, 0]) if H is None else H[start:stop, start:stop]
        levels, constants = grid.choose(group, w[start:stop], metric)
        q[start:stop] = levels.nearest(w[start:stop])
        values[start:stop] = levels.values(q[start:stop])
        chosen_constants.append(constants)
    return Rounded(q.T, values.T, _stack_constants(chosen_constants))


def gptq(w: Array, hessian: Array, grid: Grid, *, damping: float = DAMPING) -> Rounded:
    """Quantise w float [N, K] by GPTQ on a grid that was made for w.

    Groups are processed in descending order of their mean of H's diagonal, and so are the columns within a group. Each
    group's levels are chosen when GPTQ reaches it, among those of `grid`, for the weights as updated by then. A row
    keeps rounding to nearest if that has the smaller error.

    Args:
        w: the matrix, f32 or f64; its dtype is that of the computation.
        hessian: H = Xᵀ X of its inputs, [K, K], up to a constant factor.
        grid: the levels that the scheme allows.
        damping: added to H's diagonal, in units of the diagonal's mean.

    Raises ArgumentError for a Hessian that is not finite or not of w's width.
    """
    K = w.shape[1]
    if hessian.shape != (K, K):
        raise ArgumentError("hessian", f"must be [{K}, {K}] as w is wide", f"shape {hessian.shape}")
    H = hessian.astype(np.float64)
    importance = np.diagonal(H)
    group_order, order = _order(grid.bounds, importance)
    U = inverse_factor(H[order][:, order], damping)
    share = (U / np.diagonal(U)[:, None]).astype(w.dtype)  # of column j's error, what each later column takes off
    cost = np.diagonal(U).astype(w.dtype) ** -2
    work = w.T[order]  # [K, N], columns of w one after the other
    q, values = np.empty_like(work), np.empty_like(work)
    chosen_constants: list[Constants] = [()] * len(group_order)
    start = 0
    for group in group_order:
        stop = start + grid.bounds[group][1] - grid.bounds[group][0]
        levels, chosen_constants[group] = grid.choose(group, work[start:stop], cost[start:stop])
        q[start:stop], errors = _compensate_group(work[start:stop], levels, share[start:stop, start:stop])
        values[start:stop] = levels.values(q[start:stop])
        work[stop:] -= share[start:stop, stop:].T @ errors
        start = stop
    inverse_order = np.argsort(order)
    compensated = Rounded(q[inverse_order].T, values[inverse_order].T, _stack_constants(chosen_constants))
    nearest = round_to_nearest(w, H, grid)
    is_worse = objective(w, compensated.values, H) > objective(w, nearest.values, H)
    pairs = zip(nearest[:2] + nearest.constants, compensated[:2] + compensated.constants, strict=True)
    q, values, *constants = (np.where(is_worse[:, None], old_array, new_array) for old_array, new_array in pairs)
    return Rounded(q, values, tuple(constants))


def _compensate_group(w: Array, levels: Levels, share: Array) -> tuple[Array, Array]:
    """Round the columns of a group w [g, N] one after the other; return the integers and their errors.

    Each column's error is compensated in the columns after it. Columns are in steps of the levels, which differ only
    from row to row, so a column takes few operations.
    """
    positions = levels.positions(w)
    q = np.empty_like(positions)
    for start in range(0, len(positions), BLOCK):
        stop = min(start + BLOCK, len(positions))
        for j in range(start, stop):
            q[j] = levels.nearest_to(positions[j])
            positions[j + 1 : stop] -= share[j, j + 1 : stop, None] * (positions[j] - q[j])
        positions[stop:] -= share[start:stop, stop:].T @ (positions[start:stop] - q[start:stop])
    return q, (positions - q) * levels.step * levels.unit


def objective(w: Array, values: Array, hessian: Array) -> Array:
    """Compute the error of each row of the quantised matrix, float64 [N]: d H dᵀ with d = w - values."""
    error = w - values
    return ((error @ hessian.astype(w.dtype)) * error).sum(axis=1, dtype=np.float64)


def inverse_factor(hessian: Array, damping: float = DAMPING) -> Array:
    """Compute U upper triangular with (H + damping·mean(diag H)·I)⁻¹ = Uᵀ U.

    Damping is raised until there is an inverse.
    """
    if not bool(np.isfinite(hessian).all()):
        raise ArgumentError("hessian", "must be finite", "NaN or infinity")
    identity = np.identity(len(hessian), hessian.dtype, like=hessian)  # np.eye passes a `device`, which CuPy lacks
    mean = float(np.diagonal(hessian).mean()) or 1.0
    for _ in range(_TRIES):
        with suppress(np.linalg.LinAlgError):
            inverse = np.linalg.inv(hessian + damping * mean * identity)
            factor = np.linalg.cholesky(inverse)
            # CuPy does not raise where the factorisation fails, and returns a partial factor.
            if bool(np.abs(factor @ factor.T - inverse).max() <= 1e-6 * np.abs(inverse).max()):
                return factor.T
        damping *= 10
    raise ArgumentError("hessian", "must be positive semidefinite", f"no inverse with damping {damping:g}")


def _order(bounds: list[tuple[int, int]], importance: Array) -> tuple[list[int], Array]:
    """Return the groups, and every column, in the order in which they are quantised."""

    def descending(group: int) -> Array:
        start, stop = bounds[group]
        return start + np.argsort(-importance[start:stop], kind="stable")

    share = [float(importance[start:stop].mean()) for start, stop in bounds]
    groups = sorted(range(len(bounds)), key=lambda group: -share[group])
    return groups, np.concatenate([descending(group) for group in groups])


def _stack_constants(chosen: list[Constants]) -> Constants:
    return tuple(np.stack(arrays, axis=1) for arrays in zip(*chosen, strict=True))
