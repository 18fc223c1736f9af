"""Mutants of the dequantisers before the prover and before the tests: refuted, killed, or survivors with a reason.

`python -m tests.support.proofs FILE.json [NAME ...]` tries all of them (about half an hour) and keeps what it saw.
"""

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import z3

from ptxlab import registry
from ptxlab.emulator.front.ir import Entry
from ptxlab.io.files import write_text
from ptxlab.prove import Claim, decide, loops
from ptxlab.prove.kernels import query
from ptxlab.prove.loop_claim import LoopClaim
from ptxlab.prove.solve import ask
from ptxlab.runtime import Kernel, load
from ptxlab.spec import KernelSpec
from ptxlab.spec.claims import KernelClaim
from tests.support.mutation import battery, is_killed, mutants
from tests.support.small_kernels import HEADER

NAMES = [name for name, spec in registry.specs().items() if spec.family == "dequant"]
# The list of `tests/lowbit/kernels/test_mutation.py`, and what a contract within its rules cannot tell.
SURVIVORS = (
    (r"mad\.wide\.u32 => .*mad\.wide\.s32", "indices stay below 2^31 unless a matrix has 2^35 weights"),
    (r"cvt\.u64\.u32 => .*cvt\.s64\.s32", "groups number fewer than 2^31"),
    (r"mov\.u32 (=> not\.b32)? *%none, 0;", "vadd4's third source is taken only where a mask leaves a lane out"),
    (r"and\.b32 +%d[13], %t, 0xf0f0f0f0; => 4042322161", "the shift has left nothing in bits 0..3 of %t"),
    (r"ld\.global\.nc\.u8 => .*nc\.s8 +%(scale|zero)", "the rules keep both below 128; the tests draw any byte"),
    (
        r"ld\.param\.u32 => .*ld\.param\.u16.*\[(pairs|words|shift)\]",
        "pairs, words and shift of the example are below 2^16",
    ),
)


def load_body(folder: Path, body: str, params: str = ".param .u64 out") -> Kernel:
    """Load a kernel of one thread around a body; %o points to `out`."""
    path = folder / "body.ptx"
    path.write_text(f"""{HEADER}.visible .entry body({params}) {{
        .reg .u32 %a, %b, %c, %d; .reg .u64 %o, %x, %y; .reg .f32 %f, %g; .reg .b16 %h; .reg .pred %p;
        ld.param.u64 %o, [out]; {body} ret; }}""")
    return load(path)


def loop_text(body: str) -> str:
    """Write a kernel with this body as its loop, from the label `again`.

    %a and %b are for loads from %x, %s is a sum, %n a number.
    """
    return f"""{HEADER}.visible .entry k(.param .u64 x, .param .u32 n) {{
        .reg .u32 %n, %a, %b, %i; .reg .s32 %s; .reg .u64 %x; .reg .pred %p;
        ld.param.u64 %x, [x]; ld.param.u32 %n, [n]; mov.s32 %s, 0; mov.u32 %i, 0;
        {body}
        add.u32 %i, %i, 1; add.u64 %x, %x, 4; setp.lt.u32 %p, %i, %n; @%p bra again; st.global.s32 [%x], %s; ret; }}"""


def entry_of(text: str, folder: Path) -> Entry:
    """Load a module and return its only entry."""
    path = folder / "k.ptx"
    path.write_text(text)
    (entry,) = load(path).module.entries.values()
    return entry


def loop_verdict(text: str, rule: str, loop: LoopClaim, *numbers: int, tmp_path: Path) -> str:
    """Return a solver's verdict on a claim about the loop of a kernel with this text."""
    steps = loops.steps_of(entry_of(text, tmp_path))
    return decide(Claim("k", rule, "", lambda: getattr(loops, rule)(steps, loop, *numbers))).verdict


def contract(spec: KernelSpec) -> list[KernelClaim]:
    """Return the claims that say what the kernel computes, the first of them on all threads.

    Claims that repeat it for one quantiser, or beside another kernel, are left out.
    """
    first, *further = (claim for claim in spec.claims if claim.expect == "proved")
    return [replace(first, alone=False), *(claim for claim in further if not claim.alone and not claim.equals)]


def verdict(spec: KernelSpec, text: str) -> str:
    """Return a solver's verdict on the contract of a kernel with this text, which the kernel itself fulfils.

    The text is refuted by the first claim that it breaks.
    """
    verdicts = (verdict_on(spec, claim, text) for claim in contract(spec))
    return next((judged for judged in verdicts if judged != "proved"), "proved")


def verdict_on(spec: KernelSpec, claim: KernelClaim, text: str) -> str:
    """Return a solver's verdict on one claim.

    A word that the mutant stores as the kernel does needs no solver; of the others the easiest goes first.
    """
    source = registry.find(spec.name)[1][0]
    mutant_queries, kernel_queries = (query(spec, replace(source, text=t), claim) for t in (text, source.text))
    kernel_conditions = [z3.And(*condition.assume, z3.Not(condition.holds)) for condition in kernel_queries]
    open_queries = [
        condition
        for condition in mutant_queries
        if not any(z3.And(*condition.assume, z3.Not(condition.holds)).eq(k) for k in kernel_conditions)
    ]
    for seconds in (1, 600):
        verdicts = {ask(condition, seconds=seconds).verdict for condition in open_queries}
        if "refuted" in verdicts or not verdicts - {"proved"}:
            break
    return "refuted" if "refuted" in verdicts else "undecided" if "undecided" in verdicts else "proved"


def survivors(name: str, every: int = 1, first: int = 0) -> Iterator[tuple[str, str]]:
    """Yield (mutant, verdict) of all mutants that are not refuted, among every `every`-th one."""
    spec, sources = registry.find(name)
    for mutant, text in list(mutants(sources[0].text))[first::every]:
        if (outcome := verdict(spec, text)) != "refuted":
            yield mutant, outcome


def survivor_reason(mutant: str) -> str:
    """Return the reason why a survivor is not refuted; empty if it is not on the list."""
    return next((why for pattern, why in SURVIVORS if re.search(pattern, mutant)), "")


def compare_with_tests(name: str) -> dict[str, object]:
    """Judge every mutant of a kernel by the prover and by the tests; list those that either of them lets pass."""
    spec, (source, *_) = registry.find(name)
    inputs, all_mutants, passed = battery(spec), list(mutants(source.text)), []
    for mutant, text in all_mutants:
        prover_verdict, killed = verdict(spec, text), is_killed(spec, replace(source, text=text), inputs)
        print(f"{name} {mutant}: {prover_verdict}, {'killed' if killed else 'survives the tests'}", flush=True)
        if prover_verdict != "refuted" or not killed:
            passed.append(
                {"mutant": mutant, "verdict": prover_verdict, "killed_by_tests": killed, "why": survivor_reason(mutant)}
            )
    return {"kernel": name, "mutants": len(all_mutants), "not_by_both": passed}


def main(path: Path, names: list[str]) -> int:
    """Compare and record; the exit status is 1 if the prover lets a mutant pass that has no reason."""
    records = {record["kernel"]: record for record in json.loads(path.read_text())} if path.exists() else {}
    for name in names or NAMES:
        records[name] = compare_with_tests(name)
        write_text(path, json.dumps([records[name] for name in NAMES if name in records], indent=1) + "\n")
    return int(
        any(m["verdict"] != "refuted" and not m["why"] for record in records.values() for m in record["not_by_both"])
    )


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2:]))
