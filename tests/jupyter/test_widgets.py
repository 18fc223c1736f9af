"""Sliders: moving one changes the page under it."""

import sys
from typing import Any

import numpy as np
import pytest

from ptxlab.errors import ArgumentError, UnavailableError
from ptxlab.jupyter import debug
from ptxlab.lowbit.jupyter import dequant_sliders, identities, layout_explorer, who_holds
from tests.support.debug_sessions import SCALE, load_text

pytest.importorskip("ipywidgets", reason="ipywidgets is not installed: it comes with the extra `jupyter`")


def controls(widget: Any) -> dict[str, Any]:
    """Find every control within a widget by its description."""
    controls_by_name = {widget.description: widget} if getattr(widget, "description", "") else {}
    for child in getattr(widget, "children", ()):
        controls_by_name |= controls(child)
    return controls_by_name


def test_the_identities_follow_the_sliders() -> None:
    box = dequant_sliders()
    named, page = controls(box), box.children[1]
    assert page.value == identities()._repr_html_()
    named["s1"].value, named["min"].value, named["q4, lane 1"].value = 16, -112, 7
    assert page.value == identities((15, 7, 0, 9), 16, -112)._repr_html_()


def test_the_explorer_follows_map_and_lane() -> None:
    box = layout_explorer("dual_mma", 100)
    named, page = controls(box), box.children[1]
    assert page.value == who_holds("dual_mma", 100)._repr_html_() and named["lane"].max == 127
    named["map"].value = "qserve"  # which has 32 lanes
    assert named["lane"].max == 31 and page.value == who_holds("qserve", 31)._repr_html_()
    named["lane"].value = 3
    assert page.value == who_holds("qserve", 3)._repr_html_()


def test_without_ipywidgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(UnavailableError, match=r"ptxlab\[jupyter\]"):
        dequant_sliders()


def test_bad_input() -> None:
    for call, problem in (
        (lambda: dequant_sliders(q4=(1, 2)), "q4: four values 0..15"),
        (lambda: dequant_sliders(s1=0), "s1: 1..255"),
        (lambda: layout_explorer("nothing"), "name: one of .*got nothing"),
        (lambda: layout_explorer("qserve", 32), "lane: 0..31 for qserve"),
    ):
        with pytest.raises(ArgumentError, match=problem):
            call()
    assert controls(dequant_sliders(s1=99))["s1"].value == 99


@pytest.fixture
def debugger() -> Any:
    box = debug(load_text(SCALE), *np.zeros((2, 128), np.float32), 0.5, grid=1, block=128)
    yield box
    box.session.close()


def test_the_debugger_follows_its_buttons_and_its_line(debugger: Any) -> None:
    named, (output, listing) = controls(debugger), debugger.children[2:]
    assert "begin: k.ptx" in output.value and "ld.param.u64" in listing.value
    named["step"].click()
    assert debugger.session.now.moment.pc == 1 and "dispatch 1" in output.value
    for command, shown in (("break bar.sync", "breakpoint 1"), ("print %nosuch", "error: print: no register %nosuch")):
        named["command"].value = command
        assert shown in output.value and named["command"].value == ""
    named["continue"].click()
    assert 'class="at"' in listing.value and "bar.sync" in listing.value and "breakpoint 1" in output.value
    named["command"].value = "registers all"
    assert "%turned = 0" in output.value
    named["back"].click()
    assert "st.shared.f32" in listing.value and "%at = 1024" in listing.value
    named["continue"].click(), named["continue"].click()
    assert "the launch has ended" in output.value and "%at" not in listing.value
    named["stepi"].click()
    assert "error: step: the launch has ended" in output.value
    named["restart"].click()
    assert debugger.session.now.moment.key == (0, False)


def test_the_debugger_without_ipywidgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(UnavailableError, match=r"ptxlab\[jupyter\]"):
        debug(load_text(SCALE), *np.zeros((2, 128), np.float32), 0.5, grid=1, block=128)
