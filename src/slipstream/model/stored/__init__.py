"""Formats in which checkpoints store weights: quantized, packed, sparse, GGUF blocks."""
