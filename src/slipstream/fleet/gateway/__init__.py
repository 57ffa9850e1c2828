"""The gateway: it routes requests to replicas and forwards their answers."""
