"""An opcode, taken apart: its name and its modifiers; and tables of what opcodes mean."""

from collections.abc import Callable
from typing import Generic, TypeVar

from ptxlab.emulator.front.types import DTYPES, is_float


class UnknownOpcode(Exception):  # noqa: N818  (turned into UnknownInstruction, with its place, where the place is known)
    """No operation of this name, or none with these modifiers."""


class Opcode:
    """An opcode's name and its modifiers, which a builder takes one after another; any left over make it unknown."""

    def __init__(self, text: str, selectors: tuple[str, ...] = ()) -> None:
        self.text = text
        self._selectors = selectors
        self.selected = not any(selectors)
        self.name, *self.modifiers = text.split(".")

    def flag(self, name: str) -> bool:
        """Consume a modifier; False if the opcode does not have it."""
        if name not in self.modifiers:
            return False
        self.modifiers.remove(name)
        return True

    def choice(self, *names: str, default: str | None = None) -> str:
        """Consume and return the one of `names` that the opcode has, or `default`; raise UnknownOpcode for neither."""
        for modifier in self.modifiers:
            if modifier in names:
                self.modifiers.remove(modifier)
                return modifier
        if default is None:
            raise UnknownOpcode(self.text)
        return default

    def type(self, *allowed: str) -> str:
        """Consume and return the first type among the modifiers, which must be one of `allowed`."""
        type_name = self.choice(*DTYPES)
        if allowed and type_name not in allowed:
            raise UnknownOpcode(self.text)
        return type_name

    @property
    def selectors(self) -> tuple[str, str, str, str]:
        """Selectors of a video instruction's operands d, a, b, c, such as "b3210" or ""."""
        self.selected = True
        d, a, b, c = (*self._selectors, "", "", "", "")[:4]
        return d, a, b, c

    @property
    def floating(self) -> bool:
        """True if the last type named is a floating-point one."""
        types = [m for m in self.modifiers if m in DTYPES]
        return bool(types) and is_float(types[-1])


Meaning = TypeVar("Meaning")
Builder = Callable[[Opcode], Meaning]


class OpcodeTable(Generic[Meaning]):
    """Meanings of opcodes: a builder per name takes the modifiers, on integers and floating-point types apart."""

    def __init__(self) -> None:
        self._builders: dict[tuple[str, bool], Builder[Meaning]] = {}

    def enter(self, *names: str, floating: bool | None = None) -> Callable[[Builder[Meaning]], Builder[Meaning]]:
        """Decorate a builder of these names, on integers (False), floating-point types (True) or both (None)."""

        def add_builder(builder: Builder[Meaning]) -> Builder[Meaning]:
            for name in names:
                for domain in (False, True) if floating is None else (floating,):
                    self._builders[name, domain] = builder
            return builder

        return add_builder

    def find(self, text: str, selectors: tuple[str, ...] = ()) -> Meaning:
        """Find the meaning of an opcode such as "mad.lo.u32", with its operands' selectors.

        Raises `UnknownOpcode` for an unknown name, and where modifiers or selectors are left over.
        """
        opcode = Opcode(text, selectors)
        builder = self._builders.get((opcode.name, opcode.floating))
        if builder is None:
            raise UnknownOpcode(text)
        meaning = builder(opcode)
        if opcode.modifiers or not opcode.selected:
            raise UnknownOpcode(text)
        return meaning
