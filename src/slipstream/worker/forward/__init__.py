"""Ways to run the model over the tokens of a step."""
