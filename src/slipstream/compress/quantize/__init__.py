"""Quantisation: rounding, scale moving, rotation, bit allocation, training."""
