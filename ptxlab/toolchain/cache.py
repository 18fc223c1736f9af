"""Compiled code on disk: made once per key, whole or not at all, checked whenever it is read.

The name of an entry ends in the digest of its content, `<key>-<digest><suffix>`, so that one rename publishes content
and checksum together, and so that the path of an entry identifies its bytes (CuPy remembers modules by their path). As
the digest is not known beforehand, an entry is looked for among its neighbours: a folder for each beginning of a key
keeps these few, however much has been compiled.

By hand: cuda-core's `FileStreamProgramCache` returns damaged entries and has no lock (decision 0034).
"""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import filelock

from ptxlab.errors import FileError
from ptxlab.io.files import CACHE_VARIABLE, cache_directory

VARIABLE, directory = CACHE_VARIABLE, cache_directory
_LOCK_SECONDS = 300.0


def key_of(*parts: object) -> str:
    """Digest everything that an entry depends on, in order."""
    sha = hashlib.sha256()
    for part in parts:
        text = str(part).encode()
        sha.update(len(text).to_bytes(8, "little") + text)
    return sha.hexdigest()[:32]


def get_or_make(key: str, suffix: str, make: Callable[[], bytes]) -> Path:
    """Return the path of an entry; `make` is called if there is none, or if what is there is damaged.

    Args:
        key: hexadecimal digest of everything the content depends on (`key_of`).
        suffix: file ending with its dot, `.cubin`.
        make: gives the content. What it raises passes through, and nothing is left behind.

    Two processes that ask for the same entry make it once: the second waits. `FileError` if the folder cannot be
    written to.
    """
    folder = directory() / key[:2]
    path = _intact(folder, key, suffix)
    if path is not None:
        return path
    # One lock per folder and suffix, not one per entry: they stay behind when a process is killed.
    lock = filelock.FileLock(folder / f"{suffix[1:]}.lock", timeout=_LOCK_SECONDS)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except filelock.Timeout:
        raise _unusable(f"another process has been compiling for {_LOCK_SECONDS:.0f} s") from None
    except OSError as error:
        raise _unusable(error.strerror) from None
    try:
        return _intact(folder, key, suffix) or _publish(folder, key, suffix, make())
    finally:
        lock.release()


def _publish(folder: Path, key: str, suffix: str, content: bytes) -> Path:
    # Under the lock there is one writer, so whatever a killed process left under this name is simply overwritten.
    unfinished_path = folder / f"{key}{suffix}.tmp"
    final_path = folder / f"{key}-{_digest(content)}{suffix}"
    try:
        _remove(unfinished_path)
        unfinished_path.write_bytes(content)
        os.replace(unfinished_path, final_path)
    except OSError as error:
        unfinished_path.unlink(missing_ok=True)
        raise _unusable(error.strerror) from None
    return final_path


def _unusable(problem: str | None) -> FileError:
    return FileError(f"{VARIABLE}: must name a folder that can be written to (got {directory()}: {problem})")


def _intact(folder: Path, key: str, suffix: str) -> Path | None:
    """Find the entry of that key whose content still has the digest in its name; damaged ones are removed."""
    for path in sorted(folder.glob(f"{key}-*{suffix}")):
        try:
            if path.is_file() and path.stem.rpartition("-")[2] == _digest(path.read_bytes()):
                return path
            _remove(path)
        except OSError:
            continue
    return None


def _remove(path: Path) -> None:
    """Remove any kind of file.

    That includes what cannot be opened as a file without waiting (a FIFO) or at all (a folder).
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
