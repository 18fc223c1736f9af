"""`EmulatorOptions`: how the emulator runs a launch. Default, rule, error text and meaning of each option are here.

Functions for users take the fields as keywords (`OptionKeywords`; `run` some of them) or one object as `options`.
All others pass the object on, down to `LaunchState.options`, where machine and checks read it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self, TypedDict

import numpy as np

from ptxlab.emulator.unneeded import Statement
from ptxlab.errors import ArgumentError
from ptxlab.validate import is_integer, is_one_of

# Kinds of findings by check. Those of the async proxy are reported by `async`, and in plain kernels by `proxy`.
KINDS = {
    "lanes": ("carry", "range"),
    "init": ("uninitialised",),
    "race": ("race",),
    "async": ("async", "async-dirty", "war"),
    "divergence": ("divergence",),
    "overrun": ("overrun",),
    "quirks": (),  # notes alone
    "float": ("nan", "infinity", "overflow", "subnormal"),
    "proxy": ("async-dirty", "war"),
    "narrow": ("narrow",),
}
ON_REQUEST = frozenset({"float", "proxy", "narrow"})  # not among `all`: what they report may be on purpose, or usual
CHECKS = frozenset(KINDS) - ON_REQUEST
MODES = ("early", "late")
# Instructions that a wave of blocks dispatches, at some ten to a hundred microseconds each.
MAX_STEPS = 10_000_000


class OptionKeywords(TypedDict, total=False):
    """The fields of `EmulatorOptions` as keyword arguments; None stands for the default."""

    checks: str | Iterable[str] | None
    mode: str | None
    seed: int | None
    max_steps: int | None
    count_banks: bool | None
    step_clock: bool | None
    without: Collection[Statement] | None


@dataclass(frozen=True, kw_only=True)
class EmulatorOptions:
    """Options of a launch in the emulator, whatever the kernel. The GPU ignores all of them.

    Attributes:
        checks: what to look for: any of `lanes`, `race`, `init`, `async`, `divergence`, `overrun`, `quirks`, and of
            `float`, `proxy` and `narrow`, which `"all"` leaves out. Names, or one string with commas. Bounds and
            alignment always are.
        mode: when asynchronous operations complete: `early`, at once; `late`, when they are waited for, in an order
            drawn from `seed`. In `late` the lanes of a warp also execute their strong stores (relaxed, volatile,
            release) at two times.
        seed: seed of everything that may happen in any order.
        max_steps: instructions that a wave of blocks may dispatch; by default 10 million. Lanes that spin on what no
            other lane will change are reported before that.
        count_banks: count wavefronts of shared memory and sectors of global memory, per source line.
        step_clock: give every warp a clock of its own, for timelines (`checks.step_clock`).
        without: fences and waits of the kernel to leave out (`statements_of`).

    Raises:
        ArgumentError: a value that breaks the option's rule.
    """

    checks: frozenset[str] = frozenset()
    mode: str = "early"
    seed: int = 0
    max_steps: int = MAX_STEPS
    count_banks: bool = False
    step_clock: bool = False
    without: frozenset[Statement] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "checks", checks_of("checks", self.checks))
        if not is_one_of(self.mode, MODES):
            raise ArgumentError("mode", f"must be one of {', '.join(MODES)}", self.mode)
        if not is_integer(self.seed) or self.seed < 0:
            raise ArgumentError("seed", "is an integer, 0 or more", repr(self.seed))
        if not is_integer(self.max_steps) or self.max_steps < 1:
            raise ArgumentError("max_steps", "has to be a positive integer", repr(self.max_steps))
        for name in ("count_banks", "step_clock"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(name, "must be True or False", repr(getattr(self, name)))
        object.__setattr__(self, "without", _statements(self.without))

    @classmethod
    def combine(cls, options: "EmulatorOptions | None", keywords: Mapping[str, Any]) -> "EmulatorOptions":
        """Return `options`, by default the defaults, with the keyword arguments of a call in place of its fields.

        A keyword that is None changes nothing.

        Raises:
            ArgumentError: a value that breaks the option's rule, or `options` of another type.
            TypeError: a keyword that is no option, as of any Python function.
        """
        if not isinstance(options, EmulatorOptions | None):
            raise ArgumentError("options", "an EmulatorOptions", type(options).__name__)
        if unknown := [name for name in keywords if name not in _NAMES]:
            raise TypeError(f"unexpected keyword argument {unknown[0]!r}; the emulator's options: {', '.join(_NAMES)}")
        changes = {name: option for name, option in keywords.items() if option is not None}
        options = options or _DEFAULTS
        return replace(options, **changes) if changes else options

    def add_checks(self, checks: Iterable[str]) -> Self:
        """Return these options with further checks."""
        return replace(self, checks=self.checks | frozenset(checks))


def checks_of(option: str, checks: str | Iterable[str], caller_checks: Collection[str] = ()) -> frozenset[str]:
    """Parse names of checks, or one string such as `race`, `lanes,race` or `all,float`; `option` is named in errors.

    `caller_checks` are names of checks that the caller makes, and not the emulator: they are taken and left out.
    """
    if isinstance(checks, str):
        words = list(filter(None, map(str.strip, checks.split(","))))
        checks = [name for word in words for name in (CHECKS if word == "all" else (word,))]
    names = CHECKS | ON_REQUEST | {*caller_checks}
    rule = f"some of {', '.join(sorted(names | {'all'}))}"
    if not isinstance(checks, Iterable) or isinstance(checks, np.ndarray):
        raise ArgumentError(option, rule, checks)
    for name in (chosen := list(checks)):
        if not is_one_of(name, names):
            raise ArgumentError(option, rule, name)
    return frozenset(chosen) - {*caller_checks}


def _statements(without: Collection[Statement]) -> frozenset[Statement]:
    """Check the type of statements to leave out."""
    rule = "statements of the kernel (emulator.statements_of)"
    if not isinstance(without, Collection) or isinstance(without, np.ndarray):
        raise ArgumentError("without", rule, repr(without))
    for statement in without:
        if not isinstance(statement, Statement):
            raise ArgumentError("without", rule, repr(statement))
    return frozenset(without)


_NAMES = tuple(field.name for field in fields(EmulatorOptions))
_DEFAULTS = EmulatorOptions()  # a launch on the GPU, which ignores them, makes none
