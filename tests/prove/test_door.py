"""One predicate at every door: what `TwoLevelWeight.overflows` says, all of them say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ptxlab.errors import ArgumentError, FileError
from ptxlab.llm.checkpoints import convert
from ptxlab.llm.checkpoints.imports import import_checkpoint
from ptxlab.llm.model import Config, FloatModel
from ptxlab.llm.recipe import RECIPES, quantize
from ptxlab.lowbit import layout, quant
from ptxlab.lowbit.audit import audit_file, audit_matrix
from ptxlab.lowbit.quant.two_level import TwoLevelWeight
from tests.support import foreign_files

FLOATS = np.random.default_rng(0).standard_normal((64, 128), np.float32)
SMALL = Config(hidden=96, ffn=192, heads=6, kv_heads=2, head_dim=16, layers=1, vocabulary=60, tied_head=True)


def pack_weight(folder: Path) -> None:
    layout.pack(quant.quantize_lqq(FLOATS))


def load_weight(folder: Path) -> None:
    layout.load(folder / "packed.safetensors")


def convert_checkpoint(folder: Path) -> None:
    save_file({"w": FLOATS}, folder / "in.safetensors")
    convert.plan(folder / "in.safetensors").write(folder / "out.safetensors")


def by_a_recipe(folder: Path) -> None:
    text = np.zeros((1, 8), np.int64)
    quantize.quantize_model(FloatModel.random(SMALL), text, RECIPES["rtn"].but(group=32), folder / "out")


def import_qserve(folder: Path) -> None:
    arrays = foreign_files.qserve(*foreign_files.quantize_two_levels(FLOATS, 64))
    save_file({f"a.q.{part}": array for part, array in arrays.items()}, folder / "qserve.safetensors")
    import_checkpoint(folder / "qserve.safetensors", folder / "out.safetensors")


@pytest.mark.parametrize("door", [pack_weight, load_weight, convert_checkpoint, by_a_recipe, import_qserve])
def test_a_door_opens_or_closes_by_the_predicate(
    door: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout.save(layout.pack(quant.quantize_lqq(FLOATS)), tmp_path / "packed.safetensors", "w")
    with monkeypatch.context() as patched:
        patched.setattr(TwoLevelWeight, "overflows", everywhere)
        with pytest.raises((ArgumentError, FileError), match=r"must restore to -128\.\.127"):
            door(tmp_path)
        assert not any(tmp_path.glob("out*"))
    door(tmp_path)


def everywhere(weight: Any) -> Any:
    return np.ones(weight.group_scale.shape, bool)


def test_audit_counts_by_the_predicate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    layout.save(layout.pack(quant.quantize_lqq(FLOATS)), tmp_path / "packed.safetensors", "w")
    assert cli("audit", tmp_path / "packed.safetensors")[1].splitlines()[-1] == "safe by proof: lqq ±119"
    monkeypatch.setattr(TwoLevelWeight, "overflows", everywhere)
    (row,) = audit_file(tmp_path / "packed.safetensors")
    assert row.unsafe_groups == 128 and all(one.unsafe_groups == 64 for one in audit_matrix(FLOATS))
    last_line = cli("audit", tmp_path / "packed.safetensors")[1].splitlines()[-1]
    assert last_line == "not safe: 128 of 128 groups of lqq ±119"
