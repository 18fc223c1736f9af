"""Files of arrays and text, downloads of trained weights and texts, and other libraries' arrays by DLPack."""
