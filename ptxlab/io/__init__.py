"""Files: reading and writing them whole, checkpoints, arrays of other libraries by DLPack."""
