"""Detects faults of replicas: observations in, findings with a cause and a remedy out."""
