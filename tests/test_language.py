"""Names and docstrings that readers trip over do not become more."""

from collections import Counter
from pathlib import Path

import pytest

from tests.support import language

ROOT = Path(__file__).parents[1]
# Lower them when they fall.
LIMITS = {"participle": 9, "fragment": 0, "vague": 35, "empty": 62, "cuda": 10, "torn": 0}


@pytest.mark.full  # CI runs it with what looks at style
def test_no_kind_of_wording_becomes_more_frequent() -> None:
    counts = Counter(place.kind for place in language.places(ROOT))
    assert {kind: counts[kind] for kind in LIMITS if counts[kind] > LIMITS[kind]} == {}


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("def found(): ...", ["participle"]),
        ("def bound(): ...", []),
        ("@property\ndef packed(self): ...", []),
        ('def rows(x):\n    """Of a matrix."""', ["fragment"]),
        ('def rows(x):\n    """Return the rows of a matrix."""', []),
        ("def rows(data, other): other = data", ["empty", "vague", "vague"]),
        ("class A:\n    def __eq__(self, other): ...", []),
    ],
)
def test_kinds_of_python(text: str, kinds: list[str]) -> None:
    assert sorted(place.kind for place in language.python_places(Path("a.py"), text)) == kinds


def test_vague_identifiers_of_cuda_count_outside_comments() -> None:
    places = language.cuda_places(Path("a.cu"), "int one = 1;  // more = 2\nint rows = own[3];\n")
    assert [(place.line, place.text) for place in places] == [(1, "one"), (2, "own")]


@pytest.mark.parametrize(
    ("text", "torn"),
    [
        ("// The sums of a tile and\n// its scales.", [1]),
        ("// The sums of a tile.\n// Its scales.", []),
        ("int rows;  // of a tile; the last one\n           // has fewer", [1]),
        ("int rows;  // of a tile and the\nint columns;", [1]),
        ("int rows;  // of a tile\nint columns;  // of a tile", []),
        ("// Guide      a page\n// PTX ISA    9.7.13", []),
        (f"// {'The rows of a tile ' * 6}are\n// read at once.", []),
    ],
)
def test_comments_that_a_formatter_tore_off(text: str, torn: list[int]) -> None:
    assert [place.line for place in language.cuda_places(Path("a.cu"), text)] == torn
