"""Files of a checkpoint and the number formats in them. No torch."""
