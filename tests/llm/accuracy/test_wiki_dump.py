"""Plain text out of wiki markup and out of a dump."""

import bz2
from pathlib import Path

import pytest

from ptxlab.errors import FileError
from ptxlab.llm.accuracy.wiki_dump import SHORTEST, plain, read_wiki

MARKUP = """{{About|a thing|{{nested|template}}}}<!-- not
shown -->
[[File:x.jpg|thumb|A picture with a [[link|caption]]]]
'''Bold''' and ''italic'' [[link]]s, a [[target|shown]] one,<ref name="a">{{cite|x}}</ref><ref name="b"/> and
[http://example.org a page].<br/> E&nbsp;= mc<sup>2</sup> &amp; so on

== Heading ==
* a list
# of two kinds
{| class="wikitable"
| a || {| nested
|}
|}
<math>\\frac{1}{2}</math>
A second paragraph.
[[Category:Things]]
[[de:Ding]]
"""


def test_what_is_left_of_markup() -> None:
    shown = "Bold and italic links, a shown one, and\na page. E\xa0= mc2 & so on"
    assert plain(MARKUP) == f"{shown}\n\nA second paragraph."


def test_markup_that_is_not_closed_stays() -> None:
    assert plain("a {{b [[c {| d\ne") == "a {{b [[c {| d\ne"
    assert plain("a " + "{{" * 50 + "b" + "}}" * 49) == "a {{" and plain("a " + "{{" * 50 + "b" + "}}" * 50) == "a"


def dump(*pages: str) -> bytes:
    space = 'xmlns="http://www.mediawiki.org/xml/export-0.10/"'
    return bz2.compress(f"<mediawiki {space}>{''.join(pages)}</mediawiki>".encode())


def page(text: str, elements: str = "") -> str:
    return f"<page><title>T</title>{elements}<revision><id>1</id><text>{text}</text></revision></page>"


def test_articles_of_a_dump(tmp_path: Path) -> None:
    path, long = tmp_path / "dump.xml.bz2", "word " * SHORTEST
    path.write_bytes(
        dump(page(f"'''A''' {long}"), page("short"), page(long, "<redirect title='A' />"), page(f"B {long}"))
    )
    assert [article[:6] for article in read_wiki(path)] == ["A word", "B word"]


@pytest.mark.parametrize("content", [b"no bz2", dump("<page>")[:-20], bz2.compress(b"<mediawiki><page>"), b""])
def test_what_is_no_whole_dump_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "dump.xml.bz2"
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"dump\.xml\.bz2: not a readable \.xml\.bz2 of MediaWiki \(.+\)$"):
        read_wiki(path)
    with pytest.raises(FileError, match="nosuch"):
        read_wiki(tmp_path / "nosuch")
