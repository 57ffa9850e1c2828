"""How many replicas are wanted."""
