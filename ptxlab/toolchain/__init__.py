"""Compilers and disassembler: NVRTC for CUDA C++, nvcc where host code needs it, ptxas for PTX, nvdisasm for cubins.

None of them needs a GPU. NVRTC hands its cubins to the same assembler that `ptxas` is, and both print the same report,
so one parser reads the registers, spills and warnings of either. What they make is cached on disk
(`ptxlab.toolchain.cache`).
"""

import functools
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ptxlab.errors import ArgumentError, CompileError, UnavailableError
from ptxlab.sources import Language, Source
from ptxlab.toolchain import cache, includes, nvcc, nvrtc

Defines = Mapping[str, int | str]
Kind = Literal["ptx", "cubin"]

NO_DEFINES: Defines = MappingProxyType({})
TOOLS = ("nvrtc", "ptxas", "nvdisasm")

_ARCH = re.compile(r"sm_\d{2,3}[af]?")
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")


@dataclass(frozen=True)
class Resources:
    """Resources of one entry, as the assembler reports them: registers per thread and bytes.

    Bytes are per thread, `shared` is per block.
    """

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int


@dataclass(frozen=True)
class Image:
    """A compiled source.

    Attributes:
        kind: `"cubin"` (machine code) or `"ptx"`.
        arch: `sm_90a` ...
        language: of the source, which decides whose lines a disassembly can name.
        path: the file in the cache; its name changes with its content.
        tool: compiler and version.
        log: everything the compiler printed.
    """

    kind: Kind
    arch: str
    language: Language
    path: Path
    tool: str
    log: str

    @property
    def data(self) -> bytes:
        """The bytes of the cubin, or of the PTX text."""
        return self.path.read_bytes()

    @cached_property
    def resources(self) -> dict[str, Resources]:
        """Resources by entry; empty for PTX."""
        names_and_reports = _ENTRY.split(self.log)[1:]
        pairs = zip(names_and_reports[::2], names_and_reports[1::2], strict=True)
        return {name: _resources(report) for name, report in pairs}

    @cached_property
    def symbols(self) -> dict[str, str]:
        """Symbols of the instances that NVRTC was asked for (`Build.instances`)."""
        noted_symbols = re.findall(rf"^{nvrtc.SYMBOL_NOTE}(.*): (\w+)$", self.log, re.MULTILINE)
        return dict(noted_symbols)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Warnings, and the assembler's notes with a number, such as C7510 (wgmma serialised)."""
        return tuple(line for line in self.log.splitlines() if re.search(r"\bwarning\b|\(C\d{4}\)", line))


def compile_cuda(source: Source, arch: str, *, output: Kind = "cubin", defines: Defines = NO_DEFINES) -> Image:
    """Compile CUDA C++ with NVRTC, or with nvcc where the source's `build` says so.

    Args:
        source: a source whose language is `"cu"`.
        arch: `sm_90a` ...; PTX is made for the virtual architecture of the same number.
        output: `"cubin"` or `"ptx"`.
        defines: macros, `{"STAGES": 4}` for `-DSTAGES=4`.

    Raises:
        CompileError: with file, line, the line itself and the log.
        UnavailableError: NVRTC is not installed.
    """
    options = _cuda_options(source, arch, output, defines)
    digest_before = cuda_digest(source, arch, output=output, defines=defines)
    if source.build.compiler == "nvcc":
        run_nvcc = functools.partial(nvcc.run, find("nvcc"), source, output, options)
        return _image(source, digest_before, arch, output, f"nvcc {version('nvcc')}", options, run_nvcc)

    def run() -> tuple[bytes, str]:
        compiled = nvrtc.run(source, output, options)
        if includes.digest(source, options) not in (digest_before, None):
            raise CompileError(source.path, 0, "a header changed while it was being compiled")
        return compiled

    options_and_instances = [*options, *source.build.instances]
    return _image(source, digest_before, arch, output, f"nvrtc {version('nvrtc')}", options_and_instances, run)


def cuda_digest(source: Source, arch: str, *, output: Kind = "cubin", defines: Defines = NO_DEFINES) -> str:
    """Digest what the compiler reads of a source; each time anew where the compiler does not tell what it reads."""
    if source.build.compiler == "nvcc":
        return cache.key_of(nvcc.preprocess(find("nvcc"), source, _cuda_options(source, arch, output, defines)))
    return includes.digest(source, _cuda_options(source, arch, output, defines)) or secrets.token_hex()


def _cuda_options(source: Source, arch: str, output: Kind, defines: Defines) -> list[str]:
    for name in defines:
        if not name.isidentifier():
            raise ArgumentError("defines", "names of macros", name)
    if source.build.compiler == "nvcc":
        return [
            f"-arch={check_arch(arch)}",
            f"-std={source.build.std}",
            "-lineinfo",
            *(f"-D{name}={macro}" for name, macro in defines.items()),
            *(f"-I{folder}" for folder in source.include_dirs()),
            *(["-Xptxas=-v"] if output == "cubin" else []),
        ]
    return [
        f"-arch={check_arch(arch) if output == 'cubin' else check_arch(arch).replace('sm_', 'compute_')}",
        f"-std={source.build.std}",
        "-lineinfo",
        *(f"-D{name}={macro}" for name, macro in defines.items()),
        *(f"-I{folder}" for folder in [*source.include_dirs(), *cuda_headers()]),
        *(["--ptxas-options=-v"] if output == "cubin" else []),
    ]


def front_end_text(source: Source, arch: str, defines: Defines = NO_DEFINES) -> str:
    """Preprocess a source for an architecture; empty if the NVRTC that is here cannot preprocess alone."""
    options = _cuda_options(source, arch, "ptx", defines)
    if source.build.compiler == "nvcc":
        return nvcc.preprocess(find("nvcc"), source, options)
    return nvrtc.run_front_end(source, "--preprocess", options).decode("latin-1")  # whatever it is encoded in


def assemble(source: Source, arch: str) -> Image:
    """Assemble PTX with ptxas: `CompileError` names line and instruction, `UnavailableError` says what to install."""
    ptxas = _require("ptxas")
    options = [f"-arch={check_arch(arch)}", "-v", "-lineinfo"]

    def run() -> tuple[bytes, str]:
        with tempfile.TemporaryDirectory() as folder:
            text, cubin = Path(folder) / "in.ptx", Path(folder) / "out.cubin"
            text.write_text(source.text, encoding="utf-8")
            process = subprocess.run([ptxas, *options, text, "-o", cubin], capture_output=True, text=True)
            log = (process.stdout + process.stderr).replace(str(text), source.path)
            if process.returncode:
                raise _ptxas_error(source, arch, log)
            return cubin.read_bytes(), log

    return _image(source, source.text, arch, "cubin", f"ptxas {version('ptxas')}", options, run)


def build(source: Source, arch: str, *, defines: Defines = NO_DEFINES) -> Image:
    """Build the cubin of a source in either language. PTX has no macros, so `defines` must be empty for it."""
    if source.language == "cu":
        return compile_cuda(source, arch, defines=defines)
    if defines:
        raise ArgumentError("defines", f"none, since {source.label} is PTX", dict(defines))
    return assemble(source, arch)


def disassemble(image: Image) -> str:
    """Return nvdisasm's text of a cubin, annotated with the lines of the `.cu` or `.ptx` that it came from."""
    nvdisasm = _require("nvdisasm")
    lines = "--print-line-info" if image.language == "cu" else "--print-line-info-ptx"

    def run_nvdisasm(*options: str) -> bytes:
        process = subprocess.run([nvdisasm, "--print-code", lines, *options, image.path], capture_output=True)
        if process.returncode:
            problem = process.stderr.decode(errors="replace").strip()
            raise CompileError(str(image.path), 0, f"nvdisasm refused it: {problem.splitlines()[0]}", log=problem)
        return process.stdout

    def run() -> bytes:
        """Run nvdisasm without the analysis of data flow, except where indirect jumps need it.

        The analysis takes a third of the time, and finds no more than where indirect jumps lead.
        """
        text = run_nvdisasm("--no-dataflow")
        return run_nvdisasm() if b" BRX" in text else text

    key = cache.key_of(image.path.name, f"nvdisasm {version('nvdisasm')}", lines)
    return cache.get_or_make(key, ".sass", run).read_text(encoding="utf-8")


def missing() -> dict[str, str]:
    """List tools that are missing, each with the command that installs it."""
    return {tool: nvrtc.INSTALL for tool in TOOLS if version(tool) is None}


def versions() -> dict[str, str]:
    """Return the versions of the tools that are installed."""
    return {tool: installed_version for tool in TOOLS if (installed_version := version(tool)) is not None}


@functools.cache
def version(tool: str) -> str | None:
    """Return the version of one of `TOOLS`, or of nvcc; `None` if it is not installed."""
    if tool == "nvrtc":
        return nvrtc.version()
    path = find(tool)
    if path is None:
        return None
    text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    return match[1] if match else "unknown"


@functools.cache
def find(tool: str) -> str | None:
    """Find a command-line tool: in a wheel, under `CUDA_HOME`, or on the `PATH`."""
    try:
        from cuda.pathfinder import find_nvidia_binary_utility

        in_wheel_or_home: str | None = find_nvidia_binary_utility(tool)
    except ImportError:  # not installed, or older than 1.3.4
        in_wheel_or_home = None
    return in_wheel_or_home or shutil.which(tool)


def _require(tool: str) -> str:
    path = find(tool)
    if path is None:
        raise UnavailableError(f"{tool}: not found in the Python environment, CUDA_HOME or PATH; {nvrtc.INSTALL}")
    return path


def check_arch(arch: str) -> str:
    """Return the name of an architecture. Raises ArgumentError unless it is spelt like one."""
    if not _ARCH.fullmatch(arch):
        raise ArgumentError("arch", "sm_<number>, such as sm_80 or sm_90a", arch)
    return arch


@functools.cache
def cuda_headers() -> list[str]:
    """List the include folders of CUDA: of the wheels, then of the toolkit that the tools on the PATH belong to."""
    folders: list[str] = []
    try:
        from cuda.pathfinder import find_nvidia_header_directory

        folders += [folder for name in ("cudart", "cccl") if (folder := find_nvidia_header_directory(name))]
    except ImportError:
        pass
    tool = shutil.which("nvcc") or shutil.which("ptxas")
    if tool is not None:
        folders.append(str(Path(tool).resolve().parent.parent / "include"))
    return folders


def _image(
    source: Source,
    content: str,
    arch: str,
    kind: Kind,
    tool: str,
    options: list[str],
    run: Callable[[], tuple[bytes, str]],
) -> Image:
    """Compile a source, or return its image from the cache.

    Product and log are two entries of the cache; whichever is missing, the compiler runs at most once. `content` stands
    for all that the compiler reads.
    """
    build_image = functools.cache(run)
    key = cache.key_of(content, source.path, tool, *options)
    path = cache.get_or_make(key, f".{kind}", lambda: build_image()[0])
    log = cache.get_or_make(key, ".log", lambda: build_image()[1].encode())
    return Image(kind, arch, source.language, path, tool, log.read_text(encoding="utf-8"))


def _resources(report: str) -> Resources:
    def number(label: str) -> int:
        match = re.search(rf"(\d+) {label}", report)
        return int(match[1]) if match else 0

    spills = number("bytes spill stores"), number("bytes spill loads")
    return Resources(number("registers"), number("bytes stack frame"), *spills, number("bytes smem"))


def _ptxas_error(source: Source, arch: str, log: str) -> CompileError | ArgumentError:
    match = nvrtc.PTXAS_ERROR.search(log)
    if match and "option 'gpu-name'" in match[2]:
        return ArgumentError("arch", f"an architecture that ptxas {version('ptxas')} knows", arch)
    line = int(match[1] or 0) if match else 0
    problem = match[2] if match else log.partition("\n")[0]
    return CompileError(source.path, line, problem if line else f"{problem} ({arch})", nvrtc.excerpt(source, line), log)
