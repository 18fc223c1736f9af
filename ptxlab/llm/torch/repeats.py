"""Calls of an operator like one before them: the same kernels are launched, on other memory.

A public call checks its arguments, chooses kernels, compiles and launches them. Of the first call of a kind it is noted
which plans were launched, and of each of their pointers in which tensor it lies, and how far. A call with equal options
and tensors of the same dtypes and shapes would come to the same: it makes its results, and launches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from ptxlab import gpu
from ptxlab.lowbit.kernels.operation import launches_within, remember
from ptxlab.runtime.plan import Plan

_Place = tuple[int, int]  # the number of a tensor, of arguments and then results; bytes from its beginning
_Span = tuple[int, int]  # address, bytes
_NOWHERE = -1, 0  # of a null pointer: the last address is 0


class _Launch(NamedTuple):
    """A plan, where its pointers come from, and the tensors that it maps."""

    plan: Plan
    places: tuple[_Place, ...]
    mapped: tuple[int, ...]


class _Apart(NamedTuple):
    """An argument that is written, another, and how far the other begins, at least before it or behind it."""

    written: int
    other: int
    before: int
    behind: int


class _Again(NamedTuple):
    """What a kind of call launches, and which arguments must not share memory."""

    launches: tuple[_Launch, ...]
    apart: tuple[_Apart, ...]


class Repeats:
    """An operator on CUDA tensors.

    Attributes:
        call: makes the public call.
        make: makes its results and nothing else.
        arguments: their names in order, and whether the operator writes them.
    """

    def __init__(self, call: Callable[..., Any], make: Callable[..., Any], arguments: Mapping[str, bool]) -> None:
        self.call, self.make, self.arguments = call, make, arguments
        self._known: dict[tuple[Any, ...], _Again] = {}

    def __call__(self, *args: Any, **how: Any) -> Any:
        """What the public call returns."""
        kind, tensors, addresses = _taken_apart(args, how)
        again = self._known.get(kind)
        if again is None:
            return self._first(kind, tensors, args, how)
        for written, other, before, behind in again.apart:
            if -before < addresses[other] - addresses[written] < behind:  # the public call has its own opinion of that
                return self.call(*args, **how)
        results = self.make(*args, **how)
        for each in _tensors(results):
            tensors.append(each)
            addresses.append(each.data_ptr())
        addresses.append(0)
        stream = gpu.stream_handle()
        for plan, places, mapped in again.launches:
            plan.at(stream, [addresses[i] + offset for i, offset in places], [tensors[i] for i in mapped])
        return results

    def _first(self, kind: tuple[Any, ...], tensors: list[Tensor], args: tuple[Any, ...], how: dict[str, Any]) -> Any:
        """The public call; what it launches is noted if all memory is that of arguments and results, each apart."""
        with launches_within() as launched:
            results = self.call(*args, **how)
        spans = [(each.data_ptr(), each.nbytes) for each in (*tensors, *_tensors(results))]
        in_order = sorted(span for span in spans if span[1])
        if any(start + nbytes > following for (start, nbytes), (following, _) in pairwise(in_order)):
            return results
        launches = [_launch(plan, views, spans) for plans, views in launched for plan in plans]
        known = tuple(each for each in launches if each)
        if len(known) == len(launches):
            remember(self._known, kind, _Again(known, tuple(self._apart(args, how))))
        return results

    def _apart(self, args: tuple[Any, ...], how: dict[str, Any]) -> Iterator[_Apart]:
        given = {**dict(zip(self.arguments, args, strict=False)), **how}
        tensors = [(self.arguments[name], each.nbytes) for name in given for each in _tensors(given[name])]
        for i, (is_written, nbytes) in enumerate(tensors):
            for j, (_, others) in enumerate(tensors):
                if is_written and i != j:
                    yield _Apart(i, j, others, nbytes)


def _taken_apart(args: tuple[Any, ...], how: dict[str, Any]) -> tuple[tuple[Any, ...], list[Tensor], list[int]]:
    """By what kinds of calls are told apart; all tensors, those of lists too; where they begin."""
    kind: list[Any] = [*how]
    tensors: list[Tensor] = []
    for given in (*args, *how.values()):
        if isinstance(given, Tensor):
            tensors.append(given)
            kind += given.dtype, given.shape, given.is_contiguous(), given.get_device()
        elif isinstance(given, list):
            kind.append(len(given))
            for each in given:
                tensors.append(each)
                kind += each.dtype, each.shape, each.is_contiguous(), each.get_device()
        else:
            kind.append(given)
    addresses, low_bits = [], 0
    for each in tensors:
        address = each.data_ptr()
        addresses.append(address)
        low_bits |= address
    kind.append(low_bits % gpu.ALIGNMENT)  # the public call takes no other than 0
    return tuple(kind), tensors, addresses


def _tensors(given: Any) -> Sequence[Tensor]:
    """Those in what an operator takes or returns."""
    if isinstance(given, Tensor):
        return (given,)
    return given if isinstance(given, tuple | list) else ()


def _launch(plan: Plan, views: Mapping[str, gpu.View], spans: Sequence[_Span]) -> _Launch | None:
    """None where a pointer lies in none of the tensors, or a tensor map is of a part."""
    places = []
    for name in plan.names:
        if name not in views:
            places.append(_NOWHERE)
            continue
        at = views[name].address
        place = [(i, at - start) for i, (start, nbytes) in enumerate(spans) if start <= at < start + nbytes]
        if not place:
            return None
        places += place
    mapped = places[len(plan.names) - len(plan.mapped) :]
    return None if any(offset for _, offset in mapped) else _Launch(plan, tuple(places), tuple(i for i, _ in mapped))
