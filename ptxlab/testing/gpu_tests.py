"""The record of the tests on a GPU, and which kernels' sources have changed since.

The record holds a digest of every source. What does not reach the compiler does not count: comments (a header's
`Measured` comes from records that are made later), blank lines, the width of white space.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from ptxlab import sources
from ptxlab.errors import FileError
from ptxlab.io.files import read_record, read_text

SCHEMA = 1
FILE = "tests.json"  # under `notebooks/results/<gpu>/`
_MOST_NAMES = 8  # of kernels in a line
_LITERAL_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|//[^\n]*|/\*.*?\*/', re.DOTALL)
_INCLUDE = re.compile(r'^#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)


@dataclass(frozen=True)
class GpuTests:
    """A run of the tests on a GPU.

    Attributes:
        command: what was run.
        part: what narrowed the run down; empty for a whole one.
        device: name, slug and driver of the GPU.
        versions: of every tool and library that took part.
        commit: of the sources, with `+` behind it if they were changed since.
        date: when it began, UTC, ISO 8601.
        seconds: how long it took.
        passed: how many tests, by file.
        failed: the first line of what went wrong, by test.
        skipped: tests by reason.
        sources: `digests`, when it began.
        schema: version of this layout.
    """

    command: str
    part: str
    device: dict[str, str]
    versions: dict[str, str]
    commit: str
    date: str
    seconds: float
    passed: dict[str, int]
    failed: dict[str, str]
    skipped: dict[str, list[str]]
    sources: dict[str, str]
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON-ready values."""
        return asdict(self)


def load(path: Path) -> GpuTests:
    """Read a record; raises `FileError`, which says why in one line, for any other file."""
    fields = read_record(path, "a record of GPU tests", SCHEMA)
    try:
        record = GpuTests(**fields)
    except TypeError as error:
        raise FileError(f"{path}: not a record of GPU tests: {error}") from None
    for name, declared_type in get_type_hints(GpuTests).items():
        field, kind = getattr(record, name), get_origin(declared_type) or declared_type
        if type(field) is not kind and (type(field), kind) != (int, float):
            rule = f"{name} has to be a {kind.__name__}"
            raise FileError(f"{path}: not a record of GPU tests: {rule} (got {field!r:.40})")
    return record


def digests() -> dict[str, str]:
    """Compute the SHA-256 of every source's code and of the headers that it includes.

    Keys are paths: `ptx/dequant/dequant_lqq.ptx`.
    """
    folders = sources.ptx_dir(), sources.cuda_dir()
    paths = [path.resolve() for folder in folders for path in sorted(folder.rglob("*"))]
    codes = {path: code_of(read_text(path)) for path in paths if path.suffix in (".ptx", ".cu", ".cuh")}
    root = folders[0].resolve().parent
    return {path.relative_to(root).as_posix(): _digest(path, codes) for path in codes}


def code_of(text: str) -> str:
    """Return a source without comments and blank lines, runs of white space as one space; `//` in quotes stays."""
    code = _LITERAL_OR_COMMENT.sub(lambda match: " " if match[0].startswith("/") else match[0], text)
    return "\n".join(filter(None, (" ".join(line.split()) for line in code.split("\n"))))


def _digest(path: Path, codes: Mapping[Path, str]) -> str:
    sha = hashlib.sha256()
    for source in (path, *sorted(_headers(path, codes))):
        sha.update(source.name.encode() + b"\0" + codes[source].encode() + b"\0")
    return sha.hexdigest()


def _headers(path: Path, codes: Mapping[Path, str]) -> set[Path]:
    """Find the project's headers that a source includes, directly or not."""
    seen_headers: set[Path] = set()
    pending_paths = [path]
    while pending_paths:
        including_path = pending_paths.pop()
        for name in _INCLUDE.findall(codes[including_path]):
            candidates = (folder / name for folder in (including_path.parent, sources.include_dir().resolve()))
            new_headers = {header for header in candidates if header in codes} - seen_headers
            seen_headers |= new_headers
            pending_paths += new_headers
    return seen_headers - {path}


def changed_sources(since: GpuTests, now: Mapping[str, str]) -> list[str]:
    """List labels of the kernels' sources (`dequant_lqq.ptx`) that differ from the record, new ones among them.

    A source is known by its name, which is unique: in another folder it is the same kernel.
    """
    recorded_digests, current_digests = (
        {Path(path).name: digest for path, digest in digests_by_path.items()}
        for digests_by_path in (since.sources, now)
    )
    return [
        name
        for name, digest in current_digests.items()
        if not name.endswith(".cuh") and recorded_digests.get(name) != digest
    ]


def warnings() -> list[str]:
    """Warn of each record whose tests failed or whose kernels have changed since.

    Only a checkout has records.
    """
    if not sources.in_checkout():
        return []
    lines, now = [], cache(digests)
    for path in sorted(sources.results_dir().glob(f"*/{FILE}")):
        try:
            record = load(path)
        except FileError as error:
            lines.append(str(error))
            continue
        details = f"{record.date[:10]}" + (f", {record.part} alone" if record.part else "")
        run = f"the GPU tests of {record.commit[:10]}{'+' * record.commit.endswith('+')} ({details})"
        if record.failed:
            lines.append(f"{len(record.failed)} failed in {run}")
        if names := changed_sources(record, now()):
            remainder = [f"and {len(names) - _MOST_NAMES} more"] if len(names) > _MOST_NAMES else []
            lines.append(f"changed since {run}: {', '.join([*names[:_MOST_NAMES], *remainder])}")
    return lines
