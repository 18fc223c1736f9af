"""Would anybody notice? Each synchronising statement of the GEMM kernels is taken out, one at a time.

A mutant is found by a finding, by an error (a deadlock, a fault), or by a wrong result, early and late.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from ptxlab import emulator, registry
from ptxlab.errors import EmulationError, UnknownInstruction
from ptxlab.lowbit.kernels.gemm import grouped, sm90, strips_tiles, w4a4, w4ax
from ptxlab.lowbit.kernels.gemm.common import F16
from ptxlab.lowbit.kernels.gemm.grouped import GROUPED
from ptxlab.lowbit.kernels.gemm.ladder import LADDER
from ptxlab.lowbit.kernels.gemm.strips import LARGE, SMALL
from ptxlab.lowbit.kernels.gemm.strips_tiles import StripChoice
from ptxlab.lowbit.kernels.gemm.w8a8 import W8A8
from ptxlab.runtime import Kernel, run_spec
from ptxlab.sources import Source
from tests.support.axes import both_modes
from tests.support.skeletons import inline_skeletons
from tests.support.sync_mutants import Place, apply_change, end_at_first_finding, expect_no_bytes, statements_by_place

LADDER_NAMES = dict.fromkeys(step.spec.name for step in LADDER if step.order == "row_major")
NAMES = (*LADDER_NAMES, W8A8.name, GROUPED.name, *(spec.name for spec in (*w4a4.SPECS, *w4ax.SPECS)))
STEPS = (1, 5, 4)  # stages: fewer than the ring has, soonest done; enough to use it again, ending in its first or not


@dataclass(frozen=True, eq=False)
class Variant:
    """A kernel, in tiles as small as it takes, on problems of a few stages (by `STEPS`)."""

    kernel: str
    label: str
    tile: Mapping[str, int]
    M: int
    N: int
    channels: int  # of a stage, over all blocks of a cluster
    sms: int = 132  # what a persistent kernel believes that there are
    plain: "Variant | None" = None  # whose statements are not taken out once more
    full: int = 0  # further tokens, which fill up their tiles: no fence for zeros behind them stands in for another

    @property
    def problems(self) -> Iterator[dict[str, int]]:
        """Sizes."""
        symbols = registry.specs()[self.kernel].example_sizes[0]
        for M, steps in itertools.product(filter(None, (self.M, self.full)), STEPS):
            # a block that needs one stage per tile is back at the ring's start after more tiles
            tiles = 1 if steps > self.tile["STAGES"] or self.sms == 132 else 2
            K = self.channels * steps
            sizes = {"M": M, "N": self.N * tiles, "K": K, "g": 128, "E": 2, "outliers": 128}
            sizes |= {"K4": K - self.channels, "K8": 384, "blocks": 2}
            yield {symbol: sizes[symbol] for symbol in symbols}

    @property
    def config(self) -> dict[str, int]:
        """The constants to compile with: the kernel's own, but for the tile."""
        usual = registry.specs()[self.kernel].config_for(next(self.problems))
        return usual | {name: constant for name, constant in self.tile.items() if name in usual}

    def __str__(self) -> str:
        return f"{self.kernel}{self.label and '-'}{self.label}"


def variants(name: str) -> Iterator[Variant]:
    """Yield the variants of a kernel, on Hopper alone and in a cluster.

    A persistent kernel has one block, or one cluster, for two tiles.
    """
    if name in (w4ax.INORDER.name, w4ax.REMAP.name, w4ax.COMET.name, w4ax.STEAL.name):  # quarters need larger tiles
        yield Variant(name, "", {"BN": 64, "BM": 32, "WM": 1, "STAGES": 3}, M=9, N=40, channels=128)
        return
    if name.endswith("sm80"):
        tile = {"BN": 32, "BM": 8, "BK": 128, "WN": 1, "WM": 1, "WK": 2, "STAGES": 3}
        yield Variant(name, "", tile, M=9, N=40, channels=128)
        return
    if name == W8A8.name:
        # accumulators as they are would not need the scales, whose barriers are to be missed
        tile = {"BM": 64, "WN": 2, "BK": 128, "STAGES": 3, "SPLIT": 1, "OUT": F16}
        plain = Variant(name, "", tile, M=40, N=256, channels=128, sms=1)
        yield from (plain, Variant(name, "split", tile | {"SPLIT": 2}, M=40, N=128, channels=256, plain=plain))
        return
    if name == GROUPED.name:
        tile = {"BM": 16, "WN": 2, "MN": 1, "STRIPS": 8, "BK": 128, "STAGES": 3, "SIGNED": 0}
        plain = Variant(name, "", tile, M=40, N=128, channels=128, sms=1)
        yield from (
            plain,
            Variant(name, "f16", tile | {"BM": 32, "OUT": F16}, M=40, N=128, channels=128, sms=1, plain=plain),
        )
        return
    if name in (w4a4.SM90.name, w4ax.SM90.name):
        tile = {"BM": 32, "WN": 1, "TOGETHER": 2, "STAGES": 3}
        yield Variant(name, "", tile, M=40, N=72, channels=128, sms=1)
        return
    if name == SMALL.name:  # one block, whose tiles of sums have their turns again
        tile = {"ROWS": 2, "SLICES": 2, "STAGES": 3, "SIGNED": 0, "OUT": F16}
        yield Variant(name, "", tile, M=9, N=136, channels=256, sms=1)
        return
    if name == LARGE.name:
        tile = StripChoice(strips_tiles.StripTile(32, WN=2, WK=1, MN=1, BK=128), 8, 3, 1).constants | {
            "SIGNED": 0,
            "OUT": F16,
        }
        plain = Variant(name, "", tile, M=72, N=136, channels=128, sms=1, full=96)
        split = tile | {"WN": 1, "WK": 2, "STRIPS": 4, "STAGES": 4, "SPLIT": 2}
        yield from (plain, Variant(name, "split", split, M=24, N=64, channels=512, plain=plain))
        return
    if name == sm90.DYNAMIC.name:  # one block of two tiles, whose stages the warp groups share out
        tile = {"BM": 64, "BK": 256, "STAGES": 3, "RESIDENT": 1}
        yield Variant(name, "", tile, M=40, N=128, channels=256, sms=1)
        return
    tile = {"BM": 64, "WN": 2, "BK": 128, "STAGES": 3, "CLUSTER": 1, "RESIDENT": 1}  # results go out in two chunks
    persistent = "imfp" in name
    plain = Variant(name, "", tile, M=40, N=256 if persistent else 128, channels=128, sms=1)
    yield from (plain, Variant(name, "cluster", tile | {"CLUSTER": 2}, M=40, N=128, channels=256, plain=plain))


SHARES = 8  # of a kernel's mutants, tests that run side by side
VARIANTS = [variant for name in NAMES for variant in variants(name)]
# (kernel, the statement and its source where it stands and one line on, why nothing can tell): regular expressions.
SURVIVORS = (
    (r"_sm80$", r"cp_async_wait<0>", "the groups that the loop has not waited for are empty"),
    (
        r"_(excp|imfp|w8a8|w4a8)_sm90$",
        r"cluster_wait\(\);\n *(\} else|return;|\})",
        "these warps touch no other block's memory; they wait since whoever arrives at the cluster's barrier has to",
    ),
    (
        r"_excp_sm90$",
        r"wait\(&full.*\n.*wait\(&ready",
        "who dequantises waits for the same before saying ready; the wait is kept, as what the copy engine wrote is "
        "promised only to those who wait for it themselves",
    ),
    (
        r"_dynamic_sm90$",
        r"try_wait.*\n.*wait\(&full\[slot\]",
        "the task was taken when its operands were there; the wait is kept, as what the copy engine wrote is promised "
        "only to those who wait for it themselves",
    ),
    (
        r"_(excp|imfp|w8a8|w4a8)_sm90$",
        r"^bar\.warp\.sync.*\n *__syncwarp\(\);\n.*cluster_wait\(\)",
        "these lanes have nothing more to do; they meet since all of a warp has to wait for the cluster at once",
    ),
    (
        r"_excp_sm90$",
        r"^bar\.warp\.sync.*\n.*arrive_warp\(&empty\[slot\.index\]\)",
        "the slot is given back by those who multiply as well, and each lane has told them by saying ready",
    ),
    (
        r"_excp_sm90$",
        r"^bar\.warp\.sync.*\n.*arrive_warp\(&(empty\[slot_before\]|spent)",
        "wgmma alone has read what is given back, and who arrives has waited for it, as all of its warp",
    ),
)


@dataclass(frozen=True, eq=False)
class Mutant:
    """A kernel without one statement, which stood at `place`, the lines from the innermost function outwards."""

    variant: Variant
    removed: str
    place: Place
    module: emulator.Module

    @property
    def survives(self) -> bool:
        """Tell whether the mutant is listed among those that no check can notice."""
        source = source_of(self.variant.kernel)
        line = next((line for path, line in self.place if path == source.path), 0)
        following = [text for text in source.text.splitlines()[line - 1 :] if not text.strip().startswith("PHASE(")]
        context = "\n".join([self.removed, *following[:2]])
        return any(re.search(name, self.variant.kernel) and re.search(text, context) for name, text, _ in SURVIVORS)

    def __str__(self) -> str:
        return f"{self.variant}:{'<'.join(str(line) for _, line in self.place)}: {self.removed}"


@cache
def source_of(kernel: str) -> Source:
    return inline_skeletons(registry.find(kernel)[1][0])


@cache
def kernel_of(variant: Variant) -> Kernel:
    return Kernel.of(registry.find(variant.kernel)[0], source_of(variant.kernel), variant.config)


def mutants(variant: Variant) -> Iterator[Mutant]:
    """Yield one mutant for every synchronising statement, and one more for every arrival that expects bytes."""
    kernel = kernel_of(variant)
    code = kernel.module.entries[kernel.entry].instructions
    plain_statements = statements_by_place(kernel_of(variant.plain)) if variant.plain else {}
    for (opcode, place), copies in statements_by_place(kernel).items():
        if (opcode, place) in plain_statements:
            continue
        text = re.sub(r"%\w+", "%", code[copies[0]].text)
        yield Mutant(variant, text, place, apply_change(kernel, copies))
        if ".expect_tx" in opcode:
            yield Mutant(variant, f"expect_tx of {text}", place, apply_change(kernel, copies, expect_no_bytes))


def diagnosis(variant: Variant, module: emulator.Module, mode: str) -> list[emulator.Finding | str]:
    """Return findings, the error, or "wrong result" of the first problem that has any.

    The list is empty if all problems pass.
    """
    with pytest.MonkeyPatch.context() as patch:
        end_at_first_finding(patch)
        patch.setattr(Kernel, "module", module)
        patch.setattr(sm90, "_SMS", variant.sms)
        patch.setattr(grouped, "SMS", variant.sms)
        patch.setattr(strips_tiles, "SMS", variant.sms)
        return next(filter(None, (diagnosis_of(variant, sizes, mode) for sizes in variant.problems)), [])


def diagnosis_of(variant: Variant, sizes: dict[str, int], mode: str) -> list[emulator.Finding | str]:
    spec, source = registry.find(variant.kernel)[0], source_of(variant.kernel)
    logical = spec.example(np.random.default_rng(0), **sizes)
    options: dict[str, Any] = {"backend": "emulator", "checks": ("race", "init", "async"), "mode": mode}
    try:
        outcome = run_spec(spec, source, spec.pack(logical), sizes=sizes, config=variant.config, **options)
    except UnknownInstruction:
        raise
    except EmulationError as error:
        return [str(error)]
    right = np.array_equal(outcome.outputs["y"], spec.expected(logical, variant.config)["y"])
    return [*outcome.findings, *([] if right else ["wrong result"])]


@pytest.mark.full
@both_modes
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_the_kernel_itself_is_clean(variant: Variant, mode: str) -> None:
    assert diagnosis(variant, kernel_of(variant).module, mode) == []


def names_the_source(diagnosed: emulator.Finding | str, name: str) -> bool:
    """Tell whether a finding, or an error's text, is about a line of the kernel's own `.cu`."""
    path = registry.find(name)[1][0].path
    if isinstance(diagnosed, str):
        return path in diagnosed
    return path in (diagnosed.path, *(caller for caller, _ in diagnosed.callers))


def complaint(mutant: Mutant) -> str:
    """Return the fault in how checks find a mutant, early or late; empty if there is none."""
    for mode in emulator.MODES:
        findings = diagnosis(mutant.variant, mutant.module, mode)
        if mutant.survives:
            if findings:
                return f"{mutant}: a justification that is not needed any more"
        elif not findings:
            return f"{mutant}: nobody notices, {mode}"
        elif not names_the_source(findings[0], mutant.variant.kernel):
            return f"{mutant}: found elsewhere, {mode}: {findings[0]}"
    return ""


@pytest.mark.default_cases("gemm_w4a8_qoq_channel_sm80-2")
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_missing_statement_is_found_early_and_late(variant: Variant, share: int) -> None:
    assert list(filter(None, map(complaint, itertools.islice(mutants(variant), share, None, SHARES)))) == []


@pytest.mark.default_cases("gemm_w4a8_qoq_sm90-cluster")
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_kernel_has_statements_to_miss(variant: Variant) -> None:
    assert next(mutants(variant))
