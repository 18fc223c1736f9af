"""The measuring of `append_kv4`, on a GPU made of the emulator."""

import numpy as np
import pytest

from ptxlab.bench.ceilings import Ceilings
from ptxlab.errors import BenchmarkError
from ptxlab.lowbit.bench.attention import append
from ptxlab.lowbit.layout import page_bytes
from ptxlab.lowbit.quant import KV_SCHEMES

CEILINGS = Ceilings(4.6, 4.0)


@pytest.mark.default_cases("66-False-kv4")
@pytest.mark.parametrize("scheme", KV_SCHEMES)
@pytest.mark.parametrize(("tokens", "rope"), [(5, True), (66, False), (70, True)])
def test_a_row(emulated_gpu, tokens: int, rope: bool, scheme: str) -> None:
    row = append.measure_append(tokens, 1, scheme, rope, CEILINGS)
    assert row.measure == "append" and row.limit == "copy" and row.checked == "every byte equal to the quantiser's"
    assert row.floor_us == row.bytes / 4e6 and row.fraction == row.floor_us / 10
    assert row.sizes["T"] == tokens and (row.sizes["R"] > 0) == rope and row.variant["ROPE"] == rope


def test_bytes_that_are_moved() -> None:
    token = 2 * 2 * 128 + 2 * (64 + 4)  # k and v of one head, and their places in the pages
    assert append.moved_bytes(4096, 32, "kv4", False) == 4096 * (32 * token + 4)
    assert append.moved_bytes(64, 8, "kv4", True) == 64 * (8 * token + 4 + 4 + 2 * 64 * 4)
    assert append.moved_bytes(1, 1, "kv4_channel", False) == 2 * 2 * 128 + 2 * 64 + 2 * 2 * 128 * 4 + 4
    assert append.moved_bytes(1, 1, "kv8_channel", False) == 2 * 2 * 128 + 2 * 128 + 2 * 128 * 4 + 4
    assert page_bytes("kv4", 64, 128) == 64 * 68


def test_slots_are_one_per_page_or_whole_pages() -> None:
    assert np.array_equal(append.slots_of(64) // append.PAGE, np.arange(64))
    assert np.array_equal(append.slots_of(4096), np.arange(4096))


def test_every_point_is_measured(emulated_gpu) -> None:
    points = []
    emulated_gpu.setattr(append, "measure_append", lambda *arguments: points.append(arguments[:4]))
    lines: list[str] = []
    list(append.rows(CEILINGS, lines.append))
    assert len(lines) == 4 and len(points) == 4 * 5 == len(set(points))
    assert {arguments[:2] for arguments in points} == {(64, 32), (4096, 32), (64, 8), (4096, 8)}


def test_a_wrong_byte_is_an_error(emulated_gpu) -> None:
    right = append._expected_pages

    def other(*arguments: object) -> np.ndarray:
        pool = right(*arguments)
        pool[-1, 1, 0, -1] ^= 1
        return pool

    emulated_gpu.setattr(append, "_expected_pages", other)
    with pytest.raises(BenchmarkError, match="append_kv4: wrong bytes for 5 tokens of 1 heads by kv4"):
        append.measure_append(5, 1, "kv4", False, CEILINGS)
