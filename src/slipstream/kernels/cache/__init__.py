"""Tensors of the KV cache: shapes, blocks, and the format of 4-bit caches."""
