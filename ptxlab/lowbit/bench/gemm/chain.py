"""The four GEMMs of a decoder layer one after the other, where each may begin while the one before it ends.

In one CUDA graph, launched programmatically (PDL) where a kernel waits by itself, over weights that no chain finds in
the L2. Beside it the same chain launched plainly, and cuBLAS's.
"""

from collections.abc import Callable, Iterator, Sequence

from ptxlab.bench.record import Row
from ptxlab.lowbit.bench.gemm import headline
from ptxlab.lowbit.bench.gemm.points import StreamTime, in_turn_on, in_turn_row
from ptxlab.lowbit.bench.gemm.problem import expected_bits, first_tokens, tokens
from ptxlab.lowbit.bench.peers import Peers
from ptxlab.lowbit.bench.shapes import CHAINS, FEW_TOKENS, GROUP, PER_CHANNEL, Layer
from ptxlab.spec import Arrays

MEASURE = "chain"


def rows(stream_us: StreamTime, progress: Callable[[str], None], peers: Peers) -> Iterator[Row]:
    """Measure every model at every number of tokens of a decoding step, in groups and per channel."""
    for layers in CHAINS:
        progress(f"{layers[0].model}: chain")
        peer_times = peers.cublas_chain([(layer.N, layer.K) for layer in layers], FEW_TOKENS)
        for group in (GROUP, PER_CHANNEL):
            logical = [{**headline.weight_of(layer, group), **tokens(layer, max(FEW_TOKENS))} for layer in layers]
            for M in FEW_TOKENS:
                inputs = [first_tokens(layer_inputs, M) for layer_inputs in logical]
                yield measure_chain(layers, M, inputs, stream_us, peer_times[M], group=group)


def measure_chain(
    layers: Sequence[Layer],
    M: int,
    logical: Sequence[Arrays],
    stream_us: StreamTime,
    peer_times: dict[str, float],
    *,
    group: int = GROUP,
) -> Row:
    """Time the GEMMs of `layers` in this order, and check what every one of them wrote."""
    links = [headline.point_at(layer, M, group) for layer in layers]
    plain_timing, _ = in_turn_on(links, logical)
    measured, ready = in_turn_on(links, logical, programmatic=True)
    checked = [link.check(expected_bits(link.spec, inputs)) for link, inputs in zip(ready, logical, strict=True)]
    return in_turn_row(
        ready,
        measured,
        stream_us,
        measure=MEASURE,
        sizes={"hidden": layers[0].K, "M": M, **({} if group == PER_CHANNEL else {"g": group})},
        checked="; ".join(checked),
        peers=peer_times,
        activations=headline.ORDER,
        face=headline.FACE,
        more={"plain_us": plain_timing.us},
    )
