"""Import paths of version 0.1: each imports the module at its new place, with one DeprecationWarning. Gone in 0.3."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_BENCHMARKS = "benchmarks"

# Old path -> new path, below `ptxlab`, or in `notebooks` of a checkout (`benchmarks`); the longest beginning counts.
PATHS = {
    "bench.attention": "lowbit.bench.attention",
    "bench.counts": "lowbit.bench.counts",
    "bench.dequant": "lowbit.bench.dequant",
    "bench.emulation": "lowbit.bench.emulation",
    "bench.gemm": "lowbit.bench.gemm",
    "bench.launching": "runtime.launching",
    "bench.layer": "benchmarks.layer",
    "bench.layer.shapes": "benchmarks.layer_shapes",
    "bench.loads": "lowbit.bench.loads",
    "bench.models": "benchmarks.decode",
    "bench.own": "bench.user_kernels",
    "bench.peers": "benchmarks.peers",
    "bench.peers_layer": "benchmarks.peers_layer",
    "bench.problems": "lowbit.bench.problems",
    "bench.shapes": "lowbit.bench.shapes",
    "bench.stored": "benchmarks.stored",
    "bench.stream": "lowbit.bench.stream",
    "bench.sweep": "lowbit.bench.sweep",
    "bench.timing": "runtime.timing",
    "cli.accuracy": "llm.cli.accuracy",
    "cli.cost": "lowbit.cli.cost",
    "cli.generate": "llm.cli.generate",
    "cli.imports": "llm.cli.imports",
    "cli.models": "llm.cli.models",
    "cli.perplexity": "llm.cli.perplexity",
    "cli.quantize": "llm.cli.quantize",
    "cli.stalls": "lowbit.cli.stalls",
    "cli.sweep": "lowbit.cli.sweep",
    "cost": "lowbit.cost",
    "cost.sheets": "hardware.sheets",
    "demo": "lowbit.demo",
    "doctor": "cli.doctor",
    "io.checkpoint": "lowbit.layout.checkpoint",
    "io.gguf": "llm.checkpoints.gguf",
    "io.text": "llm.accuracy.wiki_dump",
    "io.tokenizer": "llm.checkpoints.tokenizer",
    "io.torch_file": "llm.checkpoints.torch_file",
    "io.weights": "io.downloads",
    "jupyter.drawing": "lowbit.jupyter.drawing",
    "jupyter.identities": "lowbit.jupyter.identities",
    "jupyter.maps": "lowbit.jupyter.maps",
    "kernels.own": "spec.user_specs",
    "layout": "lowbit.layout",
    "layout.banks": "hardware.banks",
    "layout.descriptors": "hardware.descriptors",
    "layout.foreign": "llm.checkpoints.foreign",
    "layout.fragments": "hardware.fragments",
    "layout.tensor_map": "hardware.tensor_map",
    "model": "llm.model",
    "model.folder": "llm.checkpoints.folder",
    "model.open": "llm.checkpoints.open",
    "model.parting": "llm.accuracy.parting",
    "model.server": "llm.server",
    "model.text": "llm.accuracy.text",
    "nsight": "profile.nsight",
    "profile.stalls": "lowbit.bench.stalls",
    "prove.kv4": "lowbit.claims.kv4",
    "prove.layouts": "lowbit.claims.layouts",
    "prove.main_loops": "lowbit.claims.main_loops",
    "prove.quantisers": "lowbit.claims.quantisers",
    "prove.reordering": "lowbit.claims.reordering",
    "prove.w4a4": "lowbit.claims.w4a4",
    "quant": "lowbit.quant",
    "quant.numerics": "llm.model.numerics",
    "quant.recipe": "llm.recipe",
    "reference": "lowbit.reference",
    "reference.decoder": "llm.model.decoder",
    "reference.floats": "hardware.floats",
    "reference.packed": "hardware.words",
    "timeline": "profile.timeline",
    "torch": "llm.torch",
    "torch.bench": "benchmarks.pytorch",
    "verify": "runtime.verify",
    "weights.accuracy": "llm.accuracy.steps",
    "weights.audit": "lowbit.audit",
    "weights.audit_inputs": "llm.accuracy.audit_inputs",
    "weights.calibrate": "llm.recipe.calibrate",
    "weights.convert": "llm.checkpoints.convert",
    "weights.imports": "llm.checkpoints.imports",
    "weights.plot": "lowbit.audit.plot",
    "weights.quantize": "llm.recipe.quantize",
}
# Old path -> the modules that its names have gone to.
TAKEN_APART = {
    "kernels": ("lowbit.kernels", "registry", "runtime.by_name"),
    "model": ("llm.model", "llm.checkpoints", "llm.server", "llm.accuracy.text", "llm.accuracy.parting"),
    "reference": ("lowbit.reference", "llm.model.decoder"),
    "weights": ("llm.recipe",),
}
# Names that have left a module that is still there: (module, name) -> where they are.
NAMES = {
    ("emulator.launch", "CHECKS"): "emulator.options",
    ("emulator.launch", "MAX_STEPS"): "emulator.options",
    ("emulator.launch", "MODES"): "emulator.options",
    ("emulator.launch", "ON_REQUEST"): "emulator.options",
    ("jupyter.displays", "of_weight"): "lowbit.jupyter.displays",
    ("jupyter.widgets", "dequant_sliders"): "lowbit.jupyter",
    ("jupyter.widgets", "layout_explorer"): "lowbit.jupyter",
    ("prove.claims", "prove_kernel"): "prove.kernels",
    ("runtime.arguments", "checks_of"): "emulator",
    ("jupyter", "HolderView"): "lowbit.jupyter",
    ("jupyter", "Identities"): "lowbit.jupyter",
    ("jupyter", "dequant_sliders"): "lowbit.jupyter",
    ("jupyter", "identities"): "lowbit.jupyter",
    ("jupyter", "layout_explorer"): "lowbit.jupyter",
    ("jupyter", "who_holds"): "lowbit.jupyter",
}


def new_path(old: str) -> str | None:
    """Find the new path of an old one below `ptxlab`; None of a module that has not moved."""
    place = _place(old)
    return place and (place if place.startswith(_BENCHMARKS) else f"ptxlab.{place}")


def _place(old: str) -> str | None:
    parts = old.split(".")
    for count in range(len(parts), 0, -1):
        head, remaining = ".".join(parts[:count]), parts[count:]
        if head in TAKEN_APART and not remaining:
            return TAKEN_APART[head][0]
        if head in PATHS:
            return ".".join([PATHS[head], *remaining])
        if head in TAKEN_APART:
            return ".".join([TAKEN_APART[head][0], *remaining])
    return None


class _TakenApart(ModuleType):
    """A module whose names are in several others."""

    def __init__(self, name: str, homes: Sequence[str]) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._homes = tuple(homes)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            for home in self._homes:
                module = import_module(f"ptxlab.{home}")
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class OldPaths:
    """Finder and loader of modules at old paths."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find a module at its old path; None for every other name."""
        old_path = name.removeprefix("ptxlab.")
        if old_path == name or new_path(old_path) is None:
            return None
        return ModuleSpec(name, OldPaths(), is_package=True)  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType | None:
        """Make the module that `exec_module` replaces, or one whose names are looked up in several."""
        old_path = spec.name.removeprefix("ptxlab.")
        return _TakenApart(spec.name, TAKEN_APART[old_path]) if old_path in TAKEN_APART else None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Warn, and put the module at the new path in the place of this one."""
        old_path = module.__name__.removeprefix("ptxlab.")
        imported_path = str(new_path(old_path))
        warnings.warn(
            f"{module.__name__} has moved to {imported_path}", DeprecationWarning, stacklevel=_importing_frame()
        )
        if isinstance(module, _TakenApart):
            return
        if imported_path.startswith(_BENCHMARKS):
            _reach_notebooks(module.__name__, imported_path)
        sys.modules[module.__name__] = import_module(imported_path)


def _reach_notebooks(old: str, new: str) -> None:
    """Let `notebooks` of a checkout be imported from; ModuleNotFoundError where there is none."""
    notebooks = Path(__file__).resolve().parents[1] / "notebooks"
    if not (notebooks / _BENCHMARKS).is_dir():
        raise ModuleNotFoundError(f"{old} has moved to {new}, in notebooks/ of a checkout", name=old)
    if str(notebooks) not in sys.path:
        sys.path.append(str(notebooks))


def _importing_frame() -> int:
    """Count the frames up to the import statement. `warnings.warn` itself skips those of the import system."""
    package_files = {importlib.__file__, str(Path(__file__).with_name("__init__.py"))}
    level, frame = 1, sys._getframe(1)
    while frame.f_back:
        frame = frame.f_back
        if not frame.f_code.co_filename.startswith("<frozen importlib"):
            level += 1
            if frame.f_code.co_filename not in package_files:
                break
    return level


def install() -> None:
    """Let old paths be found: before all other finders, as an old folder may still lie there with compiled files."""
    if not any(isinstance(finder, type) and finder is OldPaths for finder in sys.meta_path):
        sys.meta_path.insert(0, OldPaths)


def name_in(module: str, name: str) -> Any:
    """Look up a name that has left a module, with a DeprecationWarning; AttributeError for any other."""
    new_module = NAMES.get((module.removeprefix("ptxlab."), name))
    if new_module is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    warnings.warn(f"{module}.{name} has moved to ptxlab.{new_module}", DeprecationWarning, stacklevel=3)
    return getattr(import_module(f"ptxlab.{new_module}"), name)
