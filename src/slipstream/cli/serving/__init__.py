"""Verbs on servers and fleets."""
