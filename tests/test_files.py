import zipfile
from pathlib import Path

import numpy as np
import pytest

from ptxlab.errors import FileError
from ptxlab.files import load_arrays, save_arrays, write_whole


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


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"gone\.npz: cannot be read: No such file"):
        load_arrays(tmp_path / "gone.npz")


def test_a_file_that_claims_too_much_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "a.npz", a=np.zeros(1000))
    monkeypatch.setattr("ptxlab.files.MAX_BYTES", 4096)
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
