"""Answers that keep to a grammar or a schema. No torch."""
