"""Trainings: a student, a draft head, an adapter."""
