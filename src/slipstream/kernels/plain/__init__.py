"""Ops in plain torch, on any device: the oracle, and the ops that training differentiates."""
