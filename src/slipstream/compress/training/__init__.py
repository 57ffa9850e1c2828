"""Trains models: a student, a draft head, an adapter."""
