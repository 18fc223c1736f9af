"""The command line as a person or a script meets it: output, JSON, exit codes, one-line errors."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ptxlab import kernels, layout
from ptxlab.cli import main
from ptxlab.layout.words import pack_u4
from tests.test_runtime import PTX_ADD4


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command line in this process: (exit code, standard output, standard error)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ptxlab", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def lqq_file(tmp_path: Path) -> Path:
    q4 = np.random.default_rng(0).integers(0, 16, (2, 64), dtype=np.uint8)
    scale, offset = np.full((2, 1), 8, np.uint8), np.full((2, 1), 64, np.uint8)
    np.savez(tmp_path / "in.npz", qweight=pack_u4(q4), scale=scale, offset=offset)
    return tmp_path / "in.npz"


def test_list_as_json(cli: Any) -> None:
    code, out, _ = cli("list", "--json")
    rows = json.loads(out)
    assert code == 0 and [r["name"] for r in rows] == list(kernels.specs())
    assert all({"name", "family", "sources", "arch", "wrong_by_design"} <= set(r) for r in rows)
    assert [r["name"] for r in rows if r["wrong_by_design"]] == ["dequant_qoq_presub"]
    assert next(r for r in rows if r["name"] == "dequant_lqq")["sources"] == ["ptx", "cu"]


def test_show_prints_contract_and_source(cli: Any) -> None:
    code, out, _ = cli("show", "dequant_lqq")
    assert code == 0 and "K % g == 0" in out and ".visible .entry dequant_lqq" in out and "dequant_lqq.cu" in out


def test_an_unknown_kernel_is_bad_input_with_a_suggestion(cli: Any) -> None:
    code, out, err = cli("show", "dequant_lpp")
    assert code == 2 and out == ""
    assert err.count("\n") == 1 and "did you mean dequant_lqq" in err


def test_run_writes_what_the_kernel_wrote(cli: Any, lqq_file: Path, tmp_path: Path) -> None:
    code, out, _ = cli(
        "run",
        "dequant_lqq",
        "--in",
        lqq_file,
        "--out",
        tmp_path / "out.npz",
        "--backend",
        "emulator",
        "--check",
        "all",
        "--json",
    )
    assert code == 0 and json.loads(out) == {
        "backend": "emulator",
        "outputs": {"out": {"dtype": "int8", "shape": [2, 64]}},
        "findings": [],
    }
    arrays = np.load(lqq_file)
    q4 = np.load(tmp_path / "out.npz")["out"].astype(int)
    assert np.array_equal((q4 + 128 - 64) % 8, np.zeros_like(q4)), arrays.files


def test_run_refuses_what_the_rules_refuse_and_unchecked_admits_it(cli: Any, tmp_path: Path) -> None:
    arrays = {
        "qweight": np.full((1, 4), 0xFFFFFFFF, np.uint32),
        "scale": np.full((1, 1), 17, np.uint8),
        "offset": np.full((1, 1), 9, np.uint8),
    }
    np.savez(tmp_path / "in.npz", **arrays)
    code, out, err = cli(
        "run", "dequant_lqq", "--in", tmp_path / "in.npz", "--out", tmp_path / "out.npz", "--backend", "emulator"
    )
    assert code == 2 and "dequant_lqq: scale: scale <= 16 (got scale[0, 0] = 17)" in err and out == ""
    assert not (tmp_path / "out.npz").exists()
    code, out, _ = cli(
        "run",
        "dequant_lqq",
        "--in",
        tmp_path / "in.npz",
        "--backend",
        "emulator",
        "--unchecked",
        "--check",
        "lanes",
        "--json",
    )
    findings = json.loads(out)["findings"]
    assert code == 1 and {f["kind"] for f in findings} == {"carry", "range"}
    assert all({"line", "thread", "lane", "operands"} <= set(f) for f in findings)


def test_run_a_file_without_a_spec(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "add4.ptx").write_text(PTX_ADD4)
    a = np.full(32, 0xFF, np.uint32)
    np.savez(tmp_path / "in.npz", a=a, b=a, sum=np.zeros_like(a))
    code, out, _ = cli(
        "run",
        tmp_path / "add4.ptx",
        "--in",
        tmp_path / "in.npz",
        "--out",
        tmp_path / "o.npz",
        "--backend",
        "emulator",
        "--check",
        "lanes",
    )
    assert code == 1 and "carry" in out and "add4.ptx:11" in out
    assert (np.load(tmp_path / "o.npz")["sum"] == 0x1FE).all()
    code, _, err = cli(
        "run", tmp_path / "add4.ptx", "--in", tmp_path / "in.npz", "--block", "33", "--backend", "emulator"
    )
    assert code == 1 and "add4.ptx:10" in err and "out of bounds" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "dequant_lqq", "--in", "missing.npz"), "missing.npz: cannot be read: No such file"),
        (
            ("run", "dequant_lqq", "--in", "{lqq}", "--check", "everything"),
            "--check: some of async, init, lanes, race (got everything)",
        ),
        (("run", "dequant_lqq", "--in", "{lqq}", "--backend", "tpu"), "backend: one of gpu, emulator (got tpu)"),
        (("run", "missing/kernel.ptx", "--in", "{lqq}"), "kernel.ptx: cannot be read: No such file"),
        (("verify",), "names: kernels' names, or --all"),
        (("sass",), "targets: one or two kernels or files"),
        (("audit", "missing.safetensors"), "missing.safetensors"),
        (("quantize", "missing.safetensors", "--out", "x"), "missing.safetensors: no such file"),
        (("demo", "--out", "picture.txt"), "picture: a file name that ends in .png, .svg or .pdf"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    cli: Any, lqq_file: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = cli(*(a.replace("{lqq}", str(lqq_file)) for a in arguments))
    assert code == 2 and message in err
    assert len(err.strip().splitlines()) == 1


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    w = np.random.default_rng(0).standard_normal((64, 128)).astype(np.float32)
    save_file({"layer.0.up": w, "layer.0.odd": w[:3], "layer.0.bias": w[0]}, tmp_path / "in.safetensors")
    return tmp_path / "in.safetensors"


def test_quantize_writes_a_checkpoint_that_loads(cli: Any, checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    options = ("--scheme", "qoq", "--group", "32", "--layout", "qserve", "--tensor", "*.0.*", "--out", out)
    code, printed, err = cli("quantize", checkpoint, *options)
    assert code == 0 and err == ""
    text = " ".join(printed.split())
    assert "qoq, group 32, qserve; loaded again, equal in every bit" in text
    assert "layer.0.up 64x128 32,768 4,864 4.75" in text
    assert "copied layer.0.odd: N must be a positive multiple of 8 (N=3)" in text and "bias" not in text
    assert "1 packed, 2 copied:" in text
    assert layout.load(out).layout == "qserve"


def test_quantize_as_json(cli: Any, checkpoint: Path, tmp_path: Path) -> None:
    code, printed, _ = cli("quantize", checkpoint, "--out", tmp_path / "out.safetensors", "--json")
    rows = {row["tensor"]: row for row in json.loads(printed)}
    assert code == 0 and list(rows) == ["layer.0.bias", "layer.0.odd", "layer.0.up"]
    assert rows["layer.0.up"] == {
        "tensor": "layer.0.up",
        "shape": [64, 128],
        "packed": {"layout": "dual_mma", "arch": "sm_90a", "scheme": "lqq", "N": 64, "K": 128, "group": 64,
                   "protective_range": 119},
        "copied_because": "",
        "bytes_before": 32768,
        "bytes": 4608,
    }  # fmt: skip
    assert rows["layer.0.bias"]["packed"] is None and rows["layer.0.bias"]["copied_because"].startswith("not a matrix")


def test_verify_as_json(cli: Any) -> None:
    code, out, _ = cli("verify", "dequant_qoq_presub", "dequant_lqq.cu", "--backend", "emulator", "--json")
    verdicts = json.loads(out)
    assert code == 0 and all(v["passed"] for v in verdicts)
    assert {v["kernel"] for v in verdicts} == {"dequant_qoq_presub.ptx", "dequant_lqq.cu"}


def test_a_failed_verification_is_exit_code_1(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = kernels.specs()["dequant_qoq_channel"]
    monkeypatch.setattr(kernels.dequant.reference, "dequant_qoq_channel", lambda q4: q4)
    object.__setattr__(spec, "reference", lambda q4: q4 ^ np.uint8(1))
    try:
        code, out, _ = cli("verify", "dequant_qoq_channel.ptx", "--backend", "emulator")
    finally:
        object.__setattr__(spec, "reference", kernels.dequant.reference.dequant_qoq_channel)
    assert code == 1 and "differ from the reference, first at [0, 0]" in " ".join(out.split())


def test_sass_side_by_side_and_as_json(cli: Any) -> None:
    code, out, _ = cli("sass", "dequant_qoq_vadd4", "dequant_qoq_vadd4_s32", "--arch", "sm_90a", "--json")
    first, second = json.loads(out)
    assert code == 0 and (first["alu_per_8"], second["alu_per_8"]) == (13, 64)
    code, out, _ = cli("sass", "dequant_qoq_vadd4", "dequant_qoq_vadd4_s32")
    assert code == 0 and "PRMT" in out


def test_sass_of_a_file_without_a_spec(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "add4.ptx").write_text(PTX_ADD4)
    code, out, _ = cli("sass", tmp_path / "add4.ptx", "--json")
    report = json.loads(out)
    assert code == 0 and report["alu_per_8"] is None and report["spill_stores"] == 0 and report["opcodes"]


def test_doctor_names_what_is_missing_and_how_to_get_it(cli: Any) -> None:
    code, out, _ = cli("doctor", "--json")
    items = {item["name"]: item for item in json.loads(out)}
    assert code == 0 and items["backend emulator"]["works"]
    assert {"nvrtc", "ptxas", "nvdisasm", "backend gpu", "demo weights", "cache"} <= set(items)


def test_demo_runs_everything_on_the_trained_weights(cli: Any, tmp_path: Path) -> None:
    code, out, _ = cli("demo", "--out", tmp_path / "demo.png", "--backend", "emulator", "--json")
    found = json.loads(out)
    assert code == 0 and "trained weights of all-MiniLM-L6-v2" in found["weights"]
    rows = {r["kernel"]: r for r in found["rows"]}
    assert set(rows) == {name for name in kernels.specs() if name.startswith("dequant_")}
    assert all(r["as_predicted"] and r["weights"] == 10_616_832 for r in rows.values())
    assert [name for name, r in rows.items() if r["wrong"]] == ["dequant_qoq_presub"]
    for scheme in ("dequant_lqq", "dequant_qoq_vadd4"):
        assert rows[scheme]["overflows"]["119"] == 0 < rows[scheme]["overflows"]["127"]
    assert {n: r["alu_per_8"] for n, r in rows.items()}["dequant_lqq_unsigned"] == 5
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_module_is_a_command_too() -> None:
    done = subprocess.run([sys.executable, "-m", "ptxlab", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0.1.0"
