"""Observers of a running kernel: the checks, counts of bank conflicts, the step clock."""
