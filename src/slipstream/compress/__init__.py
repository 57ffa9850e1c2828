"""Smaller models, with receipts: quantise, sparsify, prune, distil, and shorten what they are asked."""
