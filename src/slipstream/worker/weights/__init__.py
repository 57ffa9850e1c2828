"""Weights that change while the model runs: an update's pieces, and how they are written in place."""
