"""Which cases each tier runs, how a long run goes on, and which part a draw is."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest

from tests.support import tiers

pytest_plugins = ["pytester"]

MARKERS = """
[pytest]
addopts = --strict-markers -p tests.support.tiers -p no:xdist -p no:ptxlab
markers =
    smoke
    smoke_cases
    full
    full_cases
    default_cases
    gpu
"""
SUITE = """
import pytest
from hypothesis import given, strategies as st

@pytest.mark.default_cases("1", "3")
@pytest.mark.smoke_cases("1")
@pytest.mark.parametrize("case", range(5))
def test_chosen(case): ...

@pytest.mark.full_cases("[c*", "b?")
@pytest.mark.parametrize("case", ["a", "b1", "[c]"])
def test_all_but_some(case): ...

@pytest.mark.default_cases("x-cpu")
@pytest.mark.parametrize("backend", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", ["x", "y"])
def test_on_both(case, backend): ...

@pytest.mark.full
def test_long(): ...

@pytest.mark.smoke
def test_short(): ...
"""
DEFAULT = ["test_chosen[1]", "test_chosen[3]", "test_all_but_some[a]", "test_on_both[x-cpu]", "test_short"]
FULL = [
    *(f"test_chosen[{case}]" for case in (0, 2, 4)),
    *("test_all_but_some[b1]", "test_all_but_some[[c]]", "test_on_both[y-cpu]", "test_long"),
]


@pytest.fixture
def suite(pytester: pytest.Pytester, request: pytest.FixtureRequest) -> Iterator[Path]:
    pytester.makeini(MARKERS)
    yield pytester.makepyfile(test_suite=SUITE)
    hypothesis.settings.load_profile(tiers.examples_of(request.config))  # those runs are in this process


def names_of(pytester: pytest.Pytester, *options: str) -> list[str]:
    """List the names of the tests that a run collects."""
    printed = pytester.runpytest_inprocess("-q", "--collect-only", *options).outlines
    return [line.partition("::")[2] for line in printed if "::" in line]


@pytest.mark.full
def test_each_case_is_in_one_tier_and_gpu_cases_in_none(pytester: pytest.Pytester, suite: Path) -> None:
    assert names_of(pytester) == DEFAULT
    assert sorted(names_of(pytester, "-m", "full")) == sorted(FULL)
    assert names_of(pytester, "-m", "smoke") == ["test_chosen[1]", "test_short"]
    assert names_of(pytester, "-m", "gpu") == ["test_on_both[x-gpu]", "test_on_both[y-gpu]"]
    assert sorted(names_of(pytester, "-m", "not gpu")) == sorted(DEFAULT + FULL)


@pytest.mark.full
def test_a_case_named_by_its_whole_id_runs_whatever_its_tier(pytester: pytest.Pytester, suite: Path) -> None:
    assert names_of(pytester, f"{suite}::test_chosen[2]", f"{suite}::test_long") == ["test_chosen[2]", "test_long"]
    assert names_of(pytester, f"{suite}::test_chosen") == ["test_chosen[1]", "test_chosen[3]"]
    assert names_of(pytester, f"{suite}::test_on_both[x-gpu]") == []


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ('"1", "3"', '"1", "7*"', "test_suite.py::test_chosen: default_cases: '7*' matches no case; cases: 0, 1, 2,"),
        ('"b?"', '"b??"', "test_suite.py::test_all_but_some: full_cases: 'b??' matches no case"),
        ('"x-cpu"', '"x-gpu"', "test_suite.py::test_on_both: default_cases: 'x-gpu' matches no case"),
        ('"1")', '"2")', "test_suite.py::test_chosen[2]: a case of `smoke` must be one of the default tier"),
    ],
)
def test_a_pattern_without_a_case_is_an_error(
    old: str, new: str, line: str, pytester: pytest.Pytester, suite: Path
) -> None:
    suite.write_text(SUITE.replace(old, new))
    done = pytester.runpytest_inprocess("--collect-only")
    assert done.ret == pytest.ExitCode.INTERRUPTED and line in done.stdout.str()


@pytest.mark.full
def test_a_draw_is_a_part_and_the_parts_of_a_hash_are_alike(pytester: pytest.Pytester, suite: Path) -> None:
    part = names_of(pytester, "-m", "not gpu", "--draw", "4d1718cd/2")
    assert part == names_of(pytester, "-m", "not gpu", "--draw", "4d1718cd/2")
    assert set(part) < {*DEFAULT, *FULL} and part
    names = [f"tests/test_suite.py::test[{i}]" for i in range(4000)]
    sizes = [sum(tiers.Draw(seed, 8).takes(name) for name in names) for seed in ("4d1718cd", "e64c1e9e")]
    assert all(400 < count < 600 for count in sizes) and len({*sizes}) == 2
    assert all(tiers.Draw("4d1718cd", 1).takes(name) for name in names)
    done = pytester.runpytest_inprocess("-m", "full", "--draw", "4d1718cd/1")
    assert (
        "--draw: one case in 1; again: pytest" in done.stdout.str() and "-m full --draw 4d1718cd/1" in done.outlines[-2]
    )


@pytest.mark.parametrize("text", ["4d1718cd", "4d1718cd/0", "/8", "a b/8", "4d/-1", "4d/8.5"])
def test_a_draw_that_is_none_is_a_line(text: str) -> None:
    with pytest.raises(pytest.UsageError, match=r"^--draw: expects HASH/N with N >= 1, such as 4d1718cd/8 \(got "):
        tiers.Draw.parse(text)


@pytest.mark.full
def test_a_run_goes_on_where_it_stopped(
    pytester: pytest.Pytester, suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    Path(".gitignore").write_text(".*\n__pycache__\n")
    suite.write_text(SUITE.replace("def test_long(): ...", "def test_long(): import os; assert 'PASS' in os.environ"))
    pytester.runpytest_inprocess("-m", "full").assert_outcomes(passed=6, failed=1, deselected=7)
    done = pytester.runpytest_inprocess("-m", "full", "--resume")
    done.assert_outcomes(failed=1, deselected=13)
    assert "--resume: left out 6 cases that have passed at this state before" in done.stdout.str()
    monkeypatch.setenv("PASS", "1")
    pytester.runpytest_inprocess("-m", "full", "--resume").assert_outcomes(passed=1, deselected=13)
    done = pytester.runpytest_inprocess("-m", "full", "--resume")
    assert done.ret == pytest.ExitCode.OK and "left out 7 cases" in done.stdout.str()
    Path("kernel.ptx").write_text("ret;")  # another state of the checkout
    pytester.runpytest_inprocess("-m", "full", "--resume").assert_outcomes(passed=7, deselected=7)


def test_resume_needs_a_checkout(pytester: pytest.Pytester, suite: Path) -> None:
    done = pytester.runpytest_inprocess("-m", "full", "--resume")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert "--resume: needs a git checkout and pytest's cache" in done.stderr.str()


@pytest.mark.full
def test_workers_leave_out_the_same(pytester: pytest.Pytester, suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(tiers.__file__).parents[2]))
    pytester.makeini(MARKERS.replace("-p no:xdist", "-n 2"))
    subprocess.run(["git", "init", "-q"], check=True)
    Path(".gitignore").write_text(".*\n__pycache__\n")
    suite.write_text(SUITE.replace("def test_long(): ...", "def test_long(): assert False"))
    pytester.runpytest_subprocess("-m", "full").assert_outcomes(passed=6, failed=1)
    pytester.runpytest_subprocess("-m", "full", "--resume").assert_outcomes(failed=1)


@pytest.mark.parametrize(
    ("options", "profile"),
    [
        ([], "repeated"),
        (["-m", "smoke"], "repeated"),
        (["-m", "full"], "drawn"),
        (["-m", "not gpu"], "drawn"),
        (["-m", "full", "--draw", "4d/1"], "repeated"),
    ],
)
def test_only_full_runs_draw_new_examples(options: list[str], profile: str) -> None:
    values = dict(zip(options[::2], options[1::2], strict=True))
    config = SimpleNamespace(option=SimpleNamespace(markexpr=values.get("-m", "")), getoption=values.get)
    assert tiers.examples_of(config) == profile  # type: ignore[arg-type]
