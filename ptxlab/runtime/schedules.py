"""Schedules: orders in which asynchronous operations may complete, and whether a kernel's results depend on them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ptxlab.emulator import EmulatorOptions


@dataclass(frozen=True)
class Schedule:
    """The time at which asynchronous operations complete: `early` (at once), or `late` (at a wait, in seeded order)."""

    mode: str = "early"
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Parse `early` or `late:3`."""
        mode, _, seed = text.partition(":")
        return cls(mode, int(seed or 0))

    def apply(self, options: EmulatorOptions) -> EmulatorOptions:
        """Return the options with this schedule's mode and seed."""
        return replace(options, mode=self.mode, seed=self.seed)

    def __str__(self) -> str:
        return f"late:{self.seed}" if self.mode == "late" else "early"


CHECK = "schedules"  # the check's name on a command line; `all` includes it
CHECKED_SCHEDULES = Schedule(), Schedule("late", 0), Schedule("late", 1), Schedule("late", 2)


@dataclass(frozen=True)
class Difference:
    """A difference between two schedules: `count` of `total` elements of an array, the first at `index`."""

    name: str
    count: int
    total: int
    index: tuple[int, ...]
    values: tuple[Any, Any]
    schedules: tuple[str, str]

    def __str__(self) -> str:
        place, (first, second), (a, b) = ", ".join(map(str, self.index)), self.schedules, self.values
        count_note = f"; {self.count:,} of {self.total:,} elements differ" if self.count > 1 else ""
        return f"{self.name}[{place}] is {a} in schedule {first} and {b} in {second}{count_note}"

    def to_json(self) -> dict[str, Any]:
        """Return the difference as JSON-ready values; numbers as text."""
        return asdict(self) | {"values": [*map(str, self.values)]}


def first_differences(
    first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray], schedules: tuple[Schedule, Schedule]
) -> list[Difference]:
    """List the first difference of each array whose bytes differ between two runs."""
    differences = []
    for name, a in first.items():
        b = second[name]
        if a.tobytes() == b.tobytes():
            continue
        is_different = (a.reshape(-1).view(np.uint8) != b.reshape(-1).view(np.uint8)).reshape(a.size, -1).any(axis=1)
        place = tuple(int(i) for i in np.unravel_index(int(np.argmax(is_different)), a.shape))
        first_name, second_name = map(str, schedules)
        differences.append(
            Difference(name, int(is_different.sum()), a.size, place, (a[place], b[place]), (first_name, second_name))
        )
    return differences
