"""Weights: their formats, quantization to them and back, and adapters."""
