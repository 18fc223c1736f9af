import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import pytest

from ptxlab.errors import FileError
from ptxlab.io.files import (
    load_arrays,
    read_json,
    read_record,
    require_new,
    save_arrays,
    sole_writer,
    write_record,
    write_whole,
)


@pytest.mark.smoke
def test_round_trip(tmp_path: Path) -> None:
    arrays = {"q": np.arange(6, dtype=np.uint32).reshape(2, 3), "n": np.array(7, np.int32)}
    save_arrays(tmp_path / "a.npz", arrays)
    loaded = load_arrays(tmp_path / "a.npz")
    assert set(loaded) == {"q", "n"}
    assert np.array_equal(loaded["q"], arrays["q"]) and loaded["q"].flags.c_contiguous
    assert loaded["n"].shape == () and loaded["n"] == 7


def test_a_pickled_object_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", evil=np.array([{"a": 1}], dtype=object))
    with pytest.raises(FileError, match=r"not an \.npz of plain arrays"):
        load_arrays(tmp_path / "a.npz")


@pytest.mark.parametrize("content", (b"", b"not a zip file", b"PK\x03\x04 truncated"))
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(FileError, match=r"a\.npz: not an \.npz"):
        load_arrays(tmp_path / "a.npz")


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_regular_file_is_refused_unopened(tmp_path: Path, put: Callable[[Path], None]) -> None:
    """Opening a FIFO waits for a writer."""
    put(tmp_path / "a.npz")
    with pytest.raises(FileError, match=r"a\.npz: not a regular file"):
        load_arrays(tmp_path / "a.npz")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"gone\.npz: cannot be read: No such file"):
        load_arrays(tmp_path / "gone.npz")


def test_a_file_that_claims_too_much_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "a.npz", a=np.zeros(1000))
    monkeypatch.setattr("ptxlab.io.files.MAX_BYTES", 4096)
    with pytest.raises(FileError, match="at most 4096 bytes of arrays"):
        load_arrays(tmp_path / "a.npz")


def test_a_foreign_member_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", "not an array")
    with pytest.raises(FileError):
        load_arrays(tmp_path / "a.npz")


def test_nothing_is_left_behind_when_writing_fails(tmp_path: Path) -> None:
    target = tmp_path / "out.npz"
    target.write_bytes(b"before")

    def fail_half_way(file: "object") -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise OSError(28, "No space left on device")

    with pytest.raises(FileError, match=r"out\.npz: cannot be written: No space left on device"):
        write_whole(target, fail_half_way)
    assert target.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["out.npz"]


def npz_with(path: Path, member: bytes, **options: Any) -> Path:
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr("a.npy", member)
    return path


@pytest.mark.parametrize("shape", [(10**13,), (10**6, 10**12), (2 * 10**9,), (-1,), (3,)])
def test_a_header_that_claims_another_size_is_refused_before_anything_is_allocated(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<u4", "fortran_order": False, "shape": shape})
    path = npz_with(tmp_path / "a.npz", header.getvalue() + bytes(64))
    with pytest.raises(FileError, match=r"not an \.npz of plain arrays: a\.npy claims -?\d+ bytes and holds 64"):
        load_arrays(path)


def test_damaged_compressed_content_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", a=np.arange(1000))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    start = content.find(b"a.npy") + 30
    content[start : start + 20] = bytes(byte ^ 0xFF for byte in content[start : start + 20])
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(FileError, match=r"a\.npz: not an \.npz of plain arrays"):
        load_arrays(tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["", "/", "in.npz/out.npz", "a" * 300])
def test_a_name_that_cannot_be_written_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.npz").touch()
    with pytest.raises(FileError, match="cannot be written"):
        save_arrays(Path(name), {"a": np.zeros(1)})
    assert [p.name for p in tmp_path.iterdir()] == ["in.npz"]


@pytest.mark.parametrize(("descr", "shape"), [("|S0", (2**60,)), ("|V0", (2**60,)), ("<U0", (2**62,)),
                                              ("<f4", (0, 2**62)), ("<f4", (0, 2**70))])  # fmt: skip
def test_a_header_that_claims_more_than_any_memory_is_refused(tmp_path: Path, descr: str, shape: tuple) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": shape})
    with pytest.raises(FileError, match=r"not an \.npz of plain arrays: "):
        load_arrays(npz_with(tmp_path / "a.npz", header.getvalue()))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_what_is_not_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(FileError, match=r"a\.json: not JSON: "):
        read_json(tmp_path / "a.json")


def test_json_beyond_memory_is_refused(tmp_path: Path) -> None:
    """The size decides, which a file without content has too."""
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(FileError, match=r"a\.json: at most 268435456 bytes of JSON \(got 1099511627776\)$"):
        read_json(tmp_path / "a.json")


def test_a_record_has_a_line_per_row(tmp_path: Path) -> None:
    record = {"schema": 1, "rows": [{"us": 0.1 + 0.2, "sizes": {"M": 4}}, {"us": 1e-9}], "date": "ä"}
    write_record(tmp_path / "r.json", record, "rows")
    lines = (tmp_path / "r.json").read_text(encoding="utf-8").splitlines()
    assert lines[-5:] == [' "rows": [', '{"us":0.30000000000000004,"sizes":{"M":4}},', '{"us":1e-09}', "]", "}"]
    assert read_record(tmp_path / "r.json", "a record", 1) == record
    write_record(tmp_path / "r.json", record | {"rows": []}, "rows")
    assert json.loads((tmp_path / "r.json").read_bytes())["rows"] == []


HOLD = """
import sys, time
from pathlib import Path
from ptxlab.io.files import sole_writer
with sole_writer(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
CONTEND = """
import os, sys
from pathlib import Path
from ptxlab.errors import FileError
from ptxlab.io.files import sole_writer
path, entered, refused = Path(sys.argv[1]), 0, 0
while entered < 100:
    try:
        with sole_writer(path):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))  # fails where another process is in here
            os.unlink(path)
            entered += 1
    except FileError:
        refused += 1
print(refused)
"""


def run(program: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)


def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    """A killed writer counts as gone, though its lock file stays."""
    out = tmp_path / "out"
    with run(HOLD, out) as first:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        with pytest.raises(FileError, match="out: another process is writing it"), sole_writer(out):
            pass
        with sole_writer(tmp_path / "other"):
            pass
        first.kill()
    assert [path.name for path in tmp_path.iterdir()] == [".out.lock"]
    with sole_writer(out):
        pass
    with pytest.raises(ZeroDivisionError), sole_writer(out):
        _ = 1 / 0
    assert not [*tmp_path.iterdir()]


@pytest.mark.full
def test_writers_that_come_and_go_never_meet(tmp_path: Path) -> None:
    """Let writers remove their lock files while others open them."""
    writers = [run(CONTEND, tmp_path / "out") for _ in range(3)]
    refused = [int(writer.communicate()[0]) for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0, 0] and sum(refused) and not [*tmp_path.iterdir()]


def test_a_lock_counts_only_while_its_file_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may be done, and remove the file, after it was opened here: the next would make a new one."""
    acquire, removed = filelock.FileLock.acquire, []

    def acquire_late(lock: filelock.FileLock) -> Any:
        proxy = acquire(lock)
        if not removed:
            removed.append(lock.lock_file)
            os.unlink(lock.lock_file)
        return proxy

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire_late)
    with sole_writer(tmp_path / "out"):
        assert removed and (tmp_path / ".out.lock").exists()


def test_what_cannot_be_locked(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none" / "out", "No such file"), (Path("/"), "not the name of a file")):
        with pytest.raises(FileError, match=f"cannot be written: {message}"), sole_writer(path):
            pass
    with pytest.raises(FileError, match="is there already"):
        require_new(tmp_path)
