"""Turns what users ask for into requests of the engine core."""
