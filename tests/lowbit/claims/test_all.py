"""The quick half of `prove --all`: each claim of the project is decided as it says."""

from functools import cache

import pytest

from ptxlab import registry

pytest.importorskip("z3", reason="z3-solver is not installed: it comes with the extra `prove`")

from ptxlab.lowbit.claims.main_loops import MAIN_LOOPS
from ptxlab.prove import Claim, decide, registered_claims
from ptxlab.prove.kernels import claims_of
from tests.support.proofs import NAMES

OTHERS = {claim.subject: None for claim in registered_claims() if not claim.subject.endswith("its loop")}
LOOPS = [f"{registry.find(name)[1][0].label}, a step of its loop" for name in MAIN_LOOPS]
KERNELS = [source.label for name in NAMES for source in registry.find(name)[1]]


@cache
def all_claims() -> list[Claim]:
    return registered_claims()


@pytest.mark.default_cases(
    "accumulator*",
    "packing*",
    "quantiser lqq ceiling",
    "quantiser lqq nearest",
    "quantiser qoq*",
    "nibbles",
    "fragment maps",
    "swizzles",
    "kv4 in FP16",
    "pages of the KV cache",
    "dequant_qoq_channel.ptx",
    "quantize_activations_s8.cu, a step of its loop",
)
@pytest.mark.parametrize("subject", [*KERNELS, *LOOPS, *OTHERS])
def test_every_quick_claim_is_decided_as_expected(subject: str) -> None:
    candidates = claims_of(*registry.find(subject.partition(".")[0])) if subject in KERNELS else all_claims()
    for claim in (claim for claim in candidates if claim.subject == subject and claim.quick):
        decision = decide(claim)
        assert decision.as_expected, str(decision)
        assert decision.verdict == "proved" or decision.counterexample or decision.explanation
