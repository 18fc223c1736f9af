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
    """List the fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [Block(text.count("\n", 0, m.start()) + 1, m[1], m[2]) for m in _FENCE.finditer(text)]


def prose(page: Path) -> str:
    """Return a page's text without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: GitHub's names of its headings, as a link has them after `#`."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    """List the targets of a page's links and pictures, except those on the web."""
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", prose(page)))
    return [link for link in targets if not re.match(r"https?:", link)]
