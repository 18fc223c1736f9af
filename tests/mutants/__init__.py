"""Small mistakes, made one at a time in a copy of the checkout: does a test notice? `python -m tests.mutants`."""
