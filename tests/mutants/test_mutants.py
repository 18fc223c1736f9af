"""The list of mutants fits the checkout, the machine that tries them says what is so, and some are tried here."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from ptxlab import registry
from tests.mutants import __main__ as command
from tests.mutants import runner
from tests.mutants.runner import EQUIVALENT, ERROR, KILLED, SURVIVED, Copy, Outcome, judged
from tests.mutants.table import ROOT, Mutant, load

MUTANTS = load()


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return Copy(tmp_path_factory.mktemp("mutants") / "copy")


@pytest.mark.full
@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if mutant.ci], ids=str)
def test_a_mistake_is_noticed(mutant: Mutant, copy: Copy) -> None:
    """A sample; `python -m tests.mutants` tries all. That tests pass without a mutant, this very run shows."""
    outcome = copy.try_out(mutant)
    assert outcome.verdict == KILLED, outcome.detail


def test_every_mutant_has_its_place_and_its_tests() -> None:
    for mutant in MUTANTS:
        assert mutant.changed((ROOT / mutant.file).read_text(encoding="utf-8"))
        for test in mutant.killed_by:
            path, _, name = test.partition("::")
            assert not name or f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(encoding="utf-8"), test
    assert len(MUTANTS) > 100 and 20 <= sum(mutant.ci for mutant in MUTANTS) <= 25
    assert not any(mutant.ci and mutant.equivalent for mutant in MUTANTS)


@pytest.mark.full
def test_every_case_that_kills_is_collected(copy: Copy) -> None:
    """An id that changes would end the whole run before the first mutant."""
    tests = dict.fromkeys(test for mutant in MUTANTS for test in mutant.killed_by)
    status, output = copy.run(["--collect-only", *tests])
    assert status == 0, output


ELSEWHERE = {  # kernels without a mutant of their own, and what changes them one statement at a time instead
    "tests/lowbit/kernels/test_mutation.py": r"dequant_\w+",
    "tests/lowbit/kernels/test_load_mutation.py": r"load_\w+",
    "tests/lowbit/kernels/gemm/test_mutation.py": r"gemm_w4a8_(qoq_channel_sm80|(qoq|lqq(_\w+)?)_sm90)",
    "tests/lowbit/kernels/attention/test_mutation.py": r"attention_kv8|attention_kv4_(simple|fp16|bittrick|prefetch)",
}
WITHOUT = {
    "gemm_tile_lqq_sm80",
    "quantize_activations_s8",
    "sum_activations_s8",
    "append_kv4",
}  # nothing but tests of their own


@pytest.mark.smoke
def test_no_kernel_is_left_out() -> None:
    """Require a mutant in each kernel's own file, one elsewhere, or its name here."""
    changed = {Path(mutant.file).stem for mutant in MUTANTS}
    alone = {name for name in registry.specs() if name not in changed}
    elsewhere = {name for name in alone for pattern in ELSEWHERE.values() if re.fullmatch(pattern, name)}
    assert alone - elsewhere == WITHOUT and all((ROOT / path).is_file() for path in ELSEWHERE)


SUM = Mutant("a difference", "ptxlab/sums.py", "a + b", "a - b", ("tests/test_sums.py",))


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Make a checkout of one function and its test."""
    root = tmp_path / "checkout"
    for name, text in {
        "pyproject.toml": "",
        "ptxlab/__init__.py": "",
        "ptxlab/testing/plugin.py": "",  # which pytest loads where this project is installed
        "ptxlab/sums.py": "def add(a, b):\n    return a + b\n",
        "tests/test_sums.py": "from ptxlab.sums import add\n\n\ndef test_add():\n    assert add(2, 1) == 3\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.full
def test_mutants_are_tried_in_a_copy_and_taken_back(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_text() for path in tiny.rglob("*.py")}
    survivor = replace(SUM, what="the other way round", new="b + a")
    assert command.try_all([SUM, survivor], tmp_path / "copies", workers=1, root=tiny) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [KILLED, "tests/test_sums.py::test_add", SURVIVED, "1", "2"]
    assert lines[-1].startswith("2 mutants: 1 killed, 1 survived; ")
    assert {path: path.read_text() for path in tiny.rglob("*.py")} == before
    assert (tmp_path / "copies/0/ptxlab/sums.py").read_text() == before[tiny / "ptxlab/sums.py"]


@pytest.mark.full
def test_of_a_draw_another_takes_the_place_of_what_is_no_mutant(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = replace(SUM, what="no name", new="a.there + b")
    spare = [replace(broken, what="none either"), SUM, replace(SUM, what="not needed")]
    assert command.try_all([broken], tmp_path / "copies", workers=1, root=tiny, spare=spare) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[::2]] == [ERROR, ERROR, KILLED, "1"]
    assert lines[-1].startswith("1 mutants: 1 killed; ")
    assert command.try_all([broken], tmp_path / "others", workers=1, root=tiny) == 1, "nothing is left to draw"


@pytest.mark.full
def test_a_mutant_that_hangs_is_noticed(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a test that tries once more what has failed, as Hypothesis does."""
    monkeypatch.setattr(runner, "_TIMEOUT", 1)
    monkeypatch.setattr(runner, "_SECONDS", 20)
    (tiny / "tests/test_sums.py").write_text(
        "from ptxlab.sums import add\n\n\ndef test_add():\n    try:\n        assert add(2, 1) == 3\n"
        "    except BaseException:\n        assert add(2, 1) == 3\n"
    )
    outcome = Copy(tmp_path / "copy", tiny).try_out(
        replace(SUM, old="    return", new="    while True: pass\n    return")
    )
    assert (outcome.verdict, outcome.detail) == (KILLED, "a test that had not ended after 1 s")


@pytest.mark.full
def test_tests_that_fail_without_a_mutant_say_nothing(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tiny / "ptxlab/sums.py").write_text("def add(a, b):\n    return a + b + 1\n")
    assert command.try_all([SUM], tmp_path / "copies", workers=1, root=tiny) == 2
    assert "without a mutant all tests must pass" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["return a * b", "a + b; a + b"])
def test_a_place_that_is_gone_or_not_the_only_one_is_an_error(text: str, tiny: Path, tmp_path: Path) -> None:
    (tiny / SUM.file).write_text(text)
    outcome = Copy(tmp_path / "copy", tiny).try_out(SUM)
    assert outcome.verdict == ERROR and "must have `old` once" in outcome.detail and not outcome.good


@pytest.mark.parametrize(
    ("status", "output", "equivalent", "verdict", "detail"),
    [
        (1, "E   assert 1 == 3\nFAILED tests/a.py::b[c] - assert", "", KILLED, "tests/a.py::b[c]"),
        (0, "3 passed in 2 s", "", SURVIVED, "3 passed in 2 s"),
        (0, "3 passed in 2 s", "no bit differs", EQUIVALENT, "no bit differs"),
        (1, "FAILED tests/a.py::b - x", "no bit differs", ERROR, "listed as equivalent, but killed by tests/a.py::b"),
        (4, "ERROR: not found: tests/a.py::gone", "", ERROR, "pytest ended with 4: ERROR: not found: tests/a.py::gone"),
        (1, "E   ptxlab.errors.CompileError: x.cu(3)\nFAILED tests/a.py::b - x", "", ERROR, "not built: CompileError"),
        (2, "E   NameError: name 'x'\nERROR tests/a.py - NameError", "", ERROR, "pytest ended with 2"),
        (1, "..+++ Timeout +++\nStack\n+++ Timeout +++", "", KILLED, "a test that had not ended after 120 s"),
        (1, "Timeout", "", ERROR, "pytest ended with 1: Timeout"),
        (-1, "nothing failed in 300 s", "", ERROR, "nothing failed in 300 s"),
        (-1, "nothing failed in 300 s", "no bit differs", ERROR, "nothing failed in 300 s"),
    ],
)
def test_what_a_run_of_pytest_says(status: int, output: str, equivalent: str, verdict: str, detail: str) -> None:
    found = judged(replace(SUM, equivalent=equivalent), status, output)
    assert found[0] == verdict and found[1].startswith(detail)


def test_one_survivor_or_error_fails_the_command() -> None:
    outcomes = [Outcome(SUM, verdict, 1.0, "") for verdict in (KILLED, EQUIVALENT)]
    assert command.report(outcomes) == 0
    for verdict in (SURVIVED, ERROR):
        assert command.report([*outcomes, Outcome(SUM, verdict, 1.0, "")]) == 1


def test_a_list_with_two_of_a_name_or_an_unknown_field_is_refused(tmp_path: Path) -> None:
    entry = '[[mutant]]\nwhat = "x"\nfile = "a"\nold = "b"\nnew = "c"\nkilled_by = ["d"]\n'
    (tmp_path / "a.toml").write_text(entry * 2)
    with pytest.raises(ValueError, match="several mutants are called: x"):
        load(tmp_path)
    (tmp_path / "a.toml").write_text(entry + "because = 1\n")
    with pytest.raises(TypeError, match="because"):
        load(tmp_path)


def test_mutants_are_listed_by_file_and_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list", "parts.cuh"]) == 0
    assert "cuda_src/include/parts.cuh: parts beyond the eighth are not taken over" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["--list", "no such mutant"])
