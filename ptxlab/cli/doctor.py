"""The command `doctor`: what is installed, which backends work, and what to install for the rest."""

import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from ptxlab import __version__, gpu, toolchain
from ptxlab.cli.common import AsJson, console, print_json, table
from ptxlab.errors import FileError, UnavailableError
from ptxlab.io import downloads
from ptxlab.profile import nsight
from ptxlab.testing import gpu_tests
from ptxlab.toolchain import cache

PANEL = "Project"


@dataclass(frozen=True)
class Component:
    """A tool or library that ptxlab can use: whether it works, what it is, and how to get it."""

    name: str
    works: bool
    detail: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the component as JSON-ready values."""
        return asdict(self)


def examine() -> list[Component]:
    """Examine this machine."""
    python = ".".join(map(str, sys.version_info[:3]))
    return [
        Component("ptxlab", True, f"{__version__}, Python {python}"),
        Component("backend emulator", True, "runs PTX on the CPU; always available"),
        _gpu(),
        *(_tool(tool) for tool in toolchain.TOOLS),
        *_nsight(),
        _model_libraries(),
        *_trained_weights(),
        _cache(),
        *(Component("GPU tests", False, line, "pytest -m gpu --record-tests FILE") for line in gpu_tests.warnings()),
    ]


def _gpu() -> Component:
    reason = gpu.why_not(None)
    if reason is None:
        return Component("backend gpu", True, str(gpu.device_info()))
    return Component("backend gpu", False, reason, gpu.install_hint())


def _tool(tool: str) -> Component:
    purpose_by_tool = {
        "nvrtc": "compiles .cu",
        "ptxas": "assembles .ptx, counts registers",
        "nvdisasm": "shows and counts SASS",
    }
    version = toolchain.version(tool)
    if version is None:
        return Component(tool, False, purpose_by_tool[tool], toolchain.missing()[tool])
    return Component(tool, True, f"{version}: {purpose_by_tool[tool]}{_mixed_release(tool, version)}")


def _mixed_release(tool: str, version: str) -> str:
    """Say where NVRTC is of another release than ptxas: PyTorch's packages replace it."""
    ptxas = toolchain.version("ptxas") or version
    if tool != "nvrtc" or version.split(".")[:2] == ptxas.split(".")[:2]:
        return ""
    return f"; of another release than ptxas, {ptxas}: instruction counts can differ from the records"


def _nsight() -> list[Component]:
    version, purpose = nsight.version(), "metrics and stall samples for `ptxlab profile`"
    ncu = Component(
        "ncu", bool(version), f"{version}: {purpose}" if version else purpose, "" if version else nsight.INSTALL
    )
    try:
        nsight.require_reader()
    except UnavailableError as error:
        return [ncu, Component("ncu-report", False, "reads ncu's reports", str(error).rpartition("; ")[2])]
    return [ncu, Component("ncu-report", True, "reads ncu's reports, also without a GPU")]


def _model_libraries() -> Component:
    missing_libraries = [name for name in ("gguf", "tokenizers") if find_spec(name) is None]
    remedy = "python -m pip install 'ptxlab[model]'" if missing_libraries else ""
    return Component("models", not missing_libraries, "reads GGUF files and tokenizers", remedy)


def _trained_weights() -> list[Component]:
    """List the weights that `ptxlab weights` downloads."""
    return [
        Component(f"weights {name}", path is not None, known_weights.summary, "" if path else f"ptxlab weights {name}")
        for name, known_weights in downloads.KNOWN.items()
        for path in [downloads.find(name)]
    ]


def _cache() -> Component:
    try:
        cache.get_or_make(cache.key_of("doctor"), ".probe", lambda: b"ptxlab")
    except FileError as error:
        return Component("cache", False, str(error), f"set {cache.VARIABLE} to a folder that can be written to")
    return Component("cache", True, str(cache.directory()))


def doctor(as_json: AsJson = False) -> None:
    """Say what is installed, which backends work, and what to install for the rest."""
    components = examine()
    if as_json:
        return print_json([component.to_json() for component in components])
    cells = [
        (component.name, "yes" if component.works else "no", component.detail, component.remedy)
        for component in components
    ]
    console.print(table("", ("", "here", "what", "to get it"), cells))
