"""Whole layers with and without the epilogues of their GEMMs, side by side: which ends win, by batch.

A layer's residual epilogue gives the same bits, SiLU·mul others, so each is checked by itself. What it should bring is
predicted first (`predicted_us`), from what the other kernels were seen to take.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from benchmarks.layer import decoder
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Row
from ptxlab.llm import layer_chain
from ptxlab.llm.layer_chain import Decoder
from ptxlab.llm.model import Config, LayerWeights
from ptxlab.lowbit.cost import sheet
from ptxlab.runtime.timing import GEMM_REPLAYS, Measured, measure_graph

MEASURE = "epilogues"
MODELS = "LLaMA-2-7B", "LLaMA-2-70B"
_ROUNDS = 2  # each layer in turn; the faster time counts
_L2_TBPS = 12.0  # what one more byte takes: rmsnorm_quantize in a chain, 1 and 128 tokens (programmatic_launches.json)
_SPECIAL = 16  # ex2 or rcp of an SM per clock (CUDA C++ programming guide, throughput of instructions, 9.0)


class Ends(NamedTuple):
    """Epilogues of a layer's GEMMs: `residual`, O and down add to the residual stream; `silu_mul`, of gate and up."""

    residual: bool
    silu_mul: bool


ALL = tuple(Ends(residual, silu_mul) for silu_mul in (False, True) for residual in (False, True))


def predicted_us(config: Config, B: int, ends: Ends) -> float:
    """Predict how many microseconds longer a layer takes with these epilogues; below 0 if shorter.

    `residual`: for each of two products, the norm behind it neither reads the result nor writes the stream; the L2 is
    taken to add as quickly as it writes. `silu_mul`: half of gate and up is neither written nor read; ex2 and rcp,
    which hide behind loads in `silu_mul_quantize`, come on top.
    """
    h200, us = sheet("h200"), 0.0
    if ends.residual:
        us -= 2 * 4 * B * config.hidden / _L2_TBPS / 1e6
    if ends.silu_mul:
        special_function_us = 2 * B * config.ffn / (h200.sms * _SPECIAL * h200.clock_ghz * 1e3)
        us += special_function_us - 4 * B * config.ffn / _L2_TBPS / 1e6
    return us


def warm(config: Config, batches: Sequence[int]) -> None:
    """Compile all that is measured, in a process that ends then."""
    weights = {
        interleaved: [LayerWeights.random(config, on_device=True, interleaved=interleaved)]
        for interleaved in (False, True)
    }
    for B in batches:
        for chain in decoders(config, B, weights, caches=1).values():
            chain.calls()[0]()


def rows(config: Config, batches: Sequence[int], ceilings: Ceilings, progress: Callable[[str], None]) -> Iterator[Row]:
    """Measure one row for each choice of epilogues at every batch."""
    weights = {interleaved: layer_chain.layers_of(config, interleaved=interleaved) for interleaved in (False, True)}
    for B in batches:
        progress(f"{config.name}, batch {B}: epilogues")
        yield from rows_at(config, B, weights, ceilings, compare_twin=min(batches) == B)


def decoders(
    config: Config, B: int, weights: Mapping[bool, Sequence[LayerWeights]], caches: int = 0
) -> dict[Ends, Decoder]:
    """Make a decoder for each choice of epilogues, on the same caches; `weights` are keyed by interleaving."""
    first = Decoder(config, B, weights[False], caches)
    return {ends: first.with_epilogues(weights[ends.silu_mul], ends.residual) for ends in ALL}


def rows_at(
    config: Config,
    B: int,
    weights: Mapping[bool, Sequence[LayerWeights]],
    ceilings: Ceilings,
    compare_twin: bool = False,
) -> list[Row]:
    """Time and check each choice of epilogues at one batch, in turn.

    If `compare_twin`, each is also compared with the exact twin.
    """
    chains = decoders(config, B, weights)
    check_notes = {ends: chain.compare() if compare_twin else "" for ends, chain in chains.items()}
    fastest_by_ends: dict[Ends, Measured] = {}
    for number in range(_ROUNDS):
        for ends, chain in chains.items():
            measured, graph = measure_graph(chain.calls(), replays=GEMM_REPLAYS)
            if number == 0:
                check_notes[ends] += chain.check(graph)
            fastest_by_ends[ends] = min(fastest_by_ends.get(ends, measured), measured, key=lambda m: m.us)
    epilogue_rows = []
    for ends, chain in chains.items():
        row = decoder.row_of(config, B, fastest_by_ends[ends], decoder.work_of(chain), ceilings, check_notes[ends])
        sizes = row.sizes | {epilogue: int(enabled) for epilogue, enabled in ends._asdict().items()}
        predicted = fastest_by_ends[ALL[0]].us + predicted_us(config, B, ends)
        epilogue_rows.append(replace(row, measure=MEASURE, sizes=sizes, more={"predicted_us": predicted}))
    return epilogue_rows
