"""Tiers of KV blocks below the device's cache: host memory, disk, other hosts."""
