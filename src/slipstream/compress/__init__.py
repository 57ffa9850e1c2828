"""Making checkpoints smaller: recipes, and what carries them out."""
