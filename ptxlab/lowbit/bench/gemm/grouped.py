"""The experts of Mixtral: as many GEMMs as experts have tokens, one after the other in a graph; and all in one launch.

That loop of `gemm_w4a8`'s own kernels is what the grouped kernel has to beat, on the same inputs: each expert's weight,
and the tokens of all experts as rows of one matrix, sorted by expert.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ptxlab import gpu
from ptxlab.arithmetic import ceil_div
from ptxlab.bench.record import Row, row_of
from ptxlab.hardware.words import S32
from ptxlab.lowbit import cost
from ptxlab.lowbit.bench.gemm import headline
from ptxlab.lowbit.bench.gemm.points import Point, StreamTime, in_turn_on, in_turn_row
from ptxlab.lowbit.bench.gemm.problem import expected_bits, launches, tokens
from ptxlab.lowbit.bench.shapes import CHOSEN_EXPERTS, EXPERTS, GROUP, MIXTRAL, ROUTED_TOKENS, Layer
from ptxlab.lowbit.kernels.gemm.grouped import GROUPED, STEPS
from ptxlab.lowbit.kernels.gemm.ladder import why_not
from ptxlab.runtime.timing import GEMM_REPLAYS, copies_beyond_l2, measure
from ptxlab.spec import Arrays, evaluate

LOOP, MEASURE = "experts", "grouped"  # what rows of the loop are called, and those of a grouped kernel
STEP = STEPS[headline.SCHEME]
FACE = "gemm_w4a8_grouped"
_PLACES = 3  # in memory: where the weights of a few experts lie can move the time by a tenth


def points(names: Sequence[str]) -> Iterator[Point]:
    """Yield the grouped kernel with its sizes, if it is among `names` and runs on this GPU."""
    if GROUPED.name in names and why_not(STEP) is None:
        for layer in MIXTRAL:
            for count in ROUTED_TOKENS:
                yield STEP, sizes_at(layer, CHOSEN_EXPERTS * count)


def sizes_at(layer: Layer, rows: int) -> dict[str, int]:
    """Return the grouped kernel's sizes."""
    return {"M": rows, "N": layer.N, "K": layer.K, "E": EXPERTS, "g": GROUP}


def route_at_random(count: int, seed: int = 0) -> S32:
    """Draw the experts of `count` tokens at random: offsets of each expert into the sorted rows, [E+1]."""
    rng = np.random.default_rng(seed)
    experts = rng.permuted(np.tile(np.arange(EXPERTS), (count, 1)), axis=1)[:, :CHOSEN_EXPERTS]
    offsets = np.zeros(EXPERTS + 1, np.int32)
    offsets[1:] = np.cumsum(np.bincount(experts.ravel(), minlength=EXPERTS))
    return offsets


@dataclass(frozen=True)
class Experts:
    """Matrix of every expert, and tokens for them.

    Attributes:
        layer: the matrix.
        weights: the logical inputs of a GEMM that know nothing of tokens, by expert.
        activations: x s8 [T, K] and x_scale f32 [T], sorted by expert.
        offsets: s32 [E+1], where an expert's rows begin.
    """

    layer: Layer
    weights: Sequence[Arrays]
    activations: Arrays
    offsets: S32

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that tell rows apart."""
        tokens = int(self.offsets[-1]) // CHOSEN_EXPERTS
        return {"tokens": tokens, "N": self.layer.N, "K": self.layer.K, "g": GROUP}

    @property
    def logical(self) -> Arrays:
        """The logical inputs of the grouped kernel."""
        return {
            "weights": [weight["weight"] for weight in self.weights],
            "bias": np.stack([weight["bias"] for weight in self.weights]),
            "offsets": gpu.to_device(self.offsets),
            **self.activations,
        }

    def problems(self) -> Iterator[tuple[int, Arrays]]:
        """Yield token count and logical inputs of each expert that has tokens, in arrays that any kernel may load."""
        for expert, weight in enumerate(self.weights):
            rows = slice(*self.offsets[expert : expert + 2].tolist())
            if rows.stop > rows.start:
                expert_activations = {name: array[rows].copy() for name, array in self.activations.items()}
                yield rows.stop - rows.start, {**weight, **expert_activations}


def rows(layers: Sequence[Layer], stream_us: StreamTime, progress: Callable[[str], None]) -> Iterator[Row]:
    """Measure the loop over experts at every number of tokens, then the grouped kernel with the loop as a peer."""
    for layer in layers:
        progress(f"{layer}: {EXPERTS} experts")
        expert_weights = [headline.weight_of(layer, seed=expert) for expert in range(EXPERTS)]
        activations = tokens(layer, CHOSEN_EXPERTS * max(ROUTED_TOKENS))
        for count in ROUTED_TOKENS:
            used_activations = {name: array[: CHOSEN_EXPERTS * count] for name, array in activations.items()}
            experts = Experts(layer, expert_weights, used_activations, route_at_random(count))
            yield (looped := measure_loop(experts, stream_us))
            yield measure_grouped(experts, stream_us, looped.time_us)


def measure_loop(experts: Experts, stream_us: StreamTime) -> Row:
    """Time the GEMMs of all experts as one call, and check what every one of them wrote."""
    problems = list(experts.problems())
    measured, ready = in_turn_on(
        [headline.point_at(experts.layer, M) for M, _ in problems], [inputs for _, inputs in problems]
    )
    checked = [link.check(expected_bits(link.spec, inputs)) for link, (_, inputs) in zip(ready, problems, strict=True)]
    return in_turn_row(
        ready,
        measured,
        stream_us,
        measure=LOOP,
        sizes=experts.sizes,
        checked="; ".join(dict.fromkeys(checked)),
        activations=headline.ORDER,
        face=headline.FACE,
        more={"launches": len(ready)},
    )


def measure_grouped(experts: Experts, stream_us: StreamTime, loop_us: float) -> Row:
    """Time the grouped kernel, whose floor is that of the experts with tokens alone, and check what it wrote.

    The time is the median over copies of the weights in different places.
    """
    sizes = sizes_at(experts.layer, int(experts.offsets[-1]))
    active_experts = int((np.diff(experts.offsets) > 0).sum())
    nbytes = GROUPED.arg("strips").nbytes({**sizes, "E": active_experts})
    operations = int(evaluate(GROUPED.operations, sizes))
    places = [launches(STEP, sizes, experts.logical, copies=copies_beyond_l2(nbytes)) for _ in range(_PLACES)]
    replays = ceil_div(GEMM_REPLAYS, _PLACES)  # together as many as of the loop: more would lower the clock
    timings = [measure(ready.calls, replays=replays) for ready in places]
    measured = replace(
        sorted(timings, key=lambda timing: timing.us)[_PLACES // 2],
        fastest=min(timing.fastest for timing in timings),
        slowest=max(timing.slowest for timing in timings),
    )
    right = expected_bits(GROUPED, experts.logical)
    checked = [ready.check(right) for ready in places]
    return row_of(
        GROUPED,
        MEASURE,
        experts.sizes,
        measured,
        floor=cost.gemm_floor(stream_us(nbytes), operations, gpu.device_info().slug),
        checked=f"in each of {_PLACES} places {checked[0]}",
        nbytes=GROUPED.bytes_moved({**sizes, **places[0].variant, "E": active_experts}),
        rate=(operations / measured.us / 1e6, "TOPS"),
        operations=operations,
        peers={LOOP: loop_us},
        activations=STEP.order,
        variant=places[0].variant,
        face=FACE,
        more={"experts": active_experts, "stream_us": stream_us(nbytes), "packed_bytes": nbytes},
    )
