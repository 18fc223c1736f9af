"""Timelines: stamps that change nothing unless asked for, what is read from them, and what is made of that."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ptxlab import registry, runtime, sources, toolchain
from ptxlab.errors import ArgumentError, FileError, UnavailableError
from ptxlab.profile import timeline
from ptxlab.profile.timeline import HEADER, PHASES, STAMPS, TRACKS, Span, Timeline, Track, recorder
from ptxlab.profile.timeline.plot import STYLES, comparison_figure, timeline_figure
from ptxlab.sources import Source
from tests.support.axes import on_every_backend
from tests.support.skeletons import inline_skeletons

HEADER_FILE = (sources.include_dir() / "timeline.cuh").read_text()
LINE = re.compile(
    r'^[ \t]*(?:(?:PHASE|TIMELINE_THREAD)\(.*\);|#include "timeline.cuh")$| TIMELINE_(?:PARAMETER|ARGUMENT)',
    re.MULTILINE,
)
STAMPED = {
    s.name: inline_skeletons(s)
    for name in sources.names()
    for s in sources.sources_of_kernel(name)
    if "timeline.cuh" in s.text
}
EXCP, IMFP = "gemm_w4a8_lqq_excp_sm90", "gemm_w4a8_lqq_imfp_sm90"


def source_of(name: str) -> Source:
    return next(s for s in sources.sources_of_kernel(name) if s.language == "cu")


def record(name: str, **sizes: int) -> Timeline:
    return recorder.record(registry.find(name)[0], source_of(name), sizes, backend="emulator")


@pytest.fixture(scope="module")
def excp() -> Timeline:
    return record(EXCP, N=128)


@pytest.fixture(scope="module")
def imfp() -> Timeline:
    return record(IMFP, N=128)


# In the kernels


def test_all_kernels_of_both_ladders_are_stamped() -> None:
    ladders = {s.stem for family in ("gemm", "attention") for s in (sources.cuda_dir() / family).rglob("*.cu")}
    of_one_phase = {"append_kv4", "rope_append_kv4", "attention_merge", "gemm_f16_sm80"}  # nothing to overlap
    assert ladders - set(STAMPED) == of_one_phase


@pytest.mark.default_cases("attention_kv4_bittrick")
@pytest.mark.parametrize("name", STAMPED)
def test_stamps_are_compiled_out(name: str) -> None:
    """Without TIMELINE the compiler's PTX, with the lines it came from, is that of the source without the macros."""
    stamped = STAMPED[name]
    assert len(LINE.findall(stamped.text)) > 5 and "PHASE" not in LINE.sub("", stamped.text)
    bare = replace(stamped, text=LINE.sub("", stamped.text))
    with_, without = (toolchain.compile_cuda(s, "sm_90a", output="ptx").data for s in (stamped, bare))
    assert with_ == without


@pytest.mark.full
def test_and_so_is_the_machine_code() -> None:
    bare = replace(STAMPED[EXCP], text=LINE.sub("", STAMPED[EXCP].text))
    listings = [toolchain.disassemble(toolchain.compile_cuda(s, "sm_90a")) for s in (STAMPED[EXCP], bare)]
    assert listings[0] == listings[1] and "CS2R.32" not in listings[0]


@pytest.mark.full
def test_stamps_do_not_serialise_wgmma() -> None:
    config = registry.find(IMFP)[0].config_for({"M": 256, "N": 22016, "K": 4096, "g": 128})
    image = toolchain.compile_cuda(STAMPED[IMFP], "sm_90a", defines={**config, "TIMELINE": 2})
    assert image.warnings == () and image.resources[IMFP].spill_stores == 0
    assert "SR_CLOCKLO" in toolchain.disassemble(image)


def test_the_header_and_this_package_agree() -> None:
    names = re.search(r"enum class Phase : unsigned \{ (.*?) \}", HEADER_FILE, re.DOTALL)
    assert names and tuple(re.split(r",\s+", names[1].lower())) == PHASES
    constants = re.search(r"TRACKS = (\d+), STAMPS = (\d+), HEADER = (\d+)", HEADER_FILE)
    assert constants and tuple(map(int, constants.groups())) == (TRACKS, STAMPS, HEADER)
    assert set(STYLES) == set(PHASES) - {"end"}


@pytest.mark.full
@on_every_backend
@pytest.mark.parametrize("name", [EXCP, "gemm_w4a8_sm90"])
def test_results_with_stamps_are_right(name: str, backend: str) -> None:
    spec, sizes = registry.find(name)[0], {"M": 17, "N": 72, "K": 256, "g": 128}
    logical = spec.example(np.random.default_rng(0), **sizes)
    config = spec.config_for(sizes)
    outcome = runtime.run_spec(
        spec, source_of(name), spec.pack(logical), sizes=sizes, backend=backend, config={**config, "TIMELINE": 132}
    )
    for output, right in spec.expected(logical, config).items():
        assert np.array_equal(outcome.outputs[output], right)


# In the emulator


@pytest.mark.default_cases("gemm_w4a8_small_sm90---")
@pytest.mark.parametrize(
    ("name", "sizes", "tracks", "phases"),
    [
        (EXCP, {"N": 64}, 3, {"load", "wait_copy", "wait_group", "wait_mma", "dequantise", "issue", "epilogue"}),
        ("gemm_w4a8_sm90", {"N": 64}, 3, {"load", "wait_copy", "wait_mma", "dequantise", "issue", "epilogue"}),
        (
            "gemm_w4a8_qoq_sm80",
            {"M": 8, "N": 64, "K": 512},
            2,
            {"load", "wait_copy", "dequantise", "multiply", "epilogue"},
        ),
        ("gemm_w4a8_small_sm90", {"M": 8, "N": 16, "K": 512}, 3, {"load", "wait_copy", "multiply", "reduce"}),
        ("attention_kv4_sm90", {"B": 1, "L": 130}, 11, {"load", "wait_copy", "scores", "softmax", "values", "reduce"}),
        (
            "attention_kv4_mma_sm80",
            {"B": 1, "L": 130},
            4,
            {"load", "wait_copy", "scores", "softmax", "values", "reduce"},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_emulator_gives_the_same_stream(name: str, sizes: Any, tracks: int, phases: set[str]) -> None:
    recorded = record(name, **sizes)
    assert recorded.backend == "emulator" and recorded.unit == "steps" and len(recorded.of_sm(0).tracks) == tracks
    assert phases <= {span.phase for track in recorded.tracks for span in track.spans}
    for track in recorded.tracks:
        assert track.complete and PHASES[track.stamps[0][1]] == "setup"
        times = [time for time, _, _ in track.stamps]
        assert times == sorted(times) and times[0] >= 0


@pytest.mark.full
def test_bubbles_of_the_explicit_pipeline_and_overlap_of_the_implicit_one(excp: Timeline, imfp: Timeline) -> None:
    """LiquidGEMM, Fig. 6: ExCP's multiplying warp group waits for the other one; ImFP keeps the tensor cores busier."""
    multiplies = next(t for t in excp.of_sm(0).tracks if t.role == "wgmma")
    waits = sum(s.end - s.begin for s in multiplies.spans if s.phase == "wait_group")
    assert waits > 0.2 * excp.of_sm(0).duration
    one, two = (timeline_.of_sm(0) for timeline_ in (excp, imfp))
    assert two.busy(two.steady()) > 1.2 * one.busy(one.steady())
    first, second = (t for t in two.tracks if "dequantise" in t.role)
    products = two.products[two.tracks.index(second)]
    dequantising = [s for s in first.spans if s.phase == "dequantise"]
    assert any(p.start < s.end and s.begin < p.stop for p in products for s in dequantising)


def test_sizes_that_a_kernel_does_not_have() -> None:
    with pytest.raises(ArgumentError, match=r"--shape: attention_kv4_sm90 takes B, L, Hq, Hkv \(got R\)"):
        record("attention_kv4_sm90", R=1)
    with pytest.raises(ArgumentError, match=r"--shape: sizes of 1 or more \(got L=0\)"):
        record("attention_kv4_sm90", L=0)
    with pytest.raises(ArgumentError, match=r"backend: one of gpu, emulator \(got tpu\)"):
        recorder.record(registry.find(IMFP)[0], source_of(IMFP), backend="tpu")
    with pytest.raises(ArgumentError, match=r"K % g == 0"):
        record(EXCP, K=100)
    with pytest.raises(ArgumentError, match=r"must stamp its phases .* \(got dequant_lqq.cu\)"):
        record("dequant_lqq")


# What stands in the buffer


def stamps_of(*stamps: tuple[int, str, int]) -> tuple[tuple[int, int, int], ...]:
    return tuple((time, PHASES.index(phase), argument) for time, phase, argument in stamps)


def buffer(*tracks: tuple[int, int, int, int, int, tuple[tuple[int, int, int], ...]], first: int = 64) -> np.ndarray:
    """Write the buffer of stamps as the kernel lays it out.

    A track is (SM, block, warp, ns, clock at the beginning, stamps in clocks after it).
    """
    words = np.zeros(2 + (TRACKS + 1) * STAMPS, np.uint64)
    words[:2] = len(tracks), first
    for i, (sm, block, warp, ns, clock, stamps) in enumerate(tracks):
        row = words[2 + first // 8 + i * STAMPS :][:STAMPS]
        last = stamps[-1][0]
        row[:HEADER] = sm | warp << 32, block, ns, clock, ns + last // 2, clock + last  # two clocks per nanosecond
        for j, (time, phase, argument) in enumerate(stamps):
            row[HEADER + j] = (clock + time) & 0xFFFFFFFF | (phase | argument << 8) << 32
    return words.view(np.uint8)


SHORT = stamps_of((0, "setup", 0), (10, "load", 0), (60, "end", 0))


def test_sms_are_brought_together_by_the_time() -> None:
    """The clocks of the SMs have different origins; SM 5 began 100 ns, 200 clocks, after SM 3."""
    tracks = timeline.read_tracks(buffer((5, 1, 0, 1100, 7, SHORT), (3, 0, 4, 1000, 1 << 40, SHORT)))
    assert [(t.sm, t.block, t.warp) for t in tracks] == [(3, 0, 4), (5, 1, 0)]
    assert [t.stamps[0][0] for t in tracks] == [0, 200]
    assert tracks[0].spans == (Span("setup", 0, 10), Span("load", 10, 60))


def test_the_low_half_of_the_clock_runs_over() -> None:
    (track,) = timeline.read_tracks(buffer((0, 0, 0, 0, (3 << 32) - 20, SHORT)))
    assert track.stamps == SHORT and track.complete


def test_a_track_without_room() -> None:
    stamps = [(time, PHASES.index("load"), 0) for time in range(STAMPS - HEADER)]
    (track,) = timeline.read_tracks(buffer((0, 0, 0, 0, 0, tuple(stamps))))
    assert not track.complete and len(track.stamps) == len(stamps)


def test_stamps_of_an_earlier_launch_are_not_read() -> None:
    raw = buffer((0, 0, 0, 0, 0, SHORT), (1, 1, 0, 0, 0, SHORT))
    raw[:8] = 0
    raw[0] = 1  # only one track was given out since
    assert len(timeline.read_tracks(raw)) == 1
    raw[0] = 0
    assert timeline.read_tracks(raw) == ()


def made_up(*tracks: Track, **fields: Any) -> Timeline:
    return Timeline("k", "cu", "gpu", "clocks", {"M": 256, "N": 2, "K": 4}, {}, tracks, mhz=2000, **fields)


def test_wgmmas_of_an_sm_take_turns_at_its_tensor_cores() -> None:
    """Two warp groups issue 40 clocks of work at a time; one waits until all but its last have ended, then for all."""
    first_stamps = stamps_of(
        (0, "issue", 40), (10, "wait_mma", 1), (20, "issue", 40), (30, "wait_mma", 1), (100, "wait_mma", 0),
        (170, "end", 0),
    )  # fmt: skip
    second_stamps = stamps_of((5, "issue", 40), (15, "wait_mma", 0), (90, "end", 0))
    timeline_of_three = made_up(
        Track(0, 0, 4, first_stamps), Track(0, 0, 8, second_stamps), Track(1, 9, 0, second_stamps)
    )
    first, second, elsewhere = timeline_of_three.products
    assert [(p.begin, p.end, p.start, p.stop) for p in first] == [(0, 100, 0, 40), (20, 170, 80, 120)]
    assert [(p.begin, p.end, p.start, p.stop) for p in second] == [(5, 90, 40, 80)]
    assert [(p.start, p.stop) for p in elsewhere] == [(5, 45)]
    assert timeline_of_three.of_sm(0).busy() == 120 / 170 and timeline_of_three.of_sm(0).busy((30, 50)) == 1


def test_a_wgmma_ends_when_it_is_known_to_have_ended() -> None:
    stamps = stamps_of((0, "issue", 100), (10, "wait_mma", 0), (50, "end", 0))
    ((product,),) = made_up(Track(0, 0, 0, stamps)).products
    assert (product.start, product.stop) == (0, 50)


# On disk, and for others


@pytest.mark.full
def test_a_timeline_is_what_was_saved(tmp_path: Path, imfp: Timeline) -> None:
    timeline.save(imfp, tmp_path / "a.json")
    assert timeline.load(tmp_path / "a.json") == imfp


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ("[]", "not a timeline as `ptxlab timeline --out` writes it, of schema 1"),
        ('{"schema": 1, "phases": []}', "not a timeline as `ptxlab timeline --out` writes it, of schema 1"),
        (json.dumps({"schema": 1, "phases": PHASES}), "not a timeline: 'tracks'"),
        (json.dumps({"schema": 1, "phases": PHASES, "tracks": [{"sm": 0}]}), "not a timeline"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(FileError, match=re.escape(problem)):
        timeline.load(tmp_path / "a.json")


@pytest.mark.full
def test_the_trace_has_every_span(imfp: Timeline) -> None:
    events = timeline.trace(imfp)["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == sum(len(t.spans) for t in imfp.tracks) + sum(map(len, imfp.products))
    threads = {(e["pid"], e["tid"]) for e in spans}
    assert threads == {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for thread in threads:  # of one thread none begins before the one before has ended
        spans_of_thread = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if (e["pid"], e["tid"]) == thread)
        assert all(a[1] <= b[0] for a, b in pairwise(spans_of_thread))


def test_a_clock_of_a_trace_is_a_microsecond_over_the_rate() -> None:
    events = timeline.trace(made_up(Track(0, 0, 0, SHORT)))["traceEvents"]
    assert [(e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [(0, 0.005), (0.005, 0.025)]


# Pictures and pages


def test_a_row_per_track_and_one_for_the_tensor_cores(imfp: Timeline) -> None:
    whole, part = timeline_figure(imfp).axes
    labels = [[label.get_text() for label in axes.get_yticklabels()] for axes in (whole, part)]
    assert labels[0][:3] == ["warp 0: load", "warp 4: dequantise + wgmma", "warp 8: dequantise + wgmma"]
    assert labels[0][3] == f"tensor cores: {imfp.of_sm(0).busy():.0%}" != labels[1][-1]
    assert whole.get_xlim()[1] == imfp.of_sm(0).duration > part.get_xlim()[1]


@pytest.mark.full
def test_the_comparison_leaves_out_who_does_nothing(excp: Timeline) -> None:
    late = Track(0, 7, 0, tuple((t + 10 * excp.duration, p, a) for t, p, a in excp.tracks[0].stamps))
    (axes,) = comparison_figure([replace(excp, tracks=(*excp.of_sm(0).tracks, late))], ["t"], 500).axes
    assert [label.get_text().split(":")[0] for label in axes.get_yticklabels()][-2:] == ["warp 8", "tensor cores"]
    assert axes.get_xlim() == (0, 500)


def test_the_readme_says_what_is_recorded(
    report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, excp: Timeline, imfp: Timeline
) -> None:
    pipelines = report("pipelines")
    monkeypatch.setattr(timeline, "folder", lambda gpu="h200": tmp_path)
    assert pipelines.section() == "Not recorded yet.\n"
    for one in (imfp, excp):
        recorded = replace(one, sizes={**one.sizes, "M": 256}, time_us=50.0, recording_us=51.5, device={"slug": "h200"})
        timeline.save(recorded, timeline.default_path(recorded))
    assert {path.name for path in tmp_path.glob("*.json")} == {f"{EXCP}-M256.json", f"{IMFP}-M256.json"}
    text = pipelines.section()
    assert f"| `{EXCP}` | 50.0 µs | 51.5 µs |" in text and "timeline_gemm_256.png" in text
    assert text.index(f"`{EXCP}`") < text.index(f"`{IMFP}`")
    assert len(pipelines.comparison(256).axes) == 2


def test_the_readme_says_what_is_seen_in_the_other_pictures(
    report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch has 100 clocks: the first 30 pass before the scores, the last 20 after the values."""
    pipelines = report("pipelines")
    times = {0: "setup", 30: "scores", 60: "values", 80: "epilogue", 100: "end"}
    track = Track(0, 0, 0, tuple((time, PHASES.index(phase), 0) for time, phase in times.items()))
    one = Timeline(pipelines.ATTENTION, "cu", "gpu", "clocks", {"B": 64}, {}, (track,), time_us=20.0,
                   device={"slug": "h200"})  # fmt: skip
    assert pipelines._edges(one) == pytest.approx((0.3, 0.2))
    text = pipelines.section()
    assert "timeline_gemm_64.png" in text and "timeline_attention.png" in text, "as recorded on the H200"
    monkeypatch.setattr(timeline, "folder", lambda gpu="h200": tmp_path)
    timeline.save(one, timeline.default_path(one))
    link = "attention](notebooks/figures/timeline_attention.png) a launch takes 20.0 µs. 30% of this has passed"
    assert link in pipelines._other_pictures()[0]


# The command


@pytest.mark.full
def test_the_command_draws_exports_and_prints(tmp_path: Path, cli: Any) -> None:
    shape = ("--backend", "emulator", "--shape", "N=64,K=512")
    code, out, _ = cli("timeline", EXCP, *shape, "--plot", tmp_path / "a.png")
    assert code == 0 and (tmp_path / "a.png").stat().st_size > 10_000
    assert "0/8" in out and "tensor cores busy: at least" in out
    code, out, _ = cli("timeline", EXCP, *shape, "--trace", tmp_path / "a.json", "--json")
    assert code == 0 and json.loads(out)["kernel"] == EXCP
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]


@pytest.mark.full
def test_the_command_reads_what_it_kept(tmp_path: Path, cli: Any) -> None:
    path = tmp_path / "a.json"
    code, out, _ = cli("timeline", IMFP, "--backend", "emulator", "--shape", "N=64,K=512", "--out", path, "--json")
    assert code == 0 and json.loads(out) == json.loads(json.dumps(timeline.load(path).to_json()))
    code, out, _ = cli("timeline", "--from", path, "--plot", tmp_path / "a.svg")
    assert code == 0 and IMFP in out and "N=64 K=512" in out and "<svg" in (tmp_path / "a.svg").read_text()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "timeline expects either a kernel or --from FILE"),
        ([IMFP, "--from", "a.json"], "timeline expects either a kernel or --from FILE"),
        ([IMFP, "--shape", "X=1"], "--shape: gemm_w4a8_lqq_imfp_sm90 takes M, N, K, g (got X)"),
        (["load_dual_mma"], "kernel: must stamp its phases (timeline.cuh) (got load_dual_mma.ptx)"),
        (["missing.cu"], "missing.cu: cannot be read"),
        (["attention"], "kernel: one of attention_"),
        (["--from", "a.json", "--shape", "M=3"], "--shape needs a launch, and --from launches nothing"),
        (["--from", "a.json", "--backend", "emulator"], "--backend needs a launch, and --from launches nothing"),
        ([IMFP, "--out", "b.ncu-rep"], "--out expects a .json file, got b.ncu-rep"),
        ([IMFP, "--trace", "b.png"], "--trace expects a .json file, got b.png"),
        ([IMFP, "--plot", "none/a.png"], "none/a.png: cannot be written: none is no folder"),
        ([IMFP, "--backend", "cuda"], "backend: one of gpu, emulator (got cuda)"),
        ([IMFP, "--shape", "M=0"], "--shape: sizes of 1 or more (got M=0)"),
        ([IMFP, "--backend", "emulator", "--shape", "K=128", "--plot", "a.jpg"], "--plot expects a .png or .svg"),
    ],
)
def test_bad_command_lines(cli: Any, arguments: list[str], problem: str) -> None:
    code, _, output = cli("timeline", *arguments)
    assert code == 2 and problem in output and output.count("\n") == 1


@pytest.mark.full
def test_the_gpu_is_asked_for_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder.gpu, "why_not", lambda *_, **__: "no GPU")
    with pytest.raises(UnavailableError, match="no GPU backend here: no GPU"):
        recorder.record(registry.find(IMFP)[0], source_of(IMFP), {"M": 8, "N": 64, "K": 128}, backend="gpu")
    with pytest.raises(UnavailableError, match="the emulator would take about"):
        recorder.record(registry.find(EXCP)[0], source_of(EXCP), {"M": 8192, "N": 22016})


@pytest.mark.gpu
@pytest.mark.timing
@pytest.mark.parametrize("name", [EXCP, IMFP, "gemm_w4a8_sm90", "attention_kv4_sm90"])
def test_on_a_gpu(name: str) -> None:
    shape = {"B": 4, "L": 1024} if name.startswith("attention") else {"N": 4096, "K": 2048}
    recorded = recorder.record(registry.find(name)[0], source_of(name), shape, backend="gpu")
    assert recorded.sms in ([0], [0, 1])  # few blocks are spread over every other SM
    assert recorded.unit == "clocks" and all(track.complete for track in recorded.tracks)
    assert 0 < recorded.time_us < recorded.duration / recorded.mhz * 3 and 500 < recorded.mhz < 3000
    assert recorded.recording_us < 2 * recorded.time_us
