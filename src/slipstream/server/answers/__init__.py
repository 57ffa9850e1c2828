"""From the engine's outputs to the answers of every protocol."""
