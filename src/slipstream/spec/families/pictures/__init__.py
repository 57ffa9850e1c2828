"""Families that accept images, and their image preprocessing."""
