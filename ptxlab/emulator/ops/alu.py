"""The table of register-to-register operations: opcode -> types of its operands, and a function of their rows.

Each family module (`integer`, `floating`, `convert`, `video`) enters its operations with `@operation`. A function
takes one array per source and returns one per destination, all of shape [lanes]; a constant source has shape [1] and
broadcasts. Sources may be views of the register file, so a function never writes into them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from ptxlab.emulator.types import DTYPES, is_float


class UnknownOpcode(Exception):  # noqa: N818  (turned into UnknownInstruction, with its place, where the place is known)
    """No operation of this name, or none with these modifiers."""


@dataclass(frozen=True)
class Form:
    """What an opcode does: PTX types of destinations and sources in operand order, and the function.

    The pseudo-type "cc" is the carry flag, which is no operand. `compute` returns an array, or a tuple of as many as
    there are destinations.
    """

    out: tuple[str, ...]
    sources: tuple[str, ...]
    compute: Callable[..., Any]


class Opcode:
    """An opcode's name and its modifiers, which a builder takes one after another; any left over make it unknown."""

    def __init__(self, text: str, selectors: tuple[str, ...] = ()) -> None:
        self.text = text
        self._selectors = selectors
        self.selected = not any(selectors)
        self.name, *self.modifiers = text.split(".")

    def flag(self, name: str) -> bool:
        """Whether the modifier is there."""
        if name not in self.modifiers:
            return False
        self.modifiers.remove(name)
        return True

    def choice(self, *names: str, default: str | None = None) -> str:
        """The one of the names that is there, else the default; neither: unknown."""
        for modifier in self.modifiers:
            if modifier in names:
                self.modifiers.remove(modifier)
                return modifier
        if default is None:
            raise UnknownOpcode(self.text)
        return default

    def type(self, *allowed: str) -> str:
        """The first type among the modifiers that are left; `allowed` names the types that the operation has."""
        found = self.choice(*DTYPES)
        if allowed and found not in allowed:
            raise UnknownOpcode(self.text)
        return found

    @property
    def selectors(self) -> tuple[str, str, str]:
        """Selectors of a video instruction's first three operands, such as "b3210" or ""."""
        self.selected = True
        d, a, b = (*self._selectors, "", "", "")[:3]
        return d, a, b

    @property
    def floating(self) -> bool:
        """Whether the last type named is a floating-point one."""
        types = [m for m in self.modifiers if m in DTYPES]
        return bool(types) and is_float(types[-1])


Builder = Callable[[Opcode], Form]
_BUILDERS: dict[tuple[str, bool], Builder] = {}


def operation(*names: str, floating: bool | None = None) -> Callable[[Builder], Builder]:
    """Enter a builder for opcodes of these names, on integers (False), floating-point types (True) or both (None)."""

    def enter(builder: Builder) -> Builder:
        for name in names:
            for domain in (False, True) if floating is None else (floating,):
                _BUILDERS[name, domain] = builder
        return builder

    return enter


@cache
def form(text: str, selectors: tuple[str, ...] = ()) -> Form:
    """The form of a full opcode such as "mad.lo.u32", with its operands' selectors; raises `UnknownOpcode`."""
    opcode = Opcode(text, selectors)
    builder = _BUILDERS.get((opcode.name, opcode.floating))
    if builder is None:
        raise UnknownOpcode(text)
    result = builder(opcode)
    if opcode.modifiers or not opcode.selected:
        raise UnknownOpcode(text)
    return result
