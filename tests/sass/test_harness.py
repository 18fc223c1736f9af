"""The harnesses compute what the kernels compute: run in the emulator."""

import numpy as np
import pytest

from ptxlab import emulator, registry
from ptxlab.lowbit import reference
from ptxlab.lowbit.bench import dequant
from ptxlab.lowbit.layout.nibbles import unpack_u4
from ptxlab.sass import harness
from ptxlab.sources import Source

NAMES = [name for name, spec in registry.specs().items() if spec.family == "dequant"]
THREADS = 4
FEEDBACK = 0x9E3779B1


def ptx(name: str) -> Source:
    return registry.find(f"{name}.ptx")[1][0]


def run(source: Source, entry: str, args: list) -> None:
    emulator.run(emulator.parse(source.text, source.path), entry, args, grid=(1, 1, 1), block=(THREADS, 1, 1))


def count_words(name: str, words: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """Run the counting harness on 16 words per thread, and return its results: [thread, word, register]."""
    word = harness.word_of(ptx(name))
    source = harness.counting_harness(ptx(name), 16)
    assert word is not None and source is not None
    counted = np.zeros((THREADS, 16, len(word.result_registers)), np.uint32)
    run(source, harness.COUNTING, [words, shared, counted])
    return counted


@pytest.mark.smoke
@pytest.mark.parametrize("name", NAMES)
def test_loop_feeds_the_words_results_back(name: str) -> None:
    rng = np.random.default_rng(3)
    word, loop = harness.word_of(ptx(name)), harness.looping_harness(ptx(name))
    assert word is not None and loop is not None
    words = rng.integers(0, 2**32, (THREADS, harness.LOOP_WORDS), np.uint32)
    shared = rng.integers(0, 2**32, (THREADS, max(1, len(word.shared))), np.uint32)
    looped = np.zeros_like(words)
    run(loop, harness.LOOPING, [words, shared, looped, np.uint32(2)])

    expected = words
    for _ in range(2):
        padded = np.zeros((THREADS, 16), np.uint32)
        padded[:, : harness.LOOP_WORDS] = expected
        d = count_words(name, padded, shared)[:, : harness.LOOP_WORDS]
        expected = d[..., 0] * d[..., 1] + np.uint32(FEEDBACK)
        if d.shape[-1] == 4:
            expected = expected + d[..., 2] * d[..., 3]
    assert (looped == expected).all()


@pytest.mark.parametrize("words", [8, 16])
def test_counted_words_are_dequantised(words: int) -> None:
    rng = np.random.default_rng(4)
    packed = rng.integers(0, 2**32, (THREADS, 16), np.uint32)
    scale = rng.integers(1, 7, (THREADS, 1), np.uint32)
    offset = rng.integers(9, 150, (THREADS, 1), np.uint32)
    shared = np.concatenate([scale, offset * 0x01010101], axis=1).astype(np.uint32)
    source = harness.counting_harness(ptx("dequant_lqq"), words)
    assert source is not None
    counted = np.full((THREADS, 16, 2), 0xA5A5A5A5, np.uint32)
    run(source, harness.COUNTING, [packed, shared, counted])
    expected = reference.dequant_lqq(
        unpack_u4(packed), np.repeat(scale, 1, 1).astype(np.uint8), offset.astype(np.uint8)
    ).reshape(THREADS, 16, 8)
    got = counted.view(np.int8).reshape(THREADS, 16, 8)
    assert (got[:, :words] == expected[:, :words]).all()
    assert (counted[:, words:] == 0xA5A5A5A5).all()


@pytest.mark.parametrize("name", NAMES)
def test_benchmark_sizes_obey_the_rules(name: str) -> None:
    spec = registry.specs()[name]
    sizes = {s: dequant.SIZES[s] for s in spec.example_sizes[0]}
    spec.check_sizes(sizes)
    assert sizes["R"] % dequant._DISTINCT_ROWS == 0
    assert spec.bytes_moved(sizes) > 200e6
