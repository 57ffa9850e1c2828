"""Converts users' requests to requests of the engine core."""
