"""What the suite `load` measures, without a GPU: the repeating harness, and the split of the instructions."""

import numpy as np
import pytest

from ptxlab import registry, sass, toolchain
from ptxlab.errors import UnavailableError
from ptxlab.lowbit.bench import loads as suite
from ptxlab.profile.nsight import ncu
from ptxlab.runtime import load
from ptxlab.sass import dataflow, harness
from ptxlab.sources import sources_of_kernel

TILES = [name for name, spec in registry.specs().items() if spec.family == "load" and "T" in spec.example_sizes[0]]


@pytest.mark.parametrize("name", TILES)
@pytest.mark.parametrize("repeats", (1, 5))
def test_an_odd_number_of_repeats_gives_the_same_fragments(name: str, repeats: int) -> None:
    spec, (source, *_) = registry.find(name)
    repeated_source = harness.repeating_harness(source)
    assert repeated_source is not None
    logical = spec.example(np.random.default_rng(0), T=2)
    (tiles,) = spec.pack(logical).values()
    out = np.empty(spec.outputs[0].resolve({"T": 2}), spec.outputs[0].dtype)
    checks = ("init", "race")
    outcome = load(repeated_source)(
        tiles, out, np.uint32(repeats), grid=2, block=128, backend="emulator", checks=checks
    )
    assert outcome.findings == ()
    assert np.array_equal(out, spec.reference(**logical))


def test_an_even_number_cancels() -> None:
    """The loads are folded, not only repeated: a harness that loaded once would not notice."""
    spec, (source, *_) = registry.find("load_ldmatrix_s8")
    tiles = next(iter(spec.pack(spec.example(np.random.default_rng(0), T=1)).values()))
    out = np.ones((1, 128, 32), np.int8)
    repeated_source = harness.repeating_harness(source)
    assert repeated_source is not None
    load(repeated_source)(tiles, out, np.uint32(2), grid=1, block=128, backend="emulator")
    assert not out.any()


def test_a_kernel_without_a_marked_fragment_has_no_harness() -> None:
    assert harness.repeating_harness(sources_of_kernel("load_bulk_sm90")[0]) is None


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "loads", "unpack"),
    [
        ("load_ldmatrix_s8", 2, 0),
        ("load_ldmatrix_u4", 1, 12),
        ("load_lds32_u4", 8, 19),
        ("load_qserve_reorder", 1, 12),
        ("load_dual_mma", 1, 12),
        ("load_comet_interleave", 1, 12),
    ],
)
def test_instructions_of_a_fragment(name: str, loads: int, unpack: int) -> None:
    (source, *_) = sources_of_kernel(name)
    image = toolchain.assemble(source, "sm_90a")
    cost = dataflow.fragment_cost(sass.parse(toolchain.disassemble(image))[name])
    assert (cost.loads, cost.unpack) == (loads, unpack)
    thread_order = name in ("load_qserve_reorder", "load_dual_mma", "load_comet_interleave")
    assert (cost.address <= 3) == thread_order, "a thread's own 16 bytes: its number and the base, nothing else"


@pytest.mark.default_cases("load_dual_mma")
@pytest.mark.parametrize("name", TILES)
def test_every_repeat_is_a_load_in_machine_code(name: str) -> None:
    """ptxas must not load once and reuse it: the loop holds as many loads as the fragment needs, or a multiple."""
    repeated_source = harness.repeating_harness(sources_of_kernel(name)[0])
    assert repeated_source is not None
    instructions = sass.parse(toolchain.disassemble(toolchain.assemble(repeated_source, "sm_90a")))[name]
    body = sass.loop_of(instructions)
    once = dataflow.fragment_cost(
        sass.parse(toolchain.disassemble(toolchain.assemble(sources_of_kernel(name)[0], "sm_90a")))[name]
    )
    loads = sum(i.opcode in ("LDS", "LDSM") for i in body)
    assert loads and loads % once.loads == 0


def test_the_bank_model_counts_every_warp_of_every_tile() -> None:
    spec, (source, *_) = registry.find("load_lds32_u4")
    counts = suite.modelled_banks(spec, source)
    warps = 4 * suite.BANK_TILES
    per_warp = {name: count / warps for name, count in counts.items()}
    assert per_warp == {"load_wavefronts": 16, "store_wavefronts": 4, "load_conflicts": 8, "conflicts": 8}


def test_without_ncu_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    with pytest.raises(UnavailableError, match=r"ncu \(Nsight Compute\): not on the PATH"):
        suite.counted_banks(registry.specs()["load_dual_mma"])
    figures = suite._bank_figures(*((spec_and_sources := registry.find("load_dual_mma"))[0], spec_and_sources[1][0]))
    assert figures["load_wavefronts_per_warp_model"] == 4 and not any(name.endswith("ncu") for name in figures)
