"""Verbs that ask a model: text, vectors, scores, speech."""
