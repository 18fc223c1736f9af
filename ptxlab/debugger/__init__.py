"""A debugger for kernels in the emulator: `ptxlab debug`, and in Jupyter `ptxlab.jupyter.debugger`.

`stoppable` lets a call stop at any instruction, `session` moves from stop to stop, forwards and backwards; `state`,
`matrices` and `pending` say what is there, `values` prints numbers. `commands` are lines of text over all of it.
"""

from ptxlab.debugger.commands import Commands
from ptxlab.debugger.session import Breakpoint, DebuggerError, Session, Stop
from ptxlab.debugger.state import Held, State
from ptxlab.debugger.stoppable import Moment

__all__ = ["Breakpoint", "Commands", "DebuggerError", "Held", "Moment", "Session", "State", "Stop"]
