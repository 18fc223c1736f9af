"""What rooms and other packages bring: kernels, commands, suites and more, found by name and loaded when asked for.

What this project's rooms bring is listed in `_ROOMS`, so that a checkout works that is not installed. Another package
registers by entry points of the group `ptxlab.KIND`:

    kernels    a family: a module with `SPECS`, perhaps `FORMS`, and `SOURCES`, the folder of `NAME.ptx` and `NAME.cu`
    commands   a function with Typer's annotations, a command of `ptxlab`; its first line of help is its docstring's
    suites     a `bench.Suite`, measured by `ptxlab bench NAME`
    problems   a `runtime.problems.Problems`: what a family's kernels are profiled, swept and recorded on
    claims     a module that registers claims (`prove.register`)
    pictures   a `spec.pictures.Pictures`: what `ptxlab show` draws of a family's kernels
    counts     a function that renews recorded instruction counts and returns the paths, for `ptxlab sass --record`
    chains     a function that launches kernels one after another and checks them, for `ptxlab sanitize NAME`
    displays   a function that registers displays of its types with a Jupyter shell
"""

import difflib
import os
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ptxlab import sources
from ptxlab.errors import ArgumentError, UnavailableError, UnknownKernel
from ptxlab.io.dynamo import break_graph
from ptxlab.sources import Source, split_target

if TYPE_CHECKING:  # NumPy, which a list of commands need not wait for
    from ptxlab.spec import KernelSpec

PACKAGE = "ptxlab"
_ROOMS: Mapping[str, Mapping[str, str]] = {
    "kernels": {
        family: f"ptxlab.lowbit.kernels.{family}"
        for family in ("dequant", "load", "quantize", "gemm", "attention", "moe")
    },
    "commands": {
        "list": "ptxlab.cli.run:list_kernels",
        "show": "ptxlab.cli.run:show",
        "run": "ptxlab.cli.run:run",
        "debug": "ptxlab.cli.debug:debug",
        "verify": "ptxlab.cli.run:verify",
        "prove": "ptxlab.cli.prove:prove",
        "sanitize": "ptxlab.cli.sanitize:sanitize",
        "sass": "ptxlab.cli.sass:sass",
        "bench": "ptxlab.cli.bench:bench",
        "sweep": "ptxlab.lowbit.cli.sweep:sweep",
        "profile": "ptxlab.cli.profile:profile",
        "timeline": "ptxlab.cli.timeline:timeline",
        "stalls": "ptxlab.lowbit.cli.stalls:stalls",
        "cost": "ptxlab.lowbit.cli.cost:cost",
        "cost schedule": "ptxlab.lowbit.cli.cost:schedule",
        "weights": "ptxlab.cli.weights:weights",
        "audit": "ptxlab.llm.cli.audit:audit",
        "quantize": "ptxlab.llm.cli.quantize:quantize",
        "import": "ptxlab.llm.cli.imports:import_",
        "perplexity": "ptxlab.llm.cli.perplexity:perplexity",
        "accuracy": "ptxlab.llm.cli.accuracy:accuracy",
        "generate": "ptxlab.llm.cli.generate:generate",
        "init": "ptxlab.cli.init:init",
        "demo": "ptxlab.lowbit.cli.demo:demo",
        "doctor": "ptxlab.cli.doctor:doctor",
    },
    "suites": {
        "dequant": "ptxlab.lowbit.bench.dequant:SUITE",
        "load": "ptxlab.lowbit.bench.loads:SUITE",
        "gemm": "ptxlab.lowbit.bench.gemm:SUITE",
        "attention": "ptxlab.lowbit.bench.attention:SUITE",
        "emulator": "ptxlab.lowbit.bench.emulation:SUITE",
    },
    "problems": {
        "gemm": "ptxlab.lowbit.bench.problems:GEMM",
        "attention": "ptxlab.lowbit.bench.problems:ATTENTION",
    },
    "claims": {
        topic: f"ptxlab.lowbit.claims.{topic}" for topic in ("kv4", "layouts", "main_loops", "quantisers", "w4a4")
    },
    "pictures": {"load": "ptxlab.lowbit.kernels.holders:PICTURES"},
    "counts": {"lowbit": "ptxlab.lowbit.bench.counts:save"},
    "chains": {"layer": "ptxlab.llm.layer_chain:check_chains"},
    "displays": {"lowbit": "ptxlab.lowbit.jupyter:register"},
}


class Registration(NamedTuple):
    """A registered module or name: `MODULE` or `MODULE:NAME`, not imported yet."""

    name: str
    place: str
    package: str = ""  # that registers it, if it is another one than this

    @property
    def module(self) -> str:
        """The module to import."""
        return self.place.partition(":")[0]

    def load(self) -> Any:
        """Import the module; return it, or what the name is in it.

        Raises UnavailableError if another package's module cannot be imported, or lacks the name.
        """
        module, _, name = self.place.partition(":")
        try:
            loaded = import_module(module)
            return getattr(loaded, name) if name else loaded
        except (ImportError, AttributeError) as error:
            if not self.package:
                raise
            raise UnavailableError(f"{self.package}: entry point {self.name} = {self.place}: {error}") from error


@cache
def entries(kind: str) -> dict[str, Registration]:
    """List the registrations of a kind, by name: the project's own, then other packages'.

    Raises ArgumentError for a name that two packages register.
    """
    registrations = {name: Registration(name, place) for name, place in _ROOMS[kind].items()}
    for entry_point in _entry_points_of_others(kind):
        if entry_point.name in registrations:
            raise ArgumentError(
                f"entry point of {PACKAGE}.{kind}", "a name that nobody else registers", entry_point.name
            )
        registrations[entry_point.name] = Registration(
            entry_point.name, entry_point.value, entry_point.dist.name if entry_point.dist else entry_point.value
        )
    return registrations


def _entry_points_of_others(kind: str) -> list[EntryPoint]:
    points = entry_points(group=f"{PACKAGE}.{kind}")
    return [entry_point for entry_point in points if entry_point.dist is None or entry_point.dist.name != PACKAGE]


@cache
def _family(name: str) -> Any:
    """Load the module of a family; from then on its sources are known."""
    module = entries("kernels")[name].load()
    if folder := getattr(module, "SOURCES", None):
        sources.add_folder(Path(folder), name)
    return module


def families() -> list[str]:
    """List the families of kernels by name, in the order in which they are listed."""
    return list(entries("kernels"))


@cache
def specs() -> "dict[str, KernelSpec]":
    """Return all specs by name, family after family."""
    return {spec.name: spec for family in families() for spec in _family(family).SPECS}


def _forms(family: str) -> "tuple[KernelSpec, ...]":
    """Return the other forms of a family's kernels, `NAME:FORM`."""
    return tuple(getattr(_family(family), "FORMS", ())) if family in entries("kernels") else ()


def forms_of(spec: "KernelSpec") -> "tuple[KernelSpec, ...]":
    """Return the other forms of a kernel, by the same sources."""
    return tuple(form for form in _forms(spec.family) if form.name == spec.name and form.form != spec.form)


@break_graph
def find(name: str) -> "tuple[KernelSpec, tuple[Source, ...]]":
    """Find the spec of a kernel and its sources, the `.ptx` first.

    `dequant_lqq.cu` selects one source, `NAME:FORM` a form.

    Raises:
        ArgumentError: unknown name (the nearest ones are shown), or a source or form that the kernel does not have.
    """
    if not isinstance(name, str):
        raise ArgumentError("kernel", "a kernel's name; `ptxlab list` shows them", repr(name))
    label, _, form = name.partition(":")
    stem, _, language = label.partition(".")
    if stem not in specs():
        if kernel_sources := sources.sources_of_kernel(stem):
            family = sources.family_of(stem)
            rule = (
                f"{kernel_sources[0].label} has no spec yet: add one to SPECS of the family {family}, or name the file"
            )
            raise ArgumentError("kernel", rule, name)
        if os.path.isdir(name):
            raise ArgumentError("kernel", "a kernel's name or a file", f"the folder {name}")
        names = dict.fromkeys([*specs(), *(spec.family for spec in specs().values())])
        raise UnknownKernel(name, difflib.get_close_matches(stem, names, n=3))
    all_sources = sources.sources_of_kernel(stem)
    chosen = tuple(s for s in all_sources if language in ("", s.language))
    if not chosen:
        raise ArgumentError("kernel", f"{stem} comes as {', '.join(s.label for s in all_sources)}", name)
    spec = specs()[stem]
    forms = {form_spec.form: form_spec for form_spec in (spec, *_forms(spec.family)) if form_spec.name == stem}
    if form not in forms:
        raise ArgumentError("kernel", f"one of {', '.join(form_spec.label for form_spec in forms.values())}", name)
    return forms[form], chosen


def resolve_all(target: str) -> "list[tuple[KernelSpec | None, tuple[Source, ...], str | None]]":
    """Resolve a target of a command line to kernels.

    It is a kernel (`NAME`), a form of it (`NAME:FORM`), one source (`NAME.cu`, `NAME.cu:FORM`), a family (`gemm`),
    `FILE[:entry]`, or `FILE.py[:NAME]` with specs of a user's own.

    Returns:
        For each kernel: the spec (None for a file), the sources, the entry symbol (None: the only one of the file).
    """
    path, kernel = split_target(target)
    if Path(path).suffix in (".ptx", ".cu") and (Path(path).is_file() or Path(path).stem not in specs()):
        return [(None, (Source.read(path),), kernel)]
    path, _, entry = target.partition(":")
    if Path(path).suffix == ".py":
        from ptxlab.spec.user_specs import specs_in

        specs_and_sources = specs_in(Path(path))
        chosen = [
            (spec, spec_sources, spec.name) for spec, spec_sources in specs_and_sources if entry in ("", spec.name)
        ]
        if not chosen:
            names = ", ".join(spec.name for spec, _ in specs_and_sources)
            raise ArgumentError("kernel", f"one of {names}, which {path} has a spec for", target)
        return [*chosen]
    labels = [name for name, spec in specs().items() if spec.family == target] or [target]
    return [(spec, spec_sources, spec.name) for spec, spec_sources in map(find, labels)]


def resolve(target: str) -> "tuple[KernelSpec | None, Source, str | None]":
    """Resolve a target of one kernel, with its first source; ArgumentError for a family of several."""
    resolved_kernels = resolve_all(target)
    if len(resolved_kernels) > 1:
        names = ", ".join(str(name) for *_, name in resolved_kernels)
        raise ArgumentError("kernel", f"one of {names}", f"the family {target}")
    ((spec, spec_sources, entry),) = resolved_kernels
    return spec, spec_sources[0], entry


def load_all(kind: str) -> Iterator[tuple[str, Any]]:
    """Load everything of a kind: (name, what is registered)."""
    for name, entry in entries(kind).items():
        yield name, entry.load()
