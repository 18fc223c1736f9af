"""Options of the public calls: each is stated once, as a field of a frozen dataclass.

The path of a call can be read from its signature: signature -> options -> check -> choose -> prepare -> plan. A public
call has a keyword of the same name and default for every field of its options, and passes them to `Options.of`, in the
order of the fields. The rest follows from the fields: the key of a call (one object for equal options), the check and
the text of its error (`Options.require_valid`), the key of the kernels that are prepared for it (`Options.kernel_key`),
and the lines of its docstring (`document_options`).

So an option is added with a field and a keyword, and cannot be missing from a key: without its value `of` raises, and
tests/lowbit/kernels/test_options.py compares signatures, fields and docstrings.
"""

import inspect
import textwrap
from collections.abc import Callable, Hashable
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from typing import Any, NamedTuple, Self, TypeVar, cast

from ptxlab.errors import ArgumentError
from ptxlab.runtime.backends import BACKENDS
from ptxlab.validate import is_one_of

MAX_ENTRIES = 4096  # kernels, calls and options that are remembered
_WIDTH = 120  # columns of a docstring
_PLACEHOLDER = "{options}"

Function = TypeVar("Function", bound=Callable[..., Any])


class Rule(NamedTuple):
    """A rule for the value of one option.

    Attributes:
        text: the rule in an error.
        allows: whether a value keeps the rule.
        show: the value in an error.
    """

    text: str
    allows: Callable[[Any], bool]
    show: Callable[[Any], Any] = repr


FLAG = Rule("must be True or False", lambda flag: isinstance(flag, bool))
BACKEND = Rule(f"one of {', '.join(BACKENDS)}", lambda backend: is_one_of(backend, (*BACKENDS, None)), show=str)


def option(text: str, rule: Rule | None = None, *, default: Any = MISSING, selects_kernel: bool = True) -> Any:
    """Declare a field of `Options`.

    Args:
        text: its part of the docstring of a public call.
        rule: what holds for every value; None where that depends on other arguments.
        default: as in the signature; left out where the signature has none.
        selects_kernel: False only for an option with which the same kernels are launched in the same way.
    """
    metadata = {"text": text, "rule": rule, "selects_kernel": selects_kernel}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """Options that every call has.

    `of` makes one object for equal options, so objects are compared, and hashed in the key of a call, by identity.
    """

    backend: str | None = option(
        "`gpu` or `emulator`; by default the GPU where one will do. Host arrays are copied there and back.",
        BACKEND,
        default=None,
        selects_kernel=False,  # arrays on a device are for the GPU, whatever is asked for
    )

    @classmethod
    def of(cls, *values: Any) -> Self:
        """Return the options with these values of all fields: the same object for equal values of the same types.

        Values that cannot be hashed make a new object; no rule allows such a value.
        """
        try:
            return cast(Self, _intern(cast(Hashable, cls), *values))
        except TypeError:
            return cls._with(values)

    @classmethod
    def _with(cls, values: tuple[Any, ...]) -> Self:
        return cls(**dict(zip((option_field.name for option_field in fields(cls)), values, strict=True)))

    @property
    def check(self) -> bool:
        """True where numbers on the device are looked at, for which the call waits."""
        return False

    @property
    def programmatic(self) -> bool:
        """True where a kernel may begin before the kernel before it on the stream has ended."""
        return False

    @property
    def kernel_key(self) -> tuple[Any, ...]:
        """The values of all fields that select kernels or how they are launched."""
        return tuple(
            getattr(self, option_field.name) for option_field in fields(self) if option_field.metadata["selects_kernel"]
        )

    def require_valid(self, call: str) -> None:
        """Raise ArgumentError, in the name of a call, for the first option that breaks its rule."""
        for option_field in fields(self):
            rule, argument = option_field.metadata["rule"], getattr(self, option_field.name)
            if rule and not rule.allows(argument):
                raise ArgumentError(f"{call}: {option_field.name}", rule.text, rule.show(argument))


def early_launch(text: str) -> Any:
    """Declare the option `programmatic`, with what a call reads and writes before and after it waits."""
    start = "the call may begin before the kernel before it on the stream has ended (programmatic dependent launch)"
    return option(f"{start}{text} Of no effect on host arrays.", FLAG, default=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class LaunchOptions(Options):
    """Options of calls whose kernels can begin before the kernel before them has ended."""

    programmatic: bool = early_launch(", for which it waits by itself before it reads or writes anything.")


@lru_cache(MAX_ENTRIES, typed=True)  # typed: 1 == 1.0 == True, but rules tell them apart
def _intern(options: Any, *values: Any) -> Any:
    return options._with(values)


def document_options(options: type[Options]) -> Callable[[Function], Function]:
    """Decorate a public call: put a line for every option into its docstring, where that has a line `{options}`."""

    def document(function: Function) -> Function:
        if function.__doc__ is None:  # python -OO
            return function
        texts = {option_field.name: option_field.metadata["text"] for option_field in fields(options)}
        lines = [
            textwrap.fill(
                f"{name}: {texts[name]}",
                _WIDTH,
                initial_indent=" " * 8,
                subsequent_indent=" " * 12,
                break_long_words=False,
                break_on_hyphens=False,
            )
            for name in inspect.signature(function).parameters
            if name in texts
        ]
        function.__doc__ = function.__doc__.replace(f"        {_PLACEHOLDER}", "\n".join(lines))
        return function

    return document
