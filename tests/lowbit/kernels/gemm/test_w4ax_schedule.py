"""COMET's kernels work on the very tiles of the simulated schedules: the same SM, the same order, the same pieces."""

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from ptxlab import emulator
from ptxlab.emulator.core.lanes import indices_of
from ptxlab.emulator.core.watcher import Watcher
from ptxlab.lowbit.cost.schedule import (
    PIECES,
    Costs,
    Tile,
    TileWork,
    decomposed,
    grid,
    in_order,
    makespan,
    remapped,
    work_stealing,
)
from ptxlab.lowbit.kernels.gemm.w4ax import COMET, INORDER, REMAP, STEAL
from ptxlab.spec import KernelSpec
from tests.support import gemm_checks as checks

TILE = {"BN": 64, "BM": 32, "WM": 1, "STAGES": 3}
Turn = tuple[Tile, frozenset[int]]  # a tile and its pieces that an SM works on, one after the other
# Parts of Y along M and N, INT4 and INT8 blocks of channels, SMs, INT4 tiles in the time of an INT8 tile.
PROBLEMS = [
    (2, 3, 2, 1, 4, 2),  # the 18 tiles and four SMs of the paper's figure
    (1, 3, 3, 1, 5, 2),  # a last round of INT8 tiles that is not full, and INT4 tiles beyond it
    (1, 2, 4, 1, 3, 3),
    (1, 1, 1, 0, 6, 2),  # one tile for six SMs
    (1, 1, 7, 0, 5, 2),  # two tiles too many, of which five SMs have five or four quarters
    (1, 5, 1, 0, 6, 2),  # one SM idle
    (1, 7, 0, 1, 5, 2),  # INT8 alone
    (1, 2, 1, 1, 7, 2),  # INT4 tiles that do not fill the round of INT8 tiles
    (2, 2, 1, 1, 1, 2),
]


class SumStores(Watcher):
    """Log of stores to the sums [M, blocks, N], in time order: (SM, token, block, n)."""

    ARGUMENT = "argument 8 "

    def __init__(self, machine: Any, shape: tuple[int, int, int]) -> None:
        self.stride, self.shape = machine.launch.stride, shape
        self.region = next(r for r in machine.launch.memory.regions if r.name.startswith(self.ARGUMENT))
        self.seen: list[tuple[int, ...]] = []

    def store(self, access: Any, lanes: Any, offsets: np.ndarray, values: np.ndarray) -> None:
        """Log the stores to the sums."""
        if access.space == "global" and self.region.start <= offsets[0] < self.region.end:
            places = np.unravel_index((offsets - self.region.start) // 4, self.shape)
            self.seen += zip(indices_of(lanes) // self.stride, *places, strict=True)


def emulate_schedule(spec: KernelSpec, problem: tuple[int, ...]) -> list[list[Turn]]:
    """Run a kernel, assert that its result is right, and return each SM's tiles in order."""
    parts_m, parts_n, int4, int8, sms, ratio = problem
    sizes = {"M": parts_m * TILE["BM"], "N": parts_n * TILE["BN"], "K4": 128 * int4, "K8": 128 * int8, "blocks": sms}
    assert spec.args[8].name == "sums"
    logical = spec.example(np.random.default_rng(0), **sizes)
    watchers: list[SumStores] = []

    def attach(machine: Any) -> list[Watcher]:
        watchers.append(SumStores(machine, (sizes["M"], int4 + int8, sizes["N"])))
        return [watchers[-1]]

    chosen = spec.config_for(sizes)
    config = chosen | TILE | ({"RATIO": ratio} if "RATIO" in chosen else {})
    with emulator.watch_launches(attach):
        y = checks.run_checked(spec, spec.pack(logical), "emulator", config=config, sizes=sizes)
    assert np.array_equal(y, spec.reference(**logical)[0])
    (watcher,) = watchers
    turns: list[list[tuple[Tile, int]]] = [[] for _ in range(sms)]
    for sm, token, block, n in watcher.seen:
        (m, below), (column, right) = divmod(token, TILE["BM"]), divmod(n, TILE["BN"])
        piece = below // (TILE["BM"] // 2) * 2 + right // (TILE["BN"] // 2)
        turns[sm].append((Tile(int(m), int(column), int(block), block >= int4), int(piece)))
    return [list(join_pieces(turn)) for turn in turns]


def join_pieces(pieces: list[tuple[Tile, int]]) -> Iterator[Turn]:
    """Join the pieces of one tile that follow each other."""
    for tile, group in groupby(pieces, key=lambda turn: turn[0]):
        yield tile, frozenset(piece for _, piece in group)


def turns_of_works(works: list[TileWork], sms: int) -> list[list[Turn]]:
    """Return each SM's tiles in order, of a simulated schedule."""
    return [
        list(join_pieces([(w.tile, piece) for w in works if w.sm == sm for piece in w.pieces])) for sm in range(sms)
    ]


@pytest.mark.full
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_the_kernels_tiles_are_those_of_the_simulated_schedules(problem: tuple[int, ...]) -> None:
    """Nothing is cut where INT4 tiles do not fill the last round of INT8 tiles: that schedule is the remapped one."""
    parts_m, parts_n, int4, int8, sms, ratio = problem
    costs = Costs(int4=1, int8=ratio)
    tiles = grid(128 * parts_m, 128 * parts_n, 128 * (int4 + int8), frozenset(range(int4, int4 + int8)))
    assert emulate_schedule(INORDER, problem) == turns_of_works(in_order(tiles, sms, costs), sms)
    assert emulate_schedule(REMAP, problem) == turns_of_works(remapped(tiles, sms, costs), sms)
    expected = (remapped if fills_no_round(tiles, sms, ratio) else decomposed)(tiles, sms, costs)
    turns = emulate_schedule(COMET, problem)
    assert turns == turns_of_works(expected, sms)
    assert longest(turns, costs) == makespan(expected)


def fills_no_round(tiles: list[Tile], sms: int, ratio: int) -> bool:
    """Tell whether INT4 tiles are too few for the SMs without one of the last round of INT8 tiles: nothing is cut."""
    early = -sum(tile.int8 for tile in tiles) % sms
    return 0 < sum(not tile.int8 for tile in tiles) < ratio * early


def longest(turns: list[list[Turn]], costs: Costs) -> float:
    """Return the time of the SM that works longest, by the simulator's costs."""
    return max(sum(costs.of(tile) * len(pieces) / PIECES for tile, pieces in of_sm) for of_sm in turns)


@pytest.mark.full
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_stolen_pieces_are_those_of_the_simulated_schedule(problem: tuple[int, ...]) -> None:
    """The same tiles are cut, every piece is made once, and no SM goes back to its own pieces.

    Who steals which piece depends on who is early, and in the emulator that does not follow from the tiles' costs.
    """
    parts_m, parts_n, int4, int8, sms, ratio = problem
    costs = Costs(int4=1, int8=ratio)
    tiles = grid(128 * parts_m, 128 * parts_n, 128 * (int4 + int8), frozenset(range(int4, int4 + int8)))
    cut = {work.tile for work in work_stealing(tiles, sms, costs) if len(work.pieces) < PIECES}
    if fills_no_round(tiles, sms, ratio):
        cut = set()
    turns = emulate_schedule(STEAL, problem)
    pieces = Counter((tile, piece) for of_sm in turns for tile, numbers in of_sm for piece in numbers)
    assert pieces == Counter((tile, piece) for tile in tiles for piece in range(PIECES))
    makers: set[int] = set()
    for sm, (of_sm, planned) in enumerate(zip(turns, turns_of_works(remapped(tiles, sms, costs), sms), strict=True)):
        assigned = [tile for tile, _ in planned]
        whole = [tile for tile in assigned if tile not in cut]
        assert [tile for tile, _ in of_sm[: len(whole)]] == whole
        quartered = [tile for tile, _ in of_sm[len(whole) :]]
        assert {*quartered} <= cut and not {*quartered[1:]} & {*assigned}
        makers |= {sm} if quartered else set()
    assert len(makers) > len(cut) or not cut, "somebody steals"
    assert longest(turns, costs) <= makespan(remapped(tiles, sms, costs))
