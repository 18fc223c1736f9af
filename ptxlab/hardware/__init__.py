"""What GPUs are: fragments, descriptors, tensor maps, banks, words and floats of registers, data sheets."""
