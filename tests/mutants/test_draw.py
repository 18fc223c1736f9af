"""Drawn mistakes: the same ones by the same hash, each one change on one line that is still Python."""

import ast

import pytest

from tests.mutants import __main__ as command
from tests.mutants import draw
from tests.mutants.table import ROOT, Mutant

TEXT = '''\
"""A docstring with 1 < 2."""
from a import b


@cached(size=1)
def f(x: int = 3, *, deep: bool = False) -> list[int]:
    """Not 1."""
    if x <= 2 and deep is not None:  # é: bytes are no characters
        raise ValueError("é", 5)
    y = -x + g("ü", x, y, deep=True)
    z.append(zip(x, y, strict=True))
    w.update(x, x)
    return f"{y - 1}"
'''


def test_each_kind_of_mistake_is_made_where_code_runs() -> None:
    changes = {
        (line, change.kind, TEXT[change.start : change.stop], change.new)
        for line, of_line in draw.changes_by_line(TEXT).items()
        for change in of_line
    }
    assert changes == {
        (6, "constant", "3", "6"),
        (6, "constant", "3", "2"),
        (6, "constant", "False", "True"),
        (8, "comparison", "<=", "<"),
        (8, "comparison", "and", "or"),
        (8, "comparison", "is not", "is"),
        (8, "constant", "2", "4"),
        (8, "constant", "2", "1"),
        (9, "statement", 'raise ValueError("é", 5)', "pass"),
        (10, "sign", "-", ""),
        (10, "sign", "+", "-"),
        (10, "argument", "x, y", "y, x"),
        (10, "argument", ", deep=True", ""),
        (10, "constant", "True", "False"),
        (11, "argument", "x, y", "y, x"),
        (11, "statement", "z.append(zip(x, y, strict=True))", "pass"),
        (12, "statement", "w.update(x, x)", "pass"),  # two equal arguments are not exchanged
    }


@pytest.mark.full
def test_the_same_hash_draws_the_same_mistakes() -> None:
    drawn = draw.draw("8cbd1916", 20, "recipe")
    assert drawn[:9] == draw.draw("8cbd1916", 9, "recipe") != draw.draw("8cbd1917", 9, "recipe")
    assert len({(mutant.file, mutant.what) for mutant in drawn}) == 20
    assert {mutant.file for mutant in drawn} == {f"ptxlab/llm/recipe/{name}.py" for name in ("gptq", "grids")}
    for mutant in drawn:
        ast.parse(mutant.changed((ROOT / mutant.file).read_text("utf-8")))


def test_every_file_has_tests() -> None:
    for file, tests in draw.FILES.items():
        assert (ROOT / file).is_file() and tests, file
        for test in tests:
            path, _, name = test.partition("::")
            assert (ROOT / path).exists() and (not name or f"def {name}(" in (ROOT / path).read_text("utf-8")), test


@pytest.mark.full
def test_what_is_listed_as_equivalent_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *second_to_fifth = draw.draw("8cbd1916", 5, "recipe")
    listed = Mutant("listed", first.file, first.old, first.new, first.killed_by, equivalent="no bit differs")
    monkeypatch.setattr(draw, "load", lambda: [listed])
    assert draw.draw("8cbd1916", 4, "recipe") == second_to_fifth


@pytest.mark.full
def test_drawn_mistakes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list", "--draw", "8cbd1916/3", "loops.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.startswith("ptxlab/prove/loops.py: line ") for line in lines)
    with pytest.raises(SystemExit):
        command.main(["--list", "--draw", "8cbd1916"])
    assert "--draw expects HASH/N, such as 4d1718cd/30 (got 8cbd1916)" in capsys.readouterr().err
