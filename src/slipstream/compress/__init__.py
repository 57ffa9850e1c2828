"""Compresses models, and measures the loss of quality."""
