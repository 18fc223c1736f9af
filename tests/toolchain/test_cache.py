"""The disk cache: one maker, whole entries only, damage is noticed, an unusable folder is one line."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ptxlab.errors import FileError
from ptxlab.toolchain import cache

KEY = cache.key_of("a key")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def entries(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock")


def fail_to_make() -> bytes:
    raise AssertionError("made again")


def test_is_made_once_and_found_again(folder: Path) -> None:
    path = cache.get_or_make(KEY, ".bin", lambda: b"content")
    assert path.read_bytes() == b"content"
    assert cache.get_or_make(KEY, ".bin", fail_to_make) == path
    assert entries(folder) == [path.name]


def test_keys_and_suffixes_are_apart() -> None:
    first = cache.get_or_make(KEY, ".bin", lambda: b"1")
    assert cache.get_or_make(KEY, ".log", lambda: b"2").read_bytes() == b"2"
    assert cache.get_or_make(cache.key_of("another"), ".bin", lambda: b"3").read_bytes() == b"3"
    assert first.read_bytes() == b"1"


@pytest.mark.full
def test_much_that_was_made_before_is_not_looked_through() -> None:
    path = cache.get_or_make(KEY, ".bin", lambda: b"content")
    for key in range(300):
        cache.get_or_make(cache.key_of(key), ".bin", lambda: b"content")
    assert len(list(path.parent.iterdir())) < 20
    assert cache.get_or_make(KEY, ".bin", fail_to_make) == path


def test_key_depends_on_where_parts_end() -> None:
    assert cache.key_of("ab", "c") != cache.key_of("a", "bc")


@pytest.mark.parametrize("damage", [b"", b"conten", b"c0ntent", b"content and more"])
def test_damaged_entry_is_made_again(folder: Path, damage: bytes) -> None:
    path = cache.get_or_make(KEY, ".bin", lambda: b"content")
    path.write_bytes(damage)
    assert cache.get_or_make(KEY, ".bin", lambda: b"content") == path
    assert path.read_bytes() == b"content"
    assert entries(folder) == [path.name]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_is_no_entry(folder: Path, put: Callable[[Path], None]) -> None:
    """Reading a FIFO waits for somebody who writes; reading a device may never end."""
    path = cache.get_or_make(KEY, ".bin", lambda: b"content")
    path.unlink()
    put(path)
    put(path.with_name(f"{KEY}.bin.tmp"))
    assert cache.get_or_make(KEY, ".bin", lambda: b"content") == path
    assert path.read_bytes() == b"content" and path.is_file()
    assert entries(folder) == [path.name]


def test_failing_maker_leaves_nothing(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        cache.get_or_make(KEY, ".bin", lambda: bytes(1 // 0))
    assert entries(folder) == []
    assert cache.get_or_make(KEY, ".bin", lambda: b"content").read_bytes() == b"content"


@pytest.mark.full
def test_what_a_killed_process_left_is_no_entry(folder: Path) -> None:
    """Killed while writing, it leaves the unfinished file; the lock dies with the process."""
    killed = (
        "import os, pathlib; from ptxlab.toolchain import cache\n"
        "pathlib.Path.write_bytes = lambda self, content: (open(self, 'wb').write(content[:3]), os._exit(9))\n"
        f"cache.get_or_make({KEY!r}, '.bin', lambda: b'content')"
    )
    assert subprocess.run([sys.executable, "-c", killed]).returncode == 9
    assert entries(folder) == [f"{KEY}.bin.tmp"]
    path = cache.get_or_make(KEY, ".bin", lambda: b"content")
    assert path.read_bytes() == b"content"
    assert entries(folder) == [path.name]


@pytest.mark.full
def test_two_processes_make_it_once(folder: Path, tmp_path: Path) -> None:
    maker = (
        "import sys, time; from ptxlab.toolchain import cache\n"
        "def make():\n"
        "    open(sys.argv[1], 'a').write('made\\n'); time.sleep(0.5); return b'content'\n"
        f"print(cache.get_or_make({KEY!r}, '.bin', make))"
    )
    command = [sys.executable, "-c", maker, str(tmp_path / "calls")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate()[0] for process in running}
    assert len(paths) == 1
    assert (tmp_path / "calls").read_text() == "made\n"


def test_no_space_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, content: bytes) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(FileError, match=r"PTXLAB_CACHE_DIR.*cache: No space left on device") as raised:
            cache.get_or_make(KEY, ".bin", lambda: b"content")
    assert "\n" not in str(raised.value)
    assert entries(folder) == []


def test_rename_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(FileError, match="Permission denied"):
        cache.get_or_make(KEY, ".bin", lambda: b"content")
    assert entries(folder) == []


def test_folder_is_a_file(folder: Path) -> None:
    folder.write_text("in the way")
    with pytest.raises(FileError, match=r"PTXLAB_CACHE_DIR: must name a folder that can be written to \(got .*cache: "):
        cache.get_or_make(KEY, ".bin", lambda: b"content")


def test_read_only_folder_still_serves_what_it_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cache.get_or_make(KEY, ".bin", lambda: b"content")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert cache.get_or_make(KEY, ".bin", fail_to_make) == path
    with pytest.raises(FileError, match="Read-only file system"):
        cache.get_or_make(cache.key_of("another"), ".bin", lambda: b"content")
