"""Families of models that accept audio."""
