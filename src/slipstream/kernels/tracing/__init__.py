"""Recordings of the ops of a model, and what is read from them. No torch."""
