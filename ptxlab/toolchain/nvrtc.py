"""NVRTC through cuda.bindings: CUDA C++ in, cubin or PTX out, and errors that show the line they are about.

By hand: cuda-core's `Program` takes neither headers from memory nor options of the front end (decision 0034).
"""

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ptxlab.declarations import declarations, remove_host_declarations
from ptxlab.errors import ArgumentError, CompileError, UnavailableError
from ptxlab.sources import Source, names_same_file
from ptxlab.toolchain import headers
from ptxlab.toolchain.macros import require_finite
from ptxlab.toolchain.pytorch import lacks_headers

INSTALL = "python -m pip install 'ptxlab[asm]'"
PTXAS_ERROR = re.compile(r"^ptxas .*?(?:, line (\d+); )?(?:error|fatal) *: *(.*)$", re.MULTILINE)

_ERROR = re.compile(r"^(.+?)\((\d+)\): (?:catastrophic )?error(?: #[^:]*)?: (.*)$", re.MULTILINE)
_PLACED = re.compile(
    r"^(?P<path>.+?)\((?P<line>\d+)\): (?:catastrophic )?error(?: #[^:]*)?: (?P<problem>.*)\n.*\n(?P<before> *)\^",
    re.MULTILINE,
)
_HOST_CODE = re.compile(
    r"considered a host (?:function|variable)|marked as a __host__ function|device-side kernel launch could not"
    r"|inferred to be __host__"
)
_HOST_LIBRARY = re.compile(r'qualified name is not allowed|namespace "std" has no member')
_INSTANCE_ERROR = re.compile(
    r"^(__nv_name_map)\(\d+\): error(?: #[^:]*)?: (.*)\n\s*#pragma nv_mangled_name (.*)$", re.MULTILINE
)
SYMBOL_NOTE = "symbol of "
_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.MULTILINE)


def version() -> str | None:
    """Return NVRTC's version, `"13.2"`, or `None` if it is not installed."""
    try:
        return "{}.{}".format(*_call(_library().nvrtcVersion))
    except UnavailableError:
        return None


def run(source: Source, output: Literal["cubin", "ptx"], options: Sequence[str]) -> tuple[bytes, str]:
    """Compile; returns what was asked for, and the log, which names the symbol of each instance (`SYMBOL_NOTE`).

    Raises:
        CompileError: the source is wrong.
        ArgumentError: NVRTC does not know the architecture, which has to be the first option, or an instance is none.
        UnavailableError: NVRTC is not installed.
    """
    nvrtc = _library()
    require_finite(source)
    with _compilation(source, options, source.build.instances) as (program, status, log):
        if status == nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION:
            if "--std" in log:
                raise ArgumentError("std", f"a version of C++ that NVRTC {version()} knows", source.build.std)
            raise ArgumentError("arch", f"an architecture that NVRTC {version()} knows", options[0])
        if int(status):
            if refused_instance := _INSTANCE_ERROR.search(log):
                instance = " ".join(refused_instance[3].split())
                raise ArgumentError(f"{source.path}: entry", f"a kernel of this file ({refused_instance[2]})", instance)
            raise _error(source, log, ptx=_text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program))
        for instance in source.build.instances:
            symbol = _call(nvrtc.nvrtcGetLoweredName, program, instance.encode()).decode()
            log += f"{SYMBOL_NOTE}{instance}: {symbol}\n"
        if output == "ptx":
            return _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program).encode(), log
        return _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log


def run_front_end(source: Source, action: str, options: Sequence[str]) -> bytes:
    """Run only the front end on a source; return its text (`--preprocess`), or what it read (`--dependencies`).

    NVRTC reports a failure even where there is none, since no code comes out: a source that is wrong is for `run` to
    refuse. Empty if this NVRTC has no such action; it is not documented.
    """
    require_finite(source)
    with tempfile.TemporaryDirectory() as folder:
        output_path = Path(folder) / "made"
        front_end_options = [text for option in (action, "--output", str(output_path)) for text in ("-Xcudafe", option)]
        with _compilation(source, [*options, *front_end_options], is_whole=False):
            return output_path.read_bytes() if output_path.is_file() else b""


@contextmanager
def _compilation(
    source: Source, options: Sequence[str], instances: Sequence[str] = (), *, is_whole: bool = True
) -> Iterator[tuple[Any, Any, str]]:
    """Yield the program, compiled or not, NVRTC's result and its log.

    What it turns out to lack is added and it is compiled anew: standard headers; and unless the front end works alone
    (not `is_whole`) what nvcc includes beforehand. Host functions, which NVRTC refuses, are left out; kernels may call
    those that are `constexpr`.
    """
    nvrtc = _library()
    defines = tuple(option for option in options if option.startswith("-D"))
    key = source.text, source.path, source.build, is_whole, defines
    additions = _known_additions.get(key, _Additions(source.text))
    while True:
        provided = {
            **(headers.BY_NAME if additions.standard else {}),
            **{h: headers.BEFOREHAND[h] for h in additions.beforehand},
        }
        texts, names = ([header_text.encode() for header_text in strings] for strings in (provided.values(), provided))
        arguments = additions.text.encode(), source.path.encode(), len(names), texts or None, names or None
        program = _call(nvrtc.nvrtcCreateProgram, *arguments)
        try:
            for instance in instances:
                _call(nvrtc.nvrtcAddNameExpression, program, instance.encode())
            all_options = [*options, *(f"--pre-include={header}" for header in additions.beforehand)]
            encoded_options = [option.encode() for option in all_options]
            (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded_options), encoded_options)
            log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            tried_additions = additions
            if not additions.standard and headers.lacks_standard_header(log):
                additions = replace(additions, standard=True)
            elif int(status) and is_whole:
                needed_headers = headers.missing_beforehand(log).union(additions.beforehand)
                headers_ahead = tuple(header for header in headers.BEFOREHAND if header in needed_headers)
                additions = _Additions(
                    _without_host_code(source, additions.text, log),
                    additions.standard or bool(needed_headers),
                    headers_ahead,
                )
            if additions == tried_additions:
                yield program, status, log
                return
            _known_additions[key] = additions
        finally:
            nvrtc.nvrtcDestroyProgram(program)


@dataclass(frozen=True)
class _Additions:
    """Changes to what is compiled: text without host functions, standard headers, what nvcc includes first."""

    text: str
    standard: bool = False
    beforehand: tuple[str, ...] = ()


_known_additions: dict[tuple[Any, ...], _Additions] = {}  # so that it is found out once in a process


def _without_host_code(source: Source, text: str, log: str) -> str:
    """Remove the host functions and variables that the log is about."""
    host: list[tuple[int, int]] = []
    wrong_spans: list[tuple[int, int]] = []
    for match in _PLACED.finditer(log):
        if match["path"] == source.path:
            places = host if _HOST_CODE.search(match["problem"]) else wrong_spans
            places.append((int(match["line"]), len(match["before"]) - 1))  # NVRTC indents what it quotes by two
    return remove_host_declarations(text, host, wrong_spans)


def is_about_host_code(problem: str) -> bool:
    """Return whether NVRTC refused a function for the host, or a name of the host's library."""
    return bool(_HOST_CODE.search(problem) or _HOST_LIBRARY.search(problem))


def excerpt(source: Source, line: int, path: str = "") -> str:
    """Return that line (from 1) of the source, or of the header at `path`; empty if there is none."""
    is_in_header = path not in ("", source.path) and Path(path).is_file()
    text = Path(path).read_text(encoding="utf-8", errors="replace") if is_in_header else source.text
    lines = text.splitlines()
    return lines[line - 1].strip() if 0 < line <= len(lines) else ""


def with_hint(problem: str, log: str) -> str:
    """Add how to name a folder of headers to the message that one of the user's own is missing."""
    is_missing = "cannot open source file" in problem or problem.endswith("No such file or directory")
    return (
        f"{problem}; -I FOLDER, in Python include=, adds a folder" if is_missing and not lacks_headers(log) else problem
    )


def origin_of(source: Source, ptx: str, line: int) -> tuple[str, int]:
    """Return (path, line) of the source or of a header that a line of NVRTC's PTX comes from; line 0 if unknown."""
    locations = [loc for text in ptx.splitlines()[:line] if (loc := _LOC.match(text))]
    if not locations:
        return source.path, 0
    file, origin = locations[-1].groups()
    path = dict(_FILE.findall(ptx)).get(file, source.path)
    return source.path if names_same_file(path, source.path) else path, int(origin)


def _library() -> Any:
    """Import the module `cuda.bindings.nvrtc`; its library is loaded by its first call."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError):
        raise UnavailableError(f"NVRTC: needed to compile CUDA C++ and not found; {INSTALL}") from None
    return nvrtc


def _call(function: Callable[..., Any], *args: object) -> Any:
    """Call an NVRTC function; raise RuntimeError if it fails, which only a bug here can cause."""
    status, *values = function(*args)
    if int(status):
        raise RuntimeError(f"{function.__name__}: {status}")
    return values[0] if len(values) == 1 else values


def _read(size: Callable[..., Any], get: Callable[..., Any], program: Any) -> bytes:
    buffer = bytearray(_call(size, program))
    _call(get, program, buffer)
    return bytes(buffer)


def _text(size: Callable[..., Any], get: Callable[..., Any], program: Any) -> str:
    return _read(size, get, program).decode(errors="replace").rstrip("\0").strip() + "\n"


def _error(source: Source, log: str, ptx: str) -> CompileError:
    """Return the first error, in the source or in a header.

    For bad inline assembly it is at the statement that emitted it.
    """
    match = _ERROR.search(log)
    if match:
        path, line, problem = match[1], int(match[2]), match[3]
        undefined_match = re.match(r'identifier "(\w+)" is undefined', problem)
        if undefined_match and _is_of_host(source, undefined_match[1]):
            problem = f"{undefined_match[1]} is declared for the host: write __device__ before it"
        problem = with_hint(problem, log)
        return CompileError(path, line, problem, excerpt(source, line, path), log)
    match = PTXAS_ERROR.search(log)
    if not match or not match[1]:
        return CompileError(source.path, 0, match[2] if match else log.partition("\n")[0], log=log)
    line = int(match[1])
    path, origin = origin_of(source, ptx, line)
    return CompileError(path, origin, match[2], ptx.splitlines()[line - 1].strip(), log)


def _is_of_host(source: Source, name: str) -> bool:
    """Return whether a source declares a function or variable of that name, but not for the device."""
    same_declarations = [
        declaration
        for declaration in declarations(source.text)
        if re.search(rf"\b{name}\s*(?:[(=\[]|$)", declaration.head)
    ]
    return any(not declaration.is_of_device for declaration in same_declarations)
