"""Calls of an operator like one before them: the same kernels are launched, on other memory.

A public call checks its arguments, chooses kernels, compiles and launches them. Of the first call of a kind it is noted
which plans were launched, and of each of their pointers in which tensor it lies, and how far. A call with equal options
and tensors of the same dtypes and shapes would come to the same: it makes its results, and launches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
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
    """Two arguments, the first of which is written, and the bytes that the other must keep clear of it on each side."""

    written: int
    other: int
    before: int
    behind: int


class _Again(NamedTuple):
    """Launches of a kind of call, and the arguments that must not share memory."""

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
        """Launch a known kind of call again, otherwise make the public call; return what that returns."""
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
        """Make the public call for the first time with this kind of arguments.

        Its launches are noted if all their memory belongs to arguments and results, and nothing overlaps what they
        write.
        """
        with launches_within() as launched:
            results = self.call(*args, **how)
        spans = [(each.data_ptr(), _extent(each)) for each in (*tensors, *_tensors(results))]
        is_written = [written for written, _ in self._written(args, how)] + [True] * len(_tensors(results))
        if any(
            _overlap(spans[i], spans[j])
            for i, j in combinations(range(len(spans)), 2)
            if is_written[i] or is_written[j]
        ):
            return results
        launches = [_launch(plan, views, spans) for plans, views in launched for plan in plans]
        known = tuple(each for each in launches if each)
        if len(known) == len(launches):
            remember(self._known, kind, _Again(known, tuple(self._apart(args, how))))
        return results

    def _written(self, args: tuple[Any, ...], how: dict[str, Any]) -> list[tuple[bool, int]]:
        """Tell of every tensor among the arguments whether the operator writes it, and its extent."""
        given = {**dict(zip(self.arguments, args, strict=False)), **how}
        return [(self.arguments[name], _extent(each)) for name in given for each in _tensors(given[name])]

    def _apart(self, args: tuple[Any, ...], how: dict[str, Any]) -> Iterator[_Apart]:
        tensors = self._written(args, how)
        for i, (is_written, nbytes) in enumerate(tensors):
            for j, (_, others) in enumerate(tensors):
                if is_written and i != j:
                    yield _Apart(i, j, others, nbytes)


def _taken_apart(args: tuple[Any, ...], how: dict[str, Any]) -> tuple[tuple[Any, ...], list[Tensor], list[int]]:
    """Return the key of a call's kind, every tensor of it, those of lists too, and the tensors' addresses."""
    kind: list[Any] = [*how]
    tensors: list[Tensor] = []
    for given in (*args, *how.values()):
        if isinstance(given, Tensor):
            tensors.append(given)
            kind += given.dtype, given.shape, given.is_contiguous() or given.stride(), given.get_device()
        elif isinstance(given, list):
            kind.append(len(given))
            for each in given:
                tensors.append(each)
                kind += each.dtype, each.shape, each.is_contiguous() or each.stride(), each.get_device()
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
    """Return the tensors among an operator's arguments or results."""
    if isinstance(given, Tensor):
        return (given,)
    return given if isinstance(given, tuple | list) else ()


def _extent(tensor: Tensor) -> int:
    """Compute the bytes from a tensor's first element to the end of its last, gaps included."""
    if tensor.is_contiguous() or not tensor.numel():
        return int(tensor.nbytes)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.itemsize)


def _overlap(one: _Span, other: _Span) -> bool:
    return max(one[0], other[0]) < min(sum(one), sum(other))


def _launch(plan: Plan, views: Mapping[str, gpu.View], spans: Sequence[_Span]) -> _Launch | None:
    """Return a plan's launch with each pointer as an offset into a tensor.

    Return None where a pointer lies in none of the tensors, or may be of more than one, or a tensor map is of a part.
    Tensors that are only read may overlap, as views of one projection do: a pointer belongs to the one it begins.
    """
    places = []
    for name in plan.names:
        if name not in views:
            places.append(_NOWHERE)
            continue
        at = views[name].address
        place = [(i, 0) for i, (start, nbytes) in enumerate(spans) if nbytes and start == at]
        if not place:
            place = [(i, at - start) for i, (start, nbytes) in enumerate(spans) if start <= at < start + nbytes]
        if len(place) != 1:
            return None
        places += place
    mapped = places[len(plan.names) - len(plan.mapped) :]
    return None if any(offset for _, offset in mapped) else _Launch(plan, tuple(places), tuple(i for i, _ in mapped))
