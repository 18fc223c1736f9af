"""The pipelines of the GEMM ladder on Hopper side by side, from recorded timelines (LiquidGEMM §5.3, Fig. 6)."""

from pathlib import Path

from ptxlab import timeline
from ptxlab.timeline import Timeline

STEPS = {
    "gemm_w4a8_lqq_sm90": "one thing after the other, several blocks per SM",
    "gemm_w4a8_lqq_excp_sm90": "explicit pipeline (ExCP): warp groups load, dequantise, multiply",
    "gemm_w4a8_lqq_imfp_sm90": "implicit pipeline (ImFP): two warp groups do both, under each other",
    "gemm_w4a8_sm90": "what gemm_w4a8 launches: the same, more warp groups",
}
FEW, SHOWN = 64, 256  # tokens; the latter in the README: dequantisation and products, not the memory, take the time
ATTENTION = "attention_kv4_sm90"
WIDTH = 6000.0  # clocks of the part that is compared
_FIGURES, _ATTENTION_PICTURE = "notebooks/figures", "timeline_attention.png"


def recorded(name: str, gpu: str = "h200") -> list[Timeline]:
    """The timelines of a kernel on a GPU."""
    return [timeline.load(path) for path in sorted(timeline.folder(gpu).glob(f"{name}-*.json"))]


def compared(M: int) -> list[Timeline]:
    """The timelines of the steps at M tokens, in their order, as far as they are recorded."""
    return [one for name in STEPS for one in recorded(name) if one.sizes["M"] == M]


def titles(timelines: list[Timeline]) -> list[str]:
    """What each shows, and how long it took."""
    return [f"{one.kernel}: {STEPS[one.kernel]}; {one.time_us:.1f} µs" for one in timelines]


def section() -> str:
    """The comparison for the README: what is seen, the picture, and what the stamps cost."""
    shown = {one.kernel: one for one in compared(SHOWN)}
    excp, imfp = (shown.get(f"gemm_w4a8_lqq_{name}_sm90") for name in ("excp", "imfp"))
    if excp is None or imfp is None:
        return "Not recorded yet.\n"
    shares = [f"{_steady(one):.0%}" for one in (excp, imfp)]
    sizes = f"{excp.sizes['N']} x {excp.sizes['K']}, M = {SHOWN}"
    text = (
        f"One SM of an H200, {sizes}. Under ExCP the warp group that multiplies waits for the one that dequantises "
        f"(pink), and between stages the tensor cores (last row) stand still: they work {shares[0]} of the time. "
        f"Under ImFP a warp group dequantises (orange) while the other's wgmmas run, and they work {shares[1]} of it."
    )
    lines = ["| step | time | with stamps | tensor cores at work, as shown | in the whole launch |"]
    lines.append("| --- | ---: | ---: | ---: | ---: |")
    for one in shown.values():
        whole = one.of_sm(one.sms[0]).busy()
        times = f"{one.time_us:.1f} µs | {one.recording_us:.1f} µs"
        lines.append(f"| `{one.kernel}` | {times} | {_steady(one):.2f} | {whole:.2f} |")
    note = (
        f"Recorded by `ptxlab profile NAME --timeline --record`, {excp.date[:10]}, commit {excp.commit[:10]}. A wgmma "
        "is drawn as soon as it can run, and as short as at the peak rate: the shares are the least that they can be. "
        "They are those of the launch with stamps; without them the last step's would be higher."
    )
    shows = "Who loads, dequantises and multiplies when, in four pipelines"
    picture = f"![{shows}]({_FIGURES}/{picture_name(SHOWN)})"
    return "\n\n".join([text, picture, "\n".join(lines), note, *_others()]) + "\n"


def _others() -> list[str]:
    """What is seen in the pictures that are not shown, as far as they are recorded: a sentence each, in a paragraph."""
    found = []
    if few := compared(FEW):
        shares = sorted(_steady(one) for one in few)
        found.append(
            f"With [{FEW} tokens]({_FIGURES}/{picture_name(FEW)}) a weight is dequantised for a quarter of the "
            f"products, and the tensor cores work {shares[0]:.0%} to {shares[-1]:.0%} of the time, under any pipeline."
        )
    for one in recorded(ATTENTION)[:1]:
        before, after = (f"{share:.0%}" for share in _edges(one))
        found.append(
            f"In [attention]({_FIGURES}/{_ATTENTION_PICTURE}), {one.time_us:.1f} µs, {before} of the time has passed "
            f"when the first scores are computed, and {after} is left after the last values: why short caches stay "
            "below the memory's speed."
        )
    return [" ".join(found)] if found else []


def _edges(attention: Timeline) -> tuple[float, float]:
    """Shares of a launch before the first scores and after the last values, on the first SM."""
    one = attention.of_sm(attention.sms[0])
    spans = [span for track in one.tracks for span in track.spans]
    first = min(span.begin for span in spans if span.phase == "scores")
    last = max(span.end for span in spans if span.phase == "values")
    return first / one.duration, 1 - last / one.duration


def picture_name(M: int) -> str:
    """Of the comparison."""
    return f"timeline_gemm_{M}.png"


def _steady(one: Timeline) -> float:
    first = one.of_sm(one.sms[0])
    return first.busy(first.steady(WIDTH))


def pictures(folder: Path) -> list[Path]:
    """Draw every comparison that is recorded, and attention, into a folder; returns the pictures' paths."""
    from ptxlab import plot
    from ptxlab.timeline import plot as timelineplot

    drawn = []
    for M in (FEW, SHOWN):
        if timelines := compared(M):
            drawn.append(folder / picture_name(M))
            plot.save(timelineplot.comparison_figure(timelines, titles(timelines), WIDTH), drawn[-1])
    for one in recorded(ATTENTION)[:1]:
        drawn.append(folder / _ATTENTION_PICTURE)
        plot.save(timelineplot.timeline_figure(one), drawn[-1])
    return drawn
