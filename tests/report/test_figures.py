"""Pictures of README, guide and notebooks: stored with a palette, and written again only when they change."""

import base64
import json
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from ptxlab import plot
from report import FIGURES, figures, notebooks
from report.frames import NotMeasuredError

COLOUR_TYPE, PALETTE = 25, 3  # a byte of a PNG's header, and its value
NOTEBOOKS = [script.with_suffix(".ipynb") for script in notebooks.scripts()]


@pytest.mark.parametrize("path", sorted(FIGURES.glob("*.png")), ids=lambda path: path.stem)
def test_figures_have_a_palette(path: Path) -> None:
    """`python -m report --figures` writes them so; another tool triples their share of the tracked tree."""
    assert path.read_bytes()[COLOUR_TYPE] == PALETTE
    assert path.stem in figures.PICTURES, "nothing draws it"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_pictures_in_notebooks_have_a_palette(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    pictures = [base64.b64decode("".join(output["image/png"])) for output in outputs if "image/png" in output]
    assert [picture[COLOUR_TYPE] for picture in pictures] == [PALETTE] * len(pictures)


@pytest.mark.full
def test_unchanged_pictures_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(values: list[int]) -> Figure:
        figure = Figure(figsize=(2, 1))
        figure.subplots().plot(values)
        return figure

    def fail() -> Figure:
        raise NotMeasuredError("x.json: not recorded")

    monkeypatch.setattr(figures, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(figures, "PICTURES", {"a": lambda: draw([1, 2]), "b": lambda: draw([2, 1]), "c": fail})
    a, b, c = (tmp_path / "figures" / f"{name}.png" for name in "abc")
    changed, left_out = figures.draw_all()
    assert changed == [a, b] and len(left_out) == 1 and left_out[0].startswith(f"{c}: ") and not c.exists()
    assert plot.shrink_png(a.read_bytes()) == a.read_bytes()
    monkeypatch.setitem(figures.PICTURES, "b", lambda: draw([2, 3]))
    assert figures.draw_all()[0] == [b] and figures.draw_all()[0] == []
