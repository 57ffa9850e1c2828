"""Searches compression and settings by measuring, and writes a folder that serves the chosen point."""
