"""Notebooks: one source of truth each, a py:percent script; the `.ipynb` with its outputs is made from it."""

import base64
import re
from pathlib import Path
from typing import Any

from ptxlab.errors import FileError, UnavailableError
from ptxlab.io.files import write_whole
from ptxlab.plot import shrink_png
from report import ROOT

_ADDRESS = re.compile(r" at 0x[0-9a-f]{8,}(?=>)")  # of a function: another one in every run
_SECONDS = 300  # no cell of ours takes longer


def scripts() -> list[Path]:
    """List the notebooks' sources, `notebooks/*.py`."""
    return sorted((ROOT / "notebooks").glob("*.py"))


def execute(script: Path) -> Any:
    """Run a notebook's source from top to bottom in a Python kernel, and return the notebook with its outputs.

    Raises:
        UnavailableError: jupytext, nbclient or the Python kernel are not installed.
        FileError: a cell failed, or took longer than five minutes.
    """
    try:
        import jupytext
        import nbclient
    except ImportError as error:
        raise UnavailableError(
            f"{error.name}: needed to make notebooks; python -m pip install 'ptxlab[notebook]'"
        ) from None
    notebook: Any = jupytext.read(script)
    folder = {"metadata": {"path": str(script.parent)}}
    client = nbclient.NotebookClient(notebook, timeout=_SECONDS, coalesce_streams=True, resources=folder)
    try:
        client.execute()
    except nbclient.exceptions.CellExecutionError as error:
        raise FileError(f"{script}: a cell failed: {error.ename}: {error.evalue}") from None
    except nbclient.exceptions.CellTimeoutError:
        raise FileError(f"{script}: a cell took longer than {_SECONDS} s") from None
    for number, cell in enumerate(notebook.cells):  # without what would change the file at every run:
        cell["id"] = f"cell-{number}"  # names drawn by lot,
        cell.metadata.pop("execution", None)  # times of day
        if "outputs" in cell:
            cell.outputs = [_shrink(_from_the_root(output)) for output in cell.outputs if not _is_alive(output)]
    notebook.metadata.pop("widgets", None)
    return notebook


def _is_alive(output: Any) -> bool:
    """Tell whether an output is a live widget, such as a slider.

    A widget does nothing without a kernel behind it, and gets a new name at every run.
    """
    return "application/vnd.jupyter.widget-view+json" in output.get("data", {})


def _from_the_root(output: Any) -> Any:
    """Make a cell's output independent of the checkout.

    Paths become relative to the root, the README's links relative to this folder, and memory addresses are removed.
    """
    if isinstance(output, str):
        output = output.replace(f"{ROOT}/", "").replace("](notebooks/", "](")
        return _ADDRESS.sub("", output)
    if isinstance(output, dict):
        return type(output)({key: _from_the_root(part) for key, part in output.items()})
    return [_from_the_root(part) for part in output] if isinstance(output, list) else output


def _shrink(output: Any) -> Any:
    """Store the picture of an output, if it has one, as those of `notebooks/figures` are stored."""
    output_by_mime_type = output.get("data", {})
    if "image/png" in output_by_mime_type:
        output_by_mime_type["image/png"] = base64.b64encode(
            shrink_png(base64.b64decode(output_by_mime_type["image/png"]))
        ).decode()
    return output


def build(script: Path) -> Path:
    """Run a notebook's source and write the `.ipynb` beside it; returns its path. Raises what `execute` does."""
    notebook = execute(script)
    import jupytext

    path = script.with_suffix(".ipynb")
    text = jupytext.writes(notebook, fmt="ipynb")
    write_whole(path, lambda file: file.write(text.encode()))
    return path
