"""`tests.machine_code`: which cases it has, and what a hash depends on."""

import json
from pathlib import Path

import pytest

from ptxlab import registry, toolchain
from ptxlab.sources import Source
from tests import machine_code

KERNEL = """extern "C" __global__ void k(int* out) {
    __shared__ int tile[64];
    tile[threadIdx.x] = out[threadIdx.x] * 3;
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x ^ 1];
}
"""


def hash_of(text: str) -> str:
    return machine_code.hash_code(toolchain.compile_cuda(Source.from_text(text, "k.cu"), "sm_80"))


def test_every_source_of_every_spec_has_a_case() -> None:
    cases = list(machine_code.cases())
    assert {case.source.name for case in cases} == set(registry.specs())
    assert {case.arch for case in cases if case.source.name == "gemm_w4a8_sm90"} == {"sm_90a"}
    assert {case.arch for case in cases if case.source.name == "gemm_w4a8_qoq_sm80"} == {"sm_80", "sm_90a"}
    assert len({(case.label, case.sizes) for case in cases}) == len(cases)


def test_a_hash_leaves_out_lines_and_names() -> None:
    assert hash_of(KERNEL) == hash_of(f"// a comment\n\n{KERNEL.replace('tile', 'turned')}")


@pytest.mark.parametrize("change", [("* 3", "* 5"), ("64", "96"), ("(int* out)", "(int* out, int n)")])
def test_a_hash_covers_code_shared_memory_and_parameters(change: tuple[str, str]) -> None:
    assert hash_of(KERNEL) != hash_of(KERNEL.replace(*change))


@pytest.mark.full
def test_the_command_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert machine_code.main(["dequant_lqq.ptx"]) == 0
    recorded = tmp_path / "recorded.json"
    recorded.write_text(capsys.readouterr().out)
    assert machine_code.main(["dequant_lqq.ptx", "--against", str(recorded)]) == 0
    hashes = json.loads(recorded.read_text())
    (label, *_) = hashes
    hashes[label][machine_code.PLAIN] = "another"
    recorded.write_text(json.dumps(hashes))
    assert machine_code.main(["dequant_lqq.ptx", "--against", str(recorded)]) == 1
    assert f"{label} ({machine_code.PLAIN}): another -> " in capsys.readouterr().out
