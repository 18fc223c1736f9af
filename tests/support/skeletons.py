"""Kernels with the headers in their own text that they share with a kernel of their kind.

Tests change or take out one statement of a kernel at a time, and tell statements apart by the line of the kernel.
"""

from dataclasses import replace

from ptxlab import sources
from ptxlab.sources import Source

SKELETONS = (
    "serial_sm90.cuh",
    "qserve_sm80.cuh",
    "token_by_token.cuh",
    "kv4_halves.cuh",
    "kv4_features.cuh",
    "group_sums_sm90.cuh",
    "own_tokens.cuh",  # ahead of those that it includes
    "prefill_rows.cuh",
    "prefill_tiles.cuh",
)


def inline_skeletons(source: Source) -> Source:
    """Return the same kernel with the text of each skeleton in the place of its first `#include`."""
    text = source.text
    for name in SKELETONS:
        header = (sources.include_dir() / name).read_text().replace("#pragma once\n", "")
        text = text.replace(f'#include "{name}"\n', header, 1).replace(f'#include "{name}"\n', "")
    return replace(source, text=text)
