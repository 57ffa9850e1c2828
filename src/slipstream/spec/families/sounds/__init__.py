"""Families of models that take sounds."""
