"""Descriptions of models and of how they are compressed: data, without torch. Every other part may import them."""
