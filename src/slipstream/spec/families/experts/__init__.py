"""Families of mixtures of experts. Those that are also dense stand with their dense kin."""
