"""The stream floor: its kernel in the emulator, its digest, and the rule that makes a record invalid."""

from dataclasses import replace

import numpy as np
import pytest

from ptxlab import emulator
from ptxlab.arithmetic import ceil_div
from ptxlab.errors import BenchmarkError
from ptxlab.lowbit import cost
from ptxlab.lowbit.bench import stream
from tests.support.bench_rows import ROW

SIZES = [(128, 4), (128 * 7, 4), (128 * 1000, 3), (128 * 3001, 2)]


@pytest.mark.smoke
@pytest.mark.parametrize(("nbytes", "blocks"), SIZES)
@pytest.mark.parametrize("largest_chunk", stream._CHUNKS)
@pytest.mark.parametrize("mode", emulator.MODES)
def test_every_chunk_arrives(nbytes: int, blocks: int, largest_chunk: int, mode: str) -> None:
    words = np.random.default_rng(0).integers(0, 2**32, nbytes // 4, np.uint32)
    chunk = stream.even_chunk(nbytes, blocks, largest_chunk)
    digest = np.full((blocks, 32), 7, np.uint32)
    source, geometry = stream.source(), stream.geometry(blocks)
    outcome = emulator.run(
        emulator.parse(source.text, source.path),
        "stream_bulk",
        [words, digest, np.uint32(nbytes), np.uint32(chunk)],
        grid=geometry.grid,
        block=geometry.block,
        shared_bytes=geometry.shared_bytes,
        checks=("race", "init", "async"),
        mode=mode,
    )
    assert outcome.findings == ()
    assert (digest == stream.digest(words, chunk, blocks)).all()
    assert digest.any()


@pytest.mark.parametrize("nbytes", [8_650_752, 25_952_256, 242_221_056, 128])
@pytest.mark.parametrize("largest_chunk", stream._CHUNKS)
def test_chunks_are_even(nbytes: int, largest_chunk: int) -> None:
    chunk, blocks = stream.even_chunk(nbytes, 132, largest_chunk), 132
    rounds = ceil_div(nbytes, chunk * blocks)
    assert chunk % 128 == 0 and chunk <= largest_chunk
    assert rounds * chunk * blocks - nbytes < 132 * 128 * rounds + 1


def test_measures_the_faster_of_two_chunks(emulated_gpu: pytest.MonkeyPatch) -> None:
    assert stream.measure_stream(100_001) == 10.0


def test_a_wrong_digest_is_found(emulated_gpu: pytest.MonkeyPatch) -> None:
    emulated_gpu.setattr(stream, "digest", lambda words, chunk, blocks: np.zeros((blocks, 32), np.uint32))
    with pytest.raises(BenchmarkError, match="digests of the timed launches are wrong"):
        stream.measure_stream(4096)


@pytest.mark.parametrize(
    ("megabytes", "us"), [(8.65, 3.9), (23.2, 7.3), (25.9, 7.8), (34.6, 9.8), (46.5, 12.5), (121, 29.0), (242, 55.6)]
)
def test_the_sheet_is_what_was_measured(megabytes: float, us: float) -> None:
    assert cost.sheet("h200").stream_us(megabytes * 1e6) == pytest.approx(us, rel=0.03)


def test_the_floor_is_the_longer_of_stream_and_peak() -> None:
    assert cost.gemm_floor(12.0, 2 * 16 * 12288 * 4096, "h200") == (12.0, "stream")
    us, limit = cost.gemm_floor(12.0, 2 * 256 * 12288 * 4096, "h200")
    assert limit == "int8" and us == pytest.approx(2 + 2 * 256 * 12288 * 4096 / 1920e6)
    assert cost.gemm_floor(12.0, 1e12, "some-other-gpu") == (12.0, "stream")


@pytest.mark.parametrize(("factor", "valid"), [(0.9, True), (1.0, True), (1.029, True), (1.035, False)])
def test_slow_streams_make_the_record_invalid(factor: float, valid: bool) -> None:
    sheet = cost.sheet("h200")
    rows = [
        replace(ROW, more={"packed_bytes": n, "stream_us": factor * sheet.stream_us(n)})
        for n in (8_650_752, 25_952_256)
    ]
    reason = stream.shortfall(rows, "h200")
    assert (reason == "") == valid
    if not valid:
        assert reason == "streaming the weights takes 3.5% longer than on this card's sheet, over 2 sizes"
    assert stream.shortfall(rows, "some-other-gpu") == stream.shortfall([ROW], "h200") == ""
