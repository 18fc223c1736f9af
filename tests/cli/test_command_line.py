"""What all commands have in common: help, spellings of options, errors in one line, names, tables that fit."""

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from ptxlab import emulator, gpu, registry, sass
from ptxlab.cli import common, profile
from ptxlab.cli import run as run_commands
from ptxlab.cli import sass as sass_command
from ptxlab.cli.common import WIDTH
from ptxlab.profile import nsight
from ptxlab.runtime.verify import Job, Verdict
from tests.support.add4 import PTX_ADD4
from tests.support.markdown_pages import ROOT
from tests.support.reports import FILE, GEMM, SIZES

SUMMING = "sum_activations_s8"
COMMANDS = {name: one.load() for name, one in registry.entries("commands").items() if " " not in name}
# Of several spellings of one thing, the one that commands take.
RETIRED = {"--sizes": "--shape", "--timeline": "timeline", "--stalls": "stalls", "--sass": "--listing"}


def options(command: Callable[..., None]) -> dict[str, Any]:
    """Map each option to its type, as the signature declares them."""
    types = {}
    hints = get_type_hints(command, include_extras=True)
    for name in inspect.signature(command).parameters:
        kind, declared = get_args(hints[name])
        if "Option" in type(declared).__name__:
            spelled = [one for one in (declared.default, *(declared.param_decls or ())) if str(one).startswith("-")]
            if type(None) in get_args(kind):  # `str | None`
                kind = get_args(kind)[0]
            types[(spelled or [f"--{name.replace('_', '-')}"])[0]] = kind
    return types


def test_help_has_panels(cli: Any) -> None:
    code, out, _ = cli("--help")
    places = [out.index(f"─ {panel} ─") for panel in ("Run and check", "Measure", "Weights", "Project")]
    assert code == 0 and places == sorted(places)
    assert cli()[1].strip() == out.strip(), "without a command too"


def test_an_option_means_the_same_in_all_commands() -> None:
    kinds: dict[str, set[Any]] = defaultdict(set)
    for command in COMMANDS.values():
        for option, kind in options(command).items():
            assert option not in RETIRED, option
            kinds[option].add(kind)
    for option in ("--shape", "--check", "--plot", "--group", "--arch", "--backend", "--json"):
        assert len(kinds[option]) == 1, (option, kinds[option])


def test_a_switch_has_no_negation(cli: Any) -> None:
    """`--no-unchecked` and the like say nothing."""
    for name in ("run", "sass", "timeline", "verify"):
        assert "--no-" not in cli(name, "--help")[1]


@pytest.mark.parametrize("name", ["profile", "timeline", "stalls"])
def test_profile_is_three_commands_of_few_options(name: str) -> None:
    own_options = set(options(COMMANDS[name])) - set(options(COMMANDS["run"])) - {"--json"}
    assert len(own_options) <= 6, own_options


def test_every_command_takes_json() -> None:
    assert [name for name, command in COMMANDS.items() if "--json" not in options(command)] == []


def test_the_readme_names_every_command() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Commands")[2].partition("\n## ")[0]
    assert {*re.findall(r"`ptxlab (\w+)", table)} >= {*COMMANDS}


@pytest.mark.parametrize("command", [("run", SUMMING), ("verify", SUMMING)])
def test_an_unavailable_gpu_names_the_emulator(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, str]
) -> None:
    monkeypatch.setattr(gpu, "why_not", lambda *_, **__: "no CUDA device")
    spec = registry.specs()[SUMMING]
    packed = spec.pack(spec.example(np.random.default_rng(0), **spec.example_sizes[0]))
    np.savez(tmp_path / "in.npz", **packed)
    options = ("--in", tmp_path / "in.npz") if command[0] == "run" else ()
    code, _, err = cli(*command, *options, "--backend", "gpu")
    assert code == 2 and "no CUDA device; pass --backend emulator" in err and 'backend="' not in err


# Names


def pass_without_verifying(job: Job, seed: int) -> Verdict:
    """Return a passing verdict without verifying."""
    return Verdict(job.label, job.backend, dict(job.sizes), True, "", 0.0)


@pytest.mark.full
def test_a_family_stands_for_its_kernels(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    family = [name for name, spec in registry.specs().items() if spec.family == "load"]
    assert [spec.name for spec, *_ in registry.resolve_all("load") if spec] == family
    assert [row["name"] for row in json.loads(cli("list", "load", "--json")[1])] == family
    assert [row["name"] for row in json.loads(cli("show", "load", "--json")[1])] == family
    _, out, _ = cli("sass", SUMMING, "moe", "--json")
    of_experts = ["choose_experts", "gather_tokens", "combine_experts"]
    assert [report["entry"] for report in json.loads(out)] == [SUMMING, *of_experts]
    monkeypatch.setattr(run_commands, "verify_job", pass_without_verifying)
    _, out, _ = cli("verify", "moe", "--backend", "emulator", "--json")
    assert {verdict["kernel"].partition(".")[0] for verdict in json.loads(out)} == {*of_experts}
    assert not {spec.family for spec in registry.specs().values()} & set(registry.specs()), "a name is one or the other"


def test_a_family_is_a_folder_whatever_its_kernels_are_called() -> None:
    for family, name in (("quantize", "rmsnorm_quantize"), ("quantize", SUMMING), ("attention", "rope_append_kv4")):
        assert name in [spec.name for spec, *_ in registry.resolve_all(family) if spec]


def test_sanitize_takes_families(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(nsight.sanitizer, "sanitize", lambda *arguments: calls.append(arguments) or [])
    form = "gemm_w4a8_sm90:channel"
    code, _, _ = cli("sanitize", "layer", "moe", "dequant_lqq", form, "--tool", "memcheck,racecheck", "--shape", "R=2")
    named = ["choose_experts", "gather_tokens", "combine_experts", "dequant_lqq", form, "layer"]
    assert code == 0 and calls == [(tool, named, "R=2") for tool in ("memcheck", "racecheck")]


@pytest.mark.full
def test_a_form_of_a_kernel_is_named_like_a_kernel(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    both = "gemm_w4a8_small_sm90", "gemm_w4a8_small_sm90:channel"
    sources = ["gemm_w4a8_small_sm90.cu", "gemm_w4a8_small_sm90.cu:channel"]
    monkeypatch.setattr(run_commands, "verify_job", pass_without_verifying)
    code, out, _ = cli("verify", *both, "--shape", "M=2,N=16,K=128,g=128", "--backend", "emulator", "--json")
    sizes = {"M": 2, "N": 16, "K": 128}
    verified = [(one["kernel"], one["sizes"]) for one in json.loads(out)[-2:]]
    assert code == 0 and verified == [(sources[0], {**sizes, "g": 128}), (sources[1], sizes)]
    (listed,) = json.loads(cli("list", both[1], "--json")[1])
    assert listed["name"] == json.loads(cli("show", both[1], "--json")[1])["name"] == both[1]
    counted = json.loads(cli("sass", *both, "--json")[1])
    assert [one["name"] for one in counted] == sources and counted[0]["opcodes"] != counted[1]["opcodes"]


# Texts


@pytest.mark.parametrize("label", ["dequant_lqq.ptx", "dequant_lqq.cu", "gemm_w4a8_sm90.cu"])
def test_a_source_is_shown_verbatim(cli: Any, label: str) -> None:
    code, out, _ = cli("show", label)
    (source,) = registry.find(label)[1]
    assert code == 0 and out == source.text
    if source.language == "ptx":
        assert emulator.parse(out, "shown.ptx").entries == emulator.parse(source.text, "shown.ptx").entries
    code, out, _ = cli("show", source.name)
    assert code == 0 and source.text in out and "Arguments, in launch order" in out


@pytest.mark.full
def test_a_load_is_plotted_where_it_is_told(cli: Any, tmp_path: Path) -> None:
    code, out, _ = cli("show", "load_dual_mma", "--plot", tmp_path / "a.svg")
    assert code == 0 and "<svg" in (tmp_path / "a.svg").read_text() and out.rstrip().endswith("a.svg")


def test_a_file_is_shown_verbatim_too(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "add4.ptx").write_text(PTX_ADD4)
    assert cli("show", tmp_path / "add4.ptx")[:2] == (0, PTX_ADD4)


@pytest.mark.full
def test_a_listing_interleaves_machine_code_and_source(cli: Any, tmp_path: Path) -> None:
    text = """extern "C" __global__ void scale(float* x) {
    #ifdef TWICE
    x[threadIdx.x] *= 2.0f;  // this one
    #else
    x[threadIdx.x] += 5.0f;  // or that one
    #endif
}
"""
    (tmp_path / "scale.cu").write_text(text)
    for options, line, absent in (
        ((), "scale.cu:5  x[threadIdx.x] += 5.0f;  // or that one", "this one"),
        (("-D", "TWICE"), "scale.cu:3  x[threadIdx.x] *= 2.0f;  // this one", "or that"),
    ):
        code, out, _ = cli("sass", tmp_path / "scale.cu", "--listing", *options)
        assert code == 0 and line in out and absent not in out
        below = out[out.index(line) :].splitlines()[1]
        assert re.match(r"    /\*[0-9a-f]{4}\*/ \S", below)
    shown = re.findall(r"/\*([0-9a-f]+)\*/", out)
    assert shown == sorted(shown) and len(shown) == len(set(shown)), "every instruction once, in order"
    code, out, _ = cli("sass", "dequant_lqq.ptx", "--listing", "--json")
    assert code == 0 and any("and.b32" in one for one in json.loads(out)["dequant_lqq.ptx"])


def test_a_listing_has_the_ptx_of_each_line_and_the_occupancy(cli: Any, tmp_path: Path) -> None:
    text = 'extern "C" __global__ void scale(float* x) {\n    x[threadIdx.x] *= 2.0f;\n}\n'
    (tmp_path / "scale.cu").write_text(text)
    code, out, _ = cli("sass", tmp_path / "scale.cu", "--listing", "--ptx", "--block", 96, "--shared", 100_000)
    _, occupancy, *lines = out.splitlines()
    assert code == 0 and occupancy.startswith("An SM holds 2 blocks of 96 threads at once, ")
    of_store = lines[lines.index("scale.cu:2  x[threadIdx.x] *= 2.0f;") + 1 : lines.index("scale.cu:3  }")]
    ptx, sass = ([line for line in of_store if ("/*" in line) is in_sass] for in_sass in (False, True))
    assert of_store == [*ptx, *sass]
    assert any("st.global.f32 [" in line for line in ptx) and any(" STG.E " in line for line in sass)
    assert cli("sass", tmp_path / "scale.cu", "--ptx")[2] == "error: --ptx needs --listing\n"


def tables_fit(out: str) -> None:
    assert max(map(len, out.splitlines())) <= WIDTH, max(out.splitlines(), key=len)


@pytest.mark.full
def test_tables_fit_and_names_stand_on_one_line(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common.console, "_width", WIDTH)  # whatever COLUMNS the tests run with
    for command in (("list",), ("sass", "load"), ("doctor",), ("sass", "dequant_lqq", "gemm_w4a8_qoq_channel_sm80")):
        code, out, _ = cli(*command)
        assert code == 0 and "…" not in out and (command[1:] != ("load",) or "lines of SASS" in out), (
            "nothing is cut off"
        )
        tables_fit(out)
        named = [name for target in command[1:] for _, _, name in registry.resolve_all(target)]
        for name in named if command[0] == "sass" else registry.specs() if command[0] == "list" else ():
            assert str(name) in out, name


@pytest.mark.parametrize("width", [80, WIDTH])
def test_a_summary_of_a_family_is_not_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(common.console, "_width", width)
    labels = [source.label for name in registry.specs() for source in registry.find(name)[1]]
    one = sass.Report(
        "", "", "sm_90a", ("ptxas 13.2.86",), 168, 9000, 365, 0, 0, {"IMAD": 12345}, {}, {}, 7.5, {}, {}, ()
    )
    sass_command._summarise("sm_90a", [replace(one, name=label) for label in labels])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if len(row) == 5 and "." in row[0]] == [
        [label, "7.5", "168", "9365", "12345"] for label in labels
    ]


@pytest.mark.full
def test_a_profile_of_two_kernels_fits(capsys: pytest.CaptureFixture[str]) -> None:
    pages = [nsight.profile_of(nsight.read(path)[0], sizes=SIZES) for path in (GEMM, FILE)]
    profile.show(pages, nsight.differences(*pages))
    out = capsys.readouterr().out
    table = out[: out.index("lines with most stalls")].rsplit("\n", 1)[0]
    tables_fit(table)
    assert " ".join(f"{name}={size}" for name, size in SIZES.items()) in table and pages[0].kernel in table


def test_cost_without_a_shape_shows_the_device_that_is_asked_for(cli: Any) -> None:
    every, one = json.loads(cli("cost", "--json")[1]), json.loads(cli("cost", "--device", "h100", "--json")[1])
    assert len(every) > 1 and len(one) == 1 and one[0] in every
    assert cli("cost", "--device", "nosuch")[0] == 2
