"""Experts of a mixture: their load, and the rank or host that holds them."""
