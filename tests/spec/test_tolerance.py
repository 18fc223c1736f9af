"""The one judge of floating results: by element, by row, of repeated launches."""

import numpy as np
import pytest

from ptxlab.spec.tolerance import Allowed, describe_mismatch, misses

RIGHT = {"out": np.arange(12.0).reshape(3, 4), "lse": np.array([1.0, -np.inf, 3.0])}
ALLOWED = {"out": Allowed(np.full((3, 4), 0.1), np.full(3, 0.05)), "lse": Allowed(np.full(3, 0.01))}


def mismatch_with(**changes: tuple[tuple[int, ...], float]) -> str | None:
    """Describe the mismatch after adding to elements: name=(index, error)."""
    got = {name: array.copy() for name, array in RIGHT.items()}
    for name, (place, error) in changes.items():
        got[name][place] += error
    return describe_mismatch(got, RIGHT, ALLOWED)


def test_what_is_near_passes() -> None:
    assert mismatch_with() is None
    assert mismatch_with(out=((1, 2), 0.099), lse=((0,), -0.0099)) is None


@pytest.mark.parametrize("error", [0.11, -0.11, np.nan, np.inf])
def test_an_element_that_is_off_is_named(error: float) -> None:
    mismatch = mismatch_with(out=((1, 2), error))
    assert mismatch == f"out: 1 of 12 elements differ from the reference, first at [1, 2]: {6 + error} instead of 6.0"


def test_of_an_infinity_only_itself_is_near() -> None:
    assert describe_mismatch({"lse": np.array([1, np.inf, 3])}, RIGHT, ALLOWED) is not None
    assert describe_mismatch({"lse": np.array([1, -1e38, 3])}, RIGHT, ALLOWED) is not None
    mismatch = describe_mismatch({"lse": np.array([-np.inf, -np.inf, 3])}, RIGHT, ALLOWED)
    assert mismatch == "1 of 3 elements differ from the reference, first at [0]: -inf instead of 1.0"


def test_a_little_off_in_all_of_a_row_is_too_much() -> None:
    assert mismatch_with(out=((2, slice(None)), 0.049)) is None
    mismatch = mismatch_with(out=((2, slice(None)), 0.06))
    assert mismatch is not None and mismatch.startswith("out: 1 of 3 rows differ") and mismatch.endswith("first at [2]")


def test_repeated_launches_are_each_held_against_the_same() -> None:
    launches = np.stack([RIGHT["out"]] * 5)
    assert describe_mismatch({"out": launches}, RIGHT, ALLOWED) is None
    assert "instead of 0.0" in str(describe_mismatch({"out": launches + 1}, {"out": RIGHT["out"][None]}, ALLOWED))
    launches[3, 1] -= 0.07
    launches[4, 0, 0] += 1
    mismatch = describe_mismatch({"out": launches}, RIGHT, ALLOWED)
    assert mismatch is not None and "1 of 60 elements" in mismatch and "[4, 0, 0]: 1.0 instead of 0.0" in mismatch
    elements, rows = misses(launches, RIGHT["out"], ALLOWED["out"])
    assert np.argwhere(rows).tolist() == [[3, 1], [4, 0]] and elements.sum() == 1
