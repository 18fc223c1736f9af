"""Mutants of the dequantisers before the prover: refuted, or survivors with a reason."""

import re
from collections.abc import Iterator
from dataclasses import replace

from ptxlab import kernels
from ptxlab.prove.claims import Claim, decide
from ptxlab.prove.kernels import query
from ptxlab.spec import KernelSpec
from tests.support.mutation import mutants

NAMES = [name for name, spec in kernels.specs().items() if spec.family == "dequant"]
# The list of `tests/kernels/test_mutation.py`, and what a contract within its rules cannot tell.
SURVIVORS = (
    (r"mad\.wide\.u32 => .*mad\.wide\.s32", "indices stay below 2^31 unless a matrix has 2^35 weights"),
    (r"cvt\.u64\.u32 => .*cvt\.s64\.s32", "groups number fewer than 2^31"),
    (r"mov\.u32 (=> not\.b32)? *%none, 0;", "vadd4's third source is taken only where a mask leaves a lane out"),
    (r"and\.b32 +%d[13], %t, 0xf0f0f0f0; => 4042322161", "the shift has left nothing in bits 0..3 of %t"),
    (r"ld\.global\.nc\.u8 => .*nc\.s8 +%(scale|zero)", "the rules keep both below 128; the tests draw any byte"),
    (r"ld\.param\.u32 => .*ld\.param\.u16.*\[(pairs|words|shift)\]", "the matrix has fewer than 2^16 pairs"),
)


def contract(spec: KernelSpec) -> str:
    """The name of the claim that says what the kernel computes."""
    return next(claim.name for claim in spec.claims if claim.expect == "proved")


def verdict(spec: KernelSpec, text: str) -> str:
    """What a solver says of the contract of a kernel with this text."""
    source = replace(kernels.find(spec.name)[1][0], text=text)
    claim = replace(next(c for c in spec.claims if c.name == contract(spec)), alone=False)
    return decide(Claim(spec.name, claim.name, claim.text, lambda: query(spec, source, claim))).verdict


def survivors(name: str, every: int = 1, first: int = 0) -> Iterator[tuple[str, str]]:
    """(mutant, verdict) of all that are not refuted, of every so-many-th mutant."""
    spec, sources = kernels.find(name)
    for what, text in list(mutants(sources[0].text))[first::every]:
        if (said := verdict(spec, text)) != "refuted":
            yield what, said


def explained(what: str) -> bool:
    """Whether a survivor is on the list."""
    return any(re.search(pattern, what) for pattern, _ in SURVIVORS)


def main() -> int:
    """All mutants of all dequantisers; the exit status is 1 if one survives that has no reason."""
    wrong = 0
    for name in NAMES:
        count = len(list(mutants(kernels.find(name)[1][0].text)))
        left = list(survivors(name))
        print(f"{name}: {count} mutants, {count - len(left)} refuted, {len(left)} survive")
        for what, said in left:
            wrong += not explained(what)
            print(f"  {said}{'' if explained(what) else ', UNEXPLAINED'}: {what}")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
