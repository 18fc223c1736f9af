"""The pytest plugin, in this checkout, and pytester, which runs tests with it within a test."""

from collections.abc import Callable
from importlib.metadata import entry_points

from _pytest import pytester

MODULE = "ptxlab.testing.plugin"
# Of a checkout that was installed before it had one, or not at all, pytest does not know by itself.
INSTALLED = any(point.name == "ptxlab" for point in entry_points(group="pytest11"))
OPTIONS = () if INSTALLED else ("-p", MODULE)  # of a test run within this one


class TestModules(pytester.SysModulesSnapshot):
    """Snapshot of modules that forgets only the modules of the test files when pytester ends.

    By itself it forgets whatever was first imported while it lasted. What is then imported once more has its classes
    twice, of which one is no instance of the other; C extensions crash.
    """

    def __init__(self, preserve: Callable[[str], bool] | None = None) -> None:
        super().__init__(preserve=lambda name: not name.startswith("test_"))


pytester.SysModulesSnapshot = TestModules  # type: ignore[misc]
