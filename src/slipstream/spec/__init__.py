"""Descriptions of models and of their compression: data, without torch. Every other part may import them."""
