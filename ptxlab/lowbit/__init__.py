"""Low-bit kernels, what the documents are about: references, quantisers, layouts, kernels and their public calls.

Imports go one way: `model_shapes`, `reference`, `quant`, `layout`, `cost`, `kernels`, then `claims`, `audit`, `bench`,
`demo`, `jupyter`, `cli`.
The room imports the workbench and nothing of `ptxlab.llm`. Its public calls are names of `ptxlab`.
"""
