"""Which cases of a test `pytest` runs."""

import pytest

pytest_plugins = ["pytester"]

SUITE = """
import pytest

@pytest.mark.share(4)
@pytest.mark.parametrize("case", range(10))
def test_shared(case): ...

@pytest.mark.share(4)
@pytest.mark.gpu
@pytest.mark.parametrize("case", range(5))
def test_on_a_gpu(case): ...

@pytest.mark.parametrize("case", range(5))
def test_whole(case): ...
"""


def left(pytester: pytest.Pytester, *which: str) -> list[str]:
    """Names of the tests that `-m` leaves."""
    made = pytester.makepyfile(test_suite=SUITE)
    items, _ = pytester.inline_genitems(*(f"{made}{name}" for name in which or [""]), "-p", "tests.support.share")
    return [item.name for item in items if not item.get_closest_marker("exhaustive")]


def test_one_case_in_n_is_left_and_always_the_same(pytester: pytest.Pytester) -> None:
    found = left(pytester)
    assert found == left(pytester)
    assert sum(name.startswith("test_shared") for name in found) == 3
    assert sum(name.startswith("test_on_a_gpu") for name in found) == 5
    assert sum(name.startswith("test_whole") for name in found) == 5


def test_who_asks_for_one_case_gets_it(pytester: pytest.Pytester) -> None:
    for case in range(10):
        assert left(pytester, f"::test_shared[{case}]") == [f"test_shared[{case}]"]
