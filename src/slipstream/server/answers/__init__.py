"""Answers of every protocol, built from the engine's outputs."""
