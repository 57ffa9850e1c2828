"""Linear layers, a file for each format of the weights."""
