"""Notebooks: one source of truth each, a py:percent script; the `.ipynb` with its outputs is made from it."""

from pathlib import Path
from typing import Any

from ptxlab import sources
from ptxlab.errors import FileError, UnavailableError
from ptxlab.files import write_whole

_SECONDS = 300  # no cell of ours takes longer


def scripts() -> list[Path]:
    """The notebooks' sources, `notebooks/*.py`; `FileError` where there is no checkout."""
    folder = sources.results_dir().parent
    if folder.name != "notebooks":
        raise FileError(f"{folder}: not a checkout's notebooks/; `ptxlab report` works in a checkout")
    return sorted(folder.glob("*.py"))


def build(script: Path) -> Path:
    """Execute a notebook's source from top to bottom and write the `.ipynb` beside it; returns its path.

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
    client = nbclient.NotebookClient(notebook, timeout=_SECONDS, resources={"metadata": {"path": str(script.parent)}})
    try:
        client.execute()
    except nbclient.exceptions.CellExecutionError as error:
        raise FileError(f"{script}: a cell failed: {error.ename}: {error.evalue}") from None
    except nbclient.exceptions.CellTimeoutError:
        raise FileError(f"{script}: a cell took longer than {_SECONDS} s") from None
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day, which would change the file at every run
    path = script.with_suffix(".ipynb")
    text = jupytext.writes(notebook, fmt="ipynb")
    write_whole(path, lambda file: file.write(text.encode()))
    return path
