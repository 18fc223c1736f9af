"""Commands of `ptxlab` on whole models."""
