"""Families that read texts in both directions: vectors, scores, and what T5 decodes from."""
