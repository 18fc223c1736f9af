"""A record of whole models that nobody measured, for the tables, targets and pictures that are made of one."""

from collections.abc import Sequence

from benchmarks import decode as models
from benchmarks.layer.decoder import Alone
from benchmarks.layer_shapes import BATCHES, Work, rows_of
from ptxlab.bench.ceilings import Ceilings
from ptxlab.bench.record import Record, Row
from ptxlab.llm.model import Config, largest_batch
from ptxlab.runtime.timing import Measured

FLOOR_FRACTION = 0.8  # of the floor, at every batch
PEER_SLOWDOWNS = {"fp16/sdpa": 4.0, "fp8_row/sdpa": 2.2, "fp8_tensor/xqa_fp8": 2.0}
PEER_SLOWDOWNS |= {"humming_chn/xqa_fp8": 1.4, "humming_g128/sdpa": 1.6}
INT8_HEAD = 1.25  # times as fast as the FP16 head
SLOWDOWN_WITHOUT = 1.3  # of ours with the rewrite of QServe's GEMM
PREFILL = 0.5  # of the steps behind it
_CEILINGS = Ceilings(read_tbps=4.5, copy_tbps=4.2)


def record(configs: Sequence[Config] = models.MODELS) -> Record:
    """Make up a record of these models, on a card of 141 GB."""
    rows = tuple(row for config in configs for row in _rows(config))
    device = {"name": "NVIDIA H200", "card": "GPU-0"}
    return Record("decode", device, {}, _CEILINGS.to_json(), rows, commit="0123456789ab", date="2026-11-23")


def _rows(config: Config) -> list[Row]:
    budgets = {gb: largest_batch(config, gb, 1536, chunk=2048) for gb in models.BUDGETS}
    ours = {B for B in BATCHES if B in range(max(budgets.values()) + 1)} | {*budgets.values()}
    peer_batches = {models.largest_mix_batch(config, gb, name) for gb in models.BUDGETS for name in PEER_SLOWDOWNS} - {
        0
    }
    rows = []
    for B in sorted(ours | peer_batches):
        us = _floor(config, B) / FLOOR_FRACTION
        named = {
            name: us * over for name, over in PEER_SLOWDOWNS.items() if config.experts == 0 or "humming" not in name
        }
        columns = {f"{name} {part}_us": peer / 2 for name, peer in named.items() for part in ("gemm", "attention")}
        rows.append(models.peer_row(config, models.MIX, B, min(named.values()), named, columns))
        if B in ours:
            peers = {**named, **({} if config.experts else {models.WITHOUT: SLOWDOWN_WITHOUT * us})}
            rows.append(_step(config, B, us, peers))
    for gb, B in budgets.items():
        steps = 511 * _floor(config, B) / FLOOR_FRACTION
        run = models.RuleTimes(PREFILL * steps, steps, 1900.0, 600.0)
        composed = {
            name: ((1 + PREFILL) * steps * over * room / B, room)
            for name, over in PEER_SLOWDOWNS.items()
            if (room := models.largest_mix_batch(config, gb, name)) and not (config.experts and "humming" in name)
        }
        rows.append(models.generate_row(config, B, gb, run, composed))
    return rows


def _works(config: Config, B: int) -> list[Work]:
    weights = {f"gemm {matrix}": N * K // 2 * config.layers for matrix, (N, K) in config.matrices.items()}
    cache = B * 1280 * config.layers * config.kv_heads * 136
    head = 2 * config.vocabulary * config.hidden
    gemms = [
        Work(name, nbytes, 4 * rows_of(config, name.removeprefix("gemm "), B) * nbytes)
        for name, nbytes in weights.items()
    ]
    return [*gemms, Work("attention", cache, 0), Work("head", head, B * head)]


def _floor(config: Config, B: int) -> float:
    return sum(work.us(_CEILINGS) for work in _works(config, B))


def _step(config: Config, B: int, us: float, peers: dict[str, float]) -> Row:
    works = _works(config, B)
    parts = {work.name: work.us(_CEILINGS) / FLOOR_FRACTION / config.layers for work in works}
    kinds = {name: "gemm" for name in parts if name.startswith("gemm ")}
    alone = Alone({**parts, "norm": 1.0}, {**kinds, "attention": "attention", "head": "", "norm": "others"})
    head = parts["head"] * config.layers
    measured, columns = Measured(us, us, us, 1900.0), {"power_w": 600.0, "head_int8_us": head / INT8_HEAD}
    return models.row_at(config, B, measured, works, alone, head, _CEILINGS, "made up", peers, columns)
