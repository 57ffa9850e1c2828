"""Experts of a mixture in host memory, and the views of one expert in all layouts."""
