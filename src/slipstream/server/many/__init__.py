"""One server for several models, of which as many are loaded as fit in memory (docs/server/models.md)."""
