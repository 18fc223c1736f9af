"""Finds the kernels' sources: `ptx/` and `cuda_src/` in a checkout, `ptxlab/_sources/` in an installed wheel."""

import os
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from ptxlab.errors import ArgumentError, FileError

Language = Literal["ptx", "cu"]

_PACKAGE = Path(__file__).resolve().parent
_PTX_MARK = re.compile(r"^[ \t]*\.version\b", re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_CUDA_BOUNDS = re.compile(r"__(?:launch_bounds|cluster_dims|block_size|maxnreg)__\s*\([^()]*(?:\([^()]*\)[^()]*)*\)")
_CUDA_ENTRY = re.compile(r'(extern\s+"C"\s+)?(?:__global__\s+void|void\s+__global__)\s+(\w+)\s*\(([^)]*)\)')
_EXTERN_BLOCK = re.compile(r'extern\s+"C"\s*\{')
_PARAMETER = re.compile(r"(\w+)\s*(?:\[[^\]]*\]\s*)?(?:=.*)?$", re.DOTALL)


@dataclass(frozen=True)
class Build:
    """The options that compile a CUDA C++ source, besides its constants (`defines`) and the architecture.

    Attributes:
        include: further folders for `#include`, behind the source's own.
        std: the language, `c++17` ...
        instances: templates to instantiate, each with its arguments: `ns::add<float, 3>`.
        compiler: `nvrtc`, or `nvcc` for a source with host code that NVRTC cannot do without.
    """

    include: tuple[str, ...] = ()
    std: str = "c++17"
    instances: tuple[str, ...] = ()
    compiler: Literal["nvrtc", "nvcc"] = "nvrtc"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"(?:c|gnu)\+\+\d\w", self.std):
            raise ArgumentError("std", "a version of C++, such as c++17 or c++20", self.std)
        for folder in self.include:
            if not os.path.isdir(folder):
                raise ArgumentError("include", "a folder that exists", folder)


@dataclass(frozen=True)
class Source:
    """A PTX or CUDA C++ source.

    Attributes:
        name: the stem of the file, which is also the kernel's entry symbol for the project's own kernels.
        path: where it was read from, or a label such as `<cell>` for text that has no file.
        language: `"ptx"` or `"cu"`.
        text: the whole text.
        build: how a `.cu` is compiled.
    """

    name: str
    path: str
    language: Language
    text: str
    build: Build = Build()

    @classmethod
    def read(cls, path: str | Path) -> "Source":
        """Read a `.ptx` or `.cu` file; `FileError` if it is missing, unreadable or of another kind."""
        path = Path(path)
        if path.suffix not in (".ptx", ".cu"):
            raise ArgumentError("source", "a .ptx or .cu file", path)
        try:
            if path.exists() and not path.is_file():  # whoever opens a FIFO waits for a writer
                raise FileError(f"{path}: not a regular file")
            return cls(path.stem, str(path), path.suffix[1:], path.read_text(encoding="utf-8"))  # type: ignore[arg-type]
        except OSError as error:
            raise FileError(f"{path}: cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            position = f"byte {error.object[error.start]:#x} at {error.start}"
            raise FileError(f"{path}: not a text file in UTF-8 ({position})") from None

    @classmethod
    def from_text(cls, text: str, label: str = "<text>") -> "Source":
        """Wrap text that has no file; PTX is told from CUDA C++ by its `.version` directive."""
        return cls(label.strip("<>"), label, "ptx" if _PTX_MARK.search(text) else "cu", text)

    @property
    def label(self) -> str:
        """`name.ptx` or `name.cu`: how tests, records and messages name the source."""
        return f"{self.name}.{self.language}"

    def include_dirs(self) -> list[Path]:
        """Return the folders that `#include` searches: the file's own, those of `build`, then the project's headers."""
        source_folder = [Path(self.path).resolve().parent] if Path(self.path).is_file() else []
        return [*source_folder, *(Path(folder).resolve() for folder in self.build.include), include_dir()]


def split_target(target: str) -> tuple[str, str | None]:
    """Split `FILE.cu:ns::add<float, 3>` into the file and the kernel; None where no kernel is named."""
    path, _, entry = target.partition(":")
    return (path, entry or None) if Path(path).suffix in (".ptx", ".cu") else (target, None)


def names_same_file(recorded: str, path: str) -> bool:
    """Check whether a compiler's name of a file is that of `path`.

    It may have put the folder that it ran in before it. What was compiled may come from the cache, so that folder need
    not be the present one.
    """
    return recorded in (path, os.path.abspath(path)) or recorded.endswith(f"/{path}")


def cuda_entries(text: str, linkage: Literal["C", "C++"] = "C") -> dict[str, tuple[str, ...]]:
    """Find the `extern "C"` kernels of a CUDA C++ source, or all others, each with the names of its parameters."""
    text = _CUDA_BOUNDS.sub("", _COMMENT.sub("", text))
    entries = {}
    for match in _CUDA_ENTRY.finditer(text):
        if bool(match[1] or _EXTERN_BLOCK.search(text, 0, match.start())) == (linkage == "C"):
            parameters = re.split(r",(?![^<]*>)", match[3])  # but not at the commas of template arguments
            entries[match[2]] = tuple(name[1] for p in parameters if (name := _PARAMETER.search(p.strip())))
    return entries


def _root(folder: str) -> Path:
    for root in (_PACKAGE.parent, _PACKAGE / "_sources"):
        if (root / folder).is_dir():
            return root / folder
    raise FileError(f"{folder}/: not found beside the package nor inside it; reinstall ptxlab")


def ptx_dir() -> Path:
    """Return the folder of hand-written PTX: `ptx/<family>/<kernel>.ptx`.

    Teaching steps are in `ptx/<family>/steps/`.
    """
    return _root("ptx")


def cuda_dir() -> Path:
    """Return the folder of hand-written CUDA C++: `cuda_src/<family>/<kernel>.cu`.

    Teaching steps are in `<family>/steps/`.
    """
    return _root("cuda_src")


def include_dir() -> Path:
    """Return the folder of shared device functions: `cuda_src/include/*.cuh`."""
    return cuda_dir() / "include"


def in_checkout() -> bool:
    """Check whether the package stands in a checkout rather than in an installed wheel."""
    return (_PACKAGE.parent / "notebooks" / "results").is_dir()


def results_dir() -> Path:
    """Return the folder of recorded measurements: `notebooks/results` (`_sources/results` in a wheel)."""
    return _PACKAGE.parent / "notebooks" / "results" if in_checkout() else _root("results")


_FOLDERS: dict[str, Path] = {}  # of other packages' kernels, by family


def add_folder(folder: Path, family: str) -> None:
    """Add the sources of another package's kernels, `NAME.ptx` and `NAME.cu` in a folder, as a family.

    Raises FileError for a folder that is not there, ArgumentError for a name that another family has.
    """
    if not folder.is_dir():
        raise FileError(f"{folder}: the folder of the family {family} is not there")
    for path in folder.rglob("*"):
        if path.suffix in (".ptx", ".cu") and path.stem in _paths() and family_of(path.stem) != family:
            raise ArgumentError("kernel", f"a name that no kernel of {family_of(path.stem)} has", path.stem)
    _FOLDERS[family] = folder
    _paths.cache_clear()


@cache
def _paths() -> dict[str, tuple[Path, ...]]:
    """Map each kernel name to its sources.

    The `.ptx` comes first: it is what a bare name means.
    """
    paths_by_name: dict[str, list[Path]] = {}
    for language, folder in (("ptx", ptx_dir()), ("cu", cuda_dir())):
        for path in sorted(path for root in (folder, *_FOLDERS.values()) for path in root.rglob(f"*.{language}")):
            paths_by_name.setdefault(path.stem, []).append(path)
    return {name: tuple(paths) for name, paths in sorted(paths_by_name.items())}


def names() -> list[str]:
    """List the names of all kernels that have a source, sorted."""
    return list(_paths())


def family_of(name: str) -> str:
    """Return the family of one of the project's kernels: the first folder of its sources.

    The folder lies below `ptx/` or `cuda_src/`.
    """
    path = _paths()[name][0]
    for family, folder in _FOLDERS.items():
        if path.is_relative_to(folder):
            return family
    return path.relative_to(ptx_dir() if path.suffix == ".ptx" else cuda_dir()).parts[0]


def sources_of_kernel(name: str) -> tuple[Source, ...]:
    """Read all sources of a kernel, the `.ptx` before the `.cu`; return none for an unknown name."""
    return tuple(Source.read(path) for path in _paths().get(name, ()))


def commit() -> str:
    """Return the commit of the sources.

    It is `$PTXLAB_COMMIT`, for copies with another history; else the checkout's, with `+` if files differ from it.
    """
    if from_environment := os.environ.get("PTXLAB_COMMIT"):
        return from_environment

    def git(*arguments: str) -> str:
        process = subprocess.run(
            ["git", "-C", str(_PACKAGE.parent), *arguments], capture_output=True, text=True, check=True
        )
        return process.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
