"""`Suite`: what is measured together under one name, as a room or another package registers it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ptxlab.bench.record import Row
from ptxlab.errors import ArgumentError

PART = "_part"  # behind the name of a record that is no whole suite
Keep = Callable[[str, Callable[[], Iterable[Row]]], list[Row]]  # (section, measure) -> its rows
OURS = "_ours"  # behind that of a suite which is measured without the peers that it takes


def measure_section(section: str, measure: Callable[[], Iterable[Row]]) -> list[Row]:
    """Measure a section of a suite and keep nothing: what `rows` of a suite does by itself."""
    return [*measure()]


@dataclass(frozen=True)
class Suite:
    """Measurements that one record holds.

    Attributes:
        name: of the suite, and of its record.
        rows: measures: (names of the kernels, ceilings, progress, and by keyword what the suite takes) -> rows. Without
            a GPU: (progress) -> rows.
        on_gpu: whether it measures the GPU; else this machine's CPU.
        takes: keywords beside `only` that `rows` takes, such as `matrices` and `peers`.
        part: checks the words of `--only`; raises ArgumentError for one that names no part. None: there are no parts.
        record_of: the name of the record of a part that has a record of its own, else empty.
        keeps: whether a run that was stopped goes on behind its last section: `rows` then takes `keep`, and measures
            each section of the suite by `keep(name, measure)`.
        shortfall: (rows, device) -> why the card was slower than it should be while these were measured, else empty.
        resumes: whether a run that was stopped goes on where it was: `rows` then takes `done`, the rows of before.
    """

    name: str
    rows: Callable[..., Iterable[Row]]
    on_gpu: bool = True
    takes: frozenset[str] = frozenset()
    part: Callable[[Sequence[str]], object] | None = None
    record_of: Callable[[Sequence[str]], str] = lambda only: ""
    resumes: bool = False
    keeps: bool = False
    shortfall: Callable[[Sequence[Row], str], str] = lambda rows, device: ""

    def require_part(self, only: Sequence[str]) -> None:
        """Raise ArgumentError for words that name no part of the suite."""
        if self.part is not None:
            self.part(only)
        elif only:
            raise ArgumentError("only", f"must be empty for the suite {self.name}", ", ".join(only))

    def record_name(self, only: Sequence[str]) -> str:
        """Name the record of a part: a part without a record of its own is `SUITE_part`."""
        return self.record_of(only) or (f"{self.name}{PART}" if only else self.name)
