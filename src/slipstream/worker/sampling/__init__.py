"""Sampling: logits to tokens and log-probabilities."""
