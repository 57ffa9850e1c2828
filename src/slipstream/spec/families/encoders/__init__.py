"""Encoder families (bidirectional attention): for embeddings, for scores, and as encoders of T5 and BART."""
