"""What distinguishes packed operands besides the contents of their arrays."""

from collections.abc import Callable
from dataclasses import fields
from functools import cache, cached_property
from operator import attrgetter
from typing import Any


class Described:
    """Base of dataclasses of arrays and of numbers and names that describe these; their reprs leave the arrays out."""

    @cached_property
    def description(self) -> tuple[Any, ...]:
        """The fields that are no arrays, in order: a part of the key of calls that take the operand."""
        kind: Any = type(self)
        return _getter(kind)(self)


@cache
def _getter(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*(field.name for field in fields(kind) if field.repr))
