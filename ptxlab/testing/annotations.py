"""Findings as other tools read them: annotations of a pull request, SARIF for code scanning, JSON."""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ptxlab.emulator import remedy_of
from ptxlab.errors import PtxlabError

if TYPE_CHECKING:
    from ptxlab.emulator import Finding, Note

FORMATS = ("github", "sarif", "json")
_PLACE = re.compile(r"(?:^ *|: )(?P<path>[^:`\n]+\.(?:ptx|cu|cuh|py|h)):(?P<line>\d+)\b", re.MULTILINE)
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_HELP = "https://docs.nvidia.com/cuda/parallel-thread-execution/#memory-consistency-model"


@dataclass(frozen=True)
class Annotation:
    """A message at a line of a source.

    Attributes:
        kind: kind of the finding (`race`, `async-dirty` ...), a note's quirk, or the error's class.
        path: the file, relative to the root if it lies below it.
        line: counted from 1.
        message: the finding's text.
        test: the test that failed; empty for a command.
        level: `error`, or `note` of a line that no run was seen to go wrong by.
    """

    kind: str
    path: str
    line: int
    message: str
    test: str = ""
    level: str = "error"

    def to_json(self) -> dict[str, str | int]:
        """Return what JSON has of it: the fields, and the remedy of its kind."""
        return {**asdict(self), "remedy": remedy_of(self.kind)}


def relative(path: str, root: str | Path | None = None) -> str:
    """Return a path relative to the root (default: the current folder) if it lies below it, otherwise unchanged."""
    root = Path(root or Path.cwd()).resolve()
    absolute = Path(os.path.abspath(path))
    return absolute.relative_to(root).as_posix() if absolute.is_relative_to(root) else path


def of_finding(finding: "Finding") -> Annotation:
    """Make the annotation of a finding of the emulator's checks."""
    return Annotation(finding.kind, relative(finding.path), finding.line, str(finding))


def of_note(note: "Note") -> Annotation:
    """Make the annotation of a note of the check `quirks`."""
    return Annotation(note.quirk, relative(note.path), note.line, str(note), level="note")


def of_error(error: PtxlabError, path: str, test: str = "") -> Annotation:
    """Make the annotation of an error that ended a run.

    It lies at the first place in the error's message, otherwise at line 1 of `path`.
    """
    found = _PLACE.search(str(error))
    where = (relative(found["path"]), int(found["line"])) if found else (path, 1)
    return Annotation(type(error).__name__, *where, str(error), test)


def render(form: str, annotations: Iterable[Annotation]) -> str:
    """Render the annotations as text, in one of `FORMATS`."""
    found = list(annotations)
    if form == "github":
        return "".join(map(_github, found))
    if form == "json":
        return json.dumps([each.to_json() for each in found], indent=2) + "\n"
    return json.dumps(_sarif(found), indent=2) + "\n"


def _github(found: Annotation) -> str:
    """Format a workflow command, which GitHub shows at the line in the pull request."""

    def escape(text: str, more: str = "") -> str:
        return "".join(f"%{ord(c):02X}" if c in "%\r\n" + more else c for c in text)

    place = f"file={escape(found.path, ':,')},line={found.line},title={escape(f'ptxlab {found.kind}', ':,')}"
    test = f" ({found.test})" if found.test else ""
    remedy = f"\nremedy: {text}" if (text := remedy_of(found.kind)) else ""
    return f"::{'error' if found.level == 'error' else 'notice'} {place}::{escape(found.message + test + remedy)}\n"


def _sarif(found: list[Annotation]) -> dict[str, object]:
    """Build SARIF 2.1.0 with one run."""
    from ptxlab import __version__

    results = [
        {
            "ruleId": each.kind,
            "level": each.level,
            "message": {"text": each.message},
            "locations": [
                {"physicalLocation": {"artifactLocation": {"uri": each.path}, "region": {"startLine": each.line}}}
            ],
            **({"properties": {"test": each.test}} if each.test else {}),
        }
        for each in found
    ]
    rules = [
        {"id": kind, "helpUri": _HELP, **({"help": {"text": remedy}} if (remedy := remedy_of(kind)) else {})}
        for kind in sorted({each.kind for each in found})
    ]
    driver = {"name": "ptxlab", "version": __version__, "rules": rules}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}
