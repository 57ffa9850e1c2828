"""Quantization: rounding, scale moving, rotation, bit allocation, training."""
