"""Measurements and dummy steps before the first request."""
