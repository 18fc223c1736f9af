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
        """Return JSON-ready values: the fields, and the remedy of the kind."""
        return {**asdict(self), "remedy": remedy_of(self.kind)}


def relative(path: str, root: str | Path | None = None) -> str:
    """Return a path relative to the root (default: the current folder) if it lies below it, otherwise unchanged."""
    root = Path(root or Path.cwd()).resolve()
    absolute_path = Path(os.path.abspath(path))
    return absolute_path.relative_to(root).as_posix() if absolute_path.is_relative_to(root) else path


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
    match = _PLACE.search(str(error))
    place = (relative(match["path"]), int(match["line"])) if match else (path, 1)
    return Annotation(type(error).__name__, *place, str(error), test)


def render(form: str, annotations: Iterable[Annotation]) -> str:
    """Render the annotations as text, in one of `FORMATS`."""
    annotation_list = list(annotations)
    if form == "github":
        return "".join(map(_github, annotation_list))
    if form == "json":
        return json.dumps([annotation.to_json() for annotation in annotation_list], indent=2) + "\n"
    return json.dumps(_sarif(annotation_list), indent=2) + "\n"


def _github(annotation: Annotation) -> str:
    """Format a workflow command, which GitHub shows at the line in the pull request."""

    def escape(text: str, also: str = "") -> str:
        return "".join(f"%{ord(c):02X}" if c in "%\r\n" + also else c for c in text)

    place = f"file={escape(annotation.path, ':,')},line={annotation.line}"
    place += f",title={escape(f'ptxlab {annotation.kind}', ':,')}"
    test = f" ({annotation.test})" if annotation.test else ""
    remedy = f"\nremedy: {text}" if (text := remedy_of(annotation.kind)) else ""
    level = "error" if annotation.level == "error" else "notice"
    return f"::{level} {place}::{escape(annotation.message + test + remedy)}\n"


def _sarif(annotations: list[Annotation]) -> dict[str, object]:
    """Build SARIF 2.1.0 with one run."""
    from ptxlab import __version__

    sarif_results = [
        {
            "ruleId": annotation.kind,
            "level": annotation.level,
            "message": {"text": annotation.message},
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": annotation.path},
                        "region": {"startLine": annotation.line},
                    }
                }
            ],
            **({"properties": {"test": annotation.test}} if annotation.test else {}),
        }
        for annotation in annotations
    ]
    rules = [
        {"id": kind, "helpUri": _HELP, **({"help": {"text": remedy}} if (remedy := remedy_of(kind)) else {})}
        for kind in sorted({annotation.kind for annotation in annotations})
    ]
    driver = {"name": "ptxlab", "version": __version__, "rules": rules}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": sarif_results}]}
