"""Checkpoints: what quantising would do to them (`audit`), and a packed one made of them (`convert`)."""
