"""The one style of the report's pictures: titles at the left, no frame, tokens equally far apart."""

from collections.abc import Sequence

from matplotlib.axes import Axes


def bare(axes: Axes) -> None:
    """Remove a panel's upper and right edge."""
    axes.spines[["top", "right"]].set_visible(False)


def token_axis(axes: Axes, tokens: Sequence[int]) -> None:
    """Set up an axis of numbers of tokens, equally far apart."""
    axes.set_xticks(range(len(tokens)), [str(M) for M in tokens])
    axes.set_xlabel("tokens M")
    bare(axes)


def title(axes: Axes, text: str, size: int = 11) -> None:
    """Set a panel's title, at its left."""
    axes.set_title(text, loc="left", weight="bold", fontsize=size)
