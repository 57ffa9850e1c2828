"""The sampler of CPUs, over NumPy arrays. No torch."""
