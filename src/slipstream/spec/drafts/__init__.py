"""Drafters as data: heads, layers of the model itself, other models. No torch."""
