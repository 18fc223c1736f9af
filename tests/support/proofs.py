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
from tests.support.emulated import HEADER
from tests.support.mutation import battery, is_killed, mutants

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


def of_body(folder: Path, body: str, params: str = ".param .u64 out") -> Kernel:
    """Load a kernel of one thread around a body; %o points to `out`."""
    path = folder / "body.ptx"
    path.write_text(f"""{HEADER}.visible .entry body({params}) {{
        .reg .u32 %a, %b, %c, %d; .reg .u64 %o, %x, %y; .reg .f32 %f, %g; .reg .b16 %h; .reg .pred %p;
        ld.param.u64 %o, [out]; {body} ret; }}""")
    return load(path)


def in_loop(body: str) -> str:
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


def loop_verdict(text: str, what: str, loop: LoopClaim, *more: int, tmp_path: Path) -> str:
    """Return a solver's verdict on a claim about the loop of a kernel with this text."""
    steps = loops.steps_of(entry_of(text, tmp_path))
    return decide(Claim("k", what, "", lambda: getattr(loops, what)(steps, loop, *more))).verdict


def contract(spec: KernelSpec) -> list[KernelClaim]:
    """Return the claims that say what the kernel computes, the first of them on all threads.

    Claims that repeat it for one quantiser, or beside another kernel, are left out.
    """
    first, *others = (claim for claim in spec.claims if claim.expect == "proved")
    return [replace(first, alone=False), *(claim for claim in others if not claim.alone and not claim.equals)]


def verdict(spec: KernelSpec, text: str) -> str:
    """Return a solver's verdict on the contract of a kernel with this text, which the kernel itself fulfils.

    The text is refuted by the first claim that it breaks.
    """
    found = (verdict_on(spec, claim, text) for claim in contract(spec))
    return next((said for said in found if said != "proved"), "proved")


def verdict_on(spec: KernelSpec, claim: KernelClaim, text: str) -> str:
    """Return a solver's verdict on one claim.

    A word that the mutant stores as the kernel does needs no solver; of the others the easiest goes first.
    """
    source = registry.find(spec.name)[1][0]
    changed, kept = (query(spec, replace(source, text=t), claim) for t in (text, source.text))
    known = [z3.And(*one.assume, z3.Not(one.holds)) for one in kept]
    asked = [one for one in changed if not any(z3.And(*one.assume, z3.Not(one.holds)).eq(k) for k in known)]
    for seconds in (1, 600):
        said = {ask(one, seconds=seconds).verdict for one in asked}
        if "refuted" in said or not said - {"proved"}:
            break
    return "refuted" if "refuted" in said else "undecided" if "undecided" in said else "proved"


def survivors(name: str, every: int = 1, first: int = 0) -> Iterator[tuple[str, str]]:
    """Yield (mutant, verdict) of all mutants that are not refuted, among every `every`-th one."""
    spec, sources = registry.find(name)
    for what, text in list(mutants(sources[0].text))[first::every]:
        if (said := verdict(spec, text)) != "refuted":
            yield what, said


def explained(what: str) -> str:
    """Return the reason why a survivor is not refuted; empty if it is not on the list."""
    return next((why for pattern, why in SURVIVORS if re.search(pattern, what)), "")


def compared(name: str) -> dict[str, object]:
    """Judge every mutant of a kernel by the prover and by the tests; list those that either of them lets pass."""
    spec, (source, *_) = registry.find(name)
    inputs, made, passed = battery(spec), list(mutants(source.text)), []
    for what, text in made:
        said, tests = verdict(spec, text), is_killed(spec, replace(source, text=text), inputs)
        print(f"{name} {what}: {said}, {'killed' if tests else 'survives the tests'}", flush=True)
        if said != "refuted" or not tests:
            passed.append({"mutant": what, "verdict": said, "killed_by_tests": tests, "why": explained(what)})
    return {"kernel": name, "mutants": len(made), "not_by_both": passed}


def main(path: Path, names: list[str]) -> int:
    """Compare and record; the exit status is 1 if the prover lets a mutant pass that has no reason."""
    kept = {one["kernel"]: one for one in json.loads(path.read_text())} if path.exists() else {}
    for name in names or NAMES:
        kept[name] = compared(name)
        write_text(path, json.dumps([kept[name] for name in NAMES if name in kept], indent=1) + "\n")
    return int(any(m["verdict"] != "refuted" and not m["why"] for one in kept.values() for m in one["not_by_both"]))


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2:]))
