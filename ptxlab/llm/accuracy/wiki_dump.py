"""Plain text of the articles of a MediaWiki dump."""

import bz2
import html
import re
from pathlib import Path
from xml.etree import ElementTree

from ptxlab.errors import FileError

SHORTEST = 1000  # characters of an article; shorter pages mostly list other articles


def read_wiki(path: Path) -> list[str]:
    """Read the articles of a MediaWiki dump (.xml.bz2), in its order, as paragraphs of plain text.

    Redirects and articles of fewer than `SHORTEST` characters are left out. Raises FileError for what is no readable
    .xml.bz2 of MediaWiki.
    """
    try:
        with bz2.open(path) as file:
            pages = ElementTree.parse(file).getroot().iterfind("{*}page")
            articles = [plain(page.findtext("{*}revision/{*}text") or "") for page in pages if not _is_redirect(page)]
    except (OSError, EOFError, ElementTree.ParseError) as error:
        raise FileError(f"{path}: not a readable .xml.bz2 of MediaWiki ({error})") from None
    return [article for article in articles if len(article) >= SHORTEST]


def _is_redirect(page: ElementTree.Element) -> bool:
    return page.find("{*}redirect") is not None


# Removed from an article, in this order: pattern -> replacement.
_FIRST = [
    (r"<!--.*?-->", ""),
    (r"<ref[^<>]*/>", ""),
    (r"<(ref|math|gallery|timeline|source|code|imagemap)\b[^<>]*>.*?</\1>", ""),
]
# From the innermost outwards, until none is left: templates, tables; pictures and categories, links.
_NESTED = [
    (r"\{\{[^{}]*\}\}", ""),
    (r"\{\|[^{}]*?\|\}", ""),
    (r"(?i)\[\[(?:File|Image|Category|[a-z-]{2,12}):[^\[\]]*\]\]", ""),
    (r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1"),
]
_LAST = [
    (r"\[(?:https?|ftp):\S+ ?([^\]]*)\]", r"\1"),
    (r"'{2,}", ""),  # bold and italic
    (r"<[^<>]*>", ""),
    (r"(?m)^[*#:;|!={}][^\n]*$", ""),  # lists, headings, what is left of tables
    (r"(?m)[ \t]+$", ""),
    (r"\n{2,}", "\n\n"),
]


def plain(markup: str) -> str:
    """Strip a page's wiki markup to paragraphs separated by empty lines, without lists, tables and headings."""
    text = _replace_patterns(markup, _FIRST)
    previous_text = ""
    while text != previous_text:
        previous_text, text = text, _replace_patterns(text, _NESTED)
    return html.unescape(_replace_patterns(text, _LAST)).strip()


def _replace_patterns(text: str, patterns: list[tuple[str, str]]) -> str:
    for pattern, replacement in patterns:
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    return text
