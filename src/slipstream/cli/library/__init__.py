"""Verbs about the models on this machine."""
