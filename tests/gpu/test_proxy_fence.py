"""Where a proxy fence has to stand, on hardware and by the emulator's rules, in one kernel."""

from pathlib import Path

import numpy as np
import pytest

import ptxlab
from ptxlab import emulator
from ptxlab.spec import Launch
from tests.support.axes import both_modes

KERNEL = Path(__file__).parent / "proxy_fence.cu"
ORDERS = ("by the writers, ahead of the barrier", "by the issuing thread, behind it", "nowhere", "by the issuer, ahead")
WORDS = 16


def send(order: int, blocks: int, threads: int, rounds: int, **options: object) -> tuple[int, list[str]]:
    """Copy words in an order; return how many were copied too early, and the kinds of findings."""
    out, stale = np.zeros((blocks, WORDS, threads), np.uint32), np.zeros(len(ORDERS), np.uint32)
    kernel = ptxlab.load(KERNEL, arch="sm_90")
    launch = Launch((blocks, 1, 1), (threads, 1, 1), WORDS * threads * 4)
    outcome = kernel.launch([out, stale, np.int32(order), np.int32(rounds)], launch, **options)
    return int(stale[order]), [finding.kind for finding in outcome.findings] if outcome else []


@pytest.mark.default_cases("3-kinds3-late", "1-kinds1-early", "2-kinds2-early", "2-kinds2-late")
@both_modes
@pytest.mark.parametrize(("order", "kinds"), [(0, []), (1, []), (2, ["async-dirty"]), (3, ["async-dirty"])])
def test_what_the_emulator_finds(order: int, kinds: list[str], mode: str) -> None:
    outcome = send(order, 2, 64, 3, backend="emulator", checks=emulator.CHECKS, mode=mode)
    assert outcome == (0, kinds)


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [64, 256])
def test_hardware_sees_every_byte_behind_a_fence_on_the_way(threads: int) -> None:
    """The counts of the orders that the emulator refuses are printed (`-s`).

    Hardware need not show the mistake.
    """
    stale = {name: send(i, 1056, threads, 20_000, backend="gpu")[0] for i, name in enumerate(ORDERS)}
    print(f"\n{threads} threads, of {1056 * threads * WORDS * 20_000:.2e} words too early: {stale}")
    assert [stale[name] for name in ORDERS[:2]] == [0, 0]
