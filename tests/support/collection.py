"""While tests are collected nothing is compiled, assembled or emulated: a test module that does is not collected."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from ptxlab import emulator
from ptxlab.toolchain import cache


class BuiltAtImportError(Exception):
    """Something is built while a test module is imported, by every worker, whichever tests it runs."""


@contextmanager
def nothing_is_built() -> Iterator[None]:
    """Make compilers (NVRTC, and all that go through the cache) and the emulator raise while the block runs."""

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
    """Forbid builds while pytest imports the test modules."""
    with nothing_is_built():
        return (yield)
