"""While tests are collected nothing is compiled, assembled or emulated: a test module that does is not collected.

Of the cases of a test marked `share(n)` all but an n-th are marked `exhaustive`.
"""

from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from zlib import crc32

import pytest

from ptxlab import emulator
from ptxlab.toolchain import cache


class BuiltAtImportError(Exception):
    """Something is built while a test module is imported, by every worker, whichever tests it runs."""


@contextmanager
def nothing_is_built() -> Iterator[None]:
    """Compilers (whatever goes through the cache, and NVRTC itself) and the emulator refuse."""

    def refuse(*_: object, **__: object) -> None:
        raise BuiltAtImportError("parametrize by names, and compile in a fixture or a cached function")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "get_or_make", refuse)
        patch.setattr(emulator, "run", refuse)
        if find_spec("cuda") and find_spec("cuda.bindings"):
            patch.setattr("cuda.bindings.nvrtc.nvrtcCompileProgram", refuse)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Around the imports of all test modules."""
    with nothing_is_built():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before `-m` selects. An n-th, rounded up, is left: always the same, and spread over all parameters.

    Cases on a GPU, where they take a moment, all are.
    """
    cases: dict[tuple[str, int], list[pytest.Function]] = defaultdict(list)
    for item in items:
        share = item.get_closest_marker("share")
        if isinstance(item, pytest.Function) and share and not item.get_closest_marker("gpu"):
            cases[item.nodeid.partition("[")[0], share.args[0]].append(item)
    for (_, n), found in cases.items():
        ranked = sorted(found, key=lambda item: crc32(item.callspec.id.encode()))
        for item in ranked[-(-len(found) // n) :]:
            item.add_marker("exhaustive")
