"""An audit as a picture."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from ptxlab.errors import ArgumentError
from ptxlab.lowbit.audit import AuditRow
from ptxlab.lowbit.colours import SCHEME_COLOURS
from ptxlab.plot import GREY


def audit_figure(rows: Sequence[AuditRow], title: str) -> Figure:
    """Draw overflowing weights (top) and relative error (bottom) per tensor, scheme and protective range."""
    if not rows:
        raise ArgumentError("picture", "at least one tensor that could be audited", "none")
    tensors = list(dict.fromkeys(row.tensor for row in rows))
    figure = Figure(figsize=(max(7, 0.28 * len(tensors) + 3), 7), layout="constrained")
    overflow_axes, error_axes = figure.subplots(2, 1, sharex=True)
    names = {"qoq": "QoQ", "lqq": "LQQ", "lqq_ceiling": "LQQ ceiling", "lqq_search": "LQQ search"}
    for scheme, limit in dict.fromkeys((row.scheme, row.protective_range) for row in rows):
        row_by_tensor = {row.tensor: row for row in rows if (row.scheme, row.protective_range) == (scheme, limit)}
        marker = {119: "o", 120: "s", 127: "^"}.get(limit, "d")
        style = {
            "marker": marker,
            "linestyle": "none",
            "markersize": 5,
            "color": SCHEME_COLOURS.get(scheme, GREY),
            "alpha": 0.8,
        }
        label = f"{names.get(scheme, scheme)} at ±{limit}"
        places = [place for place, tensor in enumerate(tensors) if tensor in row_by_tensor]
        overflow_axes.plot(places, [row_by_tensor[tensors[place]].overflows for place in places], label=label, **style)
        error_axes.plot(places, [_or_nan(row_by_tensor[tensors[place]].relative_error) for place in places], **style)
    overflow_axes.set_yscale("symlog", linthresh=1)
    overflow_axes.set_ylabel("overflowing weights")
    overflow_axes.legend(ncols=3, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.02))
    figure.suptitle(f"{title}: overflow and error by protective range", x=0.01, ha="left", weight="bold")
    error_axes.set_ylabel("relative error")
    error_axes.set_xticks(range(len(tensors)), tensors, rotation=90, fontsize=7)
    return figure


def _or_nan(number: float | None) -> float:
    return float("nan") if number is None else number
