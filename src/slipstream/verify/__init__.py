"""Checks whether a served model's answers come from the given model."""
