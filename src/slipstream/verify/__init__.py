"""Checks whether a served model answers as the given model itself would."""
