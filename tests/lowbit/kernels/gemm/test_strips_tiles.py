"""The search for a tile: quick, and the choices of a plain search by the same costs."""

import time
from typing import Any

import numpy as np
import pytest

from ptxlab.arithmetic import ceil_div
from ptxlab.lowbit.kernels.gemm import strips_tiles as tiles

SHAPES = [
    (12288, 4096, 128), (4096, 11008, 64), (28672, 4096, 0), (57344, 8192, 128), (960, 576, 64), (8192, 28672, 32),
    (8, 32, 0),
]  # fmt: skip


def sizes(N: int, K: int, group: int, M: int, **tile_rows: int) -> dict[str, int]:
    return {"M": M, "N": N, "K": K, **({"g": group} if group else {}), **tile_rows}


def plain_choice(s: dict[str, int]) -> Any:
    """Try everything, remember nothing."""
    best: Any = None
    group, all_strips = tiles.group_of(s), ceil_div(s["N"], 16)
    for tile in tiles.tiles_of_widths([s["rows"]] if "rows" in s else tiles.candidate_widths(s["M"])):
        for split in tiles._splits(tile, group):
            blocks, of_tokens = tiles.SMS // split, max(1, ceil_div(s["M"], tile.BM))
            heights = {ceil_div(all_strips, rows) for n in range(1, 9) if (rows := n * blocks // of_tokens)}
            for strips in {min(tile.strips, h) for h in heights if h > tile.strips // 2} | {tile.strips}:
                stages = tiles._stages.__wrapped__(tile, strips, split, group)
                fits = tile.WK == split == 1 or tiles.count_tiles(s, tile.BM, strips) <= blocks
                if not fits or stages < 2 * tile.WK:
                    continue
                cost, high = tiles.COSTS[tiles.widest_of_kind(tile)], ceil_div(all_strips, strips)
                of_stages = ceil_div(s["K"], tile.BK) / split
                once = tiles.tile_microseconds.__wrapped__(tile, of_stages, all_strips / high, group, split)
                rounds = ceil_div(tiles.count_tiles(s, tile.BM, strips), blocks)
                busy = rounds * once + cost.launch + (cost.split if split > 1 else 0)
                key = max(busy, tiles.stream_microseconds(s) + cost.drain), strips
                if best is None or key < best[0]:
                    best = key, tiles.StripChoice(tile, strips, stages, split)
    return best[1]


def same_choices(shape: tuple[int, int, int], counts: Any) -> None:
    for M in map(int, counts):
        for tile_rows in ({}, {"rows": 64}) if M % 5 == 0 else ({},):
            s = sizes(*shape, M, **tile_rows)
            assert tiles.choose(s) == plain_choice(s), s


@pytest.mark.parametrize("shape", SHAPES)
def test_the_quick_search_chooses_as_the_plain_one(shape: tuple[int, int, int]) -> None:
    drawn = np.random.default_rng(0).integers(1, 16_385, 30)
    same_choices(shape, [0, 1, 2, 8, 9, 17, 64, 65, 256, 257, 512, 513, 16_384, *drawn])


@pytest.mark.full
@pytest.mark.parametrize("shape", SHAPES)
def test_all_counts_in_steps_of_thirteen(shape: tuple[int, int, int]) -> None:
    same_choices(shape, range(1, 16_385, 13))


def test_a_new_number_of_tokens_costs_less_than_a_millisecond() -> None:
    """Two searches of 1.7 ms each, and more for others, were most of a call with a new number of tokens."""
    tiles._choose.cache_clear()
    seconds = []
    for M in range(513, 16_385, 331):
        start = time.process_time()
        tiles.choose(sizes(12288, 4096, 128, M))
        seconds.append(time.process_time() - start)
    assert np.median(seconds) < 1e-3
