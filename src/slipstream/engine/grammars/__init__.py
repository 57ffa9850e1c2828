"""Answers constrained by a grammar or a schema. No torch."""
