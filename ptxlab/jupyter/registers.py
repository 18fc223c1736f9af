"""Registers in binary, lane by lane: the highest lane to the left, as it lies in the word."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ptxlab.emulator import LaneType
from ptxlab.jupyter.page import Html, element, table

_NIBBLE = 4


@dataclass(frozen=True)
class RegisterRow:
    """A row of the table: a word, or the exact values that it should have.

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


def word_table(rows: Iterable[RegisterRow | Html], lane: int | None = None) -> Html:
    """Build a table of words of equally many lanes, with `lane` marked; a plain number for all lanes stands once.

    Rows that are `Html`, made by `section_row`, stand between them.
    """
    rows = list(rows)
    count = max(len(row.lanes) for row in rows if isinstance(row, RegisterRow))
    lanes = [element("th", f"lane {i}", cls="num bad" if i == lane else "num") for i in reversed(range(count))]
    return table(["", "type", *lanes, ""], (_row(row, count) if isinstance(row, RegisterRow) else row for row in rows))


def section_row(*content: object) -> Html:
    """Build a heading row of such a table."""
    return element("tr", element("td", *content, colspan=99), cls="section")


def _row(row: RegisterRow, count: int) -> list[Html]:
    lanes = [
        element("td", format_bits(row.lanes[lane], row.type), cls="bits bad" if lane in row.wrong else "bits")
        for lane in reversed(range(len(row.lanes)))
    ]
    if len(lanes) < count:
        lanes = [element("td", format_bits(row.lanes[0], row.type), cls="bits", colspan=count)]
    label, kind = element("td", element("code", row.label)), element("td", str(row.type), cls="dim")
    return [label, kind, *lanes, element("td", row.note)]


def format_bits(number: int, lane_type: LaneType) -> Html:
    """Format a value as `225 = 1110 0001`.

    The bits of a value that is too wide stand out, of a negative one as far as the sign goes.
    """
    width = lane_type.bits
    low, high = lane_type.limits
    bits_html = Html(format_nibbles(number & (1 << width) - 1, width))
    overflow_bits = ""
    if number > high and number >> width:
        overflow_bits = format_nibbles(number >> width, (number >> width).bit_length())
    elif number < low:
        overflow_bits = "−"
    overflow_html = element("span", overflow_bits, cls="over") if overflow_bits else Html("")
    return Html(f"{overflow_html} {bits_html}<br>{element('span', f'{number:d}'.replace('-', '−'), cls='dim')}")


def format_nibbles(number: int, width: int) -> str:
    """Format bits in groups of four: `1110 0001`."""
    digits = f"{number:0{width}b}"
    first = len(digits) % _NIBBLE
    parts = [digits[:first]] if first else []
    return " ".join(parts + [digits[i : i + _NIBBLE] for i in range(first, len(digits), _NIBBLE)])
