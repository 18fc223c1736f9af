"""The differential fuzzer: random PTX programs with defined behaviour, run by the emulator and by a GPU, and compared.

    python -m tests.fuzz --seconds 600 --seed 7 --jobs 16 --out FOLDER

A program is made by one of the `categories`, from the seed and its number alone. `examine` runs it: in the emulator in
both modes, some with all checks; on a GPU, and where the two differ again at the driver's optimisation level 0. What a
GPU is known to do otherwise than the PTX manual says is an entry of `quirks.toml`, and the generator keeps away from
it. So every difference is news: it is reduced to its instruction, and written to FOLDER with inputs and both outputs.
Without a GPU the modes and schedules of the emulator are compared with each other.
"""
