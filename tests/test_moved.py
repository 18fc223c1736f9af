"""Paths of version 0.1 (`old_paths.txt`, every module of then that still exists) are imported with one warning each."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import ptxlab
from ptxlab import _moved

OLD_PATHS = Path(__file__).with_name("old_paths.txt").read_text().split()
# Each in a fresh process would take minutes: one process imports them all and notes the warnings of each.
IMPORT_ALL = """
import json, sys, warnings
from importlib import import_module
noted = {}
for path in json.loads(sys.argv[1]):
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        try:
            module = import_module(path)
        except ImportError as error:
            noted[path] = error.name or str(error)
            continue
    messages = [str(w.message) for w in raised if issubclass(w.category, DeprecationWarning)]
    noted[path] = [message for message in messages if message.startswith("ptxlab")]
print(json.dumps(noted))
"""


@pytest.fixture(scope="module")
def warnings_by_path() -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL, json.dumps(OLD_PATHS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    noted: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return noted


@pytest.mark.full
def test_every_old_path_is_imported_with_one_warning_that_names_the_new_one(
    warnings_by_path: dict[str, object],
) -> None:
    assert len(OLD_PATHS) > 380 and list(warnings_by_path) == OLD_PATHS
    optional = {"torch", "transformers", "z3", "IPython", "ipywidgets", "pygments", "gguf", "tokenizers"}
    wrong = {}
    for path, noted in warnings_by_path.items():
        new = _moved.new_path(path.removeprefix("ptxlab.")) if path != "ptxlab" else None
        expected = [f"{path} has moved to {new}"] if new else []
        # A parent that has moved warns first, at its own import.
        if noted != expected and not (isinstance(noted, str) and noted.split(".")[0] in optional):
            wrong[path] = noted
    assert wrong == {}


def test_a_module_at_its_old_path_is_the_module_at_the_new_one() -> None:
    with pytest.warns(DeprecationWarning, match=r"ptxlab\.layout has moved to ptxlab\.lowbit\.layout"):
        sys.modules.pop("ptxlab.layout", None)
        old = import_module("ptxlab.layout")
    assert old is import_module("ptxlab.lowbit.layout")


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("kernels", "find", "registry"),
        ("kernels", "run", "runtime.by_name"),
        ("model", "open_model", "llm.checkpoints"),
        ("model", "Server", "llm.server"),
        ("reference", "decoder_layer", "llm.model.decoder"),
        ("jupyter", "who_holds", "lowbit.jupyter"),
        ("emulator.launch", "CHECKS", "emulator.options"),
        ("runtime.arguments", "checks_of", "emulator"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_names_of_modules_that_were_taken_apart(old: str, name: str, new: str) -> None:
    assert getattr(import_module(f"ptxlab.{old}"), name) is getattr(import_module(f"ptxlab.{new}"), name)


def test_what_never_was_there_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module("ptxlab.nothing")
    with pytest.raises(AttributeError, match="nothing"):
        ptxlab.jupyter.nothing  # noqa: B018


@pytest.mark.parametrize(
    "line", ["import ptxlab.layout", "from ptxlab.layout import pack", "from ptxlab import layout"]
)
def test_a_script_sees_the_warning_at_its_own_line(line: str, tmp_path: Path) -> None:
    """Python's default filters show a DeprecationWarning in `__main__` alone."""
    script = tmp_path / "script.py"
    script.write_text(f"import ptxlab\n{line}\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and f"{script}:2: DeprecationWarning: ptxlab.layout has moved to" in done.stderr


def test_benchmarks_are_in_a_checkout_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_moved, "__file__", str(tmp_path / "ptxlab" / "_moved.py"))
    with pytest.raises(ModuleNotFoundError, match=r"ptxlab.bench.peers has moved to benchmarks.peers, in notebooks/"):
        _moved._reach_notebooks("ptxlab.bench.peers", "benchmarks.peers")
