"""The command `timeline`: what every warp group of a kernel did when."""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from ptxlab import registry
from ptxlab.cli.common import (
    PICTURES,
    AsJson,
    Backend,
    CommandLineError,
    Plot,
    Shape,
    console,
    expects,
    print_json,
    print_written,
    progress_bar,
    refuse,
    require_file,
    sizes_text,
    table,
)
from ptxlab.io.files import write_text
from ptxlab.profile import timeline as timelines
from ptxlab.profile.timeline import Timeline, recorder
from ptxlab.runtime.arguments import parse_sizes

PANEL = "Measure"


def timeline(
    target: Annotated[str | None, typer.Argument(help="A kernel that stamps its phases: a GEMM or attention.")] = None,
    shape: Shape = None,
    backend: Backend = None,
    saved: Annotated[
        Path | None, typer.Option("--from", help="Read a timeline that --out wrote instead of launching.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the timeline, for --from: FILE.json.")] = None,
    plot: Plot = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for ui.perfetto.dev: FILE.json.")] = None,
    record: Annotated[bool, typer.Option("--record", help="Write the timeline to notebooks/results/<gpu>/.")] = False,
    as_json: AsJson = False,
) -> None:
    """Record what every warp group does when, on the GPU or in the emulator: loads, waits, dequantisation, MMAs."""
    if (target is None) == (saved is None):
        raise CommandLineError("timeline expects either a kernel or --from FILE")
    require_file("--out", out, ".json")
    require_file("--trace", trace, ".json")
    require_file("--plot", plot, *PICTURES)
    sizes = parse_sizes("--shape", shape) if shape is not None else {}
    if saved is not None:
        refuse({"--shape": shape, "--backend": backend}, "needs a launch, and --from launches nothing")
        recorded_timelines = timelines.load(saved)
    else:
        with progress_bar(f"timeline of {target}", None, quiet=as_json):
            recorded_timelines = _record_kernel(str(target), sizes, backend)
    paths = [out, timelines.default_path(recorded_timelines) if record else None]
    for path in filter(None, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        timelines.save(recorded_timelines, path)
    if trace is not None:
        write_text(trace, json.dumps(timelines.trace(recorded_timelines)) + "\n")
    if plot is not None:
        from ptxlab.plot import save  # Matplotlib takes half a second that others need not pay
        from ptxlab.profile.timeline.plot import timeline_figure

        save(timeline_figure(recorded_timelines), plot)
    if as_json:
        return print_json(recorded_timelines.to_json())
    _show(recorded_timelines)
    print_written(*paths, trace, plot)


def _record_kernel(target: str, sizes: dict[str, Any], backend: str | None) -> Timeline:
    spec, source, _ = registry.resolve(target)
    if spec is None:
        raise expects("timeline", "one of the project's kernels", target)
    source_by_language = {candidate.language: candidate for candidate in registry.find(spec.name)[1]}
    source = source if "." in target else source_by_language.get("cu", source)  # the one that can stamp
    return recorder.record(spec, source, sizes, backend=backend)


def _show(recorded: Timeline) -> None:
    """Print a row per track of the first SM with the share of time in each phase."""
    first_sm = recorded.of_sm(recorded.sms[0])
    rows = []
    for track in first_sm.tracks:
        duration = max(1, track.stamps[-1][0] - track.stamps[0][0])
        time_by_phase = Counter[str]()
        for span in track.spans:
            time_by_phase[span.phase.replace("_", " ")] += span.end - span.begin
        shares = ", ".join(f"{phase} {time / duration:.0%}" for phase, time in time_by_phase.most_common())
        rows.append((f"{track.block}/{track.warp}", track.role, f"{duration:,}", shares))
    title = f"{recorded.kernel} {sizes_text(recorded.sizes)}, SM {first_sm.sms[0]}"
    console.print(table(title, ("block/warp", "role", f"{recorded.unit}>", "share of the time"), rows))
    if any(first_sm.products):
        console.print(
            f"tensor cores busy: at least {first_sm.busy():.0%} of {first_sm.duration:,} {recorded.unit}",
            highlight=False,
        )
    if recorded.time_us:
        console.print(f"{recorded.time_us:.2f} µs, with stamps {recorded.recording_us:.2f} µs", highlight=False)
    if not all(track.complete for track in first_sm.tracks):
        console.print(f"truncated: a track holds {timelines.STAMPS - timelines.HEADER} stamps")
