"""What all pictures share: their colours, and writing a Matplotlib `Figure` to a file."""

import io
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from ptxlab.errors import ArgumentError
from ptxlab.io.files import require_folder, write_whole

BLUE, ORANGE, RED, PURPLE, GREY, PALE = "#2f6db5", "#e08214", "#c2242b", "#7b6fb0", "#8a8f98", "#dfe5ec"
COLOURS, EXACT = 256, 160  # of a palette; of them, those that `shrink_png` takes from the picture as they are


def format_of(path: Path) -> str:
    """Return the format that a picture's file name asks for. Raises ArgumentError unless it is .png, .svg or .pdf."""
    suffix = path.suffix.lstrip(".").lower()
    if suffix not in ("png", "svg", "pdf"):
        raise ArgumentError("picture", "a file name that ends in .png, .svg or .pdf", path)
    return suffix


def require_writable(path: Path) -> None:
    """Raise ArgumentError or FileError if `save` could not write. Call it before a long task."""
    format_of(path)
    require_folder(path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as the path's suffix says (`format_of`), whole or not at all; a PNG with a palette."""
    content = render(figure, format_of(path))
    write_whole(path, lambda file: file.write(content))


def render(figure: Figure, file_format: str) -> bytes:
    """Return the bytes of the file that `save` writes for `"png"`, `"svg"` or `"pdf"`."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=file_format, dpi=150, bbox_inches="tight", facecolor="white")
    return shrink_png(buffer.getvalue()) if file_format == "png" else buffer.getvalue()


def shrink_png(png: bytes) -> bytes:
    """Store a PNG with a palette of 256 colours, which takes a third of the bytes of a plot.

    The 160 most frequent colours stay exact: areas, lines and the body of letters. The rest, smoothed edges of lines
    and letters, share 96 colours. A picture of at most 256 colours loses nothing. A PNG that is transparent somewhere,
    or has a palette already, is returned unchanged.
    """
    picture = Image.open(io.BytesIO(png))
    if picture.mode not in ("RGB", "RGBA") or (picture.mode == "RGBA" and np.asarray(picture)[..., 3].min() < 255):
        return png
    red, green, blue = np.moveaxis(np.asarray(picture)[..., :3].astype(np.uint32), -1, 0)
    colours, inverse, counts = np.unique(red << 16 | green << 8 | blue, return_inverse=True, return_counts=True)
    palette = rgb = np.stack([colours >> 16, colours >> 8 & 255, colours & 255], axis=-1).astype(np.uint8)
    if len(colours) > COLOURS:
        frequent_colours, rare_colours = np.split(rgb[np.argsort(-counts, kind="stable")], [EXACT])
        row = Image.fromarray(rare_colours[None])  # each colour once, however often it occurs
        row = row.quantize(COLOURS - EXACT, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
        shared_palette = np.array(row.getpalette(), np.uint8).reshape(-1, 3)[: COLOURS - EXACT]
        palette = np.concatenate([frequent_colours, shared_palette])
    centres = palette.astype(np.float32)
    nearest_colours = (
        (np.square(centres).sum(axis=1) - 2 * rgb.astype(np.float32) @ centres.T).argmin(axis=1).astype(np.uint8)
    )
    indexed_image = Image.fromarray(nearest_colours[inverse].reshape(red.shape))
    indexed_image.putpalette(palette.tobytes())
    buffer = io.BytesIO()
    indexed_image.save(buffer, "png", optimize=True, dpi=picture.info.get("dpi"))
    return buffer.getvalue()
