"""A saved Nsight Compute report (`.ncu-rep`), read by the package ncu-report: no GPU and no ncu needed."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ptxlab.errors import FileError, UnavailableError
from ptxlab.profile.nsight.ncu import unknown_metric

SAMPLES = "smsp__pcsamp_warps_issue_stalled_"  # + reason: how many sampled warps stood at an instruction for it
ISSUING = "selected"  # the one reason that is no stall: the warp issues
_NO_ISSUE = "_not_issued"  # the same, counted only when the scheduler issued nothing
_EXECUTED = "inst_executed"
_TARGET = re.compile(r"0x[0-9a-f]{9,}")  # of a branch: an address, which changes from run to run
_STEP = 16  # bytes of an instruction
_MAX_INSTRUCTIONS = 1 << 16  # instructions of a kernel, at most


@dataclass(frozen=True)
class SampledInstruction:
    """A machine instruction of a profiled kernel, with its samples.

    Attributes:
        offset: in bytes from the kernel's start.
        sass: its text.
        file: name of the source file that the line table gives, without folders; empty if unknown.
        line: in that file.
        samples: warps that stood here when they were sampled, by reason; of these `ISSUING` did not stall.
        executed: how many warps executed it.
    """

    offset: int
    sass: str
    file: str
    line: int
    samples: Mapping[str, int]
    executed: int = 0

    @property
    def stalled(self) -> int:
        """Sampled warps that did not issue."""
        return sum(count for reason, count in self.samples.items() if reason != ISSUING)


@dataclass(frozen=True)
class ProfiledLaunch:
    """A profiled launch of a report: kernel, metrics, instructions and sources.

    Attributes:
        kernel: its entry symbol.
        numbers: metrics by ncu's names, those that are numbers, in base units.
        names: metrics that are texts.
        instructions: the whole kernel in the order of addresses.
        sources: text of the source files by name, as far as the report holds them.
    """

    kernel: str
    numbers: Mapping[str, float]
    names: Mapping[str, str]
    instructions: tuple[SampledInstruction, ...]
    sources: Mapping[str, str]

    def number(self, metric: str) -> float:
        """Return a metric that must be in the report. Raises UnavailableError, which names it."""
        if metric not in self.numbers:
            raise unknown_metric(f"{metric} (it is not in the report)")
        return self.numbers[metric]

    def text_of(self, file: str, line: int) -> str:
        """Return a source line without its indentation; empty if the report does not hold it."""
        lines = self.sources.get(file, "").splitlines()
        return lines[line - 1].strip() if 0 < line <= len(lines) else ""


def require_reader() -> Any:
    """Import the package ncu-report. Raises UnavailableError, which says how to install it."""
    try:
        import ncu_report
    except ImportError:
        raise UnavailableError("ncu-report: not installed; python -m pip install 'ptxlab[profile]'") from None
    return ncu_report


def read(path: Path) -> list[ProfiledLaunch]:
    """Read the launches of a report, in their order.

    Raises:
        FileError: no such file, or no report that this ncu-report can read.
        UnavailableError: ncu-report is not installed.
    """
    ncu_report = require_reader()
    if not path.is_file():
        raise FileError(f"{path}: not found")
    try:
        context = ncu_report.load_report(str(path))
    except Exception as error:  # the package's own errors derive from nothing narrower
        raise FileError(f"{path}: not a report that ncu-report can read: {str(error).splitlines()[0]}") from None
    ranges = [context.range_by_idx(i) for i in range(context.num_ranges())]
    launches = [_read_launch(part.action_by_idx(i)) for part in ranges for i in range(part.num_actions())]
    if not launches:
        raise FileError(f"{path}: holds no launch of a kernel")
    return launches


def _read_launch(action: Any) -> ProfiledLaunch:
    numbers, names = {}, {}
    for name in action.metric_names():
        metric = action.metric_by_name(name).value()
        if isinstance(metric, int | float):
            numbers[name] = float(metric)
        elif isinstance(metric, str):
            names[name] = metric
    files = {PurePosixPath(path).name: text for path, text in action.source_files().items()}
    return ProfiledLaunch(action.name(), numbers, names, tuple(_instructions(action)), files)


def _instructions(action: Any) -> Iterator[SampledInstruction]:
    reasons = [name for name in action.metric_names() if name.startswith(SAMPLES) and not name.endswith(_NO_ISSUE)]
    counts = {name.removeprefix(SAMPLES): _by_address(action, name) for name in reasons}
    executed_by_address = _by_address(action, _EXECUTED)
    start = min(
        (address for by_address in (executed_by_address, *counts.values()) for address in by_address), default=None
    )
    if start is None:
        return
    while action.sass_by_pc(start - _STEP):
        start -= _STEP
    for address in range(start, start + _MAX_INSTRUCTIONS * _STEP, _STEP):
        sass = action.sass_by_pc(address)
        if not sass:
            return
        place = action.source_info(address)
        file, line = (PurePosixPath(place.file_name()).name, place.line()) if place else ("", 0)
        text = _TARGET.sub(lambda match: f"{int(match[0], 16) - start:#x}", " ".join(sass.split()).strip(" ;"))
        samples = {reason: by_address[address] for reason, by_address in counts.items() if by_address.get(address)}
        yield SampledInstruction(address - start, text, file, line, samples, executed_by_address.get(address, 0))


def _by_address(action: Any, name: str) -> dict[int, int]:
    """Return a metric's values by the address of the instruction."""
    metric = action.metric_by_name(name)
    if metric is None or not metric.has_correlation_ids():
        return {}
    addresses = metric.correlation_ids()
    return {int(addresses.value(i)): int(metric.value(i)) for i in range(metric.num_instances())}
