"""`gemm_w4a8_chain_sm90`: the bits of the launches that it stands for, wherever its blocks are, at every batch."""

from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import gpu, kernels
from ptxlab.errors import ArgumentError
from ptxlab.kernels.gemm.chain import CHAIN
from ptxlab.runtime import run_spec
from ptxlab.verify import Job, verify
from tests.support.axes import on_every_backend

SMALL = {"H": 256, "A": 128, "F": 640, "Q": 80, "g": 128, "eps": 1e-5}
WIDE = {"H": 4096, "A": 4096, "F": 11008, "Q": 12288, "g": 128, "eps": 1e-5}


def run(logical: dict[str, Any], sizes: dict[str, Any], backend: str) -> dict[str, np.ndarray]:
    """What the kernel writes, of halves."""
    floats = ("attended", "stream", "gamma", "gamma_next")
    packed = CHAIN.pack(logical)
    inputs = {name: array.astype(np.float16) if name in floats else array for name, array in packed.items()}
    (source,) = kernels.find(CHAIN.name)[1]
    return run_spec(CHAIN, source, inputs, sizes=sizes, backend=backend, config=CHAIN.config_for(sizes)).outputs


def one_by_one(logical: dict[str, Any], backend: str) -> dict[str, np.ndarray]:
    """The same by public calls."""
    names = ("attended", "stream", "gamma", "gamma_next")
    attended, stream, gamma, gamma_next = (logical[name].astype(np.float16) for name in names)
    norm: dict[str, Any] = {"eps": logical["eps"], "backend": backend}

    def product(x: Any, name: str, **more: Any) -> Any:
        weight = ptxlab.pack(logical[name], "strips")
        return ptxlab.gemm_w4a8(x, weight=weight, backend=backend, **more)

    product(ptxlab.quantize_activations(attended, backend=backend), "o", residual=stream)
    between = product(ptxlab.rmsnorm_quantize(stream, gamma, **norm), "gate_up")
    product(ptxlab.silu_mul_quantize(between, backend=backend), "down", residual=stream)
    y = np.empty((len(stream), 0), np.float16)
    if "qkv" in logical:
        y = product(ptxlab.rmsnorm_quantize(stream, gamma_next, **norm), "qkv", bias=logical["qkv_bias"])
    return {"stream": stream, "between": between, "y": y}


def check(sizes: dict[str, Any], backend: str, seed: int = 0) -> None:
    logical = CHAIN.example(np.random.default_rng(seed), **sizes)
    found, wanted = run(logical, sizes, backend), one_by_one(logical, backend)
    for name, right in wanted.items():
        assert np.array_equal(found[name].view(np.uint16), right.view(np.uint16)), name
    assert not found["arrived"].any()


def test_verified() -> None:
    """With all checks, at sizes that leave most blocks without strips of some products."""
    (source,) = kernels.find(CHAIN.name)[1]
    sizes = {"M": 2, **SMALL}
    verdict = verify(Job(CHAIN, source, "emulator", sizes, CHAIN.config_for(sizes)))
    assert verdict.passed, verdict.detail


@pytest.mark.parametrize(("M", "changed"), [(1, {}), (5, {"Q": 0, "g": 32}), (8, {"F": 128, "g": 64})])
def test_the_bits_of_the_launches_one_by_one(M: int, changed: dict[str, int]) -> None:
    check({"M": M, **SMALL, **changed}, "emulator", seed=M)


@pytest.mark.gpu
@pytest.mark.skipif(gpu.why_not("sm_90a", exact=True) is not None, reason="needs sm_90a")
@pytest.mark.parametrize("M", [1, 2, 4, 7, 8])
def test_the_bits_of_the_launches_one_by_one_at_full_size(M: int) -> None:
    check({"M": M, **WIDE}, "gpu", seed=M)


@on_every_backend
def test_a_token_has_the_same_bits_in_any_batch(backend: str) -> None:
    logical = CHAIN.example(np.random.default_rng(3), M=6, **SMALL)
    whole = run(logical, {"M": 6, **SMALL}, backend)
    one = {**logical, **{name: logical[name][4:5] for name in ("attended", "stream")}}
    alone = run(one, {"M": 1, **SMALL}, backend)
    for name in ("stream", "between", "y"):
        assert np.array_equal(whole[name][4:5].view(np.uint16), alone[name].view(np.uint16)), name


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"M": 9}, "1 <= M <= 8 (got M=9)"),
        ({"H": 192}, "H % 128 == 0 and 1 <= H <= 8192 (got H=192)"),
        ({"F": 28672, "M": 7}, "<= 228512 (got"),
        ({"Q": 24}, "Q % 16 == 0 and 0 <= Q (got Q=24)"),
    ],
)
def test_sizes_that_it_does_not_take(changed: dict[str, int], message: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        CHAIN.check_sizes({"M": 1, **SMALL, **changed})
    assert message in str(refused.value)


def test_shared_memory_is_never_more_than_a_block_has() -> None:
    for M in range(1, 9):
        for F in range(128, 32768, 2944):
            sizes = {"M": M, **SMALL, "F": F}
            try:
                CHAIN.check_sizes(sizes)
            except ArgumentError:
                continue
            launch = CHAIN.launch({**sizes, **CHAIN.config_for(sizes)})
            assert launch.shared_bytes + 1024 <= 232_448 and CHAIN.config_for(sizes)["STAGES"] >= 2
