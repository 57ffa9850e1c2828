"""Tokenizers, chat templates, tool-call formats, and detokenization. No torch."""
