"""The pictures of README, guide and notebooks by name, each drawn into `notebooks/figures/NAME.png`."""

from collections.abc import Callable, Sized
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from benchmarks.decode import MEASURE, MODELS
from benchmarks.stored import stored_times
from ptxlab import plot
from ptxlab.bench.record import Record
from ptxlab.lowbit import demo
from ptxlab.lowbit.demo.plot import demo_figure
from ptxlab.lowbit.kernels.attention.prefill import PREFILL
from ptxlab.lowbit.kernels.plot import load_picture
from ptxlab.profile import nsight
from ptxlab.profile.plot import page_figure
from ptxlab.profile.timeline.plot import timeline_figure
from report import (
    FIGURES,
    accuracy,
    attention,
    caches,
    costplot,
    decode,
    gemm,
    gemmplot,
    ladder,
    layer,
    pipelines,
    prefill,
    profiletables,
    w4a4,
)
from report.frames import NOT_RECORDED, NotMeasuredError, load_record


def _demo() -> Figure:
    label, matrices = demo.weights()
    return demo_figure(list(demo.rows(matrices)), matrices, label)


def _profile() -> Figure:
    profiles = profiletables.load_compared()
    return page_figure(profiles, nsight.differences(*profiles))


def _gemm(draw: Callable[[Record], Figure], *measured: Callable[[Record | None], pd.DataFrame]) -> Callable[[], Figure]:
    """Make a drawing function for the `gemm` record that raises NotMeasuredError if a frame of `measured` is empty."""

    def draw_recorded() -> Figure:
        record = ladder.load_record()
        if record is None or any(points_of(record).empty for points_of in measured):
            raise NotMeasuredError(
                "gemm.json: lacks what is drawn here; `python -m benchmarks gemm` makes a record on a GPU"
            )
        return draw(record)

    return draw_recorded


def _attention() -> Figure:
    rows = attention.points(attention.load_record())
    if rows.empty:
        raise NotMeasuredError("attention.json: not recorded; `python -m benchmarks attention` makes a record on a GPU")
    return attention.speedup_figure(rows)


def _prefill() -> Figure:
    rows = prefill.points(load_record("prefill"))
    if rows.empty:
        raise NotMeasuredError("prefill.json: not recorded; `python -m benchmarks prefill` makes a record on a GPU")
    return prefill.rates_figure(rows)


def _timeline(kernel: str) -> Figure:
    timelines = pipelines.load_timelines(kernel)
    if not timelines:
        raise NotMeasuredError(f"{kernel}: no timeline; `ptxlab timeline {kernel} --record` makes one on a GPU")
    return timeline_figure(timelines[0])


def _layer(measured: Callable[[Record], Sized], draw: Callable[[Record], Figure]) -> Callable[[], Figure]:
    """Make a drawing function for the `layer` record that raises NotMeasuredError if `measured` finds nothing in it."""

    def draw_recorded() -> Figure:
        record = layer.load_record()
        if record is None or not len(measured(record)):
            raise NotMeasuredError(
                "layer.json: lacks what is drawn here; `python -m benchmarks layer` makes a record on a GPU"
            )
        return draw(record)

    return draw_recorded


def _decode(model: str) -> Figure:
    records = decode.load_records()
    if not len(decode.points(records, MEASURE).query("model == @model") if records else ()):
        rule = f"`python -m benchmarks decode --only {model}` makes a record on a GPU"
        raise NotMeasuredError(f"decode: {model} is not recorded; {rule}")
    return decode.model_figure(records, model)


def _accuracy() -> Figure:
    accuracy_record = accuracy.load_record()
    if accuracy_record is None or accuracy.steps(accuracy.points(accuracy_record)).empty:
        raise NotMeasuredError("accuracy.json: lacks what is drawn here; `ptxlab accuracy` makes a record")
    return accuracy.steps_figure(accuracy_record)


def _accuracy_cache() -> Figure:
    accuracy_record = caches.load_record()
    if accuracy_record is None:
        raise NotMeasuredError("accuracy_cache.json: `ptxlab accuracy --only 'cache/*'` makes a record")
    return caches.cache_figure(accuracy_record)


def _w4a4_accuracy() -> Figure:
    accuracy_record = accuracy.load_record()
    if accuracy_record is None or not (w4a4.precisions(accuracy_record).group == "FMPQ").any():
        raise NotMeasuredError("accuracy.json: lacks what is drawn here; `ptxlab accuracy` makes a record")
    return w4a4.accuracy_picture(accuracy_record)


def _w4a4_measured() -> Figure:
    record = w4a4.load_record()
    if record is None:
        raise NotMeasuredError("gemm_w4a4.json: `python -m benchmarks gemm --only w4a4` makes a record on a GPU")
    return w4a4.measured_picture(record)


_BOTH = gemm.points, gemm.eight_bit
PICTURES: dict[str, Callable[[], Figure]] = {
    "demo": _demo,
    "load_ldmatrix_u4": lambda: load_picture("load_ldmatrix_u4"),  # wrong,
    "load_lds32_u4": lambda: load_picture("load_lds32_u4"),  # slow,
    "load_dual_mma": lambda: load_picture("load_dual_mma"),  # right
    "ladder_peers": lambda: gemmplot.peers_figure(stored_times()),
    "ladder_ablation": _gemm(lambda record: gemmplot.ablation_figure(ladder.points(record)), ladder.points),
    "ladder_times": _gemm(lambda r: gemmplot.times_figure(ladder.points(r)), ladder.points),
    "ladder_fraction": _gemm(lambda record: gemmplot.fraction_figure(ladder.points(record)), ladder.points),
    "ladder_roofline": _gemm(lambda record: gemmplot.roofline_figure(ladder.points(record)), ladder.points),
    "gemm_headline": _gemm(lambda record: gemmplot.headline_figure(gemm.points(record)), gemm.points),
    "gemm_beyond": _gemm(gemmplot.beyond_figure, gemm.chains),
    "cost_roofline": _gemm(costplot.roofline_figure, *_BOTH),
    "cost_predicted": _gemm(costplot.predicted_figure, *_BOTH),
    "cost_crossover": _gemm(costplot.crossover_figure, *_BOTH),
    "w4ax_schedules": w4a4.schedules_picture,
    "w4a4_accuracy": _w4a4_accuracy,
    "w4a4_measured": _w4a4_measured,
    "attention_speedup": _attention,
    "accuracy_steps": _accuracy,
    "accuracy_cache": _accuracy_cache,
    "layer_breakdown": _layer(layer.points, layer.breakdown_figure),
    "layer_timeline": _layer(layer.timelines, layer.timeline_figure),
    **{decode.picture_name(config.name): partial(_decode, config.name) for config in MODELS},
    "profile": _profile,
    "timeline_gemm_64": lambda: pipelines.comparison(64),
    "timeline_gemm_256": lambda: pipelines.comparison(256),
    "timeline_attention": partial(_timeline, pipelines.ATTENTION),
    "timeline_prefill": partial(_timeline, PREFILL.name),
    prefill.PICTURE: _prefill,
}


def picture(name: str) -> Figure:
    """Draw a picture of `PICTURES` by name; raise NotMeasuredError if its data is not recorded."""
    return PICTURES[name]()


def draw_all() -> tuple[list[Path], list[str]]:
    """Draw every picture that is measured; returns the paths that changed, and a line for each other picture."""
    FIGURES.mkdir(exist_ok=True)
    changed, left_out = [], []
    for figure_name in PICTURES:
        path = FIGURES / f"{figure_name}.png"
        try:
            png = plot.render(picture(figure_name), "png")
        except NotMeasuredError as error:
            left_out.append(f"{path}: {NOT_RECORDED} {error}")
            continue
        if not path.exists() or path.read_bytes() != png:
            path.write_bytes(png)
            changed.append(path)
    return changed, left_out
