"""Arrays in and out of `.npz` files: never unpickled, written whole or not at all."""

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ptxlab.errors import FileError

MAX_BYTES = 1 << 34  # an .npz that claims to hold more is refused before anything is allocated


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an `.npz`, by name; `FileError` if it is missing, damaged, too large, or holds objects."""
    try:
        with zipfile.ZipFile(path) as archive:
            claimed = sum(info.file_size for info in archive.infolist())
        if claimed > MAX_BYTES:
            raise FileError(f"{path}: at most {MAX_BYTES} bytes of arrays (got {claimed})")
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (zipfile.BadZipFile, ValueError, KeyError, EOFError) as error:
        raise FileError(f"{path}: not an .npz of plain arrays: {error}") from None
    if foreign := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
        raise FileError(f"{path}: not an .npz of plain arrays: {foreign[0]} is not an array")
    return {name: np.array(array, order="C") for name, array in arrays.items()}


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays as an `.npz`; the file appears under its name only when it is complete."""
    host = {name: array.get() if hasattr(array, "get") else np.asarray(array) for name, array in arrays.items()}
    savez: Any = np.savez  # its stub takes the arrays for flags
    write_whole(path, lambda file: savez(file, **host))


def write_whole(path: Path, write: Any) -> None:
    """Let `write(file)` fill a temporary file beside `path`, then rename it into place."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(unfinished, "wb") as file:
            write(file)
        os.replace(unfinished, path)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from None
    finally:
        unfinished.unlink(missing_ok=True)
