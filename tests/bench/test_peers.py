"""cuBLAS as a peer: the calls are PyTorch's, so here they run on the CPU; what times them is a stand-in."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import pytest

from ptxlab.bench import peers
from ptxlab.bench.timing import Measured
from ptxlab.errors import BenchmarkError

# Not imported here: that takes seconds of every worker.
pytestmark = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed: it comes with the extra `torch`"
)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Products on the CPU, each call run once; 7 µs each."""

    def measure(calls: Sequence[Callable[[], Any]], **_: Any) -> Measured:
        assert len(calls) == 3
        for call in calls:
            call()
        return Measured(7.0, 7.0, 7.0, 1900.0)

    monkeypatch.setattr(peers, "_DEVICE", "cpu")
    monkeypatch.setattr(peers, "importable", lambda: True)
    monkeypatch.setattr(peers, "copies_beyond_l2", lambda nbytes: 3)
    monkeypatch.setattr(peers, "measure", measure)
    return monkeypatch


def test_every_peer_at_every_number_of_tokens(on_cpu: pytest.MonkeyPatch) -> None:
    assert peers.cublas(64, 128, (4, 64)) == {M: dict.fromkeys(peers.CUBLAS, 7.0) for M in (4, 64)}


def test_a_chain_rotates_over_whole_chains(on_cpu: pytest.MonkeyPatch) -> None:
    together: list[int] = []

    def copies(nbytes: int) -> int:
        together.append(nbytes)
        return 3

    on_cpu.setattr(peers, "copies_beyond_l2", copies)
    assert peers.cublas_chain([(64, 128), (32, 64)], (4, 16)) == {M: {"cublas_fp8": 7.0} for M in (4, 16)}
    assert together == [64 * 128 + 32 * 64] * 2


def test_few_tokens_are_padded_for_int8(on_cpu: pytest.MonkeyPatch) -> None:
    """`torch._int_mm` refuses 16 rows and fewer on a GPU; the stored times were padded in the same way."""
    rows: list[int] = []
    operand = peers._operand

    def remembered(name: str, count: int, K: int, seed: int) -> Any:
        if seed:
            rows.append(count)
        return operand(name, count, K, seed)

    on_cpu.setattr(peers, "_operand", remembered)
    peers.cublas(64, 128, (4, 16, 32, 64), ["cublas_int8"])
    assert rows == [32, 32, 32, 64]


@pytest.mark.parametrize("name", peers.CUBLAS)
def test_wrong_products_are_found(name: str, on_cpu: pytest.MonkeyPatch) -> None:
    weights = [peers._operand(name, 64, 128, seed=0)]
    x = peers._operand(name, 4, 128, seed=4)
    peers._calls(name, x, weights)
    wrong = {"cublas_fp8": "_scaled_mm", "cublas_int8": "_int_mm", "cublas_fp16": "matmul"}[name]
    on_cpu.setattr(f"torch.{wrong}", lambda a, b, **_: (a.float() @ b.float()).flip(1))
    with pytest.raises(BenchmarkError, match=f"{name}: wrong results"):
        peers._calls(name, x, weights)


def test_without_a_gpu_there_are_no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "importable", lambda: False)
    assert peers.cublas(64, 128, (4, 16)) == peers.cublas_chain([(64, 128)], (4, 16)) == {4: {}, 16: {}}
    monkeypatch.undo()
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert not peers.importable()
