"""Each fence bug of `fences/` is found at its line; its fix is clean on every schedule and right."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import Launch, emulator

HERE = Path(__file__).parent / "fences"
Arrays = dict[str, np.ndarray]


def halves(x: np.ndarray) -> np.ndarray:
    return x.view(np.float16).astype(np.float32)


BUGS: dict[str, tuple[int, dict[str, str], Callable[[Arrays], Any]]] = {  # threads, text of the line by kind, results
    "flashkda_24": (
        128,
        {"async-dirty": '"l"(out), "r"(shared(wide))'},
        lambda x: (x["state"].astype(np.uint32) << 16).view(np.float32),
    ),
    "tileops_1574": (
        256,
        {"async-dirty": "shared(staged[group])", "race": "shared(staged[group])"},
        lambda x: 2 * x["x"],
    ),
    "humming_45": (
        128,
        {"async-dirty": '::"l"(out + tile * 512)', "async": "staged[i] = x[tile * 512 + i] + 1;"},
        lambda x: x["x"] + 1,
    ),
    "tilelang_2634": (
        128,
        {"async-dirty": '"l"(descriptor(left, 1024, 128)), "l"(descriptor(right, 128, 128))'},
        lambda x: halves(x["a"]) @ halves(x["b"]).T,
    ),
    "sglang_39124": (
        128,
        {"async-dirty": '"l"(descriptor(left, 1024, 128)), "l"(descriptor(last, 128, 128))'},
        lambda x: halves(x["a"]) @ halves(x["b"]).T @ halves(x["c"]).T,
    ),
    "deepep_642": (32, {"war": '::"r"(shared(to)), "l"(from)'}, lambda x: x["x"].reshape(5, 32, 4).sum(axis=(0, 2))),
    "transformer_engine_2695": (128, {"war": '::"r"(shared(to)), "l"(from)'}, lambda x: [np.abs(x["x"]).max()]),
}
each_bug = pytest.mark.parametrize("name", BUGS)


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Arrays]:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(HERE / "inputs.py"))

    def load(name: str) -> Arrays:
        with np.load(f"{name}.npz") as archive:
            return {key: array if array.shape else array[()] for key, array in archive.items()}

    return load


@each_bug
def test_the_bug_is_found_at_its_line(name: str, emulate: Any, arguments: Callable[[str], Arrays]) -> None:
    threads, expected, _ = BUGS[name]
    lines = (HERE / f"{name}.cu").read_text().splitlines()
    for seeds in (0, 1):
        with pytest.raises(AssertionError) as error:
            emulate(HERE / f"{name}.cu", grid=1, block=threads, checks="all,proxy", seeds=seeds, **arguments(name))
        notes = error.value.annotations  # type: ignore[attr-defined]
        assert {note.kind for note in notes} == {*expected}
        for note in notes:
            assert expected[note.kind] in lines[note.line - 1] and note.path == f"tests/outside/fences/{name}.cu"


@pytest.mark.default_cases("tileops_1574")
@each_bug
def test_the_fix_is_clean_and_right(name: str, emulate: Any, arguments: Callable[[str], Arrays]) -> None:
    threads, _, expected = BUGS[name]
    arrays = arguments(name)
    fixed = {"defines": {"FIXED": 1}, "checks": "all,proxy", "seeds": 2}
    out = emulate(HERE / f"{name}.cu", grid=1, block=threads, **fixed, **arrays)
    output = out["d"] if "d" in out.arrays else out["out"]
    np.testing.assert_array_equal(output.reshape(-1), np.asarray(expected(arrays)).reshape(-1))


@pytest.mark.parametrize("defines", [{}, {"FIXED": 1}], ids=["bug", "fixed"])
def test_flashinfer_3361_is_found_across_two_launches(defines: dict[str, int]) -> None:
    """The consumer's copies read what the quantiser's threads have written; fixed, its sums are right."""
    source, launch = HERE / "flashinfer_3361.cu", Launch((2, 1, 1), (128, 1, 1))
    quantize, consume = (ptxlab.load(source, entry, defines=defines, arch="sm_90") for entry in ("quantize", "consume"))
    x = (30 * np.random.default_rng(0).standard_normal(2048)).astype(np.float32)
    q, sums = np.zeros(2048, np.int8), np.zeros(2, np.int32)
    with emulator.chain(emulator.CHECKS | {"proxy"}) as chain:
        quantize.launch([x, q], launch, backend="emulator")
        consume.launch([q, sums], launch, backend="emulator", programmatic=True)
    places = [(finding.kind, finding.line) for finding in chain.findings]
    lines = source.read_text().splitlines()
    if defines:
        assert places == [] and sums.tolist() == q.reshape(2, -1).sum(axis=1).tolist()
    else:
        assert {kind for kind, _ in places} == {"async-dirty"}
        assert all('"l"(q + blockIdx.x * 1024)' in lines[line - 1] for _, line in places)


@pytest.mark.parametrize("name", ["deepep_642", "transformer_engine_2695"])
def test_what_threads_have_read_is_for_the_strict_check(name: str, emulate: Any, arguments: Any) -> None:
    emulate(HERE / f"{name}.cu", grid=1, block=BUGS[name][0], checks="all", **arguments(name))
