"""Errors in a notebook: the message with the lines of the cell that it names, and none of the frames within ptxlab."""

import re
from pathlib import Path
from types import TracebackType
from typing import Any

import ptxlab
from ptxlab.errors import PtxlabError
from ptxlab.jupyter import page

_PACKAGE = Path(ptxlab.__file__).resolve().parent
_PLACE = re.compile(r"(<cell\b[^>]*>):(\d+)")
_AROUND = 2  # lines


def excerpt(error: PtxlabError) -> list[str]:
    """Return the lines around the one of a cell that the message names, with an arrow; empty if it names none."""
    place = _PLACE.search(str(error))
    source = page.recall(place[1]) if place else None
    if place is None or source is None:
        return []
    error_line, lines = int(place[2]), source.text.splitlines()
    line_range = range(max(2, error_line - _AROUND), min(error_line + _AROUND, len(lines)) + 1)  # line 1 is the magic's
    return [f"{'---->' if number == error_line else '     '} {number:>3} {lines[number - 1]}" for number in line_range]


def without_traceback(error: PtxlabError) -> PtxlabError:
    """Make IPython show the error without a traceback, and return it.

    The magic raised it, and not the user's code.
    """
    lines = [f"{type(error).__name__}: {error}", *excerpt(error)]
    error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
    return error


def show(shell: Any, kind: type, error: PtxlabError, trace: TracebackType | None, tb_offset: int | None = None) -> None:
    """Show an error of ptxlab that nobody caught; IPython calls it."""
    for line in excerpt(error):
        error.add_note(line)
    shell.showtraceback((kind, error, _drop_package_frames(trace)), tb_offset=tb_offset)


def _drop_package_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the frames of a traceback that come before the package's."""
    if trace is None or Path(trace.tb_frame.f_code.co_filename).is_relative_to(_PACKAGE):
        return None
    return TracebackType(_drop_package_frames(trace.tb_next), trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
