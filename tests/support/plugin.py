"""Where this checkout was installed before it had a pytest plugin, or not at all, pytest is told of the plugin."""

from importlib.metadata import entry_points

MODULE = "ptxlab.testing.plugin"
INSTALLED = any(each.name == "ptxlab" for each in entry_points(group="pytest11"))
OPTIONS = () if INSTALLED else ("-p", MODULE)  # of a test run within this one
