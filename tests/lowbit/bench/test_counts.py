"""Instruction counts, pinned: they are claims of the README, and of the papers."""

import pytest

from ptxlab import registry, sass, toolchain
from ptxlab.lowbit.bench import counts
from ptxlab.spec import KernelSpec
from tests.support.alu_counts import PINNED

ALL = {s.label: (s, spec) for name, spec in registry.specs().items() for s in registry.find(name)[1]}
ARCHES = {
    "sm_75": ("sm_75", "sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120"),
    "sm_80": ("sm_80", "sm_89", "sm_90a", "sm_120"),
    "sm_90": ("sm_90", "sm_90a", "sm_100a", "sm_120"),
}


def arches(spec: KernelSpec) -> tuple[str, ...]:
    return (spec.arch,) if spec.exact_arch else ARCHES[spec.arch]


def test_every_dequantiser_is_pinned() -> None:
    """The twins of a kernel, PTX and CUDA C++, compile to the same number of instructions."""
    assert set(PINNED) == {label for label in ALL if label.startswith("dequant_")}
    assert all(PINNED[label] == PINNED[label.replace(".cu", ".ptx")] for label in PINNED)


@pytest.mark.parametrize("label", PINNED)
def test_alu_instructions_per_8_weights(label: str) -> None:
    """The shipped record has the pinned counts; the next tests see that the tools here measure the same."""
    assert counts.load()["counts"][label]["alu_per_8"] == PINNED[label]


@pytest.mark.default_cases("dequant_lqq.ptx")
@pytest.mark.parametrize("label", ALL)
def test_the_shipped_counts_are_what_the_tools_here_measure(label: str) -> None:
    source, spec = ALL[label]
    assert counts.load()["counts"][label] == counts.counts_of(spec, source)


@pytest.mark.full
@pytest.mark.parametrize("label", [label for label, (_, spec) in ALL.items() if spec.name in counts.LOOPED])
def test_the_shipped_main_loops_are_what_the_tools_here_measure(label: str) -> None:
    source, spec = ALL[label]
    assert counts.load()["main_loops"][label] == counts.main_loops(spec, source)


def test_the_shipped_record_is_of_these_tools_and_all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counts, "counts_of", lambda spec, source: counts.load()["counts"][source.label])
    monkeypatch.setattr(counts, "main_loops", lambda spec, source: counts.load()["main_loops"][source.label])
    assert counts.load() == counts.measure()


@pytest.mark.full
def test_with_the_tools_they_answer() -> None:
    assert counts.alu_per_8(ALL["dequant_lqq.cu"][0]) == (7, f"measured with ptxas {toolchain.version('ptxas')}")


def test_without_the_tools_the_record_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "missing", lambda: {"ptxas": "install it"})
    alu, origin = counts.alu_per_8(ALL["dequant_lqq.ptx"][0])
    assert alu == 7 and origin.startswith("from the shipped record (ptxas 13.2")


@pytest.mark.default_cases("gemm_w4a8_lqq_sm90.cu")
@pytest.mark.parametrize("label", ALL)
def test_assembles_without_spills_for_every_arch_it_claims(label: str) -> None:
    source, spec = ALL[label]
    for arch in arches(spec):
        image = toolchain.build(source, arch)
        used = image.resources[spec.name]
        assert used.spill_stores == used.spill_loads == used.stack == 0, arch
        assert image.warnings == (), arch


@pytest.mark.full
@pytest.mark.parametrize("label", ["dequant_lqq.ptx", "load_bulk_sm90.ptx", "attention_kv4_naive.cu"])
def test_machine_code_of_every_arch_is_understood(label: str) -> None:
    """The code of sm_90a is checked for all kernels: the shipped record is made from it."""
    source, spec = ALL[label]
    for arch in arches(spec):
        code = sass.parse(toolchain.disassemble(toolchain.build(source, arch)))[spec.name]
        assert any(i.opcode == "EXIT" for i in code) and {"load", "store"} <= {i.section for i in code}, arch
