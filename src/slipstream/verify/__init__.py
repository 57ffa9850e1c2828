"""Checks that a served model answers as the model itself would."""
