"""Verbs on the models of this machine."""
