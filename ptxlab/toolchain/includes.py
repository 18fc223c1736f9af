"""What a CUDA C++ source means with everything that it includes: the key of whatever is compiled from it.

NVRTC preprocesses the source and the result is hashed, so macro, commented, spliced and conditional includes count as
the compiler sees them. That takes some 15 ms. A process therefore remembers each digest with the files that were read
and the places where a file of the same name would have come first, and only compares these the next time.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ptxlab.sources import Source
from ptxlab.toolchain import cache, nvrtc

_digests: dict[tuple[str, ...], tuple[str, "_Inputs"]] = {}


@dataclass(frozen=True)
class _Inputs:
    """Headers by path with the digest of each, and paths that would be read instead if they existed."""

    headers: dict[str, bytes]
    absent: frozenset[str]

    def are_unchanged(self) -> bool:
        """Check whether every input is as it was."""
        headers_equal = all(_content_digest(path) == digest for path, digest in self.headers.items())
        return headers_equal and not any(map(os.path.exists, self.absent))


def digest(source: Source, options: Sequence[str]) -> str | None:
    """Digest the preprocessed source, by these options of NVRTC; None where NVRTC cannot preprocess alone.

    Raises:
        UnavailableError: NVRTC is not installed.
    """
    from_outside = [os.environ.get(f"NVRTC_{place}_FLAGS", "") for place in ("PREPEND", "APPEND")]
    key = (source.text, source.path, os.getcwd(), *from_outside, *options)
    if (cached_entry := _digests.get(key)) and cached_entry[1].are_unchanged():
        return cached_entry[0]
    inputs = _inputs(source, options)
    text = nvrtc.run_front_end(source, "--preprocess", options).decode("latin-1")  # whatever it is encoded in
    if not text:
        return None
    text_digest = cache.key_of(text, *from_outside)
    if inputs is not None and inputs.are_unchanged():  # else something changed meanwhile
        _digests[key] = text_digest, inputs
    return text_digest


def _inputs(source: Source, options: Sequence[str]) -> _Inputs | None:
    """List the files that the preprocessor depends on.

    Return None if they cannot be listed: nobody says what `__has_include` looked for.
    """
    rules = nvrtc.run_front_end(source, "--dependencies", options).decode(errors="surrogateescape").splitlines()
    source_paths = {source.path, os.path.abspath(source.path)}
    read_paths = [
        path for rule in rules if (path := rule.partition(": ")[2]) not in source_paths and os.path.isfile(path)
    ]
    texts = [source.text.encode(), *(_content(path) for path in read_paths), " ".join(options).encode()]
    if not rules or any(b"__has_include" in text.replace(b"\\\r\n", b"").replace(b"\\\n", b"") for text in texts):
        return None
    include_folders = [option[2:] for option in options if option.startswith("-I")]
    folders = dict.fromkeys([*include_folders, *(os.path.dirname(path) or "." for path in (source.path, *read_paths))])
    names = {os.path.relpath(path, folder) for path in read_paths for folder in folders}
    candidates = {os.path.join(folder, name) for folder in folders for name in names}
    absent_paths = frozenset(path for path in candidates if not os.path.exists(path))
    return _Inputs({path: _content_digest(path) for path in read_paths}, absent_paths)


def _content(path: str) -> bytes:
    try:
        return Path(path).read_bytes() if os.path.isfile(path) else b""
    except OSError:
        return b""


def _content_digest(path: str) -> bytes:
    return hashlib.sha256(_content(path)).digest()
