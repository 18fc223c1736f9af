"""`profile --timeline`: what every warp group of a kernel did when."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rich.markup import escape

from ptxlab import kernels, timeline
from ptxlab.cli.common import console, print_json, progress_bar, table
from ptxlab.errors import ArgumentError
from ptxlab.io.files import write_text
from ptxlab.timeline import Timeline, recorder


def profile_timeline(
    target: str | None,
    sizes: dict[str, int],
    *,
    backend: str | None,
    saved: Path | None,
    out: Path | None,
    keep: Path | None,
    record: bool,
    as_json: bool,
) -> None:
    """Record a timeline, or read one; print it, draw it, export it for Perfetto, keep it, also beside other records."""
    if (target is None) == (saved is None):
        raise ArgumentError("target", "a kernel, or a timeline with --from", target or "neither")
    write = _writer(out) if out is not None else None  # what cannot be written is better said at once
    if saved is not None:
        found = timeline.load(saved)
    else:
        with progress_bar(f"timeline of {target}", None, quiet=as_json):
            found = _recorded(str(target), sizes, backend)
    if write is not None:
        write(found)
    kept = [keep] if keep is not None else []
    if record:
        kept.append(timeline.default_path(found))
        kept[-1].parent.mkdir(parents=True, exist_ok=True)
    for path in kept:
        timeline.save(found, path)
    if as_json:
        return print_json(found.to_json())
    _show(found)
    for path in ([out] if out is not None else []) + kept:
        console.print(f"written: {escape(str(path))}", soft_wrap=True)


def _recorded(target: str, sizes: dict[str, int], backend: str | None) -> Timeline:
    spec, source, _ = kernels.resolve(target)
    if spec is None:
        raise ArgumentError("--timeline", "one of the project's kernels", target)
    by_language = {one.language: one for one in kernels.find(spec.name)[1]}
    source = source if "." in target else by_language.get("cu", source)  # the one that can stamp
    return recorder.record(spec, source, sizes, backend=backend)


def _writer(out: Path) -> Callable[[Timeline], None]:
    """Writes a trace for Perfetto, or a picture; ArgumentError for another kind of file."""
    if out.suffix == ".json":
        return lambda found: write_text(out, json.dumps(timeline.trace(found)) + "\n")
    from ptxlab import plot
    from ptxlab.timeline import plot as timelineplot  # Matplotlib takes half a second

    plot.format_of(out)
    return lambda found: plot.save(timelineplot.timeline_figure(found), out)


def _show(found: Timeline) -> None:
    """A row per track of the first SM: how long it was at what."""
    one = found.of_sm(found.sms[0])
    rows = []
    for track in one.tracks:
        lasted = max(1, track.stamps[-1][0] - track.stamps[0][0])
        at = Counter[str]()
        for span in track.spans:
            at[span.phase.replace("_", " ")] += span.end - span.begin
        shares = ", ".join(f"{phase} {time / lasted:.0%}" for phase, time in at.most_common())
        rows.append((f"{track.block}/{track.warp}", track.role, f"{lasted:,}", shares))
    sizes = ", ".join(f"{name}={size}" for name, size in found.sizes.items())
    title = f"{found.kernel} ({sizes}), SM {one.sms[0]}"
    console.print(table(title, ("block/warp", "does", f"{found.unit}>", "of that"), rows))
    if any(one.products):
        console.print(f"tensor cores: at least {one.busy():.0%} of {one.duration:,} {found.unit}", highlight=False)
    if found.time_us:
        console.print(f"{found.time_us:.2f} µs, {found.recording_us:.2f} with stamps", highlight=False)
    if not all(track.complete for track in one.tracks):
        console.print(f"not all stamps had room: a track holds {timeline.STAMPS - timeline.HEADER}")
