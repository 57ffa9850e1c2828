"""Writes GGUF files for `compress`."""
