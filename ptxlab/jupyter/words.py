"""Registers in binary, lane by lane: the highest lane to the left, as it lies in the word."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ptxlab.emulator import LaneType
from ptxlab.jupyter.page import Html, element, table

_NIBBLE = 4


@dataclass(frozen=True)
class Row:
    """A word, or what it should be.

    Attributes:
        label: what it is, or the instruction that made it.
        type: of its lanes.
        lanes: their values, lane 0 first; a value too wide for its lane shows the bits that do not fit.
        wrong: lanes to mark.
        note: what to say of it.
    """

    label: object
    type: LaneType
    lanes: tuple[int, ...]
    wrong: Collection[int] = field(default=())
    note: object = ""


def words(rows: Iterable[Row]) -> Html:
    """A table of words of equally many lanes; a plain number for all lanes stands once."""
    rows = list(rows)
    count = max(len(row.lanes) for row in rows)
    header = ["", "type", *(f"lane {lane}" for lane in reversed(range(count))), ""]
    return table(header, ([_label(row), element("td", str(row.type), cls="dim"), *_lanes(row, count),
                           element("td", row.note)] for row in rows))  # fmt: skip


def _label(row: Row) -> Html:
    return element("td", element("code", row.label))


def _lanes(row: Row, count: int) -> list[Html]:
    if len(row.lanes) < count:
        return [element("td", bits(row.lanes[0], row.type), cls="bits", colspan=count)]
    return [
        element("td", bits(row.lanes[lane], row.type), cls="bits bad" if lane in row.wrong else "bits")
        for lane in reversed(range(count))
    ]


def bits(value: int, lane_type: LaneType) -> Html:
    """`225 = 1110 0001`; the bits of a value that is too wide stand out, of a negative one as far as the sign goes."""
    width = lane_type.bits
    low, high = lane_type.limits
    shown = Html(in_nibbles(value & (1 << width) - 1, width))
    beyond = ""
    if value > high and value >> width:
        beyond = in_nibbles(value >> width, (value >> width).bit_length())
    elif value < low:
        beyond = "−"
    over = element("span", beyond, cls="over") if beyond else Html("")
    return Html(f"{over} {shown}<br>{element('span', f'{value:d}'.replace('-', '−'), cls='dim')}")


def in_nibbles(value: int, width: int) -> str:
    """`1110 0001`."""
    digits = f"{value:0{width}b}"
    first = len(digits) % _NIBBLE
    parts = [digits[:first]] if first else []
    return " ".join(parts + [digits[i : i + _NIBBLE] for i in range(first, len(digits), _NIBBLE)])
