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
from ptxlab.lowbit.kernels.operation import record_launches, remember
from ptxlab.runtime.plan import Plan

_Place = tuple[int, int]  # the number of a tensor, of arguments and then results; bytes from its beginning
_Span = tuple[int, int]  # address, bytes
_NOWHERE = -1, 0  # of a null pointer: the last address is 0


class _Launch(NamedTuple):
    """A plan, where its pointers come from, and the tensors that it maps."""

    plan: Plan
    places: tuple[_Place, ...]
    mapped: tuple[int, ...]


class _Clearance(NamedTuple):
    """Two arguments, the first of which is written, and the bytes that the other must keep clear of it on each side."""

    written: int
    neighbour: int
    below: int
    above: int


class _RecordedCall(NamedTuple):
    """Launches of a kind of call, and the arguments that must not share memory."""

    launches: tuple[_Launch, ...]
    clearances: tuple[_Clearance, ...]


class Repeats:
    """An operator on CUDA tensors.

    Attributes:
        call: makes the public call.
        make: makes its results and nothing else.
        arguments: their names in order, and whether the operator writes them.
    """

    def __init__(self, call: Callable[..., Any], make: Callable[..., Any], arguments: Mapping[str, bool]) -> None:
        self.call, self.make, self.arguments = call, make, arguments
        self._recorded: dict[tuple[Any, ...], _RecordedCall] = {}

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Launch a known kind of call again, otherwise make the public call; return what that returns."""
        kind, tensors, addresses = _classify_arguments(args, keywords)
        recorded_call = self._recorded.get(kind)
        if recorded_call is None:
            return self._record_first(kind, tensors, args, keywords)
        for written_tensor, neighbour_tensor, bytes_below, bytes_above in recorded_call.clearances:
            distance = addresses[neighbour_tensor] - addresses[written_tensor]
            if -bytes_below < distance < bytes_above:  # the public call has its own opinion of that
                return self.call(*args, **keywords)
        outputs = self.make(*args, **keywords)
        for tensor in _tensors(outputs):
            tensors.append(tensor)
            addresses.append(tensor.data_ptr())
        addresses.append(0)
        stream = gpu.stream_handle()
        for plan, places, mapped in recorded_call.launches:
            plan.launch_at(stream, [addresses[i] + offset for i, offset in places], [tensors[i] for i in mapped])
        return outputs

    def _record_first(
        self, kind: tuple[Any, ...], tensors: list[Tensor], args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Make the public call for the first time with this kind of arguments.

        Its launches are noted if all their memory belongs to arguments and results, and nothing overlaps what they
        write.
        """
        with record_launches() as recorded_launches:
            outputs = self.call(*args, **keywords)
        spans = [(tensor.data_ptr(), _extent(tensor)) for tensor in (*tensors, *_tensors(outputs))]
        is_written = [written for written, _ in self._tensor_arguments(args, keywords)]
        is_written += [True] * len(_tensors(outputs))
        if any(
            _overlap(spans[i], spans[j])
            for i, j in combinations(range(len(spans)), 2)
            if is_written[i] or is_written[j]
        ):
            return outputs
        launches = [_launch(plan, views, spans) for plans, views in recorded_launches for plan in plans]
        complete_launches = tuple(launch for launch in launches if launch)
        if len(complete_launches) == len(launches):
            remember(self._recorded, kind, _RecordedCall(complete_launches, tuple(self._clearances(args, keywords))))
        return outputs

    def _tensor_arguments(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> list[tuple[bool, int]]:
        """Tell of every tensor among the arguments whether the operator writes it, and its extent."""
        arguments = {**dict(zip(self.arguments, args, strict=False)), **keywords}
        return [(self.arguments[name], _extent(tensor)) for name in arguments for tensor in _tensors(arguments[name])]

    def _clearances(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[_Clearance]:
        tensors = self._tensor_arguments(args, keywords)
        for i, (is_written, nbytes) in enumerate(tensors):
            for j, (_, other_nbytes) in enumerate(tensors):
                if is_written and i != j:
                    yield _Clearance(i, j, other_nbytes, nbytes)


def _classify_arguments(
    args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], list[Tensor], list[int]]:
    """Return the key of a call's kind, every tensor of it, those of lists too, and the tensors' addresses.

    The kind includes the architecture that kernels are compiled for, since it decides which are launched.
    """
    kind: list[Any] = [gpu.target(), *keywords]
    tensors: list[Tensor] = []
    for argument in (*args, *keywords.values()):
        if isinstance(argument, Tensor):
            tensors.append(argument)
            kind += argument.dtype, argument.shape, argument.is_contiguous() or argument.stride(), argument.get_device()
        elif isinstance(argument, list):
            kind.append(len(argument))
            for tensor in argument:
                tensors.append(tensor)
                kind += tensor.dtype, tensor.shape, tensor.is_contiguous() or tensor.stride(), tensor.get_device()
        else:
            kind.append(argument)
    addresses, low_bits = [], 0
    for tensor in tensors:
        address = tensor.data_ptr()
        addresses.append(address)
        low_bits |= address
    kind.append(low_bits % gpu.ALIGNMENT)  # the public call takes no other than 0
    return tuple(kind), tensors, addresses


def _tensors(arguments: Any) -> Sequence[Tensor]:
    """Return the tensors among an operator's arguments or results."""
    if isinstance(arguments, Tensor):
        return (arguments,)
    return arguments if isinstance(arguments, tuple | list) else ()


def _extent(tensor: Tensor) -> int:
    """Compute the bytes from a tensor's first element to the end of its last, gaps included."""
    if tensor.is_contiguous() or not tensor.numel():
        return int(tensor.nbytes)
    last_element = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last_element + 1) * tensor.itemsize)


def _overlap(first: _Span, second: _Span) -> bool:
    return max(first[0], second[0]) < min(sum(first), sum(second))


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
        address = views[name].address
        place = [(i, 0) for i, (start, nbytes) in enumerate(spans) if nbytes and start == address]
        if not place:
            argument_offsets = ((i, address - start, nbytes) for i, (start, nbytes) in enumerate(spans))
            place = [(i, offset) for i, offset, nbytes in argument_offsets if 0 <= offset < nbytes]
        if len(place) != 1:
            return None
        places += place
    mapped = places[len(plan.names) - len(plan.mapped) :]
    return None if any(offset for _, offset in mapped) else _Launch(plan, tuple(places), tuple(i for i, _ in mapped))
