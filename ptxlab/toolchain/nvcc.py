"""nvcc, for CUDA C++ whose host code NVRTC cannot do without. It needs a C++ compiler of the host."""

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ptxlab.declarations import LINE_MARKER
from ptxlab.errors import ArgumentError, CompileError, UnavailableError
from ptxlab.sources import Source
from ptxlab.toolchain.nvrtc import INSTALL, excerpt, with_hint

_ERROR = re.compile(
    r"^(.+?)(?:\((\d+)\)|:(\d+)(?::\d+)?): (?:fatal |catastrophic )?error(?: #[^:]*)?: (.*)$", re.MULTILINE
)
_INSTANCE = "ptxlab_instance"
_preprocessed: tuple[tuple[object, ...], str, dict[str, tuple[int, int] | None]] | None = None
_RELAXED = "--expt-relaxed-constexpr"  # as PyTorch compiles extensions: kernels may call constexpr functions


def require_host_compiler() -> None:
    """Raise UnavailableError if there is no C++ compiler that nvcc could ask about host code."""
    compiler_name = os.environ.get("NVCC_CCBIN", "g++" if os.name == "posix" else "cl")
    if shutil.which(compiler_name) is None:
        raise UnavailableError(f"nvcc: needs a C++ compiler of the host, and {compiler_name} is not on the PATH")


def run(
    nvcc: str | None, source: Source, output: Literal["cubin", "ptx", "text"], options: Sequence[str]
) -> tuple[bytes, str]:
    """Compile, or preprocess for `text`; returns what was asked for, and the log.

    Raises:
        CompileError: the source is wrong.
        UnavailableError: nvcc or a compiler of the host is missing.
    """
    if nvcc is None:
        raise UnavailableError(f"nvcc: not found in the Python environment, CUDA_HOME or PATH; {INSTALL}")
    require_host_compiler()
    with tempfile.TemporaryDirectory() as folder:
        copy, output_file = Path(folder) / "in.cu", Path(folder) / "made"
        # The copy goes by the name of the source: messages, line numbers and `__FILE__` are the source's.
        path = os.path.abspath(source.path) if os.path.isfile(source.path) else source.path
        instances = "".join(
            f"\nstatic void *volatile {_INSTANCE}{i} = reinterpret_cast<void *>(&{name});"
            for i, name in enumerate(source.build.instances)
        )
        marker = path.replace("\\", "\\\\").replace('"', '\\"')
        copy.write_text(f'#line 1 "{marker}"\n{source.text}{instances}\n', encoding="utf-8")
        action = {"ptx": "-ptx", "cubin": "-cubin", "text": "-E"}[output]
        process = subprocess.run(
            [nvcc, action, _RELAXED, *options, copy, "-o", output_file],
            capture_output=True,
            text=True,
            errors="replace",
        )
        log = process.stdout + process.stderr
        if process.returncode:
            raise _error(source, path, log)
        text = output_file.read_bytes()
        return text.replace(str(copy).encode(), path.encode()) if output != "cubin" else text, log


def preprocess(nvcc: str | None, source: Source, options: Sequence[str]) -> str:
    """Preprocess a source; the last text is kept while the files that it came from stay as they are.

    Raises as `run` does.
    """
    global _preprocessed
    key = (nvcc, source, os.getcwd(), *options)
    if _preprocessed and _preprocessed[0] == key and _file_stamps(_preprocessed[1]) == _preprocessed[2]:
        return _preprocessed[1]
    start_ns = time.time_ns()
    text = run(nvcc, source, "text", options)[0].decode("latin-1")
    stamps = _file_stamps(text)
    if all(stamp and stamp[0] < start_ns for stamp in stamps.values()):  # else one may have changed meanwhile
        _preprocessed = key, text, stamps
    return text


def _file_stamps(preprocessed: str) -> dict[str, tuple[int, int] | None]:
    """Return time of change and size of each file that a preprocessed text names; None for one that is not there."""
    stamps: dict[str, tuple[int, int] | None] = {}
    for path in dict.fromkeys(marker[1] for marker in LINE_MARKER.finditer(preprocessed)):
        if path.startswith("<"):  # <built-in>, or the label of a text without a file
            continue
        try:
            status = os.stat(path)
            stamps[path] = status.st_mtime_ns, status.st_size
        except OSError:
            stamps[path] = None
    return stamps


def _error(source: Source, path: str, log: str) -> CompileError | ArgumentError:
    match = _ERROR.search(log)
    if not match:
        return CompileError(source.path, 0, next(iter(log.splitlines()), "nvcc failed"), log=log)
    line, problem = int(match[2] or match[3]), match[4]
    if line > len(source.text.splitlines()) and _INSTANCE in log:
        return ArgumentError(
            f"{source.path}: entry", f"a kernel of this file ({problem})", ", ".join(source.build.instances)
        )
    path_in_message = source.path if match[1] in (path, source.path) else match[1]
    problem = with_hint(problem, log)
    return CompileError(path_in_message, line, problem, excerpt(source, line, path_in_message), log)
