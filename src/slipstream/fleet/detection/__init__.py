"""Fault detection: turns observations of replicas into findings with a cause and a remedy."""
