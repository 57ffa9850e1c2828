"""Rounding weights: to nearest, by GPTQ, by learned offsets; with scales moved between layers, rotations, and bits by
budget."""
