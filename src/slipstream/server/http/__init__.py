"""Connections, authentication, limits, errors, and records of requests."""
