"""What is put under a profiler: problems of every kind, launched by the very process that ncu would watch."""

import json
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from ptxlab import gpu, subject
from ptxlab.subject import Job
from tests.bench.conftest import emulated_gpu as emulated_gpu
from tests.test_runtime import PTX_ADD4

SMALL = (
    Job("gemm_w4a8_qoq_sm90", {"M": 8, "N": 64, "K": 128}),
    Job("gemm_w4a8_sm90", {"M": 8, "N": 64, "K": 128}),
    Job("attention_kv4_sm90", {"B": 1, "L": 64, "Hq": 1, "Hkv": 1}),
    Job("dequant_lqq"),
)


@pytest.fixture
def events(emulated_gpu: pytest.MonkeyPatch) -> list[str]:
    """Entries as they are launched, and where the stretch that is profiled begins and ends."""
    seen: list[str] = []
    prepare = gpu.prepare

    def remembered(kernel, args, geometry):
        call = prepare(kernel, args, geometry)
        return lambda: (seen.append(kernel.run.entry), call())

    @contextmanager
    def profiled():
        seen.append("begin")
        yield
        seen.append("end")

    emulated_gpu.setattr(gpu, "prepare", remembered)
    emulated_gpu.setattr(gpu, "profiled", profiled)
    emulated_gpu.setattr(subject, "WARM_UP", 1)
    return seen


def test_each_job_is_warmed_up_and_then_profiled_once(events: list[str]) -> None:
    subject.main(json.dumps([asdict(job) for job in SMALL]))
    assert events == [e for job in SMALL for e in (job.target, "begin", job.target, "end")]


def test_a_file_takes_its_arguments_from_an_npz(events: list[str], tmp_path: Path) -> None:
    (tmp_path / "add4.ptx").write_text(PTX_ADD4)
    names = subject.entry_of(Job(str(tmp_path / "add4.ptx")))
    arrays = {n: np.zeros(32, np.uint32) for n in kernels_parameters(tmp_path / "add4.ptx")}
    np.savez(tmp_path / "in.npz", **arrays)
    call = subject.prepared(Job(str(tmp_path / "add4.ptx"), inputs=str(tmp_path / "in.npz")))
    call()
    assert events == [names]


def kernels_parameters(path: Path) -> tuple[str, ...]:
    from ptxlab import runtime

    return runtime.load(path).parameters
