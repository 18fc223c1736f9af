"""The pipelines of the GEMM ladder on Hopper side by side, from recorded timelines (LiquidGEMM §5.1, Fig. 6)."""

import pandas as pd
from matplotlib.figure import Figure

from ptxlab.profile import timeline
from ptxlab.profile.timeline import Timeline
from ptxlab.profile.timeline.plot import comparison_figure
from report.frames import markdown

STEPS = {
    "gemm_w4a8_lqq_sm90": "one phase after the other, several blocks per SM",
    "gemm_w4a8_lqq_excp_sm90": "explicit pipeline (ExCP), a warp group per job",
    "gemm_w4a8_lqq_imfp_sm90": "implicit pipeline (ImFP), two warp groups do both",
    "gemm_w4a8_sm90": "what gemm_w4a8 launches: ImFP, three warp groups",
}
FEW, SHOWN = 64, 256  # tokens; the latter in the README: dequantisation and products, not the memory, take the time
ATTENTION = "attention_kv4_sm90"
WIDTH = 6000.0  # clocks of the main loop that the picture shows and `_busy` is of
_FIGURES, _ATTENTION_PICTURE = "notebooks/figures", "timeline_attention.png"


def load_timelines(name: str, gpu: str = "h200") -> list[Timeline]:
    """Load the recorded timelines of a kernel on a GPU."""
    return [timeline.load(path) for path in sorted(timeline.folder(gpu).glob(f"{name}-*.json"))]


def step_timelines(M: int) -> list[Timeline]:
    """Load the timelines of the steps at M tokens, in the steps' order, without those that are not recorded."""
    return [step_timeline for step in STEPS for step_timeline in load_timelines(step) if step_timeline.sizes["M"] == M]


def titles(timelines: list[Timeline]) -> list[str]:
    """Return a title per timeline: what the step shows, its time, and the share in which the shown SM has work."""
    return [
        f"{step_timeline.kernel}: {STEPS[step_timeline.kernel]}; {step_timeline.time_us:.1f} µs"
        f" (SM at work {_first_sm(step_timeline).share_of_launch:.0%})"
        for step_timeline in timelines
    ]


def finding(timelines: list[Timeline]) -> str:
    """Say why the kernel whose tensor cores are busiest in the main loop need not be the fastest."""
    busiest, fastest = max(timelines, key=_busy), min(timelines, key=lambda one: one.time_us)
    if _busy(busiest) < 0.5:
        return (
            f"Under every pipeline the tensor cores are idle for half of the time or more; {fastest.kernel} is fastest"
        )
    if busiest is fastest:
        return f"{fastest.kernel} is the fastest and keeps the tensor cores busiest ({_busy(fastest):.0%})"
    return (
        f"{busiest.kernel} keeps the tensor cores busiest ({_busy(busiest):.0%}), but this SM works only "
        f"{_first_sm(busiest).share_of_launch:.0%} of the launch;\n{fastest.kernel} ({_busy(fastest):.0%}) is the "
        f"fastest: there it works {_first_sm(fastest).share_of_launch:.0%}"
    )


def comparison(M: int) -> Figure:
    """Draw the picture of the steps at M tokens."""
    timelines = step_timelines(M)
    return comparison_figure(timelines, titles(timelines), WIDTH, finding(timelines))


def section() -> str:
    """Write the README's comparison of pipelines: what the picture shows, the picture, and what the stamps cost."""
    timeline_by_kernel = {step_timeline.kernel: step_timeline for step_timeline in step_timelines(SHOWN)}
    excp, imfp = (timeline_by_kernel.get(f"gemm_w4a8_lqq_{step}_sm90") for step in ("excp", "imfp"))
    if excp is None or imfp is None:
        return "Not recorded yet.\n"
    sizes = f"{excp.sizes['N']} x {excp.sizes['K']}, M = {SHOWN}"
    text = (
        f"One SM of an H200, {sizes}. Under ExCP the warp group that issues wgmma waits for the one that dequantises "
        f"(pink), and between stages the tensor cores (last row) are idle: they are busy {_busy(excp):.0%} of the "
        "time. Under ImFP a warp group dequantises (orange) while the wgmmas of the other run, and they are busy "
        f"{_busy(imfp):.0%}. A busy main loop is not yet a fast launch: tiles that do not divide evenly among the "
        f"SMs leave some of them idle. The SM shown works {_first_sm(imfp).share_of_launch:.0%} of the ImFP launch"
    )
    if last := timeline_by_kernel.get("gemm_w4a8_sm90"):
        text += (
            f" and {_first_sm(last).share_of_launch:.0%} of that of `{last.kernel}`, whose tiles are shared out evenly"
        )
    lines = []
    for step_timeline in timeline_by_kernel.values():
        busy_shares, work_share = _first_sm(step_timeline).busy(), _first_sm(step_timeline).share_of_launch
        line = {
            "step": f"`{step_timeline.kernel}`",
            "time": f"{step_timeline.time_us:.1f} µs",
            "with time stamps": f"{step_timeline.recording_us:.1f} µs",
        }
        line |= {
            "tensor cores busy, as shown": f"{_busy(step_timeline):.2f}",
            "SM at work": f"{work_share:.2f}",
        }
        lines.append(line | {"tensor cores busy, whole launch": f"{busy_shares * work_share:.2f}"})
    note = (
        f"Recorded by `ptxlab timeline NAME --record`, {excp.date[:10]}, commit {excp.commit[:10]}. A wgmma "
        "is drawn as soon as it can run, and as short as at the peak rate: the shares are lower bounds. The last three "
        "columns are of the launch in which the marks store time stamps."
    )
    picture = f"![What each warp group does when, in four pipelines]({_FIGURES}/{picture_name(SHOWN)})"
    table = markdown(pd.DataFrame(lines)).rstrip()
    return "\n\n".join([f"{text}.", picture, table, note, *_other_pictures()]) + "\n"


def _other_pictures() -> list[str]:
    """Describe the recorded pictures that the README does not show, one sentence each, as one paragraph."""
    sentences = []
    if small_batch := step_timelines(FEW):
        shares = sorted(_busy(step_timeline) for step_timeline in small_batch)
        sentences.append(
            f"With [{FEW} tokens]({_FIGURES}/{picture_name(FEW)}) a weight is dequantised for a quarter of the "
            f"products, and the tensor cores work {shares[0]:.0%} to {shares[-1]:.0%} of the time, under any pipeline."
        )
    for step_timeline in load_timelines(ATTENTION)[:1]:
        share_before, share_after = (f"{share:.0%}" for share in _edges(step_timeline))
        sentences.append(
            f"In [attention]({_FIGURES}/{_ATTENTION_PICTURE}) a launch takes {step_timeline.time_us:.1f} µs."
            f" {share_before} of this has passed when the first scores are computed, and {share_after} is left"
            " after the last values. This is why short caches stay below the memory's speed."
        )
    return [" ".join(sentences)] if sentences else []


def _edges(attention: Timeline) -> tuple[float, float]:
    """Return the shares of a launch before the first scores and after the last values, on the first SM."""
    sm_timeline = _first_sm(attention)
    spans = [span for track in sm_timeline.tracks for span in track.spans]
    first = min(span.begin for span in spans if span.phase == "scores")
    last = max(span.end for span in spans if span.phase == "values")
    return first / sm_timeline.duration, 1 - last / sm_timeline.duration


def picture_name(M: int) -> str:
    """Return the file name of the comparison's picture at M tokens."""
    return f"timeline_gemm_{M}.png"


def _first_sm(one: Timeline) -> Timeline:
    return one.of_sm(one.sms[0])


def _busy(one: Timeline) -> float:
    """Return the share of the shown clocks in which the first SM's tensor cores are busy."""
    return _first_sm(one).busy(_first_sm(one).steady(WIDTH))
