"""Draft models as data: draft heads, the model's own layers, or other models. No torch."""
