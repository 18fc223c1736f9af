"""Options of attention and of the calls that append to its cache."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ptxlab.lowbit.kernels.options import FLAG, LaunchOptions, Rule, early_launch, option
from ptxlab.validate import is_integer


def _is_scale(scale: Any) -> bool:
    return scale is None or (isinstance(scale, (int, float, np.floating)) and bool(2.0**-149 <= scale < 2.0**128))


def _is_window(window: Any) -> bool:
    return window is None or (is_integer(window) and window >= 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionOptions(LaunchOptions):
    """Options of `attention_kv4`; once a cache is known, `scale` is a number, and `window` one or None for all."""

    scale: float | None = option(
        "of the scores, above 0; by default D^-0.5.",
        Rule("must be above 0 and finite in float32", _is_scale),
        default=None,
    )
    window: int | None = option(
        "how many tokens a query sees at most, its own included; None for all.",
        Rule("must be an integer, 1 or more, or None", _is_window),
        default=None,
    )
    return_lse: bool = option(
        "return (out, lse): the natural logarithm of the sum of exponentials.", FLAG, default=False
    )
    kernel: str | None = option(
        "one of the kernels by name; by default the highest that runs here, `attention_kv4_sm90` or"
        " `attention_kv4_mma_sm80`. Teaching steps take D 128, T 1, pages of 64, float16, kv4 (`attention_kv8`: kv8).",
        default=None,
    )
    programmatic: bool = early_launch(
        ": it reads lengths, block table and constants by channel at once, so no kernel that may still run then may"
        " write these; before it reads queries and pool, or writes anything, it waits by itself. Only for kernels that"
        " do so."
    )
    check: bool = option(
        "look at lengths, block table, constants by channel, and whether the workspace is zeros where it has to be, on"
        " a GPU too, for which the call waits. On the host that is always done.",
        FLAG,
        default=False,
        selects_kernel=False,  # a call with it prepares the kernel of a later one in a capture
    )
    batch_invariant: bool = option(
        "a sequence gets the same bits whatever else is in the batch, and wherever it is there: it is cut by its own"
        " length, not so that all blocks have equally much. Only `attention_kv4_sm90` does so, with a larger workspace;"
        " with `query_start_loc` a sequence is not cut at all.",
        FLAG,
        default=False,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class AppendOptions(LaunchOptions):
    """Options of `append_kv4`."""

    check: bool = option(
        "look at slots and positions on a GPU too, for which the call waits. On the host that is always done.",
        FLAG,
        default=False,
        selects_kernel=False,  # as of attention
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class RopeAppendOptions(AppendOptions):
    """Options of `rope_append_kv4`."""

    programmatic: bool = early_launch(
        ": it reads slots, tables, positions and constants by channel at once, so no kernel that may still run then may"
        " write these; before it reads qkv, or writes anything, it waits by itself."
    )
