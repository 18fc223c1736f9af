"""Profiles of launches: what to launch, what ncu measured, where warps stalled."""
