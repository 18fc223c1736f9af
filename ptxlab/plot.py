"""What all pictures share: their colours, and writing a Matplotlib `Figure` to a file."""

import io
from pathlib import Path

from matplotlib.figure import Figure

from ptxlab.errors import ArgumentError
from ptxlab.io.files import require_folder, write_whole

BLUE, ORANGE, RED, PURPLE, GREY, PALE = "#2f6db5", "#e08214", "#c2242b", "#7b6fb0", "#8a8f98", "#dfe5ec"
SCHEME_COLOURS = {"qoq": ORANGE, "lqq": BLUE, "lqq_ceiling": "#74add1", "lqq_search": "#1b3a5f"}


def format_of(path: Path) -> str:
    """The format that a picture's file name asks for; ArgumentError for none of .png, .svg and .pdf."""
    suffix = path.suffix.lstrip(".").lower()
    if suffix not in ("png", "svg", "pdf"):
        raise ArgumentError("picture", "a file name that ends in .png, .svg or .pdf", path)
    return suffix


def require_writable(path: Path) -> None:
    """ArgumentError or FileError where `save` could not write: to be asked before anything long is done."""
    format_of(path)
    require_folder(path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as the path's suffix says (`format_of`), whole or not at all."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=format_of(path), dpi=150, bbox_inches="tight", facecolor="white")
    write_whole(path, lambda file: file.write(buffer.getvalue()))
