"""The rules that keep the project in shape: who may import whom, one name per kernel, sizes of modules."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ptxlab import kernels, sources

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ptxlab"
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if "_sources" not in p.parts)

# Imports go down this list: a module may import what stands before it, and its own package.
ORDER = (
    "errors", "validate", "files", "dlpack", "checkpoint", "sources", "cache", "nvrtc", "includes", "toolchain",
    "sheets", "cost", "reference", "quant", "layout", "dtypes", "expressions", "tolerance", "spec", "emulator", "gpu",
    "signature", "arguments", "backends", "runtime", "plan", "kernels", "audit", "convert", "verify", "harness",
    "sanitizer", "sass", "dataflow", "mainloop", "nsight", "bench", "subject", "profiles", "stalls", "timeline",
    "recorder", "counts", "demo", "tested", "doctor", "tiles", "plot", "timelineplot", "pipelines",
    "profileplot", "profiletables", "dequantplot", "ladder", "ladderplot", "headline", "targets", "gemmtables",
    "headlineplot", "predictions", "costtables", "costplot", "kvpoints", "kvtargets", "kvtables", "kvplot", "headers",
    "figures", "showcase", "report", "notebooks", "jupyter", "cli", "__main__",
)  # fmt: skip


def imported(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    """Dotted names that a module imports."""
    tree = ast.parse(path.read_text())
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_gpu_imports_cupy(path: Path) -> None:
    if part(path) != "gpu":
        assert not [name for name in imported(path) if name.split(".")[0] == "cupy"]


@pytest.mark.parametrize("path", sorted((PACKAGE / "reference").glob("*.py")), ids=lambda p: p.name)
def test_reference_imports_only_numpy(path: Path) -> None:
    allowed = ("numpy", "typing", "ptxlab.reference", "ptxlab")
    for name in imported(path):
        assert name.startswith(allowed) and (not name.startswith("ptxlab") or "reference" in name), name


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_the_list(path: Path) -> None:
    mine = part(path)
    if mine == "__init__":
        return
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != "ptxlab" or len(parts) < 2 or parts[1] not in ORDER or parts[1] == mine:
            continue
        assert ORDER.index(parts[1]) < ORDER.index(mine), f"{mine} imports {parts[1]}"


def test_every_source_has_a_spec_and_every_spec_a_source() -> None:
    assert set(sources.names()) == set(kernels.specs())


@pytest.mark.parametrize("name", sources.names())
def test_entry_symbol_is_the_name(name: str) -> None:
    for source in sources.of_kernel(name):
        pattern = r"\.visible \.entry (\w+)" if source.language == "ptx" else r"__launch_bounds__\([^)]*\)\s+(\w+)\("
        assert re.findall(pattern, source.text) == [name]


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300


CUDA = sorted((ROOT / "cuda_src").rglob("*.cu*"))
GENERIC_LAMBDA = re.compile(r"\[[^\[\]]*\]\s*(?:<[^<>]*>\s*)?\((?:[^()]|\([^()]*\))*\bauto\b")


def test_no_lambda_takes_what_it_is_given() -> None:
    """No `auto` parameters: some versions of NVRTC take such a lambda in a kernel for a function of the host."""
    assert GENERIC_LAMBDA.search("const auto f = [&](int i,\n const auto& rows) {")
    assert CUDA and [str(path) for path in CUDA if GENERIC_LAMBDA.search(path.read_text())] == []


def test_nothing_names_a_machine() -> None:
    """No absolute path of somebody's machine in what is shipped."""
    folders = [ROOT / name for name in ("ptxlab", "ptx", "cuda_src", "tests", "notebooks")]
    files = [*ROOT.glob("*"), *(path for folder in folders for path in folder.rglob("*"))]
    tracked = [p for p in files if p.suffix in {".py", ".md", ".toml", ".ptx", ".cu", ".cuh", ".json"}]
    home = re.compile(r"(?<![\w.])/(?:home|root|Users|work|mnt|tmp)/\w")
    offenders = [p for p in tracked if home.search(p.read_text())]
    assert [p for p in offenders if p != Path(__file__).resolve()] == []
