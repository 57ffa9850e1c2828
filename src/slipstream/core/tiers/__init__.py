"""KV cache tiers below the device. No torch."""
