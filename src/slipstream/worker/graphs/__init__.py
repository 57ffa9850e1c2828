"""CUDA graphs of steps."""
