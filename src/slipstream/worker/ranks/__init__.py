"""One model over several processes, one per rank."""
