"""Loading a model: where its tensors come from, what is done with them, where they go."""
