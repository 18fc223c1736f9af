"""Names that tests take from the project's modules: a test of a GPU runs nowhere else, so a renamed one shows here."""

import ast
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PACKAGES = ("ptxlab", "benchmarks")
ROOT = Path(__file__).parents[1]
ON_GPU = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8")]


def read_name(module: ModuleType, name: str) -> Any:
    """Return what a module has by this name, a module of a package also where nobody imported it; None if nothing."""
    if not hasattr(module, name) and hasattr(module, "__path__") and find_spec(f"{module.__name__}.{name}"):
        return import_module(f"{module.__name__}.{name}")
    return getattr(module, name, None)


def missing_names(text: str) -> Iterator[str]:
    """Yield `module.name` for each name that the modules of the project, as a text imports them, have not."""
    tree = ast.parse(text)
    modules: dict[str, ModuleType] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in PACKAGES:
            package = import_module(str(node.module))
            for alias in node.names:
                if isinstance(imported := read_name(package, alias.name), ModuleType):
                    modules[alias.asname or alias.name] = imported
                elif not hasattr(package, alias.name):
                    yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            modules.pop(node.id, None)  # a variable has the name too
        elif isinstance(node, ast.arg):
            modules.pop(node.arg, None)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            module = modules[node.value.id]
            if read_name(module, node.attr) is None and not hasattr(module, node.attr):
                yield f"{module.__name__}.{node.attr}"


@pytest.mark.parametrize("path", ON_GPU, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_of_tests_on_a_gpu_exist(path: Path) -> None:
    try:
        assert [*missing_names(path.read_text("utf-8"))] == []
    except ModuleNotFoundError as error:
        assert str(error.name).partition(".")[0] not in PACKAGES, error
        pytest.skip(f"{error.name} is not installed")


def test_a_name_that_is_gone_is_found() -> None:
    text = "from ptxlab.lowbit.bench.gemm import quantiser\nfrom ptxlab import gone\nquantiser._activations(5, 256)\n"
    assert [*missing_names(text)] == ["ptxlab.gone", "ptxlab.lowbit.bench.gemm.quantiser._activations"]
