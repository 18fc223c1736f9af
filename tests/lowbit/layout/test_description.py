"""The description of a packed operand: all its fields but arrays."""

from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab.lowbit import quant
from ptxlab.lowbit.layout import KVCache, pack_activations, pack_atom, pack_atom_activations

ONES = np.ones((8, 256), np.float32)
WEIGHT = ptxlab.pack(quant.quantize_lqq(ONES, group=64), "strips")
ATOM = quant.quantize_atom_weight(ONES, 64, 64)
OPERANDS: list[tuple[Any, dict[str, Any]]] = [
    (
        WEIGHT,
        {
            "layout": "strips",
            "scheme": "lqq",
            "N": 8,
            "K": 256,
            "group": 64,
            "protective_range": WEIGHT.protective_range,
            "version": WEIGHT.version,
            "interleaved": False,
        },
    ),
    (
        ptxlab.stack_experts([WEIGHT] * 3),
        {
            "layout": "strips",
            "scheme": "lqq",
            "E": 3,
            "N": 8,
            "K": 256,
            "group": 64,
            "protective_range": WEIGHT.protective_range,
        },
    ),
    (pack_atom(ATOM), {"layout": "strips", "N": 8, "K": 192, "outliers": 64, "group": 64, "version": 1}),
    (
        pack_atom_activations(quant.quantize_atom_activations(ONES, 64, 64)),
        {"layout": "bytes", "M": 8, "K": 192, "outliers": 64, "group": 64},
    ),
    (
        pack_activations(quant.quantize_activations(ONES), "tiles", 16),
        {"layout": "tiles", "M": 8, "K": 256, "rows": 16},
    ),
    (KVCache.empty(2, 2, 2, 64, page_size=16), {"page_size": 16, "head_dim": 64, "scheme": "kv4", "rotated": False}),
]


@pytest.mark.parametrize(("operand", "fields"), OPERANDS, ids=[type(operand).__name__ for operand, _ in OPERANDS])
def test_it_has_every_field_but_arrays(operand: Any, fields: dict[str, Any]) -> None:
    assert operand.description == tuple(fields.values())
    assert operand.description is operand.description
    for name, number_or_name in fields.items():
        assert getattr(operand, name) == number_or_name
