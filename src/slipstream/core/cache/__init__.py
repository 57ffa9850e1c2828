"""The KV cache's blocks and states: the pool, keys of prefixes, who holds what, and what is evicted first."""
