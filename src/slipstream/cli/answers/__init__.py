"""Verbs that use a model: text, vectors, scores, speech."""
