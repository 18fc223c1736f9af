"""Reports that an H200 made: `gemm_w4a8_qoq_sm90` at M=16, N=1024, K=2048, g=128, and a file of PTX without lines."""

from pathlib import Path

GEMM = (Path(__file__).parents[1] / "profile" / "nsight").joinpath("gemm_w4a8_qoq_sm90.ncu-rep")
FILE = (Path(__file__).parents[1] / "profile" / "nsight").joinpath("add4.ncu-rep")
SIZES = {"M": 16, "N": 1024, "K": 2048, "g": 128}
