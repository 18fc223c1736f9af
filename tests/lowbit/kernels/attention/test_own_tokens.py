"""Chunks whose own keys and values are given in 16 bits beside the cache."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import ptxlab
from ptxlab import emulator, toolchain
from ptxlab.errors import ArgumentError
from ptxlab.lowbit.kernels.attention import exact, prefill, prefill_sm80
from ptxlab.runtime.verify import compare
from ptxlab.spec import Arrays, KernelSpec
from ptxlab.spec.dtypes import convert_to_dtype
from tests.support.axes import on_every_backend
from tests.support.prefill_problems import SHAPES, chunks_of, run, source_of, with_own_kv
from tests.support.result_bits import difference
from tests.support.skeletons import inline_skeletons

FORMS = {
    "sm90": prefill.OWN,
    "sm90-rotated": prefill.OWN_ROTATED,
    "sm80": prefill_sm80.OWN,
    "sm80-rotated": prefill_sm80.OWN_ROTATED,
}
DTYPES = "float16", "bfloat16"


def problem_of(spec: KernelSpec, shape: dict[str, Any]) -> tuple[Arrays, dict[str, Any]]:
    """Make a problem of a form: its cache is rotated or not."""
    if "parts" not in spec.symbols:
        shape = {**shape, "parts": 1}
    if shape.get("parts", 1) > 1:
        shape = {**shape, "D": 64}  # wider heads stay whole
    logical, sizes = with_own_kv(chunks_of(**shape))
    rotated = spec in (prefill.OWN_ROTATED, prefill_sm80.OWN_ROTATED)
    return {**logical, "cache": replace(logical["cache"], rotated=rotated)}, sizes


def run_oracle(spec: KernelSpec, logical: Arrays, sizes: dict[str, Any], BF16: int) -> tuple[Any, Any]:
    """Return (out, lse) by the oracle in the kernel's order."""
    q, k, v = (convert_to_dtype(logical[name], DTYPES[BF16]) for name in "qkv")
    options = {name: logical[name] for name in ("softmax_scale", "window", "parts")}
    config = {**spec.config_for(sizes), "BF16": BF16}
    return exact.prefill(q, logical["cache"], logical["starts"], config=config, own_kv=(k, v), **options)


@pytest.mark.default_cases("sm80-1-pages of 32, a window-emulator")
@on_every_backend
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("BF16", [0, 1])
@pytest.mark.parametrize("spec", FORMS.values(), ids=FORMS)
def test_ragged_chunks(spec: KernelSpec, BF16: int, shape: str, backend: str) -> None:
    """The cache has no number of own tokens, so a kernel that read one would say so."""
    logical, sizes = problem_of(spec, SHAPES[shape])
    options = {} if backend == "gpu" else {"checks": emulator.CHECKS}
    outputs, outcome = run(logical, sizes, backend, BF16=BF16, spec=spec, **options)
    compare(spec, outputs, logical, {"BF16": BF16})
    assert not outcome.findings
    if backend == "emulator":
        right = run_oracle(spec, logical, sizes, BF16)
        assert difference(right, (outputs["out"], outputs["lse"]), bool(BF16)) == ""


@pytest.mark.full
@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("spec", FORMS.values(), ids=FORMS)
def test_chunks_that_begin_at_the_edge_of_a_block_or_page(spec: KernelSpec, edge: int) -> None:
    for page in (16, 64):
        logical, sizes = problem_of(spec, {"new": (70, 3), "past": (128 + edge, page + edge), "D": 64, "page": page})
        outputs, _ = run(logical, sizes, spec=spec)
        assert difference(run_oracle(spec, logical, sizes, 0), (outputs["out"], outputs["lse"]), False) == ""


LAUNCHABLE = [
    (form, D, page, parts)
    for form, spec in FORMS.items()
    for D, page in product((64, 128, 256), (16, 32, 64))
    for parts in ((1, 2) if D == 64 and "parts" in spec.symbols else (1,))
]


@pytest.mark.full
@pytest.mark.parametrize("BF16", [0, 1])
@pytest.mark.parametrize(("form", "D", "page", "parts"), LAUNCHABLE)
def test_no_register_is_spilt(form: str, D: int, page: int, parts: int, BF16: int) -> None:
    """Compile every variant that a call may launch."""
    spec = FORMS[form]
    sizes = problem_of(spec, {"new": (1,), "past": (2000,), "D": D, "page": page, "parts": parts})[1]
    config = {**spec.config_for(sizes), "BF16": BF16}
    resources = toolchain.compile_cuda(source_of(spec), spec.arch, defines=config).resources[spec.name]
    assert (resources.spill_stores, resources.spill_loads) == (0, 0)


def test_parts_of_wide_heads_are_refused_and_never_chosen() -> None:
    """Their registers would spill."""
    logical, sizes = with_own_kv(chunks_of((1,), (2000,), D=128, parts=2))
    with pytest.raises(ArgumentError, match=r"parts == 1 or D == 64"):
        run(logical, sizes, spec=prefill.OWN)
    many_blocks = {**sizes, "blocks": 132}
    assert prefill.choose_parts(many_blocks, has_own_kv=True) == 1 < prefill.choose_parts(many_blocks)


CHANGES = {
    "sm90": (
        prefill.OWN,
        {
            "own tokens are not fenced": (
                "        ptxlab::fence_proxy_async();\n        if (has_pages)",
                "        if (has_pages)",
            ),
            "own keys of the token before": ("of.start - cached, of.head", "of.start - cached - 1, of.head"),
            "pages of own tokens are copied": ("if constexpr (OWN) tile.keep_cached<KEYS>();", ""),
        },
    ),
    "sm80": (
        prefill_sm80.OWN,
        {
            "own keys of the token before": ("tile.start - cached, tile.head", "tile.start - cached - 1, tile.head"),
            "what the cache has of own tokens": (
                "const int cached = tokens - tile.queries;",
                "const int cached = tokens;",
            ),
        },
    ),
}


@pytest.mark.default_cases("sm80-own keys*")
@pytest.mark.parametrize(
    ("kernel", "change"), [(kernel, change) for kernel in CHANGES for change in CHANGES[kernel][1]]
)
def test_a_changed_kernel_is_noticed(kernel: str, change: str) -> None:
    spec, changes = CHANGES[kernel]
    (old, new), source = changes[change], inline_skeletons(source_of(spec))
    assert source.text.count(old) == 1
    logical, sizes = problem_of(spec, {"new": (70, 3), "past": (100, 200)})
    changed = replace(source, text=source.text.replace(old, new))
    try:
        outputs, outcome = run(logical, sizes, source=changed, spec=spec, checks=emulator.CHECKS)
        compare(spec, outputs, logical)
    except ptxlab.PtxlabError:
        return
    assert outcome.findings


LOGICAL, SIZES = with_own_kv(chunks_of((40, 0, 3), (30, 7, 60), D=128, Hkv=2))
Q, K, V = (LOGICAL[name].astype(np.float16) for name in "qkv")
CALL: dict[str, Any] = {"cache": LOGICAL["cache"], "query_start_loc": LOGICAL["starts"], "backend": "emulator"}


@pytest.mark.parametrize("kernel", [None, prefill_sm80.OWN.name])
def test_the_public_call_takes_rows_that_lie_apart(kernel: str | None) -> None:
    rows = np.concatenate([Q.reshape(43, -1), K.reshape(43, -1), V.reshape(43, -1)], axis=1)
    k, v = (rows[:, first : first + 256].reshape(43, 2, 128) for first in (512, 768))
    assert np.shares_memory(k, rows) and np.shares_memory(v, rows)
    out, lse = ptxlab.attention_kv4(Q, k=k, v=v, kernel=kernel, return_lse=True, **CALL)
    as_given = {name: array.astype(np.float32) for name, array in (("q", Q), ("k", K), ("v", V))}
    compare(prefill_sm80.OWN, {"out": out, "lse": lse}, {**LOGICAL, **as_given})


REFUSED: dict[str, dict[str, Any]] = {
    r"k: only with query_start_loc \(got shape \[43, 2, 128\]\)": {"query_start_loc": None},
    r"v: must be given too, as the other of k and v is \(got None\)": {"v": None},
    r"k: must be given too, as the other of k and v is \(got None\)": {"k": None},
    r"k: must be \[43, 2, 128\], one for each query and kv head \(got shape \[42, 2, 128\]\)": {"k": K[1:]},
    r"v: dtype float16 \(got float32\)": {"v": LOGICAL["v"]},
    r"k: C-contiguous but for gaps between rows": {"k": np.asfortranarray(K)},
    r"k: rows of 256 elements must lie 256 or more apart, a multiple of 16 bytes": {
        "k": np.zeros((43, 257), np.float16)[:, :256].reshape(43, 2, 128)
    },
    r"out: must not share memory with v": {"v": (block := np.zeros((43, 4, 128), np.float16))[:, :2], "out": block},
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_refused_by_name(message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as raised:
        ptxlab.attention_kv4(**{"q": Q, "k": K, "v": V, **CALL, **REFUSED[message]})
    assert "\n" not in str(raised.value)
