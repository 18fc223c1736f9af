"""`EmulatorOptions`: one place for every option, whoever asks for it, and each reaches the machine."""

import inspect
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

import ptxlab
from ptxlab import emulator
from ptxlab.debugger import Session
from ptxlab.emulator import EmulatorOptions, OptionKeywords
from ptxlab.emulator.options import KINDS
from ptxlab.errors import ArgumentError, EmulationError
from ptxlab.runtime.schedules import CHECK
from tests.support.small_kernels import kernel_text, record_options

GUIDE = Path(__file__).parents[2] / "notebooks" / "guide"
TEXT = kernel_text("bar.sync 0; ret;", ".param .u64 x")
SOURCE = ptxlab.Source.from_text(TEXT, "k.ptx")
(BARRIER,) = emulator.statements_of(emulator.parse(TEXT, "k.ptx").entries["k"])
SPEC = ptxlab.KernelSpec(
    name="k",
    summary="a barrier",
    args=(ptxlab.Arg("x", "uint32", ("n",), "inout"),),
    launch=lambda sizes: ptxlab.Launch(grid=(1, 1, 1), block=(32, 1, 1)),
    example=lambda rng, *, n: {"x": np.zeros(n, np.uint32)},
    pack=lambda logical: logical,
    reference=lambda x: x,
)

# A value of each option that is not its default.
CHANGED: dict[str, Any] = {
    "checks": frozenset({"race"}),
    "mode": "late",
    "seed": 7,
    "max_steps": 1000,
    "count_banks": True,
    "step_clock": True,
    "without": frozenset({BARRIER}),
}
NAMES = [field.name for field in fields(EmulatorOptions)]


def array() -> np.ndarray:
    return np.zeros(32, np.uint32)


# Who takes options: (options of the emulator) -> launches the kernel.
SURFACES: dict[str, Callable[..., object]] = {
    "emulator.run": lambda **keywords: emulator.run(TEXT, "k", [array()], grid=1, block=32, **keywords),
    "Kernel.launch": lambda **keywords: ptxlab.load(SOURCE).launch(
        [array()], ptxlab.Launch((1, 1, 1), (32, 1, 1)), backend="emulator", **keywords
    ),
    "Kernel": lambda **keywords: ptxlab.load(SOURCE)(array(), grid=1, block=32, backend="emulator", **keywords),
    "Kernel[]": lambda **keywords: ptxlab.load(SOURCE)[1, 32](array(), backend="emulator", **keywords),
    "run_spec": lambda **keywords: ptxlab.run_spec(SPEC, SOURCE, {"x": array()}, backend="emulator", **keywords),
    "debugger": lambda **keywords: debug(**{"checks": (), **keywords}),
}


def debug(**keywords: Any) -> None:
    with Session.of(ptxlab.load(SOURCE), array(), grid=1, block=32, **keywords) as session:
        if error := session.go_on().moment.error:
            raise error


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> list[EmulatorOptions]:
    """Record the options of every machine that is made."""
    return record_options(monkeypatch)


def test_fields_keywords_and_documentation_agree() -> None:
    assert [*OptionKeywords.__annotations__] == NAMES == [*CHANGED]
    assert all(hint is not None and type(None) in hint.__args__ for hint in get_type_hints(OptionKeywords).values())
    text = inspect.getdoc(EmulatorOptions)
    assert text is not None
    attributes = text.partition("Attributes:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^ {4}(\w+): ", attributes, re.MULTILINE) == NAMES
    assert {*re.findall(r"`(\w+)`", attributes)} >= emulator.CHECKS | emulator.ON_REQUEST | {*emulator.MODES}
    assert f"{emulator.MAX_STEPS // 10**6} million" in attributes


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("name", NAMES)
def test_every_option_reaches_the_machine(surface: str, name: str, machines: list[EmulatorOptions]) -> None:
    """Pass it as a keyword, and as a field of `options`; the keyword counts where both are passed."""
    call, expected = SURFACES[surface], replace(EmulatorOptions(), **{name: CHANGED[name]})
    assert expected != EmulatorOptions()
    call(**{name: CHANGED[name]})
    call(options=EmulatorOptions(), **{name: CHANGED[name]})
    if (surface, name) != ("debugger", "checks"):  # a debugger has checks of its own
        call(options=expected)
        call(options=expected, **{name: None})
    assert machines and {*machines} == {expected}


@pytest.mark.parametrize("surface", SURFACES)
def test_options_change_what_the_emulator_does(surface: str) -> None:
    with pytest.raises(EmulationError, match="still running after 1 steps"):
        SURFACES[surface](max_steps=1)


BAD: dict[str, tuple[Any, str]] = {
    "checks": (
        "lanes,speed",
        "checks: some of all, async, divergence, float, init, lanes, narrow, overrun, proxy, quirks, race (got speed)",
    ),
    "mode": ("soon", "mode: must be one of early, late (got soon)"),
    "seed": (-1, "seed: is an integer, 0 or more (got -1)"),
    "max_steps": (0, "max_steps: has to be a positive integer (got 0)"),
    "count_banks": (1, "count_banks: must be True or False (got 1)"),
    "step_clock": ("yes", "step_clock: must be True or False (got 'yes')"),
    "without": (["bar.sync"], "without: statements of the kernel (emulator.statements_of) (got 'bar.sync')"),
}


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("name", NAMES)
def test_a_bad_value_is_one_line(surface: str, name: str) -> None:
    bad, message = BAD[name]
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        SURFACES[surface](**{name: bad})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "bad", [object(), 1.5, np.zeros(3), b"x", -1, np.array(["a"]), {"a": 1}], ids=lambda bad: type(bad).__name__
)
def test_a_value_of_any_type_is_refused(name: str, bad: Any) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}: ") as error:
        EmulatorOptions(**{name: bad})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("surface", SURFACES)
def test_what_is_no_option_is_refused(surface: str) -> None:
    with pytest.raises(TypeError, match=r"^unexpected keyword argument 'mod'; the emulator's options: checks, mode, "):
        SURFACES[surface](mod="late")
    with pytest.raises(ArgumentError, match=r"^options: an EmulatorOptions \(got dict\)$"):
        SURFACES[surface](options={"mode": "late"})


def test_checks_are_names_or_one_string() -> None:
    for checks in ("race, lanes", ["lanes", "race"], {"race": 1, "lanes": 2}, iter(["race", "lanes"])):
        assert EmulatorOptions.combine(None, {"checks": checks}).checks == {"lanes", "race"}
    assert EmulatorOptions.combine(None, {"checks": "all,proxy"}).checks == emulator.CHECKS | {"proxy"}
    assert EmulatorOptions().add_checks(["race"]) == EmulatorOptions(checks=frozenset({"race"}))


def test_options_do_not_change() -> None:
    options = EmulatorOptions(seed=3)
    assert hash(options) == hash(EmulatorOptions(seed=3))
    with pytest.raises(FrozenInstanceError):
        options.seed = 4  # type: ignore[misc]


def test_a_chain_has_mode_and_seed_of_its_own_and_adds_checks(machines: list[EmulatorOptions]) -> None:
    with emulator.chain(["race"], mode="late", seed=5):
        SURFACES["emulator.run"](checks=["init"], mode="early", seed=1, max_steps=99)
    assert machines == [EmulatorOptions(checks=frozenset({"race", "init"}), mode="late", seed=5, max_steps=99)]


def test_the_checks_of_whoever_watches_are_added(machines: list[EmulatorOptions]) -> None:
    with emulator.watch_launches(lambda machine: (), ["race"]):
        SURFACES["Kernel"](checks=["init"])
    SURFACES["Kernel"]()
    assert [options.checks for options in machines] == [{"race", "init"}, frozenset()]


def test_each_kind_of_finding_has_a_remedy_and_a_page_of_the_guide() -> None:
    kinds = {kind for kinds in KINDS.values() for kind in kinds} | {CHECK, "Deadlock", "MemoryFault"}
    for kind in kinds:
        (line,) = emulator.remedies_of([kind, kind])
        page = re.fullmatch(rf"  remedy \({kind}\): .+ \(guide/(\w+\.md)\)", line)
        assert page and (GUIDE / page[1]).is_file()
    assert emulator.remedies_of(["race", "race"]) == [
        "  remedy (race): put a barrier, or a flag with release and acquire, between the two accesses (guide/checks.md)"
    ]
