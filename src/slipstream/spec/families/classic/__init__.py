"""Decoders of 2019 to 2023 with forms of their own: learned positions, ALiBi, parallel blocks."""
