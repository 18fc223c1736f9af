"""Every notebook runs from top to bottom without a GPU, and its `.ipynb` is the one made from its source."""

import json
import re
from pathlib import Path
from time import perf_counter

import pytest

from ptxlab.errors import UnavailableError
from ptxlab.io import downloads as weights
from report import notebooks

jupytext = pytest.importorskip("jupytext", reason="jupytext is not installed: it comes with the extra `dev`")
SCRIPTS = notebooks.scripts()
SECONDS = 30  # what a reader without a GPU is promised, on two cores
A_MACHINES = re.compile(r"(?<![\w.])/(?:home|root|Users|work|mnt|tmp|usr)/\w")  # paths of the one that made it


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_runs_from_top_to_bottom(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in re.findall(r'(?:fetch|open_model|open_text)\("(\w+)"\)', script.read_text(encoding="utf-8")):
        try:
            weights.fetch(name)
        except UnavailableError as error:
            pytest.skip(str(error))
    if "ptxlab.prove" in script.read_text(encoding="utf-8"):
        pytest.importorskip("z3", reason="z3-solver is not installed: it comes with the extra `prove`")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    start = perf_counter()
    ran = notebooks.execute(script)
    assert perf_counter() - start < 2 * SECONDS, "beside other tests; alone it has to stay under 30 s"
    assert not A_MACHINES.search(json.dumps([cell.get("outputs", []) for cell in ran.cells]))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_the_ipynb_is_made_from_the_script(script: Path) -> None:
    """`python -m report --notebooks` renews it."""
    source, notebook = jupytext.read(script), jupytext.read(script.with_suffix(".ipynb"))
    assert [(cell.cell_type, cell.source) for cell in source.cells] == [(c.cell_type, c.source) for c in notebook.cells]
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs and not [o for o in outputs if o.output_type == "error"]
    assert not [o for o in outputs if o.get("name") == "stderr"]
    assert any({"image/png", "text/html"} & set(output.get("data", {})) for output in outputs)
    assert not A_MACHINES.search(json.dumps(outputs))
