"""GGUF files out of `compress`."""
