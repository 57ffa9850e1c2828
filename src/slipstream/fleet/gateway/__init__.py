"""The gateway: routes requests to replicas and forwards their answers."""
