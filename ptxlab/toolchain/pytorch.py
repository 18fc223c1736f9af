"""PyTorch's headers, which the kernels of its extensions include. PyTorch itself is not imported."""

import functools
import importlib.util
import re
import sysconfig
from dataclasses import replace
from pathlib import Path

from ptxlab.errors import UnavailableError
from ptxlab.sources import Build

_MISSING = re.compile(r'(?:open source file "|error: )(?:torch|ATen|c10|pybind11)/')
_STANDARD = "c++20"  # the oldest that PyTorch 2.15's headers take


def lacks_headers(log: str) -> bool:
    """Return whether a compilation failed since a header of PyTorch was not found."""
    return _MISSING.search(log) is not None


@functools.cache
def folders() -> tuple[str, ...]:
    """Return the folders of PyTorch's headers and of Python's, which those include.

    There are none if PyTorch is not installed.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return ()
    include = Path(torch.origin).parent / "include"
    all_folders = (include, include / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include")))
    return tuple(str(folder) for folder in all_folders if folder.is_dir())


def with_headers(build: Build) -> Build:
    """Add PyTorch's headers, in C++20 at least; UnavailableError where PyTorch is not installed."""
    if not folders():
        raise UnavailableError("PyTorch's headers: not found; python -m pip install torch")
    std = build.std if build.std[-2:] >= _STANDARD[-2:] else build.std[:-2] + _STANDARD[-2:]
    return replace(build, include=(*build.include, *folders()), std=std)
