"""Findings as other tools read them: annotations of a pull request, SARIF for code scanning, JSON."""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ptxlab.errors import PtxlabError

if TYPE_CHECKING:
    from ptxlab.emulator import Finding

FORMATS = ("github", "sarif", "json")
_PLACE = re.compile(r"^(?:[\w-]+: )?(?P<path>[^:`]+\.(?:ptx|cu|cuh|py|h)):(?P<line>\d+)\b")
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_HELP = "https://docs.nvidia.com/cuda/parallel-thread-execution/#memory-consistency-model"


@dataclass(frozen=True)
class Annotation:
    """One line of a source, and what is wrong there.

    Attributes:
        kind: of the finding (`race`, `async-dirty` ...), or the name of the error.
        path: of the file, relative to the current folder where it lies below.
        line: from 1.
        message: the finding in words.
        test: the test that met it; empty for a command.
    """

    kind: str
    path: str
    line: int
    message: str
    test: str = ""


def relative(path: str, root: str | Path | None = None) -> str:
    """A path as seen from the root (the current folder) if it lies below it, else as it is."""
    root = Path(root or Path.cwd()).resolve()
    absolute = Path(os.path.abspath(path))
    return absolute.relative_to(root).as_posix() if absolute.is_relative_to(root) else path


def of_finding(finding: "Finding") -> Annotation:
    """Of a finding of the emulator's checks."""
    return Annotation(finding.kind, relative(finding.path), finding.line, str(finding))


def of_error(error: PtxlabError, path: str, test: str = "") -> Annotation:
    """Of an error that ended a run: where its message says, else at the top of `path`, the kernel's."""
    found = _PLACE.match(str(error))
    where = (found["path"], int(found["line"])) if found else (path, 1)
    return Annotation(type(error).__name__, *where, str(error), test)


def render(form: str, annotations: Iterable[Annotation]) -> str:
    """The annotations in one of `FORMATS`, with a line break at the end."""
    found = list(annotations)
    if form == "github":
        return "".join(map(_github, found))
    if form == "json":
        return json.dumps([asdict(each) for each in found], indent=2) + "\n"
    return json.dumps(_sarif(found), indent=2) + "\n"


def _github(found: Annotation) -> str:
    """A workflow command: GitHub shows it at the line, on the pull request's page of changes."""

    def escape(text: str, more: str = "") -> str:
        return "".join(f"%{ord(c):02X}" if c in "%\r\n" + more else c for c in text)

    place = f"file={escape(found.path, ':,')},line={found.line},title={escape(f'ptxlab {found.kind}', ':,')}"
    test = f" ({found.test})" if found.test else ""
    return f"::error {place}::{escape(found.message + test)}\n"


def _sarif(found: list[Annotation]) -> dict[str, object]:
    """SARIF 2.1.0, one run."""
    from ptxlab import __version__

    results = [
        {
            "ruleId": each.kind,
            "level": "error",
            "message": {"text": each.message},
            "locations": [
                {"physicalLocation": {"artifactLocation": {"uri": each.path}, "region": {"startLine": each.line}}}
            ],
            **({"properties": {"test": each.test}} if each.test else {}),
        }
        for each in found
    ]
    rules = [{"id": kind, "helpUri": _HELP} for kind in sorted({each.kind for each in found})]
    driver = {"name": "ptxlab", "version": __version__, "rules": rules}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}
