"""Peers in the same run: the calls are PyTorch's, so here they run on the CPU; what times them is a stand-in.

So is humming, whose kernels need a GPU: the part of it that is called, in PyTorch.
"""

import json
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

import pytest

from benchmarks import peers
from ptxlab.errors import BenchmarkError
from ptxlab.runtime.timing import Measured

# Not imported here: that takes seconds of every worker.
pytestmark = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed: it comes with the extra `torch`"
)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Compute products on the CPU, run each call once, and report 7 µs each."""

    def measure(calls: Sequence[Callable[[], Any]], **_: Any) -> Measured:
        assert len(calls) == 3
        for call in calls:
            call()
        return Measured(7.0, 7.0, 7.0, 1900.0)

    monkeypatch.setattr(peers, "DEVICE", "cpu")
    monkeypatch.setattr(peers, "importable", lambda: True)
    monkeypatch.setattr(peers, "copies_beyond_l2", lambda nbytes: 3)
    monkeypatch.setattr(peers, "measure", measure)
    return monkeypatch


def test_every_peer_at_every_number_of_tokens(on_cpu: pytest.MonkeyPatch) -> None:
    assert peers.cublas(64, 128, (4, 64)) == {M: dict.fromkeys(peers.CUBLAS, 7.0) for M in (4, 64)}


def test_a_chain_rotates_over_whole_chains(on_cpu: pytest.MonkeyPatch) -> None:
    byte_counts: list[int] = []

    def copies(nbytes: int) -> int:
        byte_counts.append(nbytes)
        return 3

    on_cpu.setattr(peers, "copies_beyond_l2", copies)
    assert peers.cublas_chain([(64, 128), (32, 64)], (4, 16)) == {M: {"cublas_fp8": 7.0} for M in (4, 16)}
    assert byte_counts == [64 * 128 + 32 * 64] * 2


def test_few_tokens_are_padded_for_int8(on_cpu: pytest.MonkeyPatch) -> None:
    """`torch._int_mm` refuses 16 rows and fewer on a GPU; the stored times were padded in the same way."""
    rows: list[int] = []
    operand = peers.operand

    def record_rows(name: str, count: int, K: int, seed: int) -> Any:
        if seed:
            rows.append(count)
        return operand(name, count, K, seed)

    on_cpu.setattr(peers, "operand", record_rows)
    peers.cublas(64, 128, (4, 16, 32, 64), ["cublas_int8"])
    assert rows == [32, 32, 32, 64]


@pytest.mark.parametrize("name", peers.CUBLAS)
def test_wrong_products_are_found(name: str, on_cpu: pytest.MonkeyPatch) -> None:
    weights = [peers.operand(name, 64, 128, seed=0)]
    x = peers.operand(name, 4, 128, seed=4)
    peers._calls(name, x, weights)
    wrong = {"cublas_fp8": "_scaled_mm", "cublas_int8": "_int_mm", "cublas_fp16": "matmul"}[name]
    on_cpu.setattr(f"torch.{wrong}", lambda a, b, **_: (a.float() @ b.float()).flip(1))
    with pytest.raises(BenchmarkError, match=f"{name}: wrong results"):
        peers._calls(name, x, weights)


class Schema:
    """Rounds weights to whole numbers, which takes whole groups."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.group = config["group_size"]

    def quant_tensor(self, tensor: Any, schema: "Schema", dtype: Any) -> dict[str, Any]:
        assert schema is self and tensor.shape[1] % (self.group or 1) == 0, "whole groups\nand more lines"
        return {"weight": tensor.to(dtype).round()}

    def dequant_tensors(self, tensors: dict[str, Any]) -> Any:
        return tensors["weight"].float()


class Layer:
    """Stand-in for a layer; `launched` has the dtype of the activations and the tiles of every call."""

    launched: ClassVar[list[tuple[str, list[Any]]]]

    def __init__(self, shape_n: int, shape_k: int, weight_config: Any, input_config: Any, torch_dtype: Any) -> None:
        assert weight_config["dtype"] == "int4" and input_config == {"dtype": "int8"}
        self.shape_k, self.weight_schema, self.humming_config = shape_k, Schema(weight_config), "config"
        self.weight: Any = None
        self.ready: Any = None

    def load_from_tensors(self, tensors: dict[str, Any]) -> None:
        self.weight = tensors["weight"].clone()

    def transform(self) -> None:
        self.ready = self.weight

    def __call__(self, x: Any, input_scale: Any, tuning_config: str) -> Any:
        self.launched.append((str(x.dtype), json.loads(tuning_config)))
        return (x.float() * input_scale @ self.ready.float().t()).half()


def quantize_activations(config: str, x: Any) -> Any:
    assert config == "config"
    scales = x.float().abs().amax(1, keepdim=True) / 127
    return (x.float() / scales).round().char(), scales


@pytest.fixture
def humming(on_cpu: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    def tiles(config: str) -> list[Any]:
        return [[0, 8, {"few": 1}], [8, 32, {"more": 1}], [32, 64, {"many": 1}], [64, 1 << 30, {"most": 1}]]

    parts = {"layer": {"HummingLayer": Layer}, "forward": {"may_quant_input": quantize_activations}}
    parts |= {"tune": {"get_heuristics_config": tiles}, "": {}}
    for part, names in parts.items():
        module = ModuleType(".".join(filter(None, ("humming", part))))
        module.__spec__, module.__path__ = ModuleSpec(module.__name__, None), []
        vars(module).update(names)
        on_cpu.setitem(sys.modules, module.__name__, module)
    on_cpu.setattr(Layer, "launched", [], raising=False)
    on_cpu.setattr(metadata, "version", {"humming-kernels": peers.HUMMING_RELEASE}.__getitem__)
    return on_cpu


def test_humming_in_both_schemes_at_every_number_of_tokens(humming: pytest.MonkeyPatch) -> None:
    assert peers.humming(64, 256, (33, 64)) == {M: dict.fromkeys(peers.HUMMING, 7.0) for M in (33, 64)}
    assert len(Layer.launched) == 2 * 2 * (1 + 3), "checked once, and three copies in turn"
    needed = ("torch.int8", [[0, 8, {"few": 1}], [32, 64, {"many": 1}]])
    assert all(launched == needed for launched in Layer.launched), "quantised before; tiles of one token and of these"


def test_wrong_products_of_humming_are_found(humming: pytest.MonkeyPatch) -> None:
    humming.setattr(Layer, "transform", lambda layer: setattr(layer, "ready", layer.weight.flip(0)))
    with pytest.raises(BenchmarkError, match="humming_w4a8_g128: wrong results"):
        peers.humming(64, 256, (4,))


def test_what_humming_cannot_do_is_left_out_with_a_reason(humming: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="^humming_w4a8_g128, 64 x 200: left out, AssertionError: whole groups$"):
        assert peers.humming(64, 200, (4,)) == {4: {"humming_w4a8_chn": 7.0}}

    def at_most_16(config: str, x: Any) -> Any:
        if len(x) > 16:
            raise NotImplementedError
        return quantize_activations(config, x)

    humming.setattr(sys.modules["humming.forward"], "may_quant_input", at_most_16)
    with pytest.warns(
        UserWarning, match="^humming.*, 64 x 256, M = 17: left out, NotImplementedError: raise NotImplementedError$"
    ):
        assert peers.humming(64, 256, (4, 17)) == {4: dict.fromkeys(peers.HUMMING, 7.0), 17: {}}
    humming.setitem(sys.modules, "humming.layer", None)
    with pytest.warns(UserWarning, match=r"left out, ModuleNotFoundError: .*humming\.layer"):
        assert peers.humming(64, 256, (4,)) == {4: {}}


def test_without_a_gpu_there_are_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "importable", lambda: False)
    assert peers.cublas(64, 128, (4, 16)) == peers.cublas_chain([(64, 128)], (4, 16)) == {4: {}, 16: {}}
    assert peers.humming(64, 128, (4, 16)) == {4: {}, 16: {}}
    monkeypatch.undo()
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert not peers.importable()


def test_versions_of_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "torch":
            raise peers.metadata.PackageNotFoundError(name)
        return "2.11"

    monkeypatch.setattr(peers.metadata, "version", version)
    assert peers.versions() == {"torch": "2.11"}
