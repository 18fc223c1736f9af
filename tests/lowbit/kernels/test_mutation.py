"""Would the tests notice? Every opcode and immediate of every hand-written dequantiser is changed, in turn.

A mutant is killed by a different result, by a fault, or by a finding. The survivors are listed with the reason.
"""

import re
from dataclasses import replace

import pytest

from ptxlab import emulator, registry
from tests.support.mutation import battery, is_killed, mutants

NAMES = [name for name in registry.specs() if name.startswith("dequant_")]

# (what survives, why nothing can tell): regular expressions over "old line => new line".
SURVIVORS = (
    (r"mad\.wide\.u32 => .*mad\.wide\.s32", "indices stay below 2^31 unless a matrix has 2^35 weights"),
    (r"cvt\.u64\.u32 => .*cvt\.s64\.s32", "groups number fewer than 2^31"),
    (r"mov\.u32 (=> not\.b32)? *%none, 0;", "vadd4's third source is taken only where a mask leaves a lane out"),
    (r"and\.b32 +%d[13], %t, 0xf0f0f0f0; => 4042322161", "the shift has left nothing in bits 0..3 of %t"),
    (r"ld\.param\.u32 => .*ld\.param\.u16.*\[(pairs|words|shift)\]", "the tests' matrices have fewer than 2^16 pairs"),
)


@pytest.mark.default_cases("dequant_comet")
@pytest.mark.parametrize("name", NAMES)
def test_every_changed_opcode_and_immediate_is_noticed(name: str) -> None:
    spec, sources = registry.find(name)
    inputs = battery(spec)
    assert not is_killed(spec, sources[0], inputs), "the kernel itself must survive its own battery"
    mutant_list = list(mutants(sources[0].text))
    assert len(mutant_list) > 20
    survivors = [change for change, text in mutant_list if not is_killed(spec, replace(sources[0], text=text), inputs)]
    unexplained = [change for change in survivors if not any(re.search(pattern, change) for pattern, _ in SURVIVORS)]
    assert unexplained == []


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in SURVIVORS])
def test_every_listed_survivor_still_survives_somewhere(pattern: str) -> None:
    """A justification that no mutant needs any more is stale."""
    assert any(
        not is_killed(spec, replace(source, text=text), battery(spec))
        for spec, (source, *_) in map(registry.find, NAMES)
        for change, text in mutants(source.text)
        if re.search(pattern, change)
    )


@pytest.mark.full
def test_mutants_are_run_by_the_emulator() -> None:
    """This tests the machinery itself.

    A mutant that the emulator cannot even parse would be killed for the wrong reason.
    """
    for name in NAMES:
        for change, text in mutants(registry.find(name)[1][0].text):
            assert emulator.parse(text).entries, change
