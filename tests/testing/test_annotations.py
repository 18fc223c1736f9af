"""Where annotations of errors attach."""

import json
from pathlib import Path

import pytest

from ptxlab.emulator import Finding, Note, remedy_of
from ptxlab.errors import Deadlock, MemoryFault, PtxlabError
from ptxlab.testing import annotations


@pytest.mark.parametrize(
    ("error", "path", "line"),
    [
        (Deadlock("deadlock: threads spin on what no other will change\n  dl.cu:2: `ld.u32`: spins"), "dl.cu", 2),
        (Deadlock("deadlock: no thread can run\n  sub/bulk.ptx:5: `mbarrier`: waits"), "sub/bulk.ptx", 5),
        (MemoryFault("oob.cu:7: `ld.global`: 4 bytes past the end"), "oob.cu", 7),
        (PtxlabError("scale: scale.cu:3: wrong"), "scale.cu", 3),
        (PtxlabError("n: must be given"), "k.cu", 1),
    ],
)
def test_an_error_is_at_the_first_place_of_its_message(error: PtxlabError, path: str, line: int) -> None:
    annotation = annotations.of_error(error, "k.cu")
    assert (annotation.path, annotation.line) == (path, line)
    assert f"::error file={path},line={line}," in annotations.render("github", [annotation])


def test_a_finding_is_an_error_of_its_kind_at_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    finding = Finding("race", str(tmp_path / "k.cu"), 3, "x[0] = 1;", (0, 0, 0), (1, 0, 0), None, {}, "with thread 0")
    assert annotations.of_finding(finding) == annotations.Annotation("race", "k.cu", 3, str(finding))


def test_a_note_is_no_error() -> None:
    note = Note("bfe_constant", "k.ptx", 4, "bfe.s32 %r1, %r2, 32, 1", "it is -1")
    annotation = annotations.of_note(note)
    assert "::notice file=k.ptx,line=4,title=ptxlab bfe_constant::note: " in annotations.render("github", [annotation])
    assert '"level": "note"' in annotations.render("sarif", [annotation])


def test_a_workflow_command_is_one_line_of_its_own_signs() -> None:
    """`%`, line ends, and in a property `:` and `,` too, as GitHub reads them back."""
    annotation = annotations.Annotation("race", "a,b:c%.cu", 3, "50% of\r\n8, 9: bytes", "t.py::test[1,2]")
    command = annotations.render("github", [annotation])
    assert command == (
        "::error file=a%2Cb%3Ac%25.cu,line=3,title=ptxlab race::50%25 of%0D%0A8, 9: bytes (t.py::test[1,2])"
        "%0Aremedy: put a barrier, or a flag with release and acquire, between the two accesses (guide/checks.md)\n"
    )


def test_a_path_is_relative_to_the_root_if_it_lies_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "root").mkdir()
    monkeypatch.chdir(tmp_path / "root")
    below, outside = tmp_path / "root" / "a" / "k.cu", tmp_path / "k.cu"
    assert annotations.relative(str(below)) == annotations.relative("a/k.cu") == "a/k.cu"
    assert annotations.relative(str(outside)) == str(outside) and annotations.relative("../k.cu") == "../k.cu"
    assert annotations.relative(str(below), tmp_path) == "root/a/k.cu"


@pytest.mark.parametrize("kind", ["async-dirty", "MemoryFault", "Deadlock"])
def test_each_form_has_the_remedy(kind: str) -> None:
    annotation, remedy = annotations.Annotation(kind, "k.cu", 3, "wrong"), remedy_of(kind)
    (entry,) = json.loads(annotations.render("json", [annotation]))
    (run,) = json.loads(annotations.render("sarif", [annotation]))["runs"]
    assert remedy and entry["remedy"] == remedy == run["tool"]["driver"]["rules"][0]["help"]["text"]
    assert annotations.render("github", [annotation]).endswith(f"::wrong%0Aremedy: {remedy}\n")
