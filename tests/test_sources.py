"""Sources: what can be read as one, and what cannot."""

import os
from pathlib import Path

import pytest

from ptxlab.errors import FileError
from ptxlab.sources import Source


@pytest.mark.timeout(20)
@pytest.mark.parametrize("suffix", [".cu", ".ptx"])
@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_only_regular_files_are_read(tmp_path: Path, suffix: str, put: object) -> None:
    """Opening a FIFO waits for a writer; /dev/zero never ends."""
    path = tmp_path / f"k{suffix}"
    put(path)  # type: ignore[operator]
    with pytest.raises(FileError, match=rf"k\{suffix}: not a regular file$"):
        Source.read(path)


def test_text_is_utf8(tmp_path: Path) -> None:
    path = tmp_path / "k.cu"
    path.write_bytes("// größer\n".encode("latin-1"))
    with pytest.raises(FileError, match=r"k\.cu: not a text file in UTF-8 \(byte 0xf6 at 5\)$"):
        Source.read(path)
