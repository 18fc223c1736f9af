"""Claims on quantisers, sums and layouts: decided as they say, and able to fail."""

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError
from ptxlab.hardware import fragments
from ptxlab.lowbit import layout, quant
from ptxlab.lowbit.claims import layouts, quantisers
from ptxlab.prove.claims import Claim, decide

MAKERS = (
    quantisers.ranges, quantisers.predicate, quantisers.sums,
    layouts.fragments, layouts.packings, layouts.swizzles,
)  # fmt: skip
CLAIMS = [claim for maker in MAKERS for claim in maker()]


def claim(subject: str, name: str) -> Claim:
    (match,) = (candidate for candidate in CLAIMS if (candidate.subject, candidate.name) == (subject, name))
    return match


def test_a_map_with_a_place_twice_is_refuted() -> None:
    fragment = fragments.mma_a(32)
    rows = fragment.rows.copy()
    rows[0, 0, 0] = 1
    outcome = decide(replace(CLAIMS[0], build=lambda: layouts._is_bijection(rows * fragment.shape[1] + fragment.cols)))
    assert outcome.verdict == "refuted"


PACKS = re.compile(r"_?((un)?pack(ed)?|to|from|stack|scatter|gather|interleave|join|exchange|swizzled|(re)?store)(_|$)")
NO_PACKINGS = re.compile(r"packed_(names|headers)|_packing")  # of the weights in a file; a packing by its name


def functions(module: Any) -> Iterator[tuple[str, CodeType]]:
    """Yield the functions and methods that a module defines, by qualified name."""
    for name, member in vars(module).items():
        for attribute_name, attribute in vars(member).items() if inspect.isclass(member) else [(name, member)]:
            function = inspect.unwrap(attribute) if callable(attribute) else None
            abstract = getattr(attribute, "__isabstractmethod__", False)
            if inspect.isfunction(function) and function.__module__ == module.__name__ and not abstract:
                yield (
                    f"{module.__name__}.{name if attribute_name == name else f'{name}.{attribute_name}'}",
                    function.__code__,
                )


@pytest.mark.full
def test_everything_that_packs_has_a_claim() -> None:
    """Every packing, unpacking, order and fragment map of `ptxlab.lowbit.layout` is run by one claim at least."""
    modules = [importlib.import_module(f"ptxlab.lowbit.layout.{m.name}") for m in pkgutil.iter_modules(layout.__path__)]
    code_by_name = {name: code for module in modules for name, code in functions(module)}
    last = {name: name.rpartition(".")[2] for name in code_by_name}
    packing = {name for name in code_by_name if PACKS.match(last[name]) and not NO_PACKINGS.fullmatch(last[name])}
    assert {f"{layout.__name__}.{name}" for name in ("atom.pack_atom_strips", "packings.Blocks.unpack")} <= packing
    ran = set[CodeType]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            ran.add(frame.f_code)

    sys.setprofile(note)
    try:
        for packing_claim in [*layouts.fragments(), *layouts.packings()]:
            decide(packing_claim)
    finally:
        sys.setprofile(None)
    assert sorted(name for name in packing if code_by_name[name] not in ran) == []


def test_an_accumulator_of_another_width_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^bits: must be 16 or 32 \(got 8\)$"):
        fragments.wgmma_d(8, is_float=True, bits=8)


def test_every_fragment_map_has_a_claim() -> None:
    """The rule holds for any arguments of the functions that make maps."""
    names = set[str]()
    for k, bits in product(range(1, 257), (None, 4, 8, 16, 32)):
        for make in (
            lambda k=k, b=bits: fragments.mma_a(k, b),
            lambda k=k, b=bits: fragments.mma_b(k, b),
            lambda k=k, b=bits: fragments.ldmatrix(k, trans=b is None),
            lambda b=bits: fragments.mma_c(b),
            lambda k=k, b=bits: fragments.wgmma_d(k, is_float=b is not None, bits=b or 32),
            fragments.wgmma_a,
        ):
            with suppress(ArgumentError):
                names.add(make().name)
    assert (
        names - {fragment_claim.name for fragment_claim in CLAIMS if fragment_claim.subject == "fragment maps"} == set()
    )


@pytest.mark.parametrize("case", [*layouts._packings()], ids=lambda case: f"{case[0]}, {case[1]}")
def test_two_elements_exchanged_are_refuted(case: Any) -> None:
    *_, originals, there_and_back = case

    def wrong(original: Any, sizes: dict[str, int]) -> Any:
        back = dict(layouts._arrays(there_and_back(original, sizes)))
        name = max(back, key=lambda name: np.size(back[name]))
        array = back[name] = back[name].copy()
        array.reshape(-1)[[-2, -1]] = array.reshape(-1)[[-1, -2]]
        return back

    assert layouts._returns(originals, wrong).counterexample


@pytest.mark.parametrize("scheme", [quant.LQQWeight, quant.QoQWeight, quant.QoQChannelWeight])
def test_two_nibbles_exchanged_are_refuted(scheme: type, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(packed: layout.PackedWeight) -> Any:
        weight = layout.unpack(packed)
        q4 = weight.q4.copy()
        q4[-1, [3, 4]] = q4[-1, [4, 3]]
        return replace(weight, q4=q4)

    monkeypatch.setattr(layouts, "unpack", wrong)
    outcome = decide(claim("packing strips", f"{scheme.__name__} comes back"))
    assert outcome.verdict == "refuted" and "q4" in outcome.counterexample


def test_rows_that_are_not_swizzled_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "swizzle", lambda addresses, span: np.asarray(addresses))
    outcome = decide(claim("swizzles", "128 bytes: no bank conflict"))
    assert outcome.verdict == "refuted" and outcome.counterexample == {"column": 0}


def test_the_papers_group_is_what_refutes_qoq_at_120() -> None:
    outcome = decide(claim("quantiser qoq", "restored bytes fit s8 at range 120"))
    assert outcome.counterexample["restored"] == 128 and outcome.counterexample["scale"] == 16
