"""Tiers of KV blocks below the device. No torch."""
