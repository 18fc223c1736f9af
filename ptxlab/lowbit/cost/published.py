"""Results of W4A4 on other GPUs in papers, compared with the model.

Baselines are data-sheet rates of FP16 (sums in FP32) and INT8, which no kernel reaches; matrices are 4096 x 4096.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ptxlab.hardware.sheets import device
from ptxlab.lowbit.cost import SCHEMES, Cost, LoopCounts, Scheme, gemm_cost

CountsOf = Callable[[Scheme, str], LoopCounts | None]
WIDTH = 4096  # N and K


@dataclass(frozen=True)
class PublishedFigure:
    """A published figure: a scheme's TOPS, or its speed-up over `over`.

    Attributes:
        source: paper and section.
        device: GPU.
        scheme: name of a scheme.
        M: tokens; 4096 if the paper says compute-bound.
        least, most: the reported range; equal if the paper gives one number.
        over: the baseline's scheme; empty: the figure is in TOPS.
    """

    source: str
    device: str
    scheme: str
    M: int
    least: float
    most: float
    over: str = ""

    def form(self, number: float) -> str:
        """Format a value in the figure's unit."""
        return f"{number:.2f}x" if self.over else f"{number:,.0f}"

    @property
    def reported(self) -> str:
        """The reported range, as text."""
        return self.form(self.least) if self.least == self.most else f"{self.least:.2f}-{self.form(self.most)}"


FIGURES = (
    PublishedFigure("Atom §5.4.2", "rtx4090", "W4A4", 4096, 980, 980),
    PublishedFigure("Atom §5.4.2", "rtx4090", "W4A4 outlier", 4096, 900, 900),
    PublishedFigure("Atom §5.4.2", "rtx4090", "W4A4 Atom", 4096, 770, 770),
    PublishedFigure("Atom §5.3.1", "rtx4090", "W4A4 Atom", 512, 3.4, 3.4, "FP16"),
    PublishedFigure("Atom §5.3.1", "rtx4090", "W4A4 Atom", 512, 1.9, 1.9, "W8A8"),
    PublishedFigure("APEX4", "rtx3090", "W4A4 g128", 4096, 2.0, 2.5, "FP16"),
    PublishedFigure("APEX4", "a100", "W4A4 g128", 4096, 0.43, 0.47, "FP16"),
    PublishedFigure("COMET §6.3", "a100", "W4Ax token", 16, 2.91, 2.91, "FP16"),
    PublishedFigure("COMET §6.3", "a100", "W4Ax token", 64, 2.97, 2.97, "FP16"),
    PublishedFigure("COMET §6.3", "a100", "W4Ax token", 256, 2.75, 2.75, "FP16"),
    PublishedFigure("COMET §6.3", "a100", "W4Ax g128", 256, 2.75, 2.75, "FP16"),
)


@dataclass(frozen=True)
class Predicted:
    """A published figure and the model's two predictions: all instructions in turn, or overlapped."""

    figure: PublishedFigure
    in_turn: float
    overlapped: float

    @property
    def error(self) -> float:
        """Relative error of `in_turn` from the nearer end of the reported range; 0 within the range."""
        nearest_reported = min(max(self.in_turn, self.figure.least), self.figure.most)
        return self.in_turn / nearest_reported - 1


def predictions(counts_of: CountsOf, figures: Iterable[PublishedFigure] = FIGURES) -> list[Predicted]:
    """Predict all figures; `counts_of` gives the instructions of a scheme's main loop on an architecture."""
    predicted_figures = []
    for figure in figures:
        cost = _cost(figure, figure.scheme, counts_of)
        operations = 2 * figure.M * WIDTH * WIDTH / 1e6
        base = _cost(figure, figure.over, counts_of).overlapped_us if figure.over else operations
        predicted_figures.append(Predicted(figure, base / cost.in_turn_us, base / cost.overlapped_us))
    return predicted_figures


def instructions_per_sum(figure: PublishedFigure, counts_of: CountsOf) -> float:
    """Issue slots per group sum at which the model in turn would give the reported figure."""
    gpu, cost = device(figure.device), _cost(figure, figure.scheme, counts_of)
    reported_us = _cost(figure, figure.over, counts_of).overlapped_us / ((figure.least + figure.most) / 2)
    sums = figure.M * WIDTH * WIDTH / SCHEMES[figure.scheme].group / 1e6
    return (reported_us - cost.multiply_us - cost.dequantise_us) * gpu.issue_tips / sums


def _cost(figure: PublishedFigure, scheme: str, counts_of: CountsOf) -> Cost:
    gpu = device(figure.device)
    counts = counts_of(SCHEMES[scheme], gpu.arch)
    return gemm_cost(gpu, SCHEMES[scheme], figure.M, WIDTH, WIDTH, counts=counts)
