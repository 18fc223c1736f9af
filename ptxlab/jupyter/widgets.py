"""The debugger with buttons, and what other widgets are made of: sliders over a page that follows them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ptxlab import _moved
from ptxlab.debugger import Commands, Session
from ptxlab.errors import PtxlabError, UnavailableError
from ptxlab.jupyter.page import Html, element, excerpt, page
from ptxlab.runtime import Kernel

if TYPE_CHECKING:
    from ipywidgets import VBox


STEPS = ("step", "next", "stepi", "step all", "back", "backi", "continue", "rewind", "restart")


def debug(kernel: Kernel, *args: Any, checks: str = "all", **launch: Any) -> "VBox":
    """Open the debugger on `kernel(*args, **launch)` in the emulator.

    It has buttons, a line for any command, source and registers. The box has the session as `session`.

    Raises:
        ArgumentError: arguments that the kernel does not take.
        UnavailableError: ipywidgets is not installed.
    """
    ui = require_ipywidgets()
    session = Session.of(kernel, *args, checks=checks, **launch)
    commands = Commands(session)
    buttons = [ui.Button(description=step, layout=ui.Layout(width="auto")) for step in STEPS]
    line = ui.Text(description="command", placeholder="break 12, print %r5, pending, help", continuous_update=False)
    source_view, output_view = ui.HTML(), ui.HTML()

    def carry_out(command: str) -> None:
        try:
            text = commands.run(command)
        except PtxlabError as error:
            text = f"error: {error}"
        output_view.value = page(element("pre", text))
        source_view.value = page(*_stopped_view(session))

    def run_typed_line(change: Mapping[str, Any]) -> None:
        if change["new"]:
            carry_out(change["new"])
            line.value = ""

    for button in buttons:
        button.on_click(lambda pressed: carry_out(pressed.description))
    line.observe(run_typed_line, names="value")
    carry_out("where")
    box = ui.VBox([ui.HBox(buttons), line, output_view, source_view])
    box.session = session
    return box


def _stopped_view(session: Session) -> list[Html]:
    """Render the source around the line where a session has stopped, and the registers of the instruction."""
    moment = session.now.moment
    if moment.ended:
        return []
    instruction, source = moment.instruction, session.kernel.source
    if instruction.path != source.path:
        source = replace(source, text="\n".join(session.text(instruction.path)), path=instruction.path)
    registers = Commands(session).run("registers").splitlines()
    source_excerpt = excerpt(source, instruction.line, 4) if source.text else Html("")
    return [source_excerpt, element("pre", f"#{moment.pc}  {instruction.text}\n" + "\n".join(registers))]


def link_controls(above: Any, controls: list[Any], show: Callable[[Mapping[str, Any]], str]) -> "VBox":
    """Put controls above a page that follows them."""
    ui = require_ipywidgets()
    output_area = ui.HTML()

    def update(_: object = None) -> None:
        output_area.value = show({control.description: control.value for control in controls})

    for control in controls:
        control.observe(update, names="value")
    update()
    return ui.VBox([above, output_area])


def slider(description: str, start: int, low: int, high: int) -> Any:
    """Make a slider of integers."""
    return require_ipywidgets().IntSlider(value=start, min=low, max=high, description=description)


def require_ipywidgets() -> Any:
    """Import ipywidgets; raises UnavailableError where it is not installed."""
    try:
        import ipywidgets
    except ImportError:
        raise UnavailableError("ipywidgets: needed for sliders; python -m pip install 'ptxlab[jupyter]'") from None
    return ipywidgets


def __getattr__(name: str) -> Any:
    """Look up a name that has moved."""
    return _moved.name_in(__name__, name)
