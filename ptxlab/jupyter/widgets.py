"""Sliders over the dequantisation identities and over layouts, and the debugger with buttons."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ptxlab.debugger import Commands, Session
from ptxlab.errors import PtxlabError, UnavailableError
from ptxlab.jupyter.page import Html, element, excerpt, page
from ptxlab.lowbit.jupyter import maps
from ptxlab.lowbit.jupyter.drawing import HolderView
from ptxlab.lowbit.jupyter.identities import LANES, identities
from ptxlab.runtime import Kernel

if TYPE_CHECKING:
    from ipywidgets import VBox


def dequant_sliders(q4: tuple[int, ...] = (15, 3, 0, 9), s1: int = 15, minimum: int = -104) -> "VBox":
    """Sliders for four q4, s1 and min over `identities`, which says what these may be.

    Raises:
        ArgumentError: a value out of its range.
        UnavailableError: ipywidgets is not installed.
    """
    ui = _ipywidgets()
    identities(q4, s1, minimum)
    weights = [_slider(f"q4, lane {lane}", q4[lane], 0, 15) for lane in range(LANES)]
    scale, least = _slider("s1", s1, 1, max(s1, 20)), _slider("min", minimum, -128, 127)

    def show(values: Mapping[str, int]) -> str:
        lanes = tuple(values[slider.description] for slider in weights)
        return identities(lanes, values["s1"], values["min"])._repr_html_()

    columns = ui.HBox([ui.VBox(weights[::-1]), ui.VBox([scale, least])])
    return _linked(columns, [*weights, scale, least], show)


def layout_explorer(name: str = "dual_mma", lane: int = 0) -> "VBox":
    """A list of all maps and a slider for the lane over `who_holds`.

    Raises:
        ArgumentError: no such map, or no such lane.
        UnavailableError: ipywidgets is not installed.
    """
    ui = _ipywidgets()
    maps.find(name).held_by(lane)
    choice = ui.Dropdown(options=list(maps.known()), value=name, description="map")
    slider = _slider("lane", lane, 0, maps.find(name).lanes - 1)

    def show(values: Mapping[str, Any]) -> str:
        slider.max = maps.find(values["map"]).lanes - 1
        return HolderView(maps.find(values["map"]), min(values["lane"], slider.max))._repr_html_()

    return _linked(ui.HBox([choice, slider]), [choice, slider], show)


STEPS = ("step", "next", "stepi", "step all", "back", "backi", "continue", "rewind", "restart")


def debug(kernel: Kernel, *args: Any, checks: str = "all", **launch: Any) -> "VBox":
    """The debugger on `kernel(*args, **launch)` in the emulator: buttons, a line for any command, source and registers.

    The box has the session as `session`.

    Raises:
        ArgumentError: arguments that the kernel does not take.
        UnavailableError: ipywidgets is not installed.
    """
    ui = _ipywidgets()
    session = Session.of(kernel, *args, checks=checks, **launch)
    commands = Commands(session)
    buttons = [ui.Button(description=step, layout=ui.Layout(width="auto")) for step in STEPS]
    line = ui.Text(description="command", placeholder="break 12, print %r5, pending, help", continuous_update=False)
    here, said = ui.HTML(), ui.HTML()

    def carry_out(command: str) -> None:
        try:
            text = commands.run(command)
        except PtxlabError as error:
            text = f"error: {error}"
        said.value = page(element("pre", text))
        here.value = page(*_stopped(session))

    def entered(change: Mapping[str, Any]) -> None:
        if change["new"]:
            carry_out(change["new"])
            line.value = ""

    for button in buttons:
        button.on_click(lambda pressed: carry_out(pressed.description))
    line.observe(entered, names="value")
    carry_out("where")
    box = ui.VBox([ui.HBox(buttons), line, said, here])
    box.session = session
    return box


def _stopped(session: Session) -> list[Html]:
    """The source around the line where a session has stopped, and the registers of the instruction."""
    moment = session.now.moment
    if moment.ended:
        return []
    instruction, source = moment.instruction, session.kernel.source
    if instruction.path != source.path:
        source = replace(source, text="\n".join(session.text(instruction.path)), path=instruction.path)
    registers = Commands(session).run("registers").splitlines()
    shown = excerpt(source, instruction.line, 4) if source.text else Html("")
    return [shown, element("pre", f"#{moment.pc}  {instruction.text}\n" + "\n".join(registers))]


def _linked(above: Any, controls: list[Any], show: Callable[[Mapping[str, Any]], str]) -> "VBox":
    """Controls over a page that follows them."""
    ui = _ipywidgets()
    below = ui.HTML()

    def update(_: object = None) -> None:
        below.value = show({control.description: control.value for control in controls})

    for control in controls:
        control.observe(update, names="value")
    update()
    return ui.VBox([above, below])


def _slider(description: str, value: int, low: int, high: int) -> Any:
    return _ipywidgets().IntSlider(value=value, min=low, max=high, description=description)


def _ipywidgets() -> Any:
    try:
        import ipywidgets
    except ImportError:
        raise UnavailableError("ipywidgets: needed for sliders; python -m pip install 'ptxlab[jupyter]'") from None
    return ipywidgets
