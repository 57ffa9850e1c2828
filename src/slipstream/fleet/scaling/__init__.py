"""Autoscaling: how many replicas are wanted."""
