"""Kernels outside the package: `FILE.py` holds their specs; the sources, `<name>.ptx` or `<name>.cu`, are beside it."""

import importlib.util
from functools import cache
from pathlib import Path

from ptxlab.errors import ArgumentError, FileError, PtxlabError
from ptxlab.sources import Source
from ptxlab.spec import KernelSpec

SpecWithSources = tuple[KernelSpec, tuple[Source, ...]]


def specs_in(path: Path) -> list[SpecWithSources]:
    """Run a Python file and return the specs at its top level, each with its sources, the `.ptx` first."""
    if not path.is_file():
        raise FileError(f"{path}: cannot be read: No such file")
    path = path.resolve()
    return [(spec, _sources(spec, path)) for spec in _specs_in(path, path.stat().st_mtime_ns)]


@cache
def _specs_in(path: Path, _: int) -> tuple[KernelSpec, ...]:
    module_spec = importlib.util.spec_from_file_location(f"ptxlab_own_{path.stem}", path)
    assert module_spec is not None and module_spec.loader is not None  # of a name that ends in .py
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except PtxlabError:
        raise
    except Exception as error:  # whatever somebody's file raises
        problem = " ".join(str(error).split())
        raise FileError(f"{path.name}: cannot be imported: {type(error).__name__}: {problem}") from None
    specs = {id(member): member for member in vars(module).values() if isinstance(member, KernelSpec)}
    if not specs:
        raise ArgumentError(path.name, "a KernelSpec at its top level", "none")
    return tuple(specs.values())


def _sources(spec: KernelSpec, path: Path) -> tuple[Source, ...]:
    files = [file for ending in (".ptx", ".cu") if (file := path.with_name(spec.name + ending)).is_file()]
    if not files:
        raise FileError(f"{path.name}: has a spec of {spec.name}, and beside it there is no {spec.name}.ptx or .cu")
    return tuple(map(Source.read, files))
