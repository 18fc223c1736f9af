"""Whole language models: checkpoints, recipes, runners, a server, PyTorch.

Imports go one way: `model`, `checkpoints`, `recipe`, `server`, `accuracy`, then `torch`, `layer_chain` and
`cli`. The room imports the workbench and `ptxlab.lowbit`; other libraries are imported when they are used.
"""
