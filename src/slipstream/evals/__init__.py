"""Measures a model's quality on text: perplexity, divergence from another model, tasks."""
