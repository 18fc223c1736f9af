"""Of the cases of a test marked `share(n)` all but one in n are marked `exhaustive`, which `pytest` leaves out."""

from collections import defaultdict
from zlib import crc32

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before `-m` selects. The cases that stay are always the same, spread over all parameters. All on a GPU stay."""
    cases: dict[tuple[str, int], list[pytest.Function]] = defaultdict(list)
    for item in items:
        share = item.get_closest_marker("share")
        if isinstance(item, pytest.Function) and share and not item.get_closest_marker("gpu"):
            cases[item.nodeid.partition("[")[0], share.args[0]].append(item)
    for (_, n), found in cases.items():
        ranked = sorted(found, key=lambda item: crc32(item.callspec.id.encode()))
        for item in ranked[-(-len(found) // n) :]:
            item.add_marker("exhaustive")
