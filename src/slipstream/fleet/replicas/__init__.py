"""Replicas as processes of this machine, or on Ray."""
