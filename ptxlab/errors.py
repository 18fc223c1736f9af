"""Every error that ptxlab raises on purpose.

All derive from `PtxlabError`. A message is one line and names the argument, the rule and the value; whatever is longer
(a compile log, a list of waiting threads) is kept in attributes or follows on further lines.
"""

import difflib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ptxlab.mangled import demangle_message

_MAX_SHOWN = 400  # characters of a value in a message
_BETWEEN_NAMES = re.compile(r"(?:, (?:or )?| or | and )(?![^(<]*[)>])")  # not between the parameters of one


def _letters(name: str) -> str:
    return re.sub(r"\d", "", name)


def nearest_of(rule: str, value: object) -> str:
    """Propose the nearest name of a rule that lists names, as `; nearest: lanes`; empty if none is near.

    A rule lists names where it says one (some, among) of them, or nothing else: `lqq, qoq or float`. A name with other
    digits is another name (int4 for int8), no slip.
    """
    listed_names = re.fullmatch(
        r"(?:must be )?(?:(?:one|some) of|among) (.+)|([\w.-]+(?:, [\w.-]+)*,? or [\w.-]+)", rule
    )
    if not listed_names or not isinstance(value, str) or "nearest" in rule:
        return ""
    names = [name for name in _BETWEEN_NAMES.split(listed_names[1] or listed_names[2]) if name != value]
    close_names = difflib.get_close_matches(value, names, n=1, cutoff=0.5)
    return f"; nearest: {close_names[0]}" if close_names and _letters(close_names[0]) != _letters(value) else ""


class PtxlabError(Exception):
    """Root of every error that ptxlab raises on purpose; mangled names in its message are shown as written in C++."""

    def __str__(self) -> str:
        return demangle_message(super().__str__())


class ArgumentError(PtxlabError, ValueError):
    """An argument breaks a rule: wrong dtype, shape, range, layout or name."""

    def __init__(self, argument: str, rule: str, value: object) -> None:
        value_text = " ".join(str(value).split())  # an array is several lines
        value_text = value_text if len(value_text) <= _MAX_SHOWN else f"{value_text[:_MAX_SHOWN]} ..."
        super().__init__(f"{argument}: {rule} (got {value_text}){nearest_of(rule, value)}")
        self.argument = argument
        self.rule = rule
        self.value = value


class UnknownKernel(ArgumentError):  # noqa: N818
    """No kernel or family has this name; the message shows the nearest ones."""

    def __init__(self, name: str, nearest: Sequence[str]) -> None:
        hint = f"nearest: {', '.join(nearest)}" if nearest else "`ptxlab list` shows all"
        PtxlabError.__init__(self, f"unknown kernel {name!r}; {hint}")
        self.argument, self.rule, self.value = "kernel", hint, name


class UnnamedKernel(ArgumentError):  # noqa: N818
    """A source has several kernels, and none is named; the message lists how to name them."""

    def __init__(self, path: str, names: str) -> None:
        PtxlabError.__init__(self, f"{path}: name one: {names}")
        self.argument, self.rule, self.value = f"{path}: entry", f"one of {names}", "nothing"


class FileError(PtxlabError):
    """A file cannot be used: missing, truncated, foreign, or not writable."""


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Prefix an `ArgumentError` raised inside with the name of its subject: `layer 3: w: must be finite`."""
    try:
        yield
    except ArgumentError as error:
        raise ArgumentError(f"{name}: {error.argument}", error.rule, error.value) from None


@contextmanager
def in_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an `ArgumentError` raised inside into the `FileError` of a file."""
    try:
        yield
    except ArgumentError as error:
        raise FileError(f"{path}: {error}") from None


class SourceError(PtxlabError):
    """A `.ptx` or `.cu` source is wrong; `path` and `line` say where."""

    def __init__(self, path: str, line: int, problem: str, excerpt: str = "") -> None:
        location = f"{path}:{line}" if line else path
        super().__init__(f"{location}: {problem}" + (f": `{excerpt}`" if excerpt else ""))
        self.path = path
        self.line = line
        self.problem = problem


class CompileError(SourceError):
    """NVRTC, ptxas or the driver refused a source; `log` is what it printed."""

    def __init__(self, path: str, line: int, problem: str, excerpt: str = "", log: str = "") -> None:
        super().__init__(path, line, problem, excerpt)
        self.log = log


class UnavailableError(PtxlabError):
    """Something this machine lacks (GPU, CuPy, ptxas ...); the message says what to install or to pass."""


class LaunchError(PtxlabError):
    """The GPU's driver refused a launch, or a kernel failed on the GPU."""


class EmulationError(PtxlabError):
    """The emulated kernel did something that would fault or hang on a GPU."""


class UnknownInstruction(EmulationError):  # noqa: N818  (an "UnknownInstructionError" reads no better)
    """The emulator does not implement this instruction."""


class MemoryFault(EmulationError):  # noqa: N818
    """Out-of-bounds or misaligned access."""


class Deadlock(EmulationError):  # noqa: N818
    """No lane can go on: all wait, or spin, and nothing is pending that could change that."""


class VerificationError(PtxlabError):
    """A kernel's results differ from its reference, or a check reported a finding."""


class OutOfTime(PtxlabError):  # noqa: N818
    """A proof took longer than it was allowed to, and is undecided."""


class BenchmarkError(PtxlabError):
    """A measurement is not valid: the card is slower than it should be, or the timed launch was wrong."""
