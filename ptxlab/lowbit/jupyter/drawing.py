"""A map of lanes as a picture: every run of neighbours in one register is a box with its lane and register."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ptxlab.jupyter.page import Html, chip, element, join, page
from ptxlab.lowbit.jupyter.maps import HolderMap

_ROWS, _WIDTH = 32, 800  # at most: rows, and pixels of columns, of the window that is drawn
_HEIGHT, _LEFT, _TOP = 15, 34, 18
_LABEL = 40  # pixels that `127.a3` takes
_NARROWEST = 9


@dataclass(frozen=True)
class Run:
    """Neighbours in a row that one register holds."""

    row: int
    first: int
    count: int
    lane: int
    register: int
    wrong: bool


@dataclass(frozen=True, eq=False)
class HolderView:
    """A map with one lane brought out (None: none); in a notebook it shows itself as a picture."""

    holders: HolderMap
    lane: int | None = None

    def __repr__(self) -> str:
        lines = [f"{self.holders.name}: {self.holders.description}"]
        if self.lane is not None:
            lines += [f"lane {self.lane}, r{i}: {_in_words(places)}" for i, places in self._registers()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return page(self.body())

    def body(self) -> Html:
        """Render the picture without the style."""
        title = element("div", element("b", self.holders.name), " ", self.holders.description, cls="title")
        return join([title, self._picture(), self._lane()])

    def _registers(self) -> list[tuple[int, list[tuple[int, int]]]]:
        return [] if self.lane is None else list(enumerate(self.holders.held_by(self.lane)))

    def _lane(self) -> Html:
        row, column = self.holders.axes
        if self.lane is None:
            caption = f"Down: {row}, across: {column}. In a box: lane and register; its colour: lane."
            return element("div", caption, cls="dim")
        caption = f"Lane {self.lane} holds, as ({row}, {column}) from the highest bits of a register to its lowest:"
        registers = [chip(element("code", f"r{i} {_in_words(places)}")) for i, places in self._registers()]
        return join([element("div", caption), *registers])

    def _picture(self) -> Html:
        rows, columns, width = self._window()
        ticks = [
            _text(_LEFT - 5, _TOP + (row - rows.start + 0.75) * _HEIGHT, row, "end") for row in rows if row % 8 == 0
        ]
        step = 8 if width < _LABEL else 1
        ticks += [_text(_LEFT + (c - columns.start) * width + 1, _TOP - 6, c) for c in columns if c % step == 0]
        boxes = [self._box(run, rows.start, columns.start, width) for run in _runs(self.holders, rows, columns)]
        total_width, height = _LEFT + len(columns) * width + 2, _TOP + len(rows) * _HEIGHT + 2
        svg = element("svg", *ticks, *boxes, width=total_width, height=height, viewBox=f"0 0 {total_width} {height}")
        return join([element("div", svg, cls="wide"), self._drawn_range(rows, columns)])

    def _drawn_range(self, rows: range, columns: range) -> Html:
        """Render a line that says which rows and columns are drawn; empty if all are."""
        height, width = self.holders.lane.shape
        if (len(rows), len(columns)) == (height, width):
            return Html("")
        row_range = f"rows {rows.start}-{rows.stop - 1} of {height}"
        column_range = f"{columns.start}-{columns.stop - 1} of {width}"
        return element("div", f"Drawn: {row_range}, columns {column_range}.", cls="dim")

    def _window(self) -> tuple[range, range, int]:
        """Choose the rows and columns to draw, around the lane's first element, and the pixels of a column."""
        rows, columns = (range(size) for size in self.holders.lane.shape)
        longest_run = max(run.count for run in _runs(self.holders, range(1), columns))
        width = max(_NARROWEST, _LABEL // longest_run)
        row, column = (0, 0) if self.lane is None else self.holders.held_by(self.lane)[0][0]
        return _window_around(rows, row, _ROWS), _window_around(columns, column, _WIDTH // width // 8 * 8), width

    def _box(self, run: Run, top: int, left: int, width: int) -> Html:
        x, y, box_width = _LEFT + (run.first - left) * width, _TOP + (run.row - top) * _HEIGHT, run.count * width
        state = "" if self.lane is None else "mine" if run.lane == self.lane else "other"
        kind = f"{state} wrong".strip() if run.wrong else state
        box = element("rect", x=x, y=y, width=box_width - 1, height=_HEIGHT - 1, fill=_colour(run.lane), cls=kind)
        return join([box, _text(x + box_width / 2, y + _HEIGHT - 4, f"{run.lane}.r{run.register}", f"label {state}")])


def _window_around(whole: range, place: int, window: int) -> range:
    start = place // window * window
    return range(start, min(start + window, whole.stop))


def _text(x: float, y: float, content: object, kind: str = "") -> Html:
    return element("text", content, x=f"{x:g}", y=f"{y:g}", cls=kind.strip())


def _colour(lane: int) -> str:
    """Return a lane's colour: quads in the order of the rainbow, the lanes of a quad far apart."""
    return f"hsl({(lane // 4 * 45 + lane % 4 * 100) % 360},70%,50%)"


def _runs(holders: HolderMap, rows: range, columns: range) -> Iterator[Run]:
    for row in rows:
        first = columns.start
        for column in columns:
            end = column + 1
            if end < columns.stop and _same(holders, row, column, end):
                continue
            is_wrong = bool(np.any(holders.wrong[row, first:end]))
            yield Run(
                row, first, end - first, int(holders.lane[row, first]), int(holders.register[row, first]), is_wrong
            )
            first = end


def _same(holders: HolderMap, row: int, column: int, partner_column: int) -> bool:
    return bool(
        holders.lane[row, column] == holders.lane[row, partner_column]
        and holders.register[row, column] == holders.register[row, partner_column]
    )


def _in_words(places: list[tuple[int, int]]) -> str:
    """Format places with the highest bits first: `(0, 3) (0, 2) (0, 1) (0, 0)`."""
    return " ".join(f"({row}, {column})" for row, column in reversed(places))
