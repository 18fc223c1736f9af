"""The project's Markdown pages: which there are, their fenced blocks, headings and links."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
GUIDE = [ROOT / "README.md", *sorted((ROOT / "notebooks" / "guide").rglob("*.md"))]
PAGES = [*GUIDE, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block: the line of its fence, its language, its text."""

    line: int
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [Block(text.count("\n", 0, m.start()) + 1, m[1], m[2]) for m in _FENCE.finditer(text)]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """What `#...` may follow a link to the page: GitHub's names of its headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    """Where a page's links and pictures point, apart from the web."""
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", prose(page)))
    return [link for link in found if not re.match(r"https?:", link)]
