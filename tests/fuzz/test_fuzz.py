"""The fuzzer itself: its programs run, a planted fault is found and reduced, entries say what they should."""

import dataclasses
import io
import itertools
import json
import multiprocessing
import re
import subprocess
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ptxlab
from ptxlab import toolchain
from ptxlab.errors import LaunchError
from ptxlab.hardware import quirks
from ptxlab.lowbit.reference.tensor_cores import hopper_mma
from tests.fuzz import entries, evidence, examine, record, workers
from tests.fuzz.categories import CATEGORIES, barriers
from tests.fuzz.compare import compare
from tests.fuzz.domains import DOMAINS
from tests.fuzz.forms import OPERAND, choose, parse
from tests.fuzz.program import How, Program, Tolerance
from tests.support import tensor_cores
from tests.support.axes import on_every_backend

FEW, MANY = range(2), range(2, 12)


def check(category: str, numbers: range) -> None:
    for number in numbers:
        outcome = examine.examine(11, number, category)
        assert outcome.failures == [], number


@pytest.mark.parametrize("category", CATEGORIES)
def test_programs_run_alike_in_every_mode(category: str) -> None:
    check(category, FEW)


@pytest.mark.full
@pytest.mark.parametrize("category", CATEGORIES)
def test_many_programs_run_alike_in_every_mode(category: str) -> None:
    check(category, MANY)


@pytest.mark.full
@pytest.mark.parametrize("category", CATEGORIES)
def test_ptxas_takes_the_programs(category: str, tmp_path: Path) -> None:
    for number in FEW:
        text = examine.build(12, number, category).render()
        (tmp_path / "k.ptx").write_text(text)
        command = f"{toolchain.find('ptxas')} -arch=sm_90a -O0 {tmp_path}/k.ptx -o {tmp_path}/k"
        done = subprocess.run(command.split(), capture_output=True, text=True)
        assert not done.returncode, done.stderr


def test_a_program_follows_from_seed_and_number() -> None:
    texts = {examine.build(seed, number).render() for seed in (1, 1, 2) for number in (5, 6)}
    assert len(texts) == 4


def test_alternatives_of_a_form() -> None:
    rng, (form,) = (
        np.random.default_rng(0),
        parse("  mul.(wide/lo).(t=u16/s16)(/.x) d:$2t, a:$t, #3-5;\n\n"),
    )
    drawn = {choose([form], rng) for _ in range(300)}
    assert len(drawn) == 24 and "mul.wide.s16.x d:s32, a:s16, 4;" in drawn
    assert OPERAND.findall("ld.shared::cta.u32 d:u32, [a:u64+4], {p:pred}|q:pred, !b:pred;") == [
        ("d", "u32"), ("a", "u64"), ("p", "pred"), ("q", "pred"), ("b", "pred")]  # fmt: skip


@pytest.mark.parametrize("name", DOMAINS)
def test_values_fit_their_domain(name: str) -> None:
    drawn = DOMAINS[name].draw(np.random.default_rng(3), 500)
    assert (
        drawn.dtype == np.uint64 and int(drawn.max()) < 1 << max(32, DOMAINS[name].bits) and len({*drawn.tolist()}) > 1
    )


def test_warps_of_a_block_share_no_barrier_by_chance() -> None:
    """Two warps wait at a barrier while two others are still at the one before."""
    program = Program(np.random.default_rng(0), "barriers", 192)
    program.shared.append(".shared .b8 tile[768];")
    for sequence in (barriers.meet_in_pairs, barriers.add_count_of_pairs):
        sequence(program, "tile")
    assert examine.emulate(program, program.render(), checks="all")[1] == ()


def slots_of(program: Program) -> np.ndarray:
    """Run a program in the emulator and return its slots."""
    return examine.emulate(program, program.render())[0].reshape(-1, program.total)


def test_products_of_halves_have_the_model_of_the_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator adds up exactly, so that it differs from the model unless it computes by it."""
    program = next(p for n in range(9) if (p := examine.build(3, n, "mma_roundings")).slots[0].expected is not None)
    assert compare(program, rows := slots_of(program), rows, models=True).differences
    tensor_cores.patch_emulator(hopper_mma, monkeypatch)
    rows = slots_of(program)
    assert not compare(program, rows, rows, models=True).differences


# A planted fault


def gpu_with_fault(wrong: Callable[[str], str]) -> Callable[..., np.ndarray]:
    """Return a GPU that runs the emulator, at optimisation levels above 0 on another text."""

    def run(program: Program, text: str, level: int = 4) -> np.ndarray:
        return examine.emulate(program, wrong(text) if level else text)[0]

    return run


def first_mismatch(monkeypatch: pytest.MonkeyPatch, category: str, wrong: Callable[[str], str]) -> examine.Outcome:
    monkeypatch.setattr(examine, "run_on_gpu", gpu_with_fault(wrong))
    for number in range(20):
        outcome = examine.examine(4, number, category, on_gpu=True)
        if outcome.mismatches:
            return outcome
    raise AssertionError("nothing was found")


def test_a_wrong_instruction_is_found_and_reduced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """sad.s32 that compares without signs."""
    outcome = first_mismatch(monkeypatch, "integers", lambda text: text.replace("sad.s32", "sad.u32"))
    assert {m.form.removeprefix("guarded ") for m in outcome.mismatches} == {"sad.s32"}
    assert {m.level0 for m in outcome.mismatches} == {"right"}
    for number in range(30):  # one of a form is enough, and twenty of all
        evidence.save(outcome, 4, tmp_path)
        named = dataclasses.replace(outcome.mismatches[0], form=f"add.s32 {number}")
        evidence.save(dataclasses.replace(outcome, mismatches=[named]), 4, tmp_path)
    with zipfile.ZipFile(tmp_path / "mismatches.zip") as archive:
        assert len({name.split("/")[0] for name in archive.namelist()}) == 20
        case = re.sub(r"\W+(?=s?ad)", "_", outcome.mismatches[0].form)
        (line,) = computing_lines(archive.read(f"{case}/reduced.ptx").decode())
        assert "sad.s32" in line
        with np.load(io.BytesIO(archive.read(f"{case}/arrays.npz"))) as arrays:
            assert (arrays["gpu"] != arrays["emulator"]).any()
        words = archive.read(f"{case}/mismatches.txt").decode()
    assert f"program {outcome.number} of seed 4" in words and "emulator 0x" in words


def test_a_program_that_stops_the_gpu_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(program: Program, text: str, level: int = 4) -> np.ndarray:
        raise LaunchError("failed on the GPU: an illegal instruction was encountered")

    monkeypatch.setattr(examine, "run_on_gpu", run)
    outcome = examine.examine(4, 0, "tensors", on_gpu=True)
    (mismatch,) = outcome.mismatches
    assert outcome.stops_gpu and outcome.failures == [] and outcome.evidence is not None
    assert (mismatch.form, mismatch.level0) == ("tensors stopped", "unknown")
    assert mismatch.example == "failed on the GPU: an illegal instruction was encountered"


def computing_lines(text: str) -> list[str]:
    """Return the lines of a reduced program that compute."""
    body = text.split("add.s64 %out, %out, %offset;\n")[1]
    return [line for line in body.splitlines() if not re.match(r"ld\.|st\.|setp|mov|ret|}|selp", line)]


def test_what_two_instructions_make_wrong_together_keeps_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minimum is a maximum where its operand is another instruction's result."""

    def wrong(text: str) -> str:
        written = {m[1] for m in re.finditer(r"\n(?!ld|mov)[\w.]+ (%[rx]\d+),", text)}
        return re.sub(
            r"\nmin(\.\w+ %\w+, )(%\w+)", lambda m: f"\n{'max' if m[2] in written else 'min'}{m[1]}{m[2]}", text
        )

    outcome = first_mismatch(monkeypatch, "integers", wrong)
    assert outcome.evidence is not None
    first, second = computing_lines(outcome.evidence.reduced)
    assert second.startswith("min.") and first.split()[1] in second


def test_nans_differ_in_bits_alone() -> None:
    program = Program(np.random.default_rng(0), "floats", 32)
    x = program.input("f32", np.full(32, 0x7FC00000))
    program.sequence([], "given", [(x.text, "f32")])
    right = slots_of(program)
    changed = right.copy()
    changed[0, 3] ^= 0x400000 | 1  # another NaN
    assert compare(program, right, changed).nans == 1 and not compare(program, right, changed).differences
    changed[0, 3] = right[0, 3] & ~np.uint64(0xFFFFFFFF) | np.uint64(0x7F800000)
    (difference,) = compare(program, right, changed).differences
    assert difference.slot == 0 and difference.threads.tolist() == [3]


def test_a_store_beyond_the_result_differs() -> None:
    program = Program(np.random.default_rng(0), "floats", 32)
    x = program.input("f16", np.full(32, 0x3C00))
    program.sequence([], "given", [(x.text, "f16")], how=How(tolerance=Tolerance(0.5)))
    right = slots_of(program)
    near, wide = right.copy(), right.copy()
    near[0, 5] += 3  # within the tolerance
    wide[0, 5] ^= 1 << 20
    assert not compare(program, right, near).differences
    assert len(compare(program, right, wide).differences) == 1


def test_what_follows_of_a_difference_is_no_other() -> None:
    program = Program(np.random.default_rng(0), "integers", 32)
    x = program.input("u32")
    program.sequence([f"add.u32 %r9, {x.text}, 1;"], "add", [("%r9", "u32")], (x,))
    program._counts[32] = 10
    first = program._recent[32][-1][1]
    program.sequence(["add.u32 %r10, %r9, 1;"], "add", [("%r10", "u32")], (first,))
    right = slots_of(program)
    changed = right.copy()
    changed[:, 7] += 1
    assert [d.slot for d in compare(program, right, changed).differences] == [0]


# Entries


@on_every_backend
@pytest.mark.parametrize("quirk", quirks.load().values(), ids=lambda quirk: quirk.name)
def test_an_entry_of_quirks_holds(quirk: quirks.Quirk, backend: str) -> None:
    rows = np.zeros((quirk.threads, 8), np.uint64)
    words = [[int(word, 16) for word in row] for row in quirk.inputs]
    rows[:, : len(words[0])] = [words[t % len(words)] for t in range(quirk.threads)]
    right = quirk.emulator if backend == "emulator" else quirk.gpu
    stored = np.zeros_like(rows)
    kernel = ptxlab.load(entries.wrap(quirk.program, quirk.cluster))
    kernel(rows, stored, grid=quirk.cluster, block=quirk.threads, backend=backend)
    assert [[hex(word) for word in row] for row in stored[: len(right), : len(right[0])].tolist()] == right


def test_entries_are_complete() -> None:
    source = "".join(path.read_text() for path in Path(entries.__file__).parent.rglob("*.py"))
    for quirk in quirks.load().values():
        assert (quirk.level0 == quirk.emulator) == (quirk.who == "optimiser")
        assert quirk.gpu != quirk.emulator
        if quirk.rule:
            assert f'"{quirk.rule}"' in source
        else:
            assert {entries.find_entry(line) for line in quirk.program.splitlines()} - {""} == {quirk.name}


def test_nothing_is_avoided_without_an_entry() -> None:
    with pytest.raises(ValueError, match=r"no entry of quirks\.toml has the rule 'because'"):
        Program(np.random.default_rng(0), "integers", 32).avoid("because")


# Runs


@pytest.mark.full
def test_workers_go_on_where_one_dies(tmp_path: Path) -> None:
    answers = [*workers.outcomes(workers.Task(1, "no such", False, time.time() + 60), 1)]
    assert answers == ["program 0 ended its process with 1"]
    command = f"python -m tests.fuzz --seconds 4 --seed 9 --jobs 1 --out {tmp_path}"
    done = subprocess.run(command.split(), capture_output=True, text=True)
    recorded = json.loads((tmp_path / "fuzz.json").read_text())
    assert not done.returncode and recorded["programs"] > 0 and recorded["values"] > 0, done.stderr


def test_a_worker_whose_gpu_is_lost_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing more, and the programs behind are examined."""
    context = multiprocessing.get_context("fork")  # whose processes have the patch
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr(
        workers, "examine", lambda seed, number, *_: examine.Outcome("floats", number, stops_gpu=number == 1)
    )
    answers = list(itertools.islice(workers.outcomes(workers.Task(1, "", False, time.time() + 60), 1), 4))
    assert [answer.number for answer in answers if isinstance(answer, examine.Outcome)] == [0, 1, 2, 3]


def test_runs_of_one_commit_add_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(record, "commit", lambda: "abc")
    path, device = tmp_path / "h" / "fuzz.json", {"name": "H", "slug": "h"}

    def add(seed: int, programs: int) -> dict:
        run = record.Run(seed)
        for number in range(programs):
            run.add(examine.Outcome("floats", number, values=10, avoided={"kinds": 1}))
        record.save(record.merge(run, device, path), path)
        return json.loads(path.read_text())

    assert add(1, 3)["programs"] == 3
    both = add(2, 4)
    assert (both["programs"], both["values"], [run["seed"] for run in both["runs"]]) == (7, 70, [1, 2])
    assert add(1, 2)["programs"] == 7  # the longer run of a seed stays
    monkeypatch.setattr(record, "commit", lambda: "def")
    assert add(1, 2)["programs"] == 2
