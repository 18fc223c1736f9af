"""Files read and written whole, checkpoints, downloads of trained weights, and other libraries' arrays by DLPack."""
