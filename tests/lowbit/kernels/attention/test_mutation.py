"""Would the bound notice? Small mistakes in the source of attention kernels, each wherever it has a place."""

import functools
from dataclasses import replace

import numpy as np
import pytest

from ptxlab import emulator, registry
from ptxlab.errors import EmulationError, VerificationError
from ptxlab.lowbit.kernels.attention import ladder, sm80, sm90
from ptxlab.runtime import run_spec
from ptxlab.runtime.verify import compare
from ptxlab.sources import Source
from ptxlab.spec import Arrays, KernelSpec
from tests.support import attention_problems as problems
from tests.support.skeletons import inline_skeletons

# (as it is, a mistake)
LADDER = (
    ("kv_head = head / (Hq / Hkv)", "kv_head = head % Hkv"),
    ("if (t >= length) continue;", "if (t > length) continue;"),
    ("slot < tail_tokens", "slot <= tail_tokens"),
    ("1.4426950408889634f", "1.0f"),
    ("sum > 0 ? ", "true ? "),
    ("? weight_unit / sum", "? 1 / sum"),
    ("8 * (i % 4) + i % 8 / 4 * 4", "4 * (i % 8)"),
    ("mask = 1; mask < PARTS", "mask = 2; mask < PARTS"),
    ("- row_max)", ")"),
    ("{ return low_of(i) + 2; }", "{ return low_of(i) + 4; }"),
    ("leading_power(largest)", "leading_power(1)"),
    ("leading_power(heaviest) / 512", "leading_power(1) / 512"),
    ("PAGE * ROW + i % 16 * 16", "PAGE * ROW + i % 8 * 16"),
)
MMA = (
    ("0x1p14f", "0x1p17f"),
    ("inverse / count_of(r)", "inverse"),
    ("constants.key_zero[i][e / 2] * query.column_sum[n][e % 2]", "0"),
    ("length - columns.arguments.T + 1 +", "length - columns.arguments.T +"),
    ("token < limit - window", "token <= limit - window"),
    ("if (token >= tokens) key = value = ptxlab::kNeutralConstants;", ""),
    ("weights[n][b] *= rescale[n][b], zeros[n][b] *= rescale[n][b];", "weights[n][b] *= rescale[n][b];"),
    ("p0 * inverse", "p0"),
    ("page[j] + half * pitch + offset * Page::kRowBytes", "page[j] + half * pitch"),
    ("min(page, last_page)", "page"),
    ("0x1p24f / count_of(r)", "0x1p24f"),
)
HOPPER = (
    ("bits[i] + 128", "bits[i]"),
    ("1.0f / LARGEST", "1.0f / 32767"),
    ("word & 0xf0f0f0f0u", "word & 0x70f0f0f0u"),
    ("low * 16 + high", "low + high"),
    ("of_bytes[0] * 256", "of_bytes[0] * 255"),
    ("[4 * g + t][w] = high;", "[4 * g + t][w] = low;"),
    ("[4 * (g + kPaired) + t][w] = low;", "[4 * (g + kPaired) + t][w] = 0;"),
    ("threadIdx.x % 2 == 0 ? 0x1p24f", "threadIdx.x % 2 == 1 ? 0x1p24f"),
    ("sum * -kNibbleFactor", "-sum"),
    ("kLog2E / kNibbleFactor", "kLog2E"),
    ("segment.length - arguments.T + 1 + token", "segment.length - arguments.T + token"),
    ("token < end - window", "token <= end - window"),
    ("if (g >= valid) keys[i][h] = values[i][h] = ptxlab::kNeutralConstants;", ""),
    ("weights[b] *= rescale, zeros[b] *= rescale;", "weights[b] *= rescale;"),
    ("weight[b] * inverse[i][h]", "weight[b]"),
    ("o[tile][i] - o[tile - 1][i]", "o[tile][i]"),
    ("row[e] * rescale", "row[e]"),
    ("stat->z * rescale", "stat->z"),
    ("stat->x - largest[b]", "largest[b] - stat->x"),
    ("PROMOTE == 0 || tile == first_tile", "true"),
    ("(kPages + j) * Page::kBytes, keys + pitch,", "(kPages + j) * Page::kBytes, keys,"),
)


def source_of(spec: KernelSpec) -> Source:
    return inline_skeletons(registry.find(spec.name)[1][0])


def mutate_source(spec: KernelSpec, change: tuple[str, str]) -> Source:
    source = source_of(spec)
    old, new = change
    assert old in source.text
    return replace(source, text=source.text.replace(old, new))


@functools.cache
def problems_of(name: str) -> list[tuple[Arrays, Arrays, dict[str, float]]]:
    """Make problems as (logical inputs, arguments, sizes).

    They have sequences of no tokens or part of a page, huge scores, small values, heads in groups, and a window.
    """
    spec, problem_list = registry.specs()[name], list[tuple[Arrays, Arrays, dict[str, float]]]()
    changes = problems.nothing, problems.scores_beyond_fp16, problems.large_and_small_values
    for change, page, window, T in zip(changes, (64, 16, 32), (0, 100, 60), (2, 1, 2), strict=True):
        if spec in (sm80.MMA, sm90.SM90):
            q, cache = problems.problem(
                3, (500, 0, 70), change, Hq=8, Hkv=2, scheme="kv4", T=T, page_size=page, spare=0
            )
            logical = {"q": q, "cache": cache, "softmax_scale": 0.088, "window": window}
            if spec is sm90.SM90:
                logical["blocks"] = 1
            sizes = {"page": page, "bits": 4, "channel": 0, "blocks": 1, "softmax_scale": 0.088, "window": window}
        else:
            q, cache = problems.problem(3, (150, 0, 70), change, Hq=4, Hkv=2, scheme=spec.name.split("_")[1])
            logical = {"q": q[:, 0].astype(np.float16), "cache": cache, "softmax_scale": 0.088}
            sizes = {"softmax_scale": 0.088}
        inputs = spec.pack(logical)
        problem_list.append((logical, {**inputs, "q": inputs["q"].astype(np.float16)}, sizes))
    return problem_list


def config_of(spec: KernelSpec, inputs: Arrays, sizes: dict[str, float]) -> dict[str, int]:
    """Return the constants that the spec chooses, but with a promotion of a warp's sums after every other tile."""
    shapes = {name: np.shape(array) for name, array in inputs.items()}
    config = spec.config_for(spec.sizes_of(shapes, sizes))
    return {**config, "PROMOTE": 2 * config["TOKENS"]} if spec is sm90.SM90 else config


def is_noticed(spec: KernelSpec, source: Source) -> bool:
    for logical, inputs, sizes in problems_of(spec.name):
        try:
            config = config_of(spec, inputs, sizes)
            outcome = run_spec(
                spec, source, inputs, sizes=sizes, config=config, backend="emulator", checks=emulator.CHECKS
            )
            compare(spec, outcome.outputs, logical)
        except (EmulationError, VerificationError):
            return True
        if outcome.findings:
            return True
    return False


SPECS = (*ladder.SPECS, sm80.MMA, sm90.SM90)
PLACES = [
    (spec, change)
    for spec, changes in (*((step, LADDER) for step in ladder.SPECS), (sm80.MMA, MMA), (sm90.SM90, HOPPER))
    for change in changes
    if change[0] in source_of(spec).text
]


@pytest.mark.full
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_the_kernel_itself_is_right(spec: KernelSpec) -> None:
    assert not is_noticed(spec, registry.find(spec.name)[1][0])


@pytest.mark.full
@pytest.mark.parametrize(("spec", "change"), PLACES, ids=lambda x: getattr(x, "name", None) or x[0])
def test_a_mistake_is_noticed(spec: KernelSpec, change: tuple[str, str]) -> None:
    assert is_noticed(spec, mutate_source(spec, change))


def test_every_mistake_has_a_place() -> None:
    assert {change for _, change in PLACES} == {*LADDER, *MMA, *HOPPER}
