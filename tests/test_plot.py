"""Pictures: a PNG with a palette is as good as the true-colour one that Matplotlib draws, at a third of the size."""

import io
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from ptxlab import plot
from ptxlab.errors import ArgumentError


def png_of(picture: Image.Image, **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "png", **options)
    return buffer.getvalue()


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


@pytest.fixture(scope="module")
def true_colour() -> bytes:
    """Plot a picture of thousands of colours: a heat map of 60 values, its colour bar, lines, markers, text."""
    figure = Figure(figsize=(8, 4))
    left, right = figure.subplots(1, 2)
    figure.colorbar(left.imshow(np.arange(60).reshape(6, 10), cmap="RdYlGn"))
    for cell in range(60):
        left.text(cell % 10, cell // 10, str(cell), ha="center", va="center", fontsize=8)
    for colour in (plot.BLUE, plot.ORANGE, plot.RED, plot.PURPLE):
        right.plot(np.random.default_rng(len(colour)).random(20), "o-", color=colour, label=colour)
    right.set_title("a title", weight="bold")
    right.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, facecolor="white")
    return buffer.getvalue()


@pytest.mark.full
def test_areas_keep_their_colours_and_edges_almost(true_colour: bytes) -> None:
    drawn, stored = pixels(true_colour), pixels(plot.shrink_png(true_colour))
    colours, inverse, counts = np.unique(drawn.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    assert len(colours) > 2000
    difference = np.abs(stored - drawn).max(axis=-1).reshape(-1)
    frequent = np.isin(inverse.reshape(-1), np.argsort(-counts, kind="stable")[: plot.EXACT])
    assert not difference[frequent].any() and frequent.mean() > 0.95
    assert difference.max() <= 32 and difference.mean() < 0.5
    assert [255, 255, 255] in stored[0].tolist() and stored.min() == 0


def test_a_third_of_the_size_and_nothing_left_to_shrink(true_colour: bytes) -> None:
    small = plot.shrink_png(true_colour)
    assert len(small) < 0.4 * len(true_colour)
    assert Image.open(io.BytesIO(small)).mode == "P" and plot.shrink_png(small) == small
    assert Image.open(io.BytesIO(small)).info["dpi"] == Image.open(io.BytesIO(true_colour)).info["dpi"]
    assert plot.shrink_png(true_colour) == small, "the same at every run: else every run changes the checkout"


@pytest.mark.parametrize("colours", [1, 2, 160, 161, 256, 257])
def test_few_colours_stay_exact(colours: int) -> None:
    flat = np.random.default_rng(colours).choice(1 << 24, colours, replace=False)
    square = flat[np.arange(3 * 257) % colours].reshape(3, 257)
    rgb = np.stack([square >> 16, square >> 8 & 255, square & 255], axis=-1).astype(np.uint8)
    small = plot.shrink_png(png_of(Image.fromarray(rgb)))
    assert Image.open(io.BytesIO(small)).mode == "P"
    assert (pixels(small) == rgb).all() == (colours <= plot.COLOURS)


def test_transparent_pictures_and_palettes_stay_as_they_are() -> None:
    clear = np.full((4, 4, 4), 255, np.uint8)
    clear[0, 0, 3] = 254
    for picture in (Image.fromarray(clear), Image.new("P", (4, 4)), Image.new("L", (4, 4))):
        png = png_of(picture)
        assert plot.shrink_png(png) == png


@pytest.mark.full
def test_saved_pictures(tmp_path: Path) -> None:
    figure = Figure()
    figure.subplots().plot([1, 2])
    for suffix, magic in {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}.items():
        path = tmp_path / f"x.{suffix}"
        plot.save(figure, path)
        assert path.read_bytes().startswith(magic)
    assert Image.open(tmp_path / "x.png").mode == "P"
    with pytest.raises(ArgumentError, match=r"picture: .* \(got .*x\.gif\)"):
        plot.save(figure, tmp_path / "x.gif")
