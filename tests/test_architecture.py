"""The rules that keep the project in shape: who may import whom, one name per kernel, nothing built at import."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from ptxlab import emulator, registry, sources, toolchain
from ptxlab.sources import Source
from tests.support.collection import BuiltAtImportError, nothing_is_built

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, TESTS = ROOT / "ptxlab", ROOT / "tests"

# The rooms, each of which imports only those before it. A folder or module at the package's root is of the workbench.
ROOMS = ("workbench", "lowbit", "llm")
# They offer what is in all rooms: `public` its names, and the package's root those names lazily.
DOORS = {"ptxlab", "ptxlab.public"}


@cache
def tree_of(path: Path) -> ast.Module:
    """Parse a file, once for all rules."""
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path, *, when_imported: bool = False) -> frozenset[str]:
    """Return the dotted names that a file imports: modules, and the names taken from them.

    With `when_imported`, imports within functions do not count.
    """
    tree = tree_of(path)
    names: set[str] = set()
    for node in tree.body if when_imported else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py")) if "_sources" not in path.parts}


def importers(library: str) -> set[str]:
    """List the modules that import a library, at any place."""
    return {name for name, path in MODULES.items() if any(n.split(".")[0] == library for n in imports_of(path))}


def room(module: str) -> str:
    """Return the room that a module is in."""
    first = module.split(".")[1]
    return first if first in ROOMS else "workbench"


def folder(module: str) -> str:
    """Return a module's folder within its room, or the module itself if it stands in no folder."""
    return ".".join(module.split(".")[: 2 if room(module) == "workbench" else 3])


def edges() -> Iterator[tuple[str, str]]:
    """Yield (module, imported module) of the package, wherever in a module the import stands."""
    for module, path in MODULES.items():
        if module not in DOORS:
            for name in imports_of(path):
                target = name if name in MODULES else name.rpartition(".")[0]
                if target in MODULES and target != "ptxlab":
                    yield module, target


def test_rooms_import_only_rooms_below_them() -> None:
    wrong = {f"{a} imports {b}" for a, b in edges() if ROOMS.index(room(b)) > ROOMS.index(room(a))}
    assert wrong == set()
    assert {room(module) for module in MODULES if module != "ptxlab"} == {*ROOMS}


def test_nothing_in_the_package_goes_through_its_doors() -> None:
    """`ptxlab.gemm_w4a8` and `ptxlab.public` are for users: they would hide which room a module imports."""
    wrong = {
        f"{module} imports {name}"
        for module, path in MODULES.items()
        for name in imports_of(path)
        if module not in DOORS and name != "ptxlab" and name not in MODULES and name != "ptxlab.__version__"
        if name.rpartition(".")[0] in DOORS
    }
    assert wrong == set()


def test_folders_import_one_another_one_way() -> None:
    graph: dict[str, set[str]] = {}
    for a, b in edges():
        if folder(a) != folder(b):
            graph.setdefault(folder(a), set()).add(folder(b))
    assert len(graph) > 30
    TopologicalSorter(graph).prepare()  # CycleError names the circle


def test_nothing_in_the_package_imports_notebooks() -> None:
    """Nor does it know of the README or of benchmarks beside other projects."""
    outside = re.compile(r"(benchmarks|report|notebooks|tests)\b.*")
    assert [m for m, path in MODULES.items() if any(outside.fullmatch(name) for name in imports_of(path))] == []


def test_no_two_public_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_only_gpu_imports_cupy() -> None:
    assert {folder(module) for module in importers("cupy")} == {"ptxlab.gpu"}


def test_only_gpu_and_toolchain_import_nvidias_packages() -> None:
    """cuda.bindings, cuda.core (decision 0034) and cuda.pathfinder."""
    assert {folder(module) for module in importers("cuda")} == {"ptxlab.gpu", "ptxlab.toolchain"}


def test_torch_is_imported_in_its_folders_alone() -> None:
    allowed = re.compile(r"ptxlab\.llm\.(torch|vllm)\b.*")
    assert [module for module in importers("torch") if not allowed.fullmatch(module)] == []
    code = (
        "import sys, ptxlab.public, ptxlab.llm.model, ptxlab.llm.vllm, ptxlab.bench, ptxlab.cli.app;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_only_the_plugin_of_vllm_imports_the_folder_of_torch() -> None:
    assert {folder(a) for a, b in edges() if folder(b) == "ptxlab.llm.torch" != folder(a)} == {"ptxlab.llm.vllm"}
    assert {a for a, b in edges() if folder(b) == "ptxlab.llm.vllm" != folder(a)} == set()


def test_only_its_plugin_imports_vllm() -> None:
    assert {folder(module) for module in importers("vllm")} == {"ptxlab.llm.vllm"}


def test_reference_needs_only_numpy() -> None:
    """And the words and floats of registers, which need nothing else either."""
    words = ("ptxlab.hardware.words", "ptxlab.hardware.floats")
    allowed = ("numpy", "math", "typing", "collections.abc", "ptxlab.lowbit.reference", *words)
    chosen = [module for module in MODULES if module.startswith("ptxlab.lowbit.reference") or module in words]
    names = {name for module in chosen for name in imports_of(MODULES[module])}
    assert len(chosen) > 8 and [name for name in names if not name.startswith(allowed)] == []


@pytest.mark.smoke
def test_no_module_imports_itself_around_others() -> None:
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        names = imports_of(path, when_imported=True)
        graph[module] = {name if name in MODULES else name.rpartition(".")[0] for name in names} & {*MODULES} - {module}
    TopologicalSorter(graph).prepare()  # CycleError names the circle


TEST_FILES = sorted(TESTS.rglob("*.py"))
OWN = {"support", "golden", "mutants", "outside", "fuzz"}  # folders of tests that mirror nothing


def test_tests_mirror_the_package() -> None:
    folders = {path.parent.relative_to(TESTS) for path in TEST_FILES}
    mirrored = (PACKAGE, ROOT / "notebooks")
    assert [str(f) for f in folders if not OWN & {*f.parts[:1]} and not any((m / f).is_dir() for m in mirrored)] == []


def test_no_test_module_imports_another() -> None:
    """Helpers of two modules are in `tests/support`, or fixtures of a `conftest.py`; and imports need no `sys.path`."""

    def wrong(path: Path) -> Iterator[str]:
        yield from (name for name in imports_of(path) if name.startswith("tests.") and ".test_" in name)
        yield from re.findall(r"sys\.path\.(?:insert|append)", path.read_text())

    assert {path.name: names for path in TEST_FILES if path != Path(__file__) and (names := [*wrong(path)])} == {}


def test_nothing_is_built_while_tests_are_collected() -> None:
    """The plugin `tests/support/collection.py` enforces it in every run."""
    ptx = Source.from_text(".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k() { ret; }\n", "k.ptx")
    cuda = Source.from_text('extern "C" __global__ void k() {}', "k.cu")
    toolchain.assemble(ptx, "sm_80"), toolchain.compile_cuda(cuda, "sm_80")
    for build in (
        lambda: toolchain.assemble(ptx, "sm_80"),
        lambda: toolchain.compile_cuda(cuda, "sm_80"),
        lambda: emulator.run(ptx.text, "k", [], grid=1, block=32),
    ):
        with nothing_is_built(), pytest.raises(BuiltAtImportError):
            build()


def test_every_source_has_a_spec_and_every_spec_a_source() -> None:
    assert set(sources.names()) == set(registry.specs())


@pytest.mark.parametrize("name", sources.names())
def test_entry_symbol_is_the_name(name: str) -> None:
    for source in sources.sources_of_kernel(name):
        pattern = r"\.visible \.entry (\w+)" if source.language == "ptx" else r"__launch_bounds__\([^)]*\)\s+(\w+)\("
        assert re.findall(pattern, source.text) == [name]


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
