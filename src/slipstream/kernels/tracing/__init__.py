"""Recordings of a model's ops, and tests of which fast paths can run them. No torch."""
