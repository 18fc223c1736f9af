"""The pytest plugin (`plugin`, `emulate`, `adapters`, `annotations`), and the record of the tests on a GPU."""
