"""Links of the README, the guide and their neighbours, and what a newcomer is promised of them."""

import re
from pathlib import Path

import pytest

import ptxlab
from tests.support.markdown_pages import GUIDE, PAGES, ROOT, anchors, links, prose


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists() and target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), link


def test_a_newcomer_reads_less_than_200_lines_first() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 200


def test_every_page_of_the_guide_is_reached() -> None:
    linked = {(page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in links(page)}
    assert set(GUIDE) <= linked | {ROOT / "README.md"}


def test_the_changelog_begins_with_this_version() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == ptxlab.__version__


def test_files_in_running_text_exist() -> None:
    """`tests/...`, `ptxlab/...` and the like in the prose of every page; `<family>`, `*` and `...` are patterns."""
    for page in PAGES:
        for path in re.findall(r"`((?:cuda_src|notebooks|ptx|ptxlab|tests)/[\w/.-]*)`", prose(page)):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
