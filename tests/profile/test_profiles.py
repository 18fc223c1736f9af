"""`ptxlab profile`, with an ncu that hands out a report of an H200: what is asked of it, printed, written, refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ptxlab import gpu, nsight, profiletables
from ptxlab.errors import UnavailableError
from ptxlab.profile import profiles, stalls
from ptxlab.profile.launch_target import Job
from tests.support.add4 import PTX_ADD4
from tests.support.fake_ncu import ncu
from tests.support.reports import FILE, GEMM, SIZES

__all__ = ["ncu"]

SHAPE = ",".join(f"{name}={size}" for name, size in SIZES.items())
NAME = "gemm_w4a8_qoq_sm90"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, ncu: SimpleNamespace) -> SimpleNamespace:
    """A GPU for which ncu has a report of one launch of `NAME`."""
    info = SimpleNamespace(name="NVIDIA H200", slug="h200", driver="580")
    monkeypatch.setattr(gpu, "device_info", lambda: info)
    monkeypatch.setattr(gpu, "why_not", lambda arch, exact=False: None)
    ncu.report = GEMM
    return ncu


def test_a_profile_of_a_launch(device: SimpleNamespace, tmp_path: Path) -> None:
    page = profiles.profile(Job(NAME, SIZES), keep=tmp_path / "k.ncu-rep")
    assert page.kernel == NAME and page.sizes == SIZES and "per_weight" in page.figures
    assert page.origin["ncu"] == "2025.3.1.0" and {"commit", "date", "driver"} <= set(page.origin)
    assert (tmp_path / "k.ncu-rep").read_bytes() == GEMM.read_bytes()
    asked = device.command[device.command.index("--metrics") + 1]
    assert asked == ",".join(nsight.METRICS) and json.loads(device.command[-1])[0]["target"] == NAME


def test_another_launch_than_asked_for_is_refused(device: SimpleNamespace) -> None:
    with pytest.raises(UnavailableError, match=f"launches of gemm_w4a8_sm90 .got {NAME}"):
        profiles.profile(Job("gemm_w4a8_sm90"))


def test_without_a_gpu_or_with_an_older_one(cli: Any, ncu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = cli("profile", NAME)
    assert code == 2 and "no GPU backend here" in err and "--from" in err and ncu.command == []
    older = "it runs only on sm_90a, and this is an A100"
    monkeypatch.setattr(gpu, "device_info", lambda: None)
    monkeypatch.setattr(gpu, "why_not", lambda arch, exact=False: older if arch else None)
    code, _, err = cli("profile", NAME)
    assert code == 2 and f"{NAME}: it runs only on sm_90a" in err and ncu.command == []


def test_a_saved_report_on_a_page(cli: Any, tmp_path: Path) -> None:
    code, out, _ = cli("profile", NAME, "--from", GEMM)
    assert code == 2, "one or the other"
    code, out, _ = cli("profile", "--from", GEMM, "--shape", SHAPE, "--out", tmp_path / "p.json")
    assert code == 0 and "thread instructions per weight" in out and "Stalls by reason" in out
    assert "wgmma_wait<0>" in out and "WARPGROUP.DEPBAR" in out
    page = nsight.load(tmp_path / "p.json")
    code, out, _ = cli("profile", "--from", tmp_path / "p.json", "--json")
    assert code == 0 and json.loads(out) == json.loads((tmp_path / "p.json").read_text())
    assert page.kernel == NAME and page.sizes == SIZES


def test_two_beside_each_other_and_drawn(cli: Any, device: SimpleNamespace, tmp_path: Path) -> None:
    picture = tmp_path / "p.png"
    code, out, _ = cli("profile", NAME, "--shape", SHAPE, "--compare", FILE, "--out", picture)
    assert code == 0 and "takes" in out and "times as long as add4" in out and "SHF" not in out.splitlines()[0]
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, out, _ = cli("profile", NAME, "--shape", SHAPE, "--compare", FILE, "--json")
    found = json.loads(out)
    assert [one["kernel"] for one in found["profiles"]] == [NAME, "add4"] and found["differences"]


def test_a_file_without_a_spec(cli: Any, device: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "add4.ptx").write_text(PTX_ADD4)
    np.savez(tmp_path / "in.npz", **{name: np.zeros(32, np.uint32) for name in ("a", "b", "sum")})
    device.report = FILE
    code, out, _ = cli("profile", tmp_path / "add4.ptx", "--in", tmp_path / "in.npz", "--block", "32", "--json")
    assert code == 0 and json.loads(out)["kernel"] == "add4" and "per_weight" not in json.loads(out)["figures"]
    job = json.loads(device.command[-1])[0]
    assert job["block"] == [32] and job["grid"] == [1] and job["inputs"] == str(tmp_path / "in.npz")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "target: a kernel, or a report with --from"),
        ([NAME, "--shape", "Q=3"], "--shape: of gemm_w4a8_qoq_sm90 has M, N, K, g (got Q)"),
        ([NAME, "--shape", "M=x"], "--shape: NAME=INTEGER (got M=x)"),
        ([NAME, "--shape", "M=3,M=4"], "--shape: each name once (got M)"),
        ([NAME, "--stalls"], "target: none with --stalls"),
        (["--stalls", "--shape", "M=3"], "--shape: none with --stalls"),
        ([NAME, "--keep", "report"], "--keep: a .ncu-rep (got report)"),
        (["--from", "a.json", "--keep", "b.ncu-rep"], "--keep: none with --from"),
        (["--stalls", "--set", "full"], "--set: none with --stalls"),
        ([NAME, "--grid", "4"], "--grid: for files only"),
        ([NAME, "--set", "all"], "--set: one of quick, full"),
        (["add4.ptx"], "--in: an .npz"),
        (["add4.ptx", "--in", "in.npz", "--shape", "M=3"], "--shape: for kernels with a spec"),
        ([NAME, "--out", "p.gif"], "picture: a file name that ends in .png, .svg or .pdf"),
        ([NAME, "--shape", "M=64,"], "--shape: NAME=INTEGER[,NAME=INTEGER..] (got M=64,)"),
        ([NAME, "--shape", "M"], "--shape: NAME=INTEGER[,NAME=INTEGER..] (got M)"),
        ([NAME, "--shape", "M="], "--shape: NAME=INTEGER (got M=)"),
        ([NAME, "--shape", "=3"], "--shape: NAME=INTEGER (got =3)"),
        ([NAME, "--out", "none/p.png"], "none/p.png: cannot be written: none is no folder"),
        ([NAME, "--keep", "none/p.ncu-rep"], "none/p.ncu-rep: cannot be written: none is no folder"),
        (["--stalls", "--out", "p.png"], "--out: a .json with --stalls (got p.png)"),
        (["--from", "p.json", "--shape", "M=3"], "--shape: none of a .json, which has its own (got M=3)"),
        (["--from", "p.json", "--compare", "q.json", "--shape", "M=3"], "--shape: none of a .json"),
        (["--from", "p.json", "--grid", "3"], "--grid: none where nothing is launched (got 3)"),
        (["--from", "p.ncu-rep", "--set", "full"], "--set: none where nothing is launched (got full)"),
        (["--from", str(GEMM), "--shape", "Q=3"], "--shape: of gemm_w4a8_qoq_sm90 has M, N, K, g (got Q)"),
        (["add4.ptx", "--in", "in.npz"], "in.npz: cannot be read"),
        (["add4.ptx", "--in", "short.npz"], "add4: b: must be in the --in file (got a)"),
        (["add4.ptx", "--in", "full.npz", "--grid", "0"], "grid: one to three positive integers"),
        (["--from", "other.json"], "other.json: not a profile: it has no 'carriers'"),
        (["--from", "none.ncu-rep"], "none.ncu-rep: not found"),
        (["--from", "none.txt"], "--from: a .ncu-rep or .json"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    message: str,
    cli: Any,
    device: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("add4.ptx").write_text(PTX_ADD4)
    Path("other.json").write_text('{"schema": 1}')
    np.savez("short.npz", a=np.zeros(32, np.uint32))
    np.savez("full.npz", **{name: np.zeros(32, np.uint32) for name in ("a", "b", "sum")})
    code, _, err = cli("profile", *arguments)
    assert code == 2 and message in " ".join(err.split()) and device.command == []


def test_stalls_are_recorded(
    cli: Any, device: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "KERNELS", (NAME,))
    monkeypatch.setattr(stalls, "FFN", stalls.FFN[:1])
    monkeypatch.setattr(stalls, "TOKENS", (16,))
    code, out, _ = cli("profile", "--stalls", "--out", tmp_path / "s.json")
    assert code == 0 and "7B gate+up" in out and "% of " in out
    (row,) = stalls.load(tmp_path / "s.json").rows
    assert (row.kernel, row.layer, row.sizes["N"]) == (NAME, "7B gate+up", 22016)


def test_the_readmes_page_is_of_the_recorded_profiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    origin = {"date": "2026-11-22T00:00:00", "commit": "0123456789ab", "ncu": "1"}
    page = nsight.profile_of(nsight.read(GEMM)[0], sizes=SIZES, origin=origin)
    for name in profiletables.COMPARED:
        nsight.save(page, tmp_path / f"{name}.json")
    monkeypatch.setattr(profiletables, "profile_path", lambda kernel, slug: tmp_path / f"{kernel}.json")
    section = profiletables.profile_section()
    assert "times as fast as" in section and "notebooks/figures/profile.png" in section and "0123456789," in section
    (tmp_path / f"{profiletables.COMPARED[1]}.json").unlink()
    assert profiletables.profile_section() == "Not recorded yet.\n"
