"""Wrong commands, by what is wrong with them: each ends with the one line that `wrong_commands.txt` has below it.

A line there begins with the exit code; `...` at its end stands for what a library says, which differs by version.
"""

import os
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ptxlab import gpu
from ptxlab.cli.app import report_errors
from ptxlab.errors import ArgumentError
from ptxlab.io import downloads
from tests.support.wrong_commands import make_files

TABLE = Path(__file__).with_name("wrong_commands.txt")
DRAWN = 9  # one row in so many is tried by default


def rows() -> Iterator[tuple[str, str, int, str]]:
    """Yield what is wrong, command, exit code, line."""
    group = command = ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            group = line.strip("[]")
        elif line.startswith("$ "):
            command = line.removeprefix("$ ")
        else:
            yield group, command, int(line[0]), line[2:]


ROWS = [*rows()]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wrong")
    make_files(folder)
    return folder


@pytest.mark.parametrize(
    ("command", "code", "line"),
    [
        pytest.param(command, code, line, id=f"{group}: {command}", marks=[] if n % DRAWN == 0 else pytest.mark.full)
        for n, (group, command, code, line) in enumerate(ROWS)
    ],
)
def test_a_wrong_command_ends_with_its_line(
    cli: Any, files: Path, monkeypatch: pytest.MonkeyPatch, command: str, code: int, line: str
) -> None:
    monkeypatch.chdir(files)
    monkeypatch.setattr(gpu, "why_not", lambda *_, **__: "no CUDA device")
    monkeypatch.setattr(downloads, "fetch", lambda *_, **__: pytest.fail("something was downloaded"))
    files_before = {*os.listdir(files)}
    got, out, err = cli(*shlex.split(command))
    whole = f"error: {line.removesuffix('...')}"
    assert (got, out, err.count("\n")) == (code, "", 1), err
    assert err.startswith(whole) if line.endswith("...") else err == f"{whole}\n"
    assert {*os.listdir(files)} == files_before, "nothing was written"


def test_the_table_has_each_kind_of_wrong_command() -> None:
    counts = Counter(group for group, *_ in ROWS)
    assert len({command for _, command, *_ in ROWS}) == len(ROWS) >= 150
    assert {*counts} == {"names", "files", "arguments", "sizes", "values", "gpu"} and counts["names"] >= 29
    assert counts["files"] >= 40 and counts["arguments"] >= 55


def test_memory_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def allocate() -> None:
        raise MemoryError("Unable to allocate 763. GiB")

    with pytest.raises(SystemExit) as ended:
        report_errors(allocate)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: out of memory: Unable to allocate 763. GiB\n"


@pytest.mark.parametrize(
    ("rule", "rejected", "proposal"),
    [
        ("must be one of hadamard, random or None", "hadamar", "; nearest: hadamard"),
        ("some of async, lanes, race", "races", "; nearest: race"),
        ("must be one of lqq, qoq", "zzz", ""),
        ("must be one of 32, 64, 128", 65, ""),
        ("must be a name", "nam", ""),
    ],
)
def test_a_rule_that_lists_names_proposes_the_nearest(rule: str, rejected: object, proposal: str) -> None:
    assert str(ArgumentError("x", rule, rejected)) == f"x: {rule} (got {rejected}){proposal}"
