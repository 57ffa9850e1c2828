"""Families that take pictures, and how pictures become their input."""
