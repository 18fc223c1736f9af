"""`ptxlab profile`, with an ncu that hands out a report of an H200: what is asked of it, printed, written, refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ptxlab import gpu
from ptxlab.errors import UnavailableError
from ptxlab.lowbit.bench import stalls
from ptxlab.profile import nsight, profiles
from ptxlab.profile.launch_target import LaunchTarget
from tests.support.add4 import PTX_ADD4
from tests.support.fake_ncu import ncu
from tests.support.reports import FILE, GEMM, SIZES

__all__ = ["ncu"]

SHAPE = ",".join(f"{name}={size}" for name, size in SIZES.items())
NAME = "gemm_w4a8_qoq_sm90"


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, ncu: SimpleNamespace) -> SimpleNamespace:
    """Fake a GPU for which ncu has a report of one launch of `NAME`."""
    fake_device = SimpleNamespace(name="NVIDIA H200", slug="h200", driver="580")
    monkeypatch.setattr(gpu, "device_info", lambda: fake_device)
    monkeypatch.setattr(gpu, "why_not", lambda arch, exact=False: None)
    ncu.report = GEMM
    return ncu


def test_a_profile_of_a_launch(device: SimpleNamespace, tmp_path: Path) -> None:
    page = profiles.profile(LaunchTarget(NAME, SIZES), keep=tmp_path / "k.ncu-rep")
    assert page.kernel == NAME and page.sizes == SIZES and "per_weight" in page.figures
    assert page.origin["ncu"] == "2025.3.1.0" and {"commit", "date", "driver"} <= set(page.origin)
    assert (tmp_path / "k.ncu-rep").read_bytes() == GEMM.read_bytes()
    metrics = device.command[device.command.index("--metrics") + 1]
    assert metrics == ",".join(nsight.METRICS) and json.loads(device.command[-1])[0]["target"] == NAME


def test_another_launch_than_asked_for_is_refused(device: SimpleNamespace) -> None:
    with pytest.raises(UnavailableError, match=f"^ncu: expected launches of gemm_w4a8_sm90, saw {NAME}$"):
        profiles.profile(LaunchTarget("gemm_w4a8_sm90"))


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


@pytest.mark.full
def test_two_beside_each_other_and_drawn(cli: Any, device: SimpleNamespace, tmp_path: Path) -> None:
    picture = tmp_path / "p.png"
    code, out, _ = cli("profile", NAME, "--shape", SHAPE, "--compare", FILE, "--plot", picture)
    assert code == 0 and "takes" in out and "times as long as add4" in out and "SHF" not in out.splitlines()[0]
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, out, _ = cli("profile", NAME, "--shape", SHAPE, "--compare", FILE, "--json")
    report = json.loads(out)
    assert [one["kernel"] for one in report["profiles"]] == [NAME, "add4"] and report["differences"]


def test_a_file_without_a_spec(cli: Any, device: SimpleNamespace, tmp_path: Path) -> None:
    (tmp_path / "add4.ptx").write_text(PTX_ADD4)
    np.savez(tmp_path / "in.npz", **{name: np.zeros(32, np.uint32) for name in ("a", "b", "sum")})
    device.report = FILE
    code, out, _ = cli("profile", tmp_path / "add4.ptx", "--in", tmp_path / "in.npz", "--block", "32", "--json")
    assert code == 0 and json.loads(out)["kernel"] == "add4" and "per_weight" not in json.loads(out)["figures"]
    job = json.loads(device.command[-1])[0]
    assert job["block"] == [32] and job["grid"] == [1] and job["inputs"] == str(tmp_path / "in.npz")


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: profile expects either a kernel or --from FILE"),
        ([NAME, "--from", "a.json"], "error: profile expects either a kernel or --from FILE"),
        ([NAME, "--shape", "Q=3"], "--shape: gemm_w4a8_qoq_sm90 takes M, N, K, g (got Q)"),
        ([NAME, "--shape", "M=x"], "--shape: NAME=INTEGER (got M=x)"),
        ([NAME, "--shape", "M=3,M=4"], "--shape: each name once (got M)"),
        (["gemm"], "kernel: one of gemm_tile_lqq_sm80, "),
        ([NAME, "--keep", "report"], "--keep expects a .ncu-rep file, got report"),
        (["--from", "a.json", "--keep", "b.ncu-rep"], "--keep needs a launch, and --from launches nothing"),
        ([NAME, "--grid", "4"], f"--grid is for files only: {NAME} has a spec"),
        ([NAME, "--set", "all"], "--set expects quick or full, got all"),
        (["add4.ptx"], "--in expects an .npz with the arguments of the kernel by name, got nothing"),
        (["add4.ptx", "--in", "in.npz", "--shape", "M=3"], "--shape is for kernels with a spec"),
        ([NAME, "--plot", "p.gif"], "--plot expects a .png or .svg or .pdf file, got p.gif"),
        ([NAME, "--out", "p.png"], "--out expects a .json file, got p.png"),
        ([NAME, "--shape", "M=64,"], "--shape: NAME=INTEGER[,NAME=INTEGER..] (got M=64,)"),
        ([NAME, "--shape", "M"], "--shape: NAME=INTEGER[,NAME=INTEGER..] (got M)"),
        ([NAME, "--shape", "M="], "--shape: NAME=INTEGER (got M=)"),
        ([NAME, "--shape", "=3"], "--shape: NAME=INTEGER (got =3)"),
        ([NAME, "--plot", "none/p.png"], "none/p.png: cannot be written: none is no folder"),
        ([NAME, "--keep", "none/p.ncu-rep"], "none/p.ncu-rep: cannot be written: none is no folder"),
        (["--from", "p.json", "--shape", "M=3"], "--shape cannot change the sizes that a .json profile was made with"),
        (["--from", "p.json", "--compare", "q.json", "--shape", "M=3"], "--shape cannot change the sizes"),
        (["--from", "p.json", "--grid", "3"], "--grid needs a launch"),
        (["--from", "p.ncu-rep", "--set", "full"], "--set needs a launch"),
        (["--from", str(GEMM), "--shape", "Q=3"], "--shape: gemm_w4a8_qoq_sm90 takes M, N, K, g (got Q)"),
        (["add4.ptx", "--in", "in.npz"], "in.npz: cannot be read"),
        (["add4.ptx", "--in", "short.npz"], "add4: b: must be given (got a)"),
        (["add4.ptx", "--in", "full.npz", "--grid", "0"], "grid: one to three positive integers"),
        (["--from", "other.json"], "other.json: not a profile: it has no 'carriers'"),
        (["--from", "none.ncu-rep"], "none.ncu-rep: not found"),
        (["--from", "none.txt"], "--from expects a .ncu-rep or .json file, got none.txt"),
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
    code, _, err = cli("stalls", "--out", tmp_path / "s.png")
    assert code == 2 and "--out expects a .json file" in err and device.command == []
    code, out, _ = cli("stalls", "--out", tmp_path / "s.json")
    assert code == 0 and "7B gate+up" in out and "% of " in out
    (row,) = stalls.load(tmp_path / "s.json").rows
    assert (row.kernel, row.layer, row.sizes["N"]) == (NAME, "7B gate+up", 22016)


def test_the_readmes_page_is_of_the_recorded_profiles(
    report: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profiletables = report("profiletables")
    origin = {"date": "2026-11-22T00:00:00", "commit": "0123456789ab", "ncu": "1"}
    page = nsight.profile_of(nsight.read(GEMM)[0], sizes=SIZES, origin=origin)
    for name in profiletables.COMPARED:
        nsight.save(page, tmp_path / f"{name}.json")
    monkeypatch.setattr(profiletables, "profile_path", lambda kernel, slug: tmp_path / f"{kernel}.json")
    section = profiletables.profile_section()
    assert "times as fast as" in section and "notebooks/figures/profile.png" in section and "0123456789," in section
    (tmp_path / f"{profiletables.COMPARED[1]}.json").unlink()
    assert profiletables.profile_section() == "Not recorded yet.\n"
