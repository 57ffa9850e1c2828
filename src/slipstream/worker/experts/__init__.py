"""Experts of a mixture: their load, the rank or host that holds them."""
