"""Tokenizers, chat templates, tool formats, and tokens to text. No torch."""
