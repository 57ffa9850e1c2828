"""Families that hear."""
