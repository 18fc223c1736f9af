"""Conditions of breakpoints: `%r5 == 3`, `%tid.x == 31 and sum[0] > 2.5`, asked of each lane that comes there."""

import operator
import re
from collections.abc import Callable

import numpy as np

from ptxlab.debugger.session import DebuggerError, Session
from ptxlab.debugger.state import Held, State
from ptxlab.debugger.stoppable import Moment
from ptxlab.emulator.core.lanes import indices_of
from ptxlab.emulator.front.types import Array, is_float
from ptxlab.emulator.ops.rounding import widen

_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_CLAUSE = re.compile(r"(?P<left>.+?)\s*(?P<comparison>==|!=|<=|>=|<|>)\s*(?P<right>.+)")
_USAGE = "a condition such as %r5 == 3, of numbers, registers, arguments and elements, joined by `and`"


def condition_of(session: Session, text: str) -> Callable[[Moment], Array]:
    """Parse a condition into a function: moment -> its lanes for which it holds; DebuggerError for any other text."""
    clauses = []
    for clause in re.split(r"\s+and\s+", text.strip()):
        match = _CLAUSE.fullmatch(clause)
        if match is None:
            raise DebuggerError(f"break: {_USAGE} (got {text!r})")
        clauses.append((match["left"], _COMPARISONS[match["comparison"]], match["right"]))
    for left, _, right in clauses:
        for operand in (left, right):
            _values_of(State(session), operand, np.zeros(1, np.intp))

    def holds(moment: Moment) -> Array:
        lanes = indices_of(moment.lanes)
        for left, compare, right in clauses:
            operands = [_per_lane(session, moment, operand, lanes) for operand in (left, right)]
            lanes = lanes[compare(*operands)]
        return lanes

    return holds


def _per_lane(session: Session, moment: Moment, operand: str, lanes: Array) -> Array:
    """Return an operand's value in each of these lanes, of any warps, as Python numbers, which compare exactly."""
    warps = [lanes[lanes // 32 == warp] for warp in np.unique(lanes // 32)]
    parts = [_values_of(State(session, moment, int(warp[0])), operand, warp % 32) for warp in warps]
    return np.concatenate(parts) if parts else np.zeros(0)


def _values_of(state: State, operand: str, places: Array) -> Array:
    """Return the values of an operand in lanes of one warp."""
    number = _number(operand)
    if number is not None:
        return np.full(len(places), number, object)
    operand_held = state.find(operand)
    numbers = _numbers(operand_held)
    if operand_held.lane is not None and np.shape(operand_held.values) == (32,):
        return numbers[places]
    if len(numbers) != 1:
        raise DebuggerError(f"break: one number is compared; {operand_held.name} has {len(numbers)}, so give an index")
    return np.repeat(numbers, len(places))


def _number(text: str) -> int | float | None:
    for kind in (lambda digits: int(digits, 0), float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _numbers(operand: Held) -> Array:
    """Convert values to Python's numbers; bits of unknown sign are signed, as `print` shows them."""
    flat_values = np.ascontiguousarray(operand.values).reshape(-1)
    if is_float(operand.type):
        wide_values = widen(flat_values, operand.type)
        if wide_values.ndim != 1:
            raise DebuggerError(f"break: one number is compared; {operand.name} is of type {operand.type}")
        return np.array(wide_values.tolist(), object)
    if operand.type[0] in "sb" and flat_values.dtype.kind in "iu":
        flat_values = flat_values.view(f"i{flat_values.itemsize}")
    return np.array(flat_values.tolist(), object)
