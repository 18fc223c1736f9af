"""Runs PTX on the CPU, and checks what a GPU would not: packed lanes, races, uninitialised reads."""

from ptxlab.emulator.check import Finding
from ptxlab.emulator.ir import Entry, Instruction, Module
from ptxlab.emulator.launch import CHECKS, Result, run
from ptxlab.emulator.parse import parse

__all__ = ["CHECKS", "Entry", "Finding", "Instruction", "Module", "Result", "parse", "run"]
