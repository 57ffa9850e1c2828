"""What a model knows and what a change to it cost: text, perplexity, divergence, tasks."""
