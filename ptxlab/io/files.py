"""Arrays in and out of `.npz` files, text and records: never unpickled, written whole or not at all."""

import contextlib
import json
import math
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import platformdirs

from ptxlab.errors import FileError

CACHE_VARIABLE = "PTXLAB_CACHE_DIR"
MAX_BYTES = 1 << 34  # an .npz that claims to hold more is refused before anything is allocated
MAX_JSON = 1 << 28  # bytes; parsed it takes several times as much, and the largest tokenizers have 33 MB
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
# What zipfile, zlib and NumPy raise for content that is damaged, encrypted, or compressed in a way they do not know
DAMAGE = (zipfile.BadZipFile, zlib.error, ValueError, KeyError, TypeError, EOFError, RuntimeError, MemoryError,
           OverflowError)  # fmt: skip


def cache_directory() -> Path:
    """Return the cache folder: `$PTXLAB_CACHE_DIR`, or the user's cache folder of the platform."""
    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_path("ptxlab"))


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Load all arrays of an `.npz`, by name.

    Raises `FileError` if it is missing, damaged, too large, or holds objects.
    """
    try:
        if path.exists() and not path.is_file():  # whoever opens a FIFO waits for a writer
            raise FileError(f"{path}: not a regular file")
        with zipfile.ZipFile(path) as archive:
            claimed = sum(member.file_size for member in archive.infolist())
            if claimed > MAX_BYTES:
                raise FileError(f"{path}: at most {MAX_BYTES} bytes of arrays (got {claimed})")
            for member in archive.infolist():
                _check_header(archive, member)
        with np.load(path, allow_pickle=False) as archive:
            return {name: np.array(archive[name], order="C") for name in archive.files}
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from None
    except DAMAGE as error:
        raise FileError(f"{path}: not an .npz of plain arrays: {error}") from None


def _check_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Raise ValueError unless the member is an array, of objects or of just the bytes that follow its header."""
    with archive.open(member) as content:
        read_header = _HEADERS.get(np.lib.format.read_magic(content))
        if read_header is None:
            raise ValueError(f"{member.filename} holds a structure")
        shape, _, dtype = read_header(content)
        nbytes, held_bytes = math.prod(shape) * dtype.itemsize, member.file_size - content.tell()
    if not dtype.itemsize:  # of which any number fits a file, but no memory
        raise ValueError(f"{member.filename} has elements of 0 bytes")
    if nbytes != held_bytes and not dtype.hasobject:  # objects are refused by `np.load`
        raise ValueError(f"{member.filename} claims {nbytes} bytes and holds {held_bytes}")


def load_array(path: Path) -> np.ndarray:
    """Load the array of a `.npy`. Raises `FileError` if it is missing, damaged or holds objects."""
    try:
        if path.exists() and not path.is_file():
            raise FileError(f"{path}: not a regular file")
        array: np.ndarray = np.load(path, allow_pickle=False)
        if not isinstance(array, np.ndarray):
            raise FileError(f"{path}: not a .npy of one array")
        return np.array(array, order="C")
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from None
    except DAMAGE as error:
        raise FileError(f"{path}: not a .npy of a plain array: {error}") from None


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays as an `.npz`; the file appears under its name only when it is complete."""
    host = {name: array.get() if hasattr(array, "get") else np.asarray(array) for name, array in arrays.items()}
    savez: Any = np.savez  # its stub takes the arrays for flags
    write_whole(path, lambda file: savez(file, **host))


def read_text(path: Path, *, newline: str | None = None) -> str:
    """Read a UTF-8 text file, `newline` as of `open`. Raises `FileError` if it is missing or no text."""
    try:
        with path.open(encoding="utf-8", newline=newline) as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises `FileError` if it is missing, larger than `MAX_JSON`, or not JSON."""
    try:
        if (size := path.stat().st_size) > MAX_JSON:
            raise FileError(f"{path}: at most {MAX_JSON} bytes of JSON (got {size})")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not JSON: {error}") from None


def read_record(path: Path, description: str, schema: int) -> dict[str, Any]:
    """Read a JSON object that says `schema`; `FileError` says in one line why a file is not `description`."""
    record = read_json(path)
    if not isinstance(record, dict) or record.get("schema") != schema:
        raise FileError(f"{path}: not {description} of schema {schema}")
    return record


def write_record(path: Path, record: Mapping[str, Any], rows: str) -> None:
    """Write a record as JSON, its list named `rows` last, with one line per row: a diff shows which rows changed."""
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in record[rows])
    head = json.dumps({name: record[name] for name in record if name != rows}, indent=1).removesuffix("\n}")
    write_text(path, f'{head},\n "{rows}": [\n{lines}\n]\n}}\n')


def require_folder(path: Path) -> None:
    """Raise FileError if no file can be written to that path. Call it before a long task whose output goes there."""
    if path.is_dir():
        raise FileError(f"{path}: cannot be written: it is a folder")
    if not path.parent.is_dir():
        raise FileError(f"{path}: cannot be written: {path.parent} is no folder")
    if not os.access(path.parent, os.W_OK):
        raise FileError(f"{path}: cannot be written: {path.parent} is read-only")


@contextlib.contextmanager
def sole_writer(path: Path) -> Iterator[None]:
    """Lock `path`, a file or folder, so that one process writes it at a time: FileError for a second one.

    The lock is a file beside it, which is gone afterwards. Of a process that was killed the file stays, without effect.
    """
    if not path.name:
        raise FileError(f"{path}: cannot be written: not the name of a file")
    lock_path = path.with_name(f".{path.name}.lock")
    try:
        lock = _try_lock(lock_path)
        if lock is None:
            raise FileError(f"{path}: another process is writing it")
    except (OSError, NotImplementedError) as error:  # the latter of file systems without locks
        raise FileError(f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows removes no file that is open
            lock_path.unlink()
        lock.release()


def _try_lock(path: Path) -> filelock.BaseFileLock | None:
    """Lock the file at `path`, or return None where another process has it.

    A process that is done removes the file, perhaps after it was opened here: then the lock is of a file that nobody
    else would find. It counts only if the file at `path` stayed the same.
    """
    while True:
        with open(path, "a") as lock_file:
            lock = filelock.FileLock(path, timeout=0)
            try:
                lock.acquire()
            except filelock.Timeout:
                return None
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock_file.fileno()), os.stat(path)):
                    return lock
            lock.release()


def require_new(path: Path) -> None:
    """Raise FileError unless a file or folder can be made at that path, where nothing is yet."""
    if path.exists():
        raise FileError(f"{path}: is there already")
    require_folder(path)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a hidden folder beside `path` that becomes `path` when all went well, and is gone when not.

    Raises FileError where it cannot be made or renamed.
    """
    partial_path = path.with_name(f".{path.name}.new")
    shutil.rmtree(partial_path, ignore_errors=True)  # of a run that was killed
    try:
        partial_path.mkdir()
        yield partial_path
        os.replace(partial_path, path)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(partial_path, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file, UTF-8, whole or not at all."""
    write_whole(path, lambda file: file.write(text.encode()))


def write_whole(path: Path, write: Any) -> None:
    """Let `write(file)` fill a temporary file beside `path`, then rename it into place."""
    if not path.name:
        raise FileError(f"{path}: cannot be written: not the name of a file")
    unfinished_path = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(unfinished_path, "wb") as file:
            write(file)
        os.replace(unfinished_path, path)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):  # it has been renamed, or could not be made
            unfinished_path.unlink()
