"""The emulator's imports go one way: no cycle of modules, and folders import only those before them."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import ptxlab.emulator

ROOT = Path(ptxlab.emulator.__file__).parent
# "": the package itself
LAYERS = ("front", "unneeded", "options", "remedies", "core", "ops", "sync", "async_", "checks", "chain", "launch", "")
IMPORTS: dict[str, set[str]] = {".".join(p.relative_to(ROOT).with_suffix("").parts): set() for p in ROOT.rglob("*.py")}
for name, imported in IMPORTS.items():
    for node in ast.walk(ast.parse((ROOT / f"{name.replace('.', '/')}.py").read_text())):  # also under TYPE_CHECKING
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ptxlab.emulator"):
            inside = (node.module or "").removeprefix("ptxlab.emulator").removeprefix(".")
            names = (f"{inside}.{alias.name}".removeprefix(".") for alias in node.names)
            imported |= {
                n if n in IMPORTS else f"{n}.__init__" if f"{n}.__init__" in IMPORTS else inside for n in names
            }


def layer(name: str) -> str:
    return name.removesuffix("__init__").split(".")[0]


def test_no_module_imports_itself_by_any_way() -> None:
    order = list(TopologicalSorter(IMPORTS).static_order())  # raises CycleError, with the cycle
    assert len(order) >= len(IMPORTS) > 50


def test_folders_import_those_before_them() -> None:
    upwards = {f"{a} -> {b}" for a, imported in IMPORTS.items() for b in imported
               if LAYERS.index(layer(b)) > LAYERS.index(layer(a))}  # fmt: skip
    assert not upwards
