"""Searches compression and settings by measurement, and writes a folder that serves the best
candidate."""
