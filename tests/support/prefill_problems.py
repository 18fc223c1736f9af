"""Problems of attention of any number of queries, and launches of its kernels."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ptxlab
from ptxlab import registry
from ptxlab.lowbit.kernels.attention import common
from ptxlab.lowbit.kernels.attention.prefill import PREFILL, forget_own
from ptxlab.lowbit.kernels.attention.prefill_sm80 import PREFILL_SM80
from ptxlab.sources import Source
from ptxlab.spec import Arrays, KernelSpec

SPECS = {spec.name.rpartition("_")[2]: spec for spec in (PREFILL, PREFILL_SM80)}
on_every_kernel = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
SHAPES: dict[str, dict[str, Any]] = {
    "one of each": {"D": 128, "new": (1, 130, 0, 65), "past": (64, 0, 9, 127), "Hkv": 2},
    "pages of 16": {"D": 64, "new": (70, 3), "past": (58, 126), "page": 16, "group": 3},
    "pages of 32, a window": {"D": 128, "new": (40, 100), "past": (150, 31), "page": 32, "window": 50, "group": 1},
    "wide heads": {"D": 256, "new": (33, 2), "past": (31, 64), "group": 5},
    "many heads": {"D": 64, "new": (20, 9), "past": (110, 200), "group": 16},
    "a window of one": {"D": 64, "new": (5, 1), "past": (128, 0), "window": 1},
    "parts": {"D": 128, "new": (3, 40), "past": (1100, 1), "parts": 2},
    "three parts of a window": {"D": 64, "new": (30,), "past": (1720,), "window": 1600, "parts": 3, "page": 32},
}


def chunks_of(
    new: tuple[int, ...],
    past: tuple[int, ...],
    *,
    D: int = 64,
    Hkv: int = 1,
    group: int = 2,
    page: int = 64,
    window: int = 0,
    blocks: int = 2,
    parts: int = 1,
    seed: int = 0,
) -> tuple[Arrays, dict[str, Any]]:
    """Make a problem and its sizes: of each sequence so many new tokens behind so many past ones."""
    rng, lengths = np.random.default_rng(seed), np.add(new, past)
    pages = -(-lengths // page)
    P, total = max(1, int(pages.max())), int(pages.sum()) + 1
    cache = common.draw_cache(rng, lengths, Hkv=Hkv, P=P, pages=total, D=D, page_size=page)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    q = rng.standard_normal((sum(new), group * Hkv, D), dtype=np.float32)
    sizes = {"N": sum(new), "B": len(new), "Hq": group * Hkv, "Hkv": Hkv, "D": D, "P": P, "pages": total}
    sizes |= {"page": page, "window": window, "blocks": blocks, "parts": parts, "softmax_scale": D**-0.5}
    logical: Arrays = {"q": q, "cache": cache, "starts": starts, "softmax_scale": D**-0.5, "window": window}
    return {**logical, "blocks": blocks, "parts": parts}, sizes


def with_own_kv(problem: tuple[Arrays, dict[str, Any]], gap: int = 8) -> tuple[Arrays, dict[str, Any]]:
    """Give a problem own keys and values, rows of k with a `gap`. Its cache has no number of these tokens."""
    logical, sizes = problem
    width = sizes["Hkv"] * sizes["D"]
    shape = sizes["N"], sizes["Hkv"], sizes["D"]
    k, v = np.random.default_rng(1).standard_normal((2, *shape), dtype=np.float32)
    new_kv = {"k": k, "v": v, "k_pitch": width + gap, "v_pitch": width}
    pitches = {name: new_kv[name] for name in ("k_pitch", "v_pitch")}
    return {**logical, **new_kv, "cache": forget_own(logical["cache"], logical["starts"])}, {**sizes, **pitches}


def run(
    logical: Arrays,
    sizes: dict[str, Any],
    backend: str = "emulator",
    source: Any = None,
    BF16: int = 0,
    config: Mapping[str, int] = {},
    *,
    spec: KernelSpec = PREFILL,
    **options: Any,
) -> tuple[Arrays, Any]:
    """Launch the kernel with further constants.

    Returns what is written, and the outcome with all checks that the emulator made.
    """
    arrays = spec.pack(logical)
    stored = ml_dtypes.bfloat16 if BF16 else np.float16
    for name in {"q", "k", "v"} & arrays.keys():
        array = arrays[name].astype(stored)
        arrays[name] = array.view(np.uint16) if BF16 else array
    config = {**spec.config_for(sizes), "BF16": BF16, **config}
    source, sizes = source or source_of(spec), {name: sizes[name] for name in sizes if name in spec.symbols}
    outcome = ptxlab.run_spec(spec, source, arrays, sizes=sizes, backend=backend, config=config, **options)
    return outcome.outputs, outcome


def source_of(spec: KernelSpec) -> Source:
    """Return the kernel's CUDA source."""
    (source,) = registry.find(spec.name)[1]
    return source
