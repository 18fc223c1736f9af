"""Claims on kernels: proved, refuted with a counterexample that runs, undecided; and the command that says so."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from ptxlab import registry
from ptxlab.errors import ArgumentError
from ptxlab.io.files import load_arrays
from ptxlab.runtime import load
from ptxlab.sources import results_dir
from tests.support import small_kernels
from tests.support.mutation import mutants

pytest.importorskip("z3", reason="z3-solver is not installed: it comes with the extra `prove`")

from ptxlab.prove import Claim, Decision, Enumeration, decide, prove_kernel, registered_claims
from ptxlab.prove.kernels import claims_of, query
from ptxlab.spec import KernelClaim
from tests.support.proofs import NAMES, load_body, survivor_reason, survivors

# Ten lines of one's own, as in the guide.
MINE = """.version 8.0
.target sm_80
.address_size 64
.visible .entry mine(.param .u64 q, .param .u64 scale, .param .u64 out)
{
    .reg .u32 %w, %s, %d;
    .reg .u64 %q, %scale, %out;
    ld.param.u64 %q, [q];
    ld.param.u64 %scale, [scale];
    ld.param.u64 %out, [out];
    ld.global.u32 %w, [%q];
    ld.global.u8 %s, [%scale];
    and.b32 %w, %w, 0x0f0f0f0f;
    mul.lo.u32 %d, %w, %s;      // @lanes d:u8x4 a:u8x4 b:u32
    st.global.u32 [%out], %d;
    ret;
}
"""
CLAIM = "out.u8[i] == nibbles(q)[i] * scale"


@pytest.fixture
def own_kernel(tmp_path: Path) -> str:
    path = tmp_path / "mine.ptx"
    path.write_text(MINE)
    return str(path)


def decide_claim_of_spec(name: str, claim_name: str, source: int = 0) -> Decision:
    """Decide a claim of a spec on one of its sources."""
    spec, sources = registry.find(name)
    claim = next(c for c in spec.claims if c.name == claim_name)
    return decide(Claim(name, claim_name, claim.text, lambda: query(spec, sources[source], claim), claim.expect))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "claim"),
    [
        ("dequant_lqq", "quantised at 120, nearest"),
        ("dequant_lqq", "quantised at 121, nearest"),
        ("dequant_qoq_vadd4", "quantised at 120"),
    ],
)
def test_what_a_quantiser_leaves_is_decided_as_the_spec_says(name: str, claim: str) -> None:
    assert decide_claim_of_spec(name, claim).as_expected


def test_every_dequantiser_and_every_twin_has_claims_and_all_are_recorded() -> None:
    claims = {(c.subject, c.name): c.expect for name in NAMES for c in claims_of(*registry.find(name))}
    assert len(NAMES) == 12
    assert {subject for subject, _ in claims} == {s.label for name in NAMES for s in registry.find(name)[1]}
    record = json.loads((results_dir() / "proofs.json").read_text())
    verdicts = {(c["subject"], c["name"]): c["verdict"] for c in record}
    claims |= {(c.subject, c.name): c.expect for c in registered_claims()}
    assert verdicts == claims


def test_every_mutant_that_is_recorded_as_not_refuted_has_a_reason() -> None:
    record = {row["kernel"]: row for row in json.loads((results_dir() / "proof_mutants.json").read_text())}
    assert [*record] == NAMES
    for name, row in record.items():
        mutants_by_name = dict(mutants(registry.find(name)[1][0].text))
        passed = [m for m in row["not_by_both"] if m["verdict"] != "refuted"]
        assert row["mutants"] == len(mutants_by_name) and all(
            m["mutant"] in mutants_by_name and survivor_reason(m["mutant"]) for m in passed
        )


def replay_counterexample(backend: str, tmp_path: Path, cli) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes of the output that a solver foretells, and what a run gives.

    The solver claims some of them wrong.
    """
    decision = decide_claim_of_spec("dequant_lqq", "quantised at 121, nearest")
    assert decision.explanation is not None and decision.explanation.command == "ptxlab run dequant_lqq.ptx --unchecked"
    path, out = tmp_path / "wrong.npz", tmp_path / "out.npz"
    np.savez(path, **decision.explanation.arrays)
    code, _, error = cli(
        *decision.explanation.command.split()[1:], "--in", str(path), "--out", str(out), "--backend", backend
    )
    assert code == 0, error
    got = load_arrays(out)["out"].reshape(-1)
    foretold = {int(k[4:-1]): bits for k, bits in decision.counterexample.items() if k.startswith("out[")}
    assert any(decision.counterexample[f"wrong[{i}]"] for i in foretold)
    assert all(np.int8(got[i]) != np.uint8(decision.counterexample[f"claimed[{i}]"] % 256).astype(np.int16)
               for i in foretold if decision.counterexample[f"wrong[{i}]"])  # fmt: skip
    return np.array([*foretold.values()], np.uint8), got[[*foretold]].view(np.uint8)


@pytest.mark.full
def test_the_emulator_shows_the_same_wrong_byte(tmp_path: Path, cli) -> None:
    foretold, got = replay_counterexample("emulator", tmp_path, cli)
    assert foretold.tolist() == got.tolist()


@pytest.mark.gpu
def test_the_gpu_shows_the_same_wrong_byte(tmp_path: Path, cli) -> None:
    foretold, got = replay_counterexample("gpu", tmp_path, cli)
    assert foretold.tolist() == got.tolist()


# Files without a spec


def test_an_own_kernel_is_proved_within_its_range_and_refuted_beyond(own_kernel: str, tmp_path: Path, cli) -> None:
    assert cli("prove", own_kernel, "--assume", "scale <= 17", "--claim", CLAIM)[0] == 0
    path, out = tmp_path / "wrong.npz", tmp_path / "out.npz"
    code, output, _ = cli(
        "prove", own_kernel, "--assume", "scale <= 18", "--claim", CLAIM, "--out", str(path), "--json"
    )
    (decision,) = json.loads(output)
    assert code == 1 and decision["verdict"] == "refuted"
    model = decision["counterexample"]
    wrong = [i for i in range(4) if model[f"wrong[{i}]"]]
    assert wrong and model["scale[0]"] == 18
    code, _, error = cli("run", own_kernel, "--in", str(path), "--out", str(out))
    assert code == 0, error
    assert load_arrays(out)["out"][:4].tolist() == [model[f"out.u8[{i}]"] for i in range(4)]


@pytest.mark.full
def test_in_python_a_loaded_kernel_or_a_name_is_decided(own_kernel: str) -> None:
    kernel = load(Path(own_kernel))
    assert prove_kernel(kernel, CLAIM, assume="scale <= 17").verdict == "proved"
    refuted = prove_kernel(kernel, CLAIM, assume=["scale == 18"])
    assert "refuted\n" in str(refuted) and "wrong  i = " in str(refuted)
    assert prove_kernel(kernel, "out.u8[i] == other.out.u8[i]", equals=kernel).verdict == "proved"
    below = "out[i] - 127 == other.out[i]"
    assert prove_kernel("dequant_lqq_unsigned", below, equals="dequant_lqq").verdict == "refuted"
    with pytest.raises(ArgumentError, match=r"^equals: a name beside a name, a Kernel beside a Kernel \(got str\)$"):
        prove_kernel(kernel, CLAIM, equals="dequant_lqq")


@pytest.mark.parametrize("name", ["ops::add<2>", "add(int*, int)"])
def test_a_counterexample_is_run_by_the_command_printed(
    name: str, cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had the mangled symbol."""
    monkeypatch.chdir(tmp_path)
    Path("k.cu").write_text("""namespace ops { template <int N>
__global__ void add(int* y, const int* x) { *y = *x + N; } }
template __global__ void ops::add<2>(int*, const int*);
__global__ void add(int* y, int n) { *y = n; }
__global__ void add(long* y, int n) { *y = n; }
""")
    code, output, _ = cli("prove", f"k.cu:{name}", "--claim", "y.u32[i] == 5", "--out", "in.npz")
    (command,) = re.findall(r"^  ptxlab (run .+)$", output, re.MULTILINE)
    assert code == 1 and command == f"run 'k.cu:{name}' --grid 1,1,1 --block 1,1,1 --in in.npz"
    assert cli(*shlex.split(command), "--backend", "emulator")[0] == 0


def test_the_counterexample_is_printed_lane_by_lane(own_kernel: str, cli) -> None:
    code, output, _ = cli("prove", own_kernel, "--assume", "scale == 18", "--claim", CLAIM)
    lanes = [line for line in output.splitlines() if "i = " in line]
    assert code == 1 and [line.split()[0] in ("right", "wrong") for line in lanes] == [True] * 4
    assert any(line.split()[0] == "wrong" for line in lanes)
    assert [line.strip() for line in output.splitlines() if "scale[0]" in line] == ["all    scale[0] = 18 (00010010)"]
    for line in lanes:  # as wide as the output, and wider where that does not hold it
        number, digits = re.findall(r"claimed = (\d+) \(([01]+)\)", line)[0]
        assert int(digits, 2) == int(number) and len(digits) == max(8, int(number).bit_length())


@pytest.mark.smoke
def test_annotated_lanes_are_proved_instead_of_sampled(own_kernel: str, cli) -> None:
    assert cli("prove", own_kernel, "--assume", "scale <= 17")[0] == 0
    code, output, _ = cli("prove", own_kernel)
    assert code == 1 and "mul.lo.u32 %d, %w, %s" in output
    for d, exact, digits in re.findall(r"d = \d+ \(([01]+)\), exact = (\d+) \(([01]+)\)", output):
        assert len(d) == 8 and int(digits, 2) == int(exact) and len(digits) == max(8, int(exact).bit_length())


def test_two_spellings_are_compared_on_all_inputs(own_kernel: str, tmp_path: Path, cli) -> None:
    respelled = tmp_path / "other.ptx"
    respelled.write_text(
        MINE.replace("mul.lo.u32 %d, %w, %s;", "mad.lo.u32 %d, %w, %s, 0;").replace(
            "d:u8x4 a:u8x4 b:u32", "d:u8x4 a:u8x4 b:u32 c:u8x4"
        )
    )
    assert cli("prove", own_kernel, "--equals", str(respelled))[0] == 0
    respelled.write_text(MINE.replace("0x0f0f0f0f", "0x1f0f0f0f"))
    assert cli("prove", own_kernel, "--equals", str(respelled))[0] == 1
    options = ("--claim", "out.u8[i] == other.out.u8[i]", "--assume", "scale == 0")
    assert cli("prove", own_kernel, "--equals", str(respelled), *options)[0] == 0


def test_a_number_of_64_bits_is_no_pointer(tmp_path: Path) -> None:
    """It had the value of an address, for which alone the claim held."""
    body = "ld.param.u64 %x, [n]; setp.gt.u64 %p, %x, 5; selp.u32 %a, 1, 0, %p; st.global.u32 [%o], %a;"
    kernel = load_body(tmp_path, body, ".param .u64 n, .param .u64 out")
    refuted = prove_kernel(kernel, "out.u32[i] == 1")
    assert refuted.verdict == "refuted" and refuted.explanation is not None
    assert refuted.explanation.arrays["n"] <= 5 and refuted.explanation.arrays["n"].dtype == np.uint64
    assert prove_kernel(kernel, "out.u32[i] == (1 if n > 5 else 0)").verdict == "proved"


def test_a_parameter_is_signed_as_declared(tmp_path: Path) -> None:
    kernel = load_body(tmp_path, "ld.param.u32 %a, [n]; st.global.u32 [%o], %a;", ".param .s32 n, .param .u64 out")
    refuted = prove_kernel(kernel, "out.s32[i] == n + 1", assume="n == -2")
    assert "n[0] = -2 (" in str(refuted) and prove_kernel(kernel, "out.s32[i] == n").verdict == "proved"


def test_what_nobody_wrote_is_another_thing_in_each_kernel(tmp_path: Path) -> None:
    kernel = load_body(tmp_path, "st.global.u32 [%o], %a;")
    assert prove_kernel(kernel, "out.u32[i] == other.out.u32[i]", equals=kernel).verdict == "refuted"


def test_floats_beside_plain_numbers(tmp_path: Path) -> None:
    kernel = load_body(tmp_path, "mov.f32 %f, 0f40200000; st.global.f32 [%o], %f;")
    assert prove_kernel(kernel, "out.f32[i] == 2.5").verdict == "proved"
    assert prove_kernel(kernel, "2 * out.f32[i] < 5").verdict == "refuted"
    kernel = load_body(tmp_path, "cvt.rn.bf16.f32 %h, 0f40200000; st.global.b16 [%o], %h;")
    assert "out.bf16[0] = 2.5 (0100000000100000)" in str(prove_kernel(kernel, "out.bf16[i] == 2"))


def test_an_array_of_another_type_has_no_element_by_default(tmp_path: Path) -> None:
    """Its element 1 as u32 is not its byte 1."""
    body = "ld.param.u64 %x, [a]; ld.global.u32 %a, [%x+4]; st.global.u32 [%o], %a;"
    kernel = load_body(tmp_path, body, ".param .u64 a, .param .u64 out")
    assert prove_kernel(kernel, "out.u32[i] == a").verdict == "proved"
    assert prove_kernel(kernel, "out.s32[i] == a.s32").verdict == "proved"
    with pytest.raises(ArgumentError, match=r"which element of a\.u8\? for example a\.u8\[i\]"):
        prove_kernel(kernel, "out.u32[i] == a.u8")


@pytest.mark.full
def test_a_claim_on_a_spec_assumes_its_rules_unless_unchecked(cli) -> None:
    wraps = "(out[i] - q4[i]*scale[i//g] - offset[i//g]) % 256 == 0"  # scale 1..16 by the rules; from 18 on it carries
    assert prove_kernel("dequant_qoq_vadd4", wraps).verdict == "proved"
    assert cli("prove", "dequant_qoq_vadd4.ptx", "--claim", wraps, "--unchecked")[0] == 1


@pytest.mark.full
def test_a_kernel_without_claims_in_its_spec_has_those_on_its_loop(cli) -> None:
    code, out, _ = cli("prove", "sum_activations_s8", "--json")
    assert code == 0 and [c["verdict"] for c in json.loads(out)] == ["proved", "refuted"]


def test_a_fault_refutes_every_claim(tmp_path: Path, cli) -> None:
    path = tmp_path / "mine.ptx"
    path.write_text(MINE.replace("and.b32 %w, %w,", ".reg .pred %p; setp.eq.u32 %p, %s, 3; @%p trap; and.b32 %w, %w,"))
    code, output, _ = cli("prove", str(path), "--assume", "scale <= 17", "--claim", CLAIM)
    assert code == 1 and "mine.ptx:13" in output and "the kernel traps" in output
    assert cli("prove", str(path), "--assume", "scale <= 2", "--claim", CLAIM)[0] == 0


@pytest.mark.parametrize("solver", ["bitwuzla", "cvc5"])
def test_other_solvers_agree(solver: str, own_kernel: str, cli) -> None:
    pytest.importorskip(solver, reason=f"{solver} is not installed: it comes with the extra `dev`")
    for limit, expected in ((17, 0), (18, 1)):
        options = ("--assume", f"scale <= {limit}", "--claim", CLAIM, "--solver", solver)
        assert cli("prove", own_kernel, *options)[0] == expected


@pytest.mark.parametrize(("missing", "advice"), [("z3", "'ptxlab[prove]'"), ("bitwuzla", "pip install bitwuzla")])
def test_a_solver_that_is_not_here_is_refused_in_one_line(
    own_kernel: str, missing: str, advice: str, monkeypatch: pytest.MonkeyPatch, cli
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *of: None if name == missing else find(name, *of))
    code, _, error = cli("prove", own_kernel, "--claim", CLAIM, "--solver", "bitwuzla")
    assert code == 2 and f"{missing}: not installed" in error and advice in error and error.count("\n") == 1


@pytest.mark.full
def test_a_whole_warp_is_followed(tmp_path: Path, cli) -> None:
    """A sum over 32 lanes, by shuffles: its limits, and the input that reaches one of them."""
    path, wrong, out = tmp_path / "sum.ptx", tmp_path / "wrong.npz", tmp_path / "out.npz"
    path.write_text(
        small_kernels.kernel_text(
            """mov.u32 %r0, %tid.x; cvt.u64.u32 %x1, %r0; ld.param.u64 %x0, [x]; add.u64 %x0, %x0, %x1;
            ld.global.s8 %r1, [%x0]; mov.u32 %r2, 16;
            again: shfl.sync.bfly.b32 %r3, %r1, %r2, 31, -1; add.s32 %r1, %r1, %r3; shr.u32 %r2, %r2, 1;
            setp.ne.u32 %p, %r2, 0; @%p bra again;
            setp.ne.u32 %q, %r0, 0; @%q bra done; ld.param.u64 %x2, [out]; st.global.s32 [%x2], %r1;
            done: ret;""",
            ".param .u64 x, .param .u64 out",
        )
    )
    assert cli("prove", str(path), "--block", "32", "--claim", "-4096 <= out.s32[i] <= 4064")[0] == 0
    assert cli("prove", str(path), "--block", "32", "--claim", "out.s32[i] > -4096", "--out", str(wrong))[0] == 1
    assert cli("run", str(path), "--block", "32", "--in", str(wrong), "--out", str(out))[0] == 0
    assert load_arrays(out)["out"][:4].view(np.int32).tolist() == [-4096]


@pytest.mark.full
def test_undecided_in_time_is_3(cli) -> None:
    code, output, _ = cli("prove", "dequant_lqq.ptx", "--seconds", "0.001", "--claim", "out[i] == 0")
    assert code == 3 and "undecided" in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "prove expects kernels, families, files or --all"),
        (("MINE", "--all"), "prove expects kernels, families, files or --all"),
        (("MINE", "--claim", "out.u8[i] =="), "a Python expression"),
        (
            ("MINE", "--claim", "nothing.u8[i] == 1"),
            "about element i of what the kernel stores (out), such as out.u8[i]",
        ),
        (("MINE", "--claim", "out.u8[i] == q4"), "q4 is none of before, i, out, q, scale"),
        (("MINE", "--claim", "out.u8[i] + 1"), "a condition"),
        (("MINE", "--claim", "out.x8[i] == 1"), "out.x8: a type is u1 to u64"),
        (("MINE", "--claim", "out.byte[i] == 1"), "out.byte: a type is u1 to u64"),
        (("MINE", "--claim", "out.u8[i] == __import__('os')"), "the functions are abs, min"),
        (("MINE", "--claim", "out.u8[i] == 1", "--solver", "sat"), "one of z3, bitwuzla, cvc5"),
        (("MINE", "--claim", "out.u8[i] == 1", "--block", "512"), "at most 256 threads are followed"),
        (("MINE", "--claim", CLAIM, "--assume", "scale > 300"), "assumptions that some input satisfies"),
        (("load_dual_mma",), "the spec has no claims; give --claim"),
        (("--all", "--claim", "out[i] == 1"), "is for one kernel, not for --all"),
        (("dequant_lqq", "--assume", "scale == 1"), "--assume needs --claim or --equals"),
        (("dequant_lqq", "--quick"), "--quick needs --all"),
        (("dequant_lqq", "--unchecked"), "--unchecked needs --claim or --equals"),
        (("MINE", "--claim", CLAIM, "--unchecked"), "--unchecked is for kernels with a spec"),
    ],
)
def test_bad_input_is_one_line_and_2(own_kernel: str, options: tuple[str, ...], message: str, cli) -> None:
    code, _, error = cli("prove", *(own_kernel if word == "MINE" else word for word in options))
    assert code == 2 and message in error and len(error.strip().splitlines()) == 1


def test_what_is_not_modelled_is_2_and_named_by_line(tmp_path: Path, cli) -> None:
    path = tmp_path / "mine.ptx"
    path.write_text(MINE.replace("and.b32 %w, %w, 0x0f0f0f0f;", "atom.global.add.u32 %w, [%q], 1;"))
    code, _, error = cli("prove", str(path), "--claim", CLAIM)
    assert code == 2 and "mine.ptx:13: `atom.global.add.u32 %w, [%q], 1`: not modelled" in error


# Claims on other things


def test_few_cases_are_all_tried() -> None:
    claims = [claim for claim in registered_claims() if claim.subject == "kv4 in FP16"]
    assert len(claims) == 3 and all(decide(claim).as_expected and decide(claim).cases == 256 for claim in claims)
    wrong = Claim("numbers", "small", "x < 3", lambda: Enumeration(5, {"x": 3}))
    decision = decide(wrong)
    assert (decision.verdict, decision.counterexample, decision.as_expected) == ("refuted", {"x": 3}, False)


def test_integers_never_wrap() -> None:
    """The language of claims on numbers: against Python's own integers."""
    import z3

    from ptxlab.prove.bitvectors import constant
    from ptxlab.prove.expressions import term, view_bytes
    from ptxlab.prove.integers import Integer

    rng = np.random.default_rng(5)
    texts = (
        "a*b + a - b", "a//7 + b//8", "a % 5 - b % 16", "min(a, b, 3) - max(a, -b)", "clip(a*b, -100, 99)",
        "a & b", "a | b ^ 77", "abs(a) << 9 >> 2", "~a - -b", "a if a < b <= 90 or not b == 3 else b*b",
    )  # fmt: skip
    for a, b in [*rng.integers(-128, 128, (6, 2)).tolist(), [-128, -128], [127, -128]]:
        octets = np.array([a, b], np.int8).view(np.uint8)
        view = view_bytes("x", lambda at, octets=octets: constant(int(octets[at]), 8), type="s8")
        for text in texts:
            integer = Integer.of(term(text, {"a": view[0], "b": view[1]}, 0))
            clip = lambda x, low, high: max(low, min(high, x))  # noqa: E731
            expected = eval(text, {"a": a, "b": b, "clip": clip})
            assert z3.simplify(integer.bits).as_signed_long() == expected, (text, a, b)
            assert integer.low <= expected <= integer.high


def test_a_packing_that_does_more_than_to_move_bits_is_refused() -> None:
    from dataclasses import replace

    from ptxlab.prove.execute import NotModelled
    from ptxlab.prove.symbolic_launch import launch_spec

    spec, sources = registry.find("dequant_qoq_channel")
    sums = replace(spec, pack=lambda logical: {"qweight": spec.pack(logical)["qweight"] * np.uint32(3)})
    with pytest.raises(NotModelled, match="qweight: its pack does more than to move bits"):
        launch_spec(sums, sources[0])
    with pytest.raises(ArgumentError):
        query(spec, sources[0], KernelClaim("wrong", "out[i] == nothing[i]"))


# Mutants: `python -m tests.support.proofs` tries all of them


@pytest.mark.full
@pytest.mark.parametrize(("name", "every", "first"), [("dequant_comet", 9, 2), ("dequant_lqq", 17, 6)])
def test_changed_opcodes_and_immediates_are_refuted(name: str, every: int, first: int) -> None:
    assert [mutant for mutant, _ in survivors(name, every, first) if not survivor_reason(mutant)] == []
