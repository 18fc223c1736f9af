"""Timelines: what every warp group did when, as stamped by the kernel itself (`cuda_src/include/timeline.cuh`).

The same stamps come from a GPU, in clocks of the SM, and from the emulator, in steps (`emulator.checks.step_clock`).
`recorder` makes timelines, `plot` draws them; here they are read, kept as JSON, and exported for Perfetto and Chrome.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ptxlab import sources
from ptxlab.errors import FileError
from ptxlab.io.files import read_record, write_record

# In the order of timeline.cuh.
PHASES = (
    "end", "setup", "load", "wait_copy", "wait_group", "wait_mma", "dequantise", "issue", "multiply", "scores",
    "softmax", "values", "reduce", "epilogue",
)  # fmt: skip
VARIABLE, TRACKS, STAMPS, HEADER = "ptxlab_timeline", 256, 4096, 6  # as there
SWITCH = "TIMELINE"  # the macro: of how many SMs
SCHEMA = 1
_DESCRIPTION = "a timeline as `ptxlab timeline --out` writes it,"  # what --trace writes is for Perfetto

_LOOP = ("issue", "multiply", "scores")  # once per repetition of a main loop
_REPETITIONS = 14

Stamp = tuple[int, int, int]  # time, phase, its argument
Window = tuple[float, float]  # in clocks or steps from the beginning


@dataclass(frozen=True)
class Span:
    """A phase of a track, in clocks (or steps) from the beginning of the timeline."""

    phase: str
    begin: int
    end: int


@dataclass(frozen=True)
class WgmmaGroup:
    """A group of wgmmas: issued at `begin`, known to have ended at `end`.

    `start` to `stop`: when the tensor cores were at it, if they took each group as soon as they could, group after
    group, and worked at their peak.
    """

    begin: int
    end: int
    start: int
    stop: int


@dataclass(frozen=True)
class Track:
    """Stamps of one warp group (or warp), made by the first of its warps.

    Attributes:
        sm, block, warp: whose.
        stamps: when which phase began; the last one is `end`, unless there was no room for all.
    """

    sm: int
    block: int
    warp: int
    stamps: tuple[Stamp, ...]

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The phases, one after another."""
        stamp_pairs = zip(self.stamps, self.stamps[1:], strict=False)
        return tuple(Span(PHASES[phase], begin, end) for (begin, phase, _), (end, _, _) in stamp_pairs if end > begin)

    @property
    def complete(self) -> bool:
        """True if there was room for all stamps."""
        return PHASES[self.stamps[-1][1]] == "end"

    @property
    def role(self) -> str:
        """Role of the warp group, derived from its phases."""
        phases = {PHASES[phase] for _, phase, _ in self.stamps}
        names = {
            "dequantise": "dequantise",
            "issue": "wgmma",
            "multiply": "mma",
            "scores": "attend",
            "load": "load",
            "epilogue": "store",
        }
        roles = [name for phase, name in names.items() if phase in phases]
        return " + ".join(roles[:2] if "dequantise" in roles else roles[:1]) or "prepare"


@dataclass(frozen=True)
class Timeline:
    """A launch with the stamps of its warp groups.

    Attributes:
        kernel, source: name and language.
        backend: `"gpu"` or `"emulator"`; `unit`: `"clocks"` of the SM, or `"steps"`.
        sizes, variant: of the problem; the `-D` constants.
        tracks: in the order of SM, block and warp, all on one clock.
        mhz: clocks per microsecond; 0 in the emulator.
        time_us, recording_us: of a launch without and with stamps, inputs from memory; 0 in the emulator.
        device, commit, date: of a record.
    """

    kernel: str
    source: str
    backend: str
    unit: str
    sizes: Mapping[str, Any]
    variant: Mapping[str, int]
    tracks: tuple[Track, ...]
    mhz: float = 0.0
    time_us: float = 0.0
    recording_us: float = 0.0
    device: Mapping[str, Any] = field(default_factory=dict)
    commit: str = ""
    date: str = ""
    schema: int = SCHEMA

    @cached_property
    def duration(self) -> int:
        """Time from the first stamp to the last."""
        return max((track.stamps[-1][0] for track in self.tracks), default=0)

    @property
    def sms(self) -> list[int]:
        """The SMs that were recorded."""
        return sorted({track.sm for track in self.tracks})

    def of_sm(self, sm: int) -> "Timeline":
        """Return a timeline with only the tracks of one SM."""
        return replace(self, tracks=tuple(track for track in self.tracks if track.sm == sm))

    @cached_property
    def products(self) -> tuple[tuple[WgmmaGroup, ...], ...]:
        """The groups of wgmmas of each track, scheduled on the tensor cores that an SM's tracks share."""
        groups: list[list[WgmmaGroup]] = [[] for _ in self.tracks]
        for sm in self.sms:
            issued_products = sorted(
                (p, i) for i, t in enumerate(self.tracks) if t.sm == sm for p in _issued_groups(t.stamps)
            )
            free = 0
            for (begin, end, clocks), i in issued_products:
                start = max(begin, free)
                free = min(start + clocks, end)
                groups[i].append(WgmmaGroup(begin, end, min(start, free), free))
        return tuple(map(tuple, groups))

    def busy(self, window: Window | None = None) -> float:
        """Compute a lower bound of the share of time in which one SM's tensor cores run `wgmma`."""
        begin, end = window or (0, max(1, self.duration))
        spans = [(max(p.start, begin), min(p.stop, end)) for products in self.products for p in products]
        return sum(max(0, stop - start) for start, stop in spans) / (end - begin)

    @property
    def share_of_launch(self) -> float:
        """Duration of these tracks as a share of the stamped launch; small where other SMs have more tiles."""
        return self.duration / self.mhz / self.recording_us if self.mhz and self.recording_us else 1.0

    def steady(self, width: float | None = None) -> Window:
        """Choose a time window in the main loop, centred a little before its middle; without a loop the whole launch.

        It has the given width, or that of some repetitions.
        """
        loops = [[time for time, phase, _ in track.stamps if PHASES[phase] in _LOOP] for track in self.tracks]
        times = max(loops, key=len, default=[])
        if len(times) < 2:
            return 0, max(1, self.duration)
        width = min(width or _REPETITIONS * float(np.median(np.diff(times))), self.duration)
        middle = times[int(len(times) * 0.4)]  # half of it may be where one tile ends and the next begins
        begin = min(max(0, middle - width / 2), self.duration - width)
        return begin, begin + width

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {**asdict(self), "phases": list(PHASES), "tracks": [asdict(track) for track in self.tracks]}


def _issued_groups(stamps: Iterable[Stamp]) -> Iterator[tuple[int, int, int]]:
    """Yield (issue time, time known to have ended, clocks needed) of each group of wgmmas, in order."""
    groups_in_flight: list[tuple[int, int]] = []
    may_remain = last_wait = 0
    is_waiting = False
    for time, phase, argument in stamps:
        if is_waiting:  # what ends here is the wait for all but `left`
            for begin, clocks in groups_in_flight[: len(groups_in_flight) - may_remain]:
                yield begin, time, clocks
            groups_in_flight = groups_in_flight[len(groups_in_flight) - may_remain :] if may_remain else []
        is_waiting = PHASES[phase] == "wait_mma"
        may_remain = argument if is_waiting else may_remain
        if PHASES[phase] == "issue":
            groups_in_flight.append((time, argument))
        last_wait = time
    yield from ((begin, last_wait, clocks) for begin, clocks in groups_in_flight)


def read_tracks(buffer: np.ndarray) -> tuple[Track, ...]:
    """Read the tracks in the bytes of `ptxlab_timeline`.

    SMs count from different beginnings: the time in nanoseconds of each track's first stamp brings them together.
    """
    words = np.frombuffer(buffer, np.uint64)
    begin = 2 + int(words[1]) // 8
    rows = words[begin : begin + TRACKS * STAMPS].reshape(TRACKS, STAMPS)[: min(int(words[0]), TRACKS)]
    if not len(rows):
        return ()
    place, block, ns, clock, ns_end, clock_end = rows[:, :HEADER].T.astype(np.int64)
    sm = place & 0xFFFFFFFF
    rates = (clock_end - clock)[ns_end > ns] / (ns_end - ns)[ns_end > ns]
    clocks_per_ns = float(np.median(rates)) if len(rates) else 1.0
    origin = {number: int(clock[sm == number].min()) for number in np.unique(sm).tolist()}
    clock_offset = {number: (int(ns[sm == number].min()) - int(ns.min())) * clocks_per_ns for number in origin}
    tracks = []
    columns = rows, sm.tolist(), block.tolist(), (place >> 32).tolist(), clock
    for row, number, track_block, warp, first_clock in zip(*columns, strict=True):
        low, high = (row[HEADER:] & 0xFFFFFFFF).astype(np.int64), (row[HEADER:] >> np.uint64(32)).astype(np.int64)
        count = int(np.argmax(high == 0)) + 1 if (high == 0).any() else len(high)
        times = first_clock + ((low - first_clock) & 0xFFFFFFFF) - origin[number] + round(clock_offset[number])
        stamps = zip(times[:count].tolist(), (high & 0xFF)[:count].tolist(), (high >> 8)[:count].tolist(), strict=True)
        tracks.append(Track(number, track_block, warp, tuple(stamps)))
    tracks.sort(key=lambda track: (track.sm, track.stamps[0][0] if not track.block else track.block, track.warp))
    return tuple(tracks)


def default_path(timeline: Timeline) -> Path:
    """Return a timeline's default path: `notebooks/results/<gpu>/timelines/<kernel>-M64.json` and the like."""
    first = "".join(f"-{name}{size}" for name, size in list(timeline.sizes.items())[:1])
    return folder(str(timeline.device.get("slug", timeline.backend))) / f"{timeline.kernel}{first}.json"


def folder(gpu: str = "h200") -> Path:
    """Return the folder of the timelines recorded on a GPU."""
    return sources.results_dir() / gpu / "timelines"


def save(timeline: Timeline, path: Path) -> None:
    """Write a timeline as JSON, a line per track."""
    write_record(path, timeline.to_json(), "tracks")


def load(path: Path) -> Timeline:
    """Read a timeline from JSON; raises `FileError`, which says why in one line, for any other file."""
    record = read_record(path, _DESCRIPTION, SCHEMA)
    if record.get("phases") != list(PHASES):
        raise FileError(f"{path}: not {_DESCRIPTION} of schema {SCHEMA}")
    try:
        tracks = [
            Track(**{**track, "stamps": tuple((t, p, a) for t, p, a in track["stamps"])}) for track in record["tracks"]
        ]
        names = {f.name for f in fields(Timeline)}
        return Timeline(**{**{n: v for n, v in record.items() if n in names}, "tracks": tuple(tracks)})
    except (TypeError, KeyError, ValueError) as error:
        raise FileError(f"{path}: not a timeline: {error}") from None


def trace(timeline: Timeline) -> dict[str, Any]:
    """Convert the timeline to the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

    An SM is a process, a warp group a thread; groups of wgmmas lie on a thread of their own, from issue to known end.
    Microseconds; of the emulator a step is one.
    """
    scale = 1 / timeline.mhz if timeline.mhz else 1.0
    events: list[dict[str, Any]] = []

    def add_span(sm: int, thread: int, name: str, begin: int, end: int, **arguments: Any) -> None:
        span = {"ph": "X", "pid": sm, "tid": thread, "name": name, "ts": begin * scale, "dur": (end - begin) * scale}
        events.append({**span, **({"args": arguments} if arguments else {})})

    def add_name(sm: int, thread: int | None, name: str) -> None:
        event_name = "process_name" if thread is None else "thread_name"
        events.append({"ph": "M", "pid": sm, "tid": thread or 0, "name": event_name, "args": {"name": name}})

    for sm in timeline.sms:
        add_name(sm, None, f"SM {sm}")
    for number, track in enumerate(timeline.tracks):
        thread = 4 * number  # and, as two groups of wgmmas may be in flight, two more
        add_name(track.sm, thread, f"block {track.block} warp {track.warp}: {track.role}")
        for span in track.spans:
            add_span(track.sm, thread, span.phase, span.begin, span.end)
        for i, group in enumerate(timeline.products[number]):
            lane = thread + 1 + i % 2
            if i < 2:
                add_name(track.sm, lane, f"block {track.block} warp {track.warp}: wgmma in flight, {'ab'[i]}")
            add_span(track.sm, lane, "wgmma", group.begin, group.end, at_peak=[group.start * scale, group.stop * scale])
    metadata = {"kernel": timeline.kernel, "sizes": dict(timeline.sizes), "unit": timeline.unit}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": metadata}
