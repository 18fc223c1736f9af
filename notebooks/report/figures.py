"""The pictures of the README and of the notebooks, each drawn by one function into `notebooks/figures/`."""

from pathlib import Path

from ptxlab import demo, nsight, plot
from ptxlab.bench.record import Record
from ptxlab.bench.stored import stored_attention, stored_times
from ptxlab.demo.plot import demo_figure
from ptxlab.errors import FileError
from ptxlab.kernels.plot import load_picture
from ptxlab.profile import plot as profileplot
from report import (
    FIGURES,
    costplot,
    headline,
    headlineplot,
    kvplot,
    kvpoints,
    ladder,
    ladderplot,
    pipelines,
    profiletables,
)

LADDER = ("ablation", "times", "fraction", "roofline")
COST = ("roofline", "predicted", "crossover")
LOADS = ("load_ldmatrix_u4", "load_lds32_u4", "load_dual_mma")  # wrong, slow, right


def draw_all() -> list[Path]:
    """Draw every picture; returns their paths."""
    folder = FIGURES
    folder.mkdir(exist_ok=True)
    what, matrices = demo.weights()
    drawn = [folder / "demo.png"]
    plot.save(demo_figure(list(demo.rows(matrices)), matrices, what), drawn[0])
    for name in LOADS:
        drawn.append(folder / f"{name}.png")
        plot.save(load_picture(name), drawn[-1])
    for name in ("peers", *(LADDER if ladder.recorded() else ())):
        drawn.append(folder / f"ladder_{name}.png")
        plot.save(ladder_picture(name), drawn[-1])
    record = ladder.recorded()
    drawn += draw_gemm(record, folder) + draw_cost(record, folder) + draw_attention(kvpoints.recorded(), folder)
    return drawn + draw_profile(folder) + pipelines.pictures(folder)


def ladder_picture(name: str) -> "plot.Figure":
    """`peers`: where others stand; of the GEMM ladder as recorded: `ablation`, `times`, `fraction`, `roofline`.

    Raises FileError where nothing is recorded.
    """
    stored = stored_times()
    if name == "peers":
        return ladderplot.peers_figure(stored)
    rows = ladder.rows_of(ladder.recorded())
    if not rows:
        raise FileError("gemm.json: no record of the GEMM ladder; `ptxlab bench gemm` makes one on a GPU")
    if name == "times":
        return ladderplot.times_figure(rows, stored)
    draw = {
        "ablation": ladderplot.ablation_figure,
        "fraction": ladderplot.fraction_figure,
        "roofline": ladderplot.roofline_figure,
    }
    return draw[name](rows)


def gemm_picture(name: str, record: Record | None = None) -> "plot.Figure":
    """`headline`: every point that `gemm_w4a8` was measured at; `beyond`: chains, experts, untuned shapes.

    Of a record of the suite, by default the stored one; raises FileError where that lacks them.
    """
    record = record or ladder.recorded()
    if record is None or name not in _drawable(record):
        raise FileError("gemm.json: no record of gemm_w4a8; `ptxlab bench gemm` makes one on a GPU")
    if name == "headline":
        return headlineplot.headline_figure(headline.points(record))
    return headlineplot.beyond_figure(record)


def draw_gemm(record: Record | None, folder: Path) -> list[Path]:
    """Draw what a record of the suite `gemm` has into `folder`; returns the pictures' paths."""
    drawn = []
    for name in _drawable(record):
        drawn.append(folder / f"gemm_{name}.png")
        plot.save(gemm_picture(name, record), drawn[-1])
    return drawn


def cost_picture(name: str, record: Record | None = None) -> "plot.Figure":
    """`roofline`, `predicted`, `crossover`: the cost model beside a record of the suite, by default the stored one.

    Raises FileError where that lacks `gemm_w4a8` or its 8-bit sibling.
    """
    record = record or ladder.recorded()
    if record is None or not _has_both(record):
        raise FileError("gemm.json: no record of gemm_w4a8 and W8A8; `ptxlab bench gemm` makes one on a GPU")
    draw = {
        "roofline": costplot.roofline_figure,
        "predicted": costplot.predicted_figure,
        "crossover": costplot.crossover_figure,
    }
    return draw[name](record)


def draw_cost(record: Record | None, folder: Path) -> list[Path]:
    """Draw the cost model beside a record of the suite `gemm` into `folder`; returns the pictures' paths."""
    drawn = []
    for name in COST if record is not None and _has_both(record) else ():
        drawn.append(folder / f"cost_{name}.png")
        plot.save(cost_picture(name, record), drawn[-1])
    return drawn


def _has_both(record: Record) -> bool:
    return bool(headline.points(record) and headline.eight_bit(record))


def attention_picture(record: Record | None = None) -> "plot.Figure":
    """Decode attention: everyone's bandwidth by batch and length, without a record that of others alone."""
    return kvplot.bandwidth_figure(kvpoints.points(record), kvpoints.steps(record), stored_attention())


def draw_attention(record: Record | None, folder: Path) -> list[Path]:
    """Draw what a record of the suite `attention` has into `folder`; returns the pictures' paths."""
    if not kvpoints.points(record):
        return []
    path = folder / "attention_bandwidth.png"
    plot.save(attention_picture(record), path)
    return [path]


def draw_profile(folder: Path) -> list[Path]:
    """Draw the README's page of two launches into `folder`, if both are recorded; returns the picture's path."""
    found = profiletables.compared()
    if not found:
        return []
    path = folder / "profile.png"
    plot.save(profileplot.page_figure(found, nsight.differences(*found)), path)
    return [path]


def _drawable(record: Record | None) -> list[str]:
    """The pictures of `gemm_picture` that a record is enough for; one kernel alone has no chains."""
    found = {"headline": headline.points(record), "beyond": list(headline.chains(record))}
    return [name for name, rows in found.items() if rows]
