"""The rules that keep the project in shape: who may import whom, one name per kernel, nothing built at import."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from ptxlab import emulator, registry, sources, toolchain
from ptxlab.sources import Source
from tests.support.collection import BuiltAtImportError, nothing_is_built

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, TESTS = ROOT / "ptxlab", ROOT / "tests"

# Rooms: folders and modules of the package root. Imports go one way, down the list.
ORDER = (
    "errors", "validate", "io", "plot", "sources", "toolchain", "cost", "reference", "quant", "layout", "spec",
    "emulator", "gpu", "runtime", "kernels", "model", "verify", "debugger", "prove", "sass", "nsight", "bench",
    "profile", "timeline", "weights", "demo", "testing", "torch", "public", "doctor", "jupyter", "cli", "__main__",
)  # fmt: skip


def imported(path: Path, *, when_imported: bool = False) -> set[str]:
    """Dotted names that a file imports: modules, and what it takes from them; perhaps only outside its functions."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in tree.body if when_imported else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py")) if "_sources" not in path.parts}


def importers(library: str) -> set[str]:
    """Modules that import a library, somewhere."""
    return {name for name, path in MODULES.items() if any(n.split(".")[0] == library for n in imported(path))}


def room(module: str) -> str:
    return module.split(".")[1]


def test_imports_go_down_the_list() -> None:
    """All but the package's root, which offers what is below it."""
    wrong = {
        f"{module} imports {name}"
        for module, path in MODULES.items()
        for name in imported(path)
        if name.startswith("ptxlab.") and module != "ptxlab" and room(name) in ORDER
        if ORDER.index(room(name)) > ORDER.index(room(module))
    }
    assert wrong == set()


def test_every_room_has_its_place() -> None:
    assert {room(module) for module in MODULES if module != "ptxlab"} - {*ORDER} == set()


def test_no_two_public_classes_share_a_name() -> None:
    places: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_only_gpu_imports_cupy() -> None:
    assert {room(module) for module in importers("cupy")} == {"gpu"}


def test_torch_is_imported_by_peers_and_for_prompts_alone() -> None:
    allowed = re.compile(r"ptxlab\.(torch\b.*|bench\.peers\w*|model\.prompt_attention)")
    assert [module for module in importers("torch") if not allowed.fullmatch(module)] == []


def test_nothing_imports_the_room_of_torch() -> None:
    """But the command that benches it, when it is asked to."""
    asking = {name for name, path in MODULES.items() if room(name + ".") != "torch"
              if any(each.startswith("ptxlab.llm.torch") for each in imported(path))}  # fmt: skip
    assert asking == {"ptxlab.cli.bench"}
    code = "import sys, ptxlab, ptxlab.public, ptxlab.llm.model, ptxlab.bench, ptxlab.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_reference_imports_only_numpy() -> None:
    allowed = re.compile(r"(numpy|typing|collections\.abc|ptxlab\.reference)\b.*")
    names = {name for module, path in MODULES.items() if room(f"{module}.") == "reference" for name in imported(path)}
    assert names and [name for name in names if not allowed.fullmatch(name)] == []


def test_no_module_imports_itself_around_others() -> None:
    graph: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        names = imported(path, when_imported=True)
        graph[module] = {name if name in MODULES else name.rpartition(".")[0] for name in names} & {*MODULES} - {module}
    TopologicalSorter(graph).prepare()  # CycleError names the circle


TEST_FILES = sorted(TESTS.rglob("*.py"))
OWN = {"support", "golden", "mutants", "outside", "report"}  # folders of tests that mirror no room


def test_tests_mirror_the_package() -> None:
    folders = {path.parent.relative_to(TESTS) for path in TEST_FILES}
    assert [str(f) for f in folders if not OWN & {*f.parts[:1]} and not (PACKAGE / f).is_dir()] == []


def test_no_test_module_imports_another() -> None:
    """What two share is in `tests/support`, or a fixture of a `conftest.py`; and imports need no `sys.path`."""

    def wrong(path: Path) -> Iterator[str]:
        yield from (name for name in imported(path) if name.startswith("tests.") and ".test_" in name)
        yield from re.findall(r"sys\.path\.(?:insert|append)", path.read_text())

    assert {path.name: found for path in TEST_FILES if path != Path(__file__) and (found := [*wrong(path)])} == {}


def test_nothing_is_built_while_tests_are_collected() -> None:
    """Which `tests/support/collection.py` sees to in every run."""
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
    for source in sources.of_kernel(name):
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
