"""Detects faults of replicas: takes observations, and gives findings with a cause and a remedy."""
