"""The pictures of the README and of the notebooks, each drawn by one function into `notebooks/figures/`."""

from pathlib import Path

from ptxlab import demo, headline, headlineplot, ladder, ladderplot, plot, sources, tiles
from ptxlab.bench.stored import stored_times
from ptxlab.errors import FileError

LADDER = ("ablation", "times", "fraction", "roofline")
GEMM = ("headline", "beyond")
LOADS = ("load_ldmatrix_u4", "load_lds32_u4", "load_dual_mma")  # wrong, slow, right


def draw_all() -> list[Path]:
    """Draw every picture; returns their paths."""
    folder = sources.results_dir().parent / "figures"
    folder.mkdir(exist_ok=True)
    what, matrices = demo.weights()
    drawn = [folder / "demo.png"]
    plot.save(plot.demo_figure(list(demo.rows(matrices)), matrices, what), drawn[0])
    for name in LOADS:
        drawn.append(folder / f"{name}.png")
        plot.save(load_picture(name), drawn[-1])
    for name in ("peers", *(LADDER if ladder.recorded() else ())):
        drawn.append(folder / f"ladder_{name}.png")
        plot.save(ladder_picture(name), drawn[-1])
    for name in GEMM if headline.points(ladder.recorded()) else ():
        drawn.append(folder / f"gemm_{name}.png")
        plot.save(gemm_picture(name), drawn[-1])
    return drawn


def load_picture(name: str) -> "plot.Figure":
    """Who holds what after a `load_*` kernel, and the banks it meets; a wrong one beside the right one."""
    held = [tiles.holders(name)]
    if held[0].wrong.any():
        held.append(tiles.holders(tiles.RIGHT))
    return plot.load_figure(held, tiles.shared_accesses(name))


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


def gemm_picture(name: str) -> "plot.Figure":
    """`headline`: every point that `gemm_w4a8` was measured at; `beyond`: chains, experts, untuned shapes.

    Raises FileError where nothing is recorded.
    """
    record = ladder.recorded()
    rows = headline.points(record)
    if record is None or not rows:
        raise FileError("gemm.json: no record of gemm_w4a8; `ptxlab bench gemm` makes one on a GPU")
    return headlineplot.headline_figure(rows) if name == "headline" else headlineplot.beyond_figure(record)
